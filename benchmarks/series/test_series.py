"""The series, what decides them, and the models trained on them."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from evaluate_series import about_bursts, about_forecasts, scores

from captum_ssm.examples.signals import (
    CHANNELS,
    CLASSES,
    FEATURES,
    HORIZON,
    LENGTH,
    LEVELS,
    SIGNALS,
    SOURCES,
    STEPS,
    burst_scores,
    forecast_scores,
    held_out_bursts,
    held_out_forecasts,
    make_bursts,
    make_forecasts,
    patterns,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _scan import fast_scan
from trained_models import MODELS, SeriesClassifier, load


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_future_is_made_of_the_decisive_values():
    forecasts = make_forecasts(16, generator(0))
    assert forecasts.series.shape == (16, STEPS, len(FEATURES))
    assert forecasts.future.shape == forecasts.steps.shape == (16, HORIZON, len(FEATURES))
    for h in range(HORIZON):
        for f in range(len(FEATURES)):
            decisive = forecasts.decisive(h, f)
            assert decisive.sum((1, 2)).eq(1).all()
            assert decisive.any(1)[:, SOURCES[f]].all()
            value = forecasts.series[decisive]
            torch.testing.assert_close(forecasts.future[:, h, f], LEVELS[h] * value)
    # Each mark pulses at the step of its half of the future, and nowhere else.
    pulses = forecasts.series > 2
    for h in (0, HORIZON - 1):
        mark = int(forecasts.marks[h])
        assert mark >= SIGNALS
        assert torch.equal(pulses[..., mark].nonzero()[:, 1], forecasts.steps[:, h, 0])


def test_the_pattern_is_where_the_mask_says():
    bursts = make_bursts(64, generator(0))
    assert bursts.series.shape == bursts.masks.shape == (64, CHANNELS, LENGTH)
    assert set(bursts.labels.tolist()) == set(range(len(CLASSES)))
    shown = bursts.series[bursts.masks].view(64, -1)
    closest = (shown - shown.mean(1, keepdim=True)) @ patterns().mT
    assert (closest.argmax(1) == bursts.labels).float().mean() > 0.95
    for b in range(64):
        feature, start = int(bursts.features[b]), int(bursts.starts[b])
        assert bursts.masks[b, feature, start]
        assert not bursts.masks[b, feature, :start].any()


def test_draws_follow_the_generator():
    for make in (make_forecasts, make_bursts):
        assert torch.equal(make(4, generator(1)).series, make(4, generator(1)).series)
        assert not torch.equal(make(4, generator(1)).series, make(4, generator(2)).series)


def test_the_scan_for_training_has_the_same_output_and_gradients():
    bursts = make_bursts(2, generator(0))
    torch.manual_seed(0)
    model, found = SeriesClassifier(), []
    for scan in (nullcontext, fast_scan):
        with scan():
            logits = model(bursts.series)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), model.parameters())])
    for stock, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["series-forecaster", "series-classifier"])
def test_the_committed_model_is_as_its_card_says(name):
    metrics = json.loads((MODELS / name / "metrics.json").read_text())
    card = (MODELS / name / "README.md").read_text()
    model = load(name)
    if name == "series-forecaster":
        found = forecast_scores(model, held_out_forecasts())
        assert found["r2"] > 0.97
        assert found["r2_others_redrawn"] > 0.97
        assert found["r2_decisive_redrawn"] < 0
    else:
        found = burst_scores(model, held_out_bursts())
        assert found["accuracy"] > 0.97
        assert found["accuracy_without_pattern"] < 0.35
    for key, score in found.items():
        assert score == pytest.approx(metrics[key], abs=0.005)
        assert f"{metrics[key]:.3f}" in card
    assert sum(p.numel() for p in model.parameters()) == metrics["parameters"]
    assert (MODELS / name / "model.safetensors").stat().st_size < 400_000


@pytest.mark.parametrize("name", ["series-forecaster", "series-classifier"])
def test_the_scores_of_a_right_and_of_a_wrong_explanation(name):
    asked = about_forecasts(8) if name == "series-forecaster" else about_bursts(8, load(name))
    right = scores(asked.decisive.double(), asked)
    assert all(row.eq(1).all() for key, row in right.items() if key != "last")
    wrong = scores((~asked.decisive).double(), asked)
    assert all(wrong[key].eq(0).all() for key in ("entry", "share"))
    assert (wrong["precision"] < 0.1).all()
    if asked.marks is not None:
        on_marks = scores(asked.marks.double(), asked)
        assert on_marks["entry_or_mark"].eq(1).all()
        assert on_marks["step"].eq(1).all()
        assert on_marks["entry"].eq(0).all()
