"""Interventions that run the model themselves leave it as it was, and draw the same numbers."""

from copy import deepcopy

import pytest
import torch
from models import VOCABULARY, ids, made
from torch import nn
from unchanged import assert_unchanged, fingerprint

from captum_ssm.attr import RelevanceFlow
from captum_ssm.interventions import (
    Reference,
    TokenKnockout,
    activation_patching,
    attribution_patching,
    circuit,
    swap_effects,
    value_zeroing,
)
from captum_ssm.metrics import circuit_faithfulness, find_circuit, layer_knockout, oversmoothing
from captum_ssm.models import BidirectionalMamba

L, E = 6, 8
TOKENS = ids(2, L)


class Block(nn.Module):
    """Draws random numbers, and writes to running means."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(E), nn.Dropout(0.3)
        self.mixer = BidirectionalMamba(E, state=3, bimamba_type="none")

    def forward(self, x):
        return x + self.drop(self.mixer(self.norm(x.mT).mT))


class Training(nn.Module):
    """A model in train mode, which counts its runs."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, E), nn.Linear(E, VOCABULARY)
        self.blocks = nn.Sequential(Block(), Block())
        self.runs = 0

    def forward(self, tokens):
        self.runs += 1
        return self.head(self.blocks(self.words(tokens)))


@pytest.fixture
def model():
    return made(Training).train()


def last_of(model):
    return lambda tokens: model(tokens)[:, -1]


RUNS = {
    "token knockout": lambda m: TokenKnockout(m).attribute(TOKENS, target=5),
    "activations": lambda m: activation_patching(m, TOKENS, TOKENS.flip(1), target=5).effects,
    "gradients": lambda m: (
        attribution_patching(m, TOKENS, TOKENS.flip(1), target=5, rule="gradient")["output"].effects
    ),
    "values": lambda m: value_zeroing(m, TOKENS, 0, at="blocks.1"),
    "swaps": lambda m: swap_effects(m, TOKENS[:1], TOKENS[1]),
    "reference": lambda m: Reference.of(m, TOKENS).carried["blocks.1.mixer"][0][0].values,
    "circuit": lambda m: torch.tensor(find_circuit(m, TOKENS, 5, max_edges=4).score),
    "faithfulness": lambda m: (
        circuit_faithfulness(m, TOKENS, RelevanceFlow(m).edges(TOKENS, 5), 5, ks=(2,)).scores
    ),
    "layers": lambda m: layer_knockout(last_of(m), TOKENS, torch.tensor([5, 5]), model=m)[
        "blocks.0.mixer"
    ],
    "blocks": lambda m: oversmoothing(m, TOKENS)["blocks.1"],
}


@pytest.mark.filterwarnings(
    "ignore:Training draws random numbers", "ignore:the score of one example"
)
@pytest.mark.parametrize("name", RUNS)
def test_the_model_and_the_random_state_are_as_before(model, name):
    before, runs = fingerprint(model), model.runs
    found = RUNS[name](model)
    assert_unchanged(model, before)
    assert model.runs == runs
    assert torch.equal(RUNS[name](model), found)


@pytest.mark.parametrize("coefficients", ["run", "whole"])
def test_all_edges_are_the_models_own_run_with_its_random_numbers(model, coefficients):
    edges, results = torch.ones(2, L, L, dtype=torch.bool), []
    for is_edited in (False, True):
        torch.manual_seed(3)
        with torch.no_grad():
            if not is_edited:
                results.append(model(TOKENS))
                continue
            with circuit(model, edges, coefficients=coefficients):
                results.append(model(TOKENS))
    assert torch.equal(*results)
    assert model.runs == 2


def test_weights_that_lie_elsewhere_are_loaded_into_the_copies(mamba):
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(deepcopy(mamba), execution_device="cpu")
    for name in ("token knockout", "activations", "gradients", "reference", "faithfulness"):
        run = RUNS[name] if name != "reference" else reference
        torch.testing.assert_close(run(offloaded), run(mamba), atol=1e-5, rtol=1e-4)


def reference(model):
    return Reference.of(model, TOKENS).carried["backbone.layers.1.mixer"][0][0].values
