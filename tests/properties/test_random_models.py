"""What is measured between the mixers of models that nobody has thought of."""

from __future__ import annotations

import warnings

import pytest
import torch
from inputs import noise
from methods import assert_close
from models import without_biases
from random_models import Model

from captum_ssm import LaTIM, MambaLRP, MambaRollout, UnsupportedModelError
from captum_ssm.wiring import mixing_test

FEW = range(30)
# Two mixers in series in one branch, after a mixer of some tokens, and after a token more.
BRANCHES = [212, 362]
MANY = range(30, 400)


def drawn(seed: int) -> tuple[Model, torch.Tensor]:
    model = Model(seed).double().eval()
    return model, noise(*model.shape, seed=seed)


def explained(method, model, x, *args, **options):
    """What a method returns, or None where it says that it cannot tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return method(model).attribute(x, *args, **options)
    except UnsupportedModelError:
        return None
    except ValueError as error:
        # The score is read from a constant token, or the mixers add to no residual stream.
        if "was not found" in str(error) or "residual stream" in str(error):
            return None
        raise


def check_rollouts(seeds) -> float:
    """Compares rollouts with what is known of them; the share of models that are refused."""
    refused = 0
    for seed in seeds:
        model, x = drawn(seed)
        expected = model.rollout(x)
        if not bool((expected.abs() < 1e3).all()):  # a recurrence that explodes
            continue
        found = explained(MambaRollout, model, x)
        if found is None:
            refused += 1
            continue
        found = found.sum(-1)
        if model.readout == "the mean":  # parameters among the tokens may or may not be counted
            found, expected = (row / row.abs().amax(1, keepdim=True) for row in (found, expected))
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
        assert float(error) < 1e-9, f"{seed}: {model}: off by {error:.1e}"
    return refused / len(seeds)


def check_sums(seeds) -> None:
    for seed in seeds:
        model, x = drawn(seed)
        without_biases(model, "token")
        score = model(x)[:, 2].detach()
        if not bool((score != 0).all() and score.isfinite().all()):  # of a constant token
            continue
        for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
            found = explained(method, model, x, 2, **options)
            assert found is not None or method is LaTIM, f"{seed}: {model}"
            if found is not None:
                assert_close(found.sum((1, 2)), score, 1e-9)


@pytest.mark.parametrize("width", [0, 256], ids=["by rank one", "as it is"])
def test_rollouts(width, monkeypatch):
    monkeypatch.setattr(mixing_test, "_WIDE", width)
    assert check_rollouts(FEW[width // 256 :: 2]) < 0.2


def test_a_stream_goes_around_branches_on_a_new_grid():
    check_rollouts(BRANCHES)


def test_relevance_adds_up_to_the_score():
    check_sums(FEW[:8])


@pytest.mark.slow
def test_many_rollouts():
    assert check_rollouts(MANY) < 0.1


@pytest.mark.slow
def test_relevance_of_many_adds_up_to_their_scores():
    check_sums(MANY)
