"""A model that holds a mixer which these inputs do not reach, as a tower of images for a text."""

import pytest
import torch
from inputs import noise
from models import ids
from three_mixers import Base, E, L

from captum_ssm import RelevanceFlow, UnsupportedModelError
from captum_ssm.interventions import (
    Reference,
    TokenKnockout,
    activation_patching,
    attribution_patching,
    circuit,
    knockout,
    patched,
)
from captum_ssm.metrics import circuit_faithfulness, find_circuit, find_circuits

X, Y = noise(2, L, E, seed=2), noise(2, L, E, seed=3)


class Partly(Base):
    """The mixer c is there, and does not run."""

    def forward(self, x):
        return self.head(self.towards(x)[:, -1])


def both():
    """The model, and the same one without that mixer."""
    models = [Partly().double().eval() for _ in range(2)]
    del models[1].c
    return models


def of_patching(patching):
    assert patching.layers == ["a", "b"]
    return patching.effects


def faithfulness(model, **options):
    edges = RelevanceFlow(model).edges(X, 1)
    return circuit_faithfulness(model, X, edges, 1, ks=(2, 9), **options).scores


def circuits(model):
    shared = find_circuit(model, X, 1, max_edges=8, reference_inputs=Y)
    return torch.tensor([c.score for c in (shared, *find_circuits(model, X, 1, max_edges=8))])


RUNS = {
    "knockout": lambda m: TokenKnockout(m).attribute(X, target=1),
    "sweep": lambda m: TokenKnockout(m).sweep(X, target=1).relevance,
    "activations": lambda m: of_patching(activation_patching(m, X, Y, target=1)),
    "states": lambda m: of_patching(activation_patching(m, X, Y, target=1, component="state")),
    "relevance": lambda m: of_patching(attribution_patching(m, X, Y, target=1)["values"]),
    "gradients": lambda m: of_patching(
        attribution_patching(m, X, Y, target=1, rule="gradient")["output"]
    ),
    "faithfulness": faithfulness,
    "whole": lambda m: faithfulness(m, coefficients="whole"),
    "reference": lambda m: faithfulness(m, ablation=Reference.of(m, Y)),
    "circuits": circuits,
}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_as_if_the_mixer_were_not_there(name):
    found, truth = map(RUNS[name], both())
    assert torch.equal(found, truth)


def test_a_layer_that_is_named_has_to_run():
    model, _ = both()
    for call in (
        lambda: TokenKnockout(model).attribute(X, target=1, layers=["a", "c"]),
        lambda: activation_patching(model, X, Y, target=1, layers=-1),
        lambda: attribution_patching(model, X, Y, target=1, layers="c"),
        lambda: patched(model, X, layers="c").__enter__(),
    ):
        with pytest.raises(UnsupportedModelError, match=r"c did not run .*: name some of a, b\."):
            call()
    for block in (knockout(model, sources=1), circuit(model, [(0, 2, 1)])):
        with pytest.raises(UnsupportedModelError, match="did not reach c"), block:
            model(X)


def test_masks_of_one_layer_are_one(mamba):
    mask = torch.ones(L, L, dtype=torch.bool)
    with (
        pytest.raises(ValueError, match="two are of one layer"),
        circuit(mamba, {0: mask, -2: mask}),
    ):
        mamba(ids(1, L))
