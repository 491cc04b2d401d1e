"""The scenes, and the segmentation model that was trained on them."""

import json
import sys
from pathlib import Path

import pytest
import torch

from captum_ssm.examples.scenes import (
    BACKGROUND,
    CANVAS,
    MOST,
    held_out_scenes,
    make_scenes,
    scores,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from trained_models import MODELS, load

MODEL = MODELS / "digits-segmenter"


def test_scenes_are_labelled_where_their_digits_are():
    scenes = make_scenes(20, torch.Generator().manual_seed(0), jitter=0.15)
    assert scenes.images.shape == (20, 3, CANVAS, CANVAS)
    assert torch.equal(scenes.labels != BACKGROUND, scenes.objects > 0)
    ink = scenes.images.amax(1)
    assert ink[scenes.objects > 0].mean() > 0.5 > 0 > ink[scenes.objects == 0].mean()
    present = set()
    for labels, objects in zip(scenes.labels, scenes.objects, strict=True):
        digits = objects.unique().tolist()
        assert digits == list(range(len(digits)))
        present.add(len(digits) - 1)
        assert all(len(labels[objects == k].unique()) == 1 for k in digits)
    assert present == set(range(1, MOST + 1))


def test_held_out_scenes_are_the_same_at_every_call():
    assert torch.equal(held_out_scenes(4).images, held_out_scenes(4).images)


def test_a_perfect_model_has_perfect_scores():
    scenes = held_out_scenes(100)
    logits = torch.nn.functional.one_hot(scenes.labels, 11).movedim(-1, 1).float()
    truth = dict(zip(map(torch.Tensor.sum, scenes.images.split(50)), logits.split(50), strict=True))
    found = scores(lambda images: next(v for k, v in truth.items() if k == images.sum()), scenes)
    assert found == {"miou": 1.0, "lowest_iou": 1.0, "digits": 1.0}


def test_the_committed_model_is_as_its_card_says():
    metrics = json.loads((MODEL / "metrics.json").read_text())
    model = load("digits-segmenter")
    found = scores(model, held_out_scenes())
    assert found["miou"] > 0.9
    card = (MODEL / "README.md").read_text()
    for key, score in found.items():
        assert score == pytest.approx(metrics[key], abs=0.005)
        assert f"{metrics[key]:.1%}" in card
    assert sum(p.numel() for p in model.parameters()) == metrics["parameters"]
    assert (MODEL / "model.safetensors").stat().st_size < 450_000
