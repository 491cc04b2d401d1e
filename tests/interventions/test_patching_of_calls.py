"""Patching in a mixer that a model calls several times, against a model with a mixer per call."""

from copy import deepcopy

import pytest
import torch
from models import made, normal
from torch import nn

from captum_ssm import InputError
from captum_ssm.interventions import activation_patching, attribution_patching, patched
from captum_ssm.interventions import value_zeroing as zeroed
from captum_ssm.models import BidirectionalMamba

CALLS, L, E = 3, 5, 8
NAMES = ["mixers.0", "mixers.0:1", "mixers.0:2"]


class Repeated(nn.Module):
    """Several times the same block, as in a universal transformer."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 5)
        mixer = BidirectionalMamba(E, state=3, bimamba_type="none")
        self.mixers = nn.ModuleList([mixer] * CALLS)

    def forward(self, x):
        for mixer in self.mixers:
            x = x + mixer(self.norm(x))
        return self.head(x[:, -1])


@pytest.fixture
def models():
    """The mixer shared by its calls, and one mixer for each."""
    shared = made(Repeated)
    apart = deepcopy(shared)
    apart.mixers = nn.ModuleList(deepcopy(shared.mixers[0]) for _ in range(CALLS))
    return shared, apart


def pair():
    clean = normal(2, L, E)
    corrupted = clean.clone()
    corrupted[:, 1] = normal(2, E, seed=1)
    return clean, corrupted


@pytest.mark.parametrize("component", ["output", "values", "state"])
def test_each_call_is_patched_with_its_own_activation(models, component):
    found, truth = (
        activation_patching(m, *pair(), target=1, component=component, perturbations_per_eval=2)
        for m in models
    )
    assert found.layers == NAMES
    assert truth.effects.abs().amax((0, 2)).min() > 1e-3
    torch.testing.assert_close(found.effects, truth.effects)


@pytest.mark.parametrize("rule", ["gradient", "relp"])
def test_so_is_it_to_first_order(models, rule):
    options = {"target": 1, "rule": rule, "components": ("output", "values", "state")}
    found, truth = (attribution_patching(m, *pair(), **options) for m in models)
    for component, patching in found.items():
        assert patching.layers == NAMES
        torch.testing.assert_close(patching.effects, truth[component].effects)


def test_a_block_patches_every_call(models):
    clean, corrupted = pair()
    results = []
    for model in models:
        with torch.no_grad(), patched(model, clean, component="values", tokens=[1, 2]):
            results.append(model(corrupted))
    torch.testing.assert_close(*results)
    shared, _ = models
    with torch.no_grad(), patched(shared, clean, component="values", tokens=[1, 2]):
        for _ in range(2):  # a part of the model, again and again
            torch.testing.assert_close(rows(shared, corrupted)[:, -1], results[0])


@pytest.mark.parametrize("at", [None, "head"])
def test_the_value_of_one_call_is_zero(models, at):
    for model in models:
        model.head.forward = lambda x, head=model.head: nn.Linear.forward(head, x)
        model.forward = lambda x, m=model: rows(m, x)
    options = {"at": at, "perturbations_per_eval": 2}
    for k in range(CALLS):
        found, truth = (
            zeroed(m, pair()[0], layer, **options)
            for m, layer in zip(models, (NAMES[k], k), strict=True)
        )
        assert truth.abs().max() > 1e-4
        torch.testing.assert_close(found, truth)


def rows(model, x):
    for mixer in model.mixers:
        x = x + mixer(model.norm(x))
    return model.head(x)


def test_inputs_of_another_batch_are_refused(models):
    clean, corrupted = pair()
    for model in models:
        with pytest.raises(InputError, match="the same batch"), patched(model, clean):
            model(corrupted[:1])
