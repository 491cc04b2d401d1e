"""Masks from explanations, and the network that learns from them."""

import json
import sys

import numpy as np
import pseudo_masks
import pytest
import torch


def test_otsus_threshold_by_hand_and_by_search():
    two = torch.tensor([[[0.0, 1.0, 0.0], [9.0, 8.0, 1.0]]])
    assert float(pseudo_masks.otsu(two)) == 1
    generator = np.random.default_rng(0)
    maps = torch.from_numpy(generator.normal(size=(3, 5, 6)).round(1))
    for each, cut in zip(maps, pseudo_masks.otsu(maps), strict=True):
        values = each.flatten().numpy()

        def between(t, values=values):
            low, high = values[values <= t], values[values > t]
            return len(low) * len(high) * (low.mean() - high.mean()) ** 2 if len(high) else 0.0

        assert between(float(cut)) == pytest.approx(max(between(t) for t in values))


def test_masks_take_any_scale_and_colors():
    relevance = torch.zeros(1, 3, 4, 4)
    relevance[0, :, 1:3, 1:3] = torch.tensor([1e-6, 2e-6, -1e-6])[:, None, None]
    expected = torch.zeros(1, 4, 4)
    expected[0, 1:3, 1:3] = 1
    assert torch.equal(pseudo_masks.masks_of(relevance), expected)


def test_the_network_learns_masks_and_leaves_the_random_state_alone():
    torch.manual_seed(0)
    images = torch.randn(16, 3, 12, 12)
    masks = (images.sum(1) > 1).float()
    before = torch.get_rng_state()
    first, again = (pseudo_masks.learnt(images, masks, images, epochs=100) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert float(first.mean()) == pytest.approx(float(masks.mean()), abs=0.01)
    assert pseudo_masks.agreement(first, masks.bool())["pixel_accuracy"].value > 0.85


def test_a_line_of_the_table(tmp_path, monkeypatch):
    options = ["--images", "6", "--limit", "4", "--epochs", "1", "--output", str(tmp_path)]
    options += ["--methods", "true", "hidden"]
    monkeypatch.setattr(sys, "argv", ["pseudo_masks.py", *options])
    pseudo_masks.main()
    scores = json.loads((tmp_path / "pseudo_masks.json").read_text())["scores"]
    assert set(scores) == {"True masks", "Attribution, hidden"}
    assert scores["True masks"]["masks"]["miou"]["value"] == 1
    assert "| Attribution, hidden |" in (tmp_path / "pseudo_masks.md").read_text()
