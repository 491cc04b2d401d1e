"""A mixer's output projection runs once where an earlier run showed it, with the same result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from families import build
from models import embed, ids, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.mamba.modeling_mamba import MambaMixer

from captum_ssm import RawAttention, ReconstructionError
from captum_ssm.interventions import circuit, knockout
from captum_ssm.mixers import find_mixers
from captum_ssm.mixers.registry import known_of, projection_of

L = 11
EDGES = [(0, 6, 2), (0, 5, 5), (1, 9, 4)]


class LinearRuns(TorchFunctionMode):
    """How often each weight is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.runs[id(args[1])] += 1
        return func(*args, **(kwargs or {}))

    def of(self, layers: list[nn.Linear]) -> set[int]:
        return {self.runs[id(layer.weight)] for layer in layers}


def projections(model: nn.Module) -> list[Any]:
    return [projection_of(mixer) for _, mixer in find_mixers(model)]


@pytest.mark.parametrize(
    ("formulation", "coefficients"), [("hidden", "run"), ("hidden", "whole"), ("unified", "run")]
)
@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_later_runs_are_the_first_one_with_one_projection(family, formulation, coefficients):
    model, tokens = build(family), ids(2, L)
    options = {"formulation": formulation, "coefficients": coefficients}
    e = embed(model, tokens)
    counts, found = [], []
    for _ in range(2):
        x = e.clone().requires_grad_()
        with circuit(model, EDGES, **options), LinearRuns() as linears:
            y = model(inputs_embeds=x).logits
        counts.append(linears.of(projections(model)))
        found.append((y.detach(), *torch.autograd.grad(y[:, -1, 5].sum(), x)))
    unedited = int(coefficients == "whole")
    # The whole run comes first, and shows the projection to the edited one.
    assert counts == [{2}, {1 + unedited}]
    assert all(map(torch.equal, *found))


def test_a_recorded_run_shows_the_projection():
    model, tokens = build("mamba2"), ids(2, L)
    RawAttention(model).attribute(tokens)
    with torch.no_grad(), knockout(model, sources=2), LinearRuns() as linears:
        model(tokens)
    assert linears.of(projections(model)) == {1}


def test_another_layer_than_the_projection_is_left_as_it_is():
    model, tokens = tiny("mamba"), ids(2, L)

    def run() -> Tensor:
        with torch.no_grad(), circuit(model, EDGES):
            return model(tokens).logits

    truth, layers = run(), projections(model)
    for _, mixer in find_mixers(model):
        known_of(mixer).projection = "in_proj"
    assert torch.equal(run(), truth)
    assert projections(model) == layers
    with torch.inference_mode():
        assert torch.equal(run(), truth)


def test_a_hook_is_shown_what_the_projection_returns_without_the_edit():
    model, tokens = tiny("mamba"), ids(2, L)
    layer = model.backbone.layers[0].mixer.out_proj
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, result: seen.append(result))
    with torch.no_grad():
        model(tokens)
        for _ in range(2):
            with knockout(model, sources=2):
                model(tokens)
    assert len(seen) == 3
    assert all(torch.equal(one, seen[0]) for one in seen)


class LateChange(MambaMixer):
    """Adds nothing to its result, from some run on."""

    is_late = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        return result + 0 if self.is_late else result


def test_what_follows_a_projection_is_noticed():
    model, tokens = tiny("mamba"), ids(2, L)
    mixer = model.backbone.layers[1].mixer
    mixer.__class__ = LateChange

    def run() -> Tensor:
        with torch.no_grad(), circuit(model, EDGES):
            return model(tokens).logits

    truth = run()
    mixer.is_late = True
    with pytest.raises(ReconstructionError, match="changed what its output projection returned"):
        run()
    for _ in range(2):
        torch.testing.assert_close(run(), truth)


class OwnLinear(nn.Linear):
    """A layer whose calls are not those of a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("layer", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rounding_is_left_where_no_edge_is(dtype, layer):
    model, tokens = build("olmo_hybrid").to(dtype), ids(2, L)
    attention = model.model.layers[1].self_attn
    attention.o_proj.__class__ = layer
    outputs: list[Tensor] = []
    attention.register_forward_hook(lambda module, args, result: outputs.append(result[0]))
    edges = {1: torch.ones(L, L, dtype=torch.bool).tril()}
    edges[1][4] = False
    for _ in range(2):
        with torch.no_grad(), circuit(model, edges):
            model(tokens)
        # The norm after this mixer would scale rounding up to a token's size.
        assert not outputs[-1][:, 4].any()
        assert outputs[-1][:, 5].all()
