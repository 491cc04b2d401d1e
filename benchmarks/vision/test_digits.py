"""The digits, the model that was trained on them, and the tables about it."""

import json
import sys

import evaluate
import pytest
import torch
from safetensors.torch import load_file
from train import accuracy, train

from captum_ssm.examples.digits import CANVAS, HELD_OUT, compose, glyphs, held_out_digits
from captum_ssm.models import VisionMamba
from captum_ssm.models.vision_mamba import find_cls


def test_the_splits_do_not_meet():
    (train_images, _), (test_images, _) = glyphs("train"), glyphs("test")
    assert len(test_images) == HELD_OUT
    assert len(train_images) + len(test_images) == 1797


def test_canvases_hold_their_digit_where_the_mask_says():
    samples = held_out_digits(20)
    assert samples.images.shape == (20, 3, CANVAS, CANVAS)
    assert torch.equal(samples.images, held_out_digits(20).images)
    assert not torch.equal(samples.images, held_out_digits(20, seed=2).images)
    shapes, labels = glyphs("test")
    clean = compose(shapes[:20], labels[:20], torch.Generator().manual_seed(0), 0, 0.0)
    ink = clean.images.sum(1) > -1.5 + 1e-4
    assert torch.equal(ink, clean.masks)
    assert 0.03 < clean.masks.double().mean() < 0.25


def test_the_committed_model_is_as_its_card_says():
    metrics = json.loads((evaluate.MODEL / "metrics.json").read_text())
    state = load_file(evaluate.MODEL / "model.safetensors")
    model = VisionMamba.from_state_dict(state)
    assert metrics["accuracy"] > 0.95
    assert accuracy(model, held_out_digits()) == pytest.approx(metrics["accuracy"], abs=0.005)
    assert f"{metrics['accuracy']:.1%}" in (evaluate.MODEL / "README.md").read_text()
    assert sum(p.numel() for p in model.parameters()) == metrics["parameters"]
    assert model.cls_tokens() == [50]
    assert (evaluate.MODEL / "model.safetensors").stat().st_size < 1 << 20


def test_the_trained_positions_tell_where_the_cls_token_stands():
    pos = load_file(evaluate.MODEL / "model.safetensors")["pos_embed"]
    token, patches = pos[:, 50:51], torch.cat([pos[:, :50], pos[:, 51:]], 1)
    for at, kind in ((0, "start"), (50, "middle"), (100, "end")):
        moved = torch.cat([patches[:, :at], token, patches[:, at:]], 1)
        assert find_cls(moved, (10, 10)) == kind


def test_explanations_are_better_than_random_maps():
    model = VisionMamba.from_state_dict(load_file(evaluate.MODEL / "model.safetensors"))
    samples, explanations = held_out_digits(30), evaluate.methods(model)
    with torch.no_grad():
        target = model(samples.images).argmax(1)
    found = []
    for name in ("Attribution, unified", "Random maps"):
        relevance = explanations[name](samples.images, target)
        options = {"removal": evaluate.BLACK, "patch": evaluate.PATCH, "shares": (0.1, 0.2, 0.3)}
        curve = evaluate.perturbation(model, samples.images, relevance, target, **options)
        objects = evaluate.segmentation(relevance, samples.masks)
        found.append((curve.estimate(), objects.miou(), objects.map()))
    (positive, *objects), (positive_of_noise, *noise) = found
    assert positive.high < positive_of_noise.low
    assert all(ours.low > theirs.high for ours, theirs in zip(objects, noise, strict=True))


def test_a_step_of_training_and_a_line_of_the_table(tmp_path, monkeypatch):
    model = train(2, 4, 0)
    assert 0 <= accuracy(model, held_out_digits(8)) <= 1
    arguments = ["--limit", "4", "--output", str(tmp_path), "--methods", "random", "without s6"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    evaluate.main()
    record = json.loads((tmp_path / "digits-black.json").read_text())
    assert set(record["scores"]) == {"Random maps", "Attribution, without S6"}
    text = (tmp_path / "digits-black.md").read_text()
    assert "| Random maps |" in text
    assert "(42.99)" in text
