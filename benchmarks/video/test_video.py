"""The clips, the frame that decides each, and the model that was trained on them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from clips import CLASSES, FRAMES, SIDE, held_out_clips, make_clips, scores, shapes

sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from trained_models import MODELS, load

MODEL = MODELS / "moving-video"


def test_the_shape_of_the_class_is_in_the_deciding_frame():
    clips = make_clips(32, torch.Generator().manual_seed(0))
    assert clips.clips.shape == (32, 1, FRAMES, SIDE, SIDE)
    assert set(clips.labels.tolist()) == set(range(len(CLASSES)))
    for clip, label, frame, mask in zip(
        clips.clips[:, 0], clips.labels, clips.frames, clips.masks, strict=True
    ):
        assert mask.flatten(1).any(1).nonzero().tolist() == [[frame]]
        drawn, shape = mask[frame].nonzero(), shapes()[label].nonzero()
        assert torch.equal(drawn - drawn.amin(0), shape - shape.amin(0))
        assert clip[mask].min() > 0.5


def test_no_frame_is_brighter_than_another():
    clips = make_clips(512, torch.Generator().manual_seed(0))
    light = clips.clips[:, 0].sum((-1, -2))
    own = light[torch.arange(512), clips.frames]
    assert abs(own.mean() - light.mean()) < 3 * light.std() / 512**0.5


def test_the_committed_model_is_as_its_card_says():
    metrics = json.loads((MODEL / "metrics.json").read_text())
    model = load("moving-video")
    found = scores(model, held_out_clips())
    assert metrics["accuracy"] > 0.95
    assert metrics["accuracy_without_another"] > 0.9
    assert metrics["accuracy_without_frame"] < 0.35
    card = (MODEL / "README.md").read_text()
    for key, score in found.items():
        assert score == pytest.approx(metrics[key], abs=0.005)
        assert f"{metrics[key]:.1%}" in card
    assert sum(p.numel() for p in model.parameters()) == metrics["parameters"]
    assert (MODEL / "model.safetensors").stat().st_size < 400_000
