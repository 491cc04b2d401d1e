"""Gradients through interventions: those of one function in two forms, and finite differences."""

from __future__ import annotations

import pytest
import torch
from families import build, padded
from methods import assert_close
from models import embed, ids
from torch import Tensor, nn

from captum_ssm import UnsupportedModelError
from captum_ssm.interventions import attribution_patching, circuit, knockout, patched

L = 6


class Wrapped(nn.Module):
    """A linear layer with a low-rank one beside it that adds nothing yet, as LoRA begins."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def wrapped(model: nn.Module) -> nn.Module:
    """The model again, with its output projections wrapped."""
    for module in list(model.modules()):
        for name in ("out_proj", "o_proj"):
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear):
                setattr(module, name, Wrapped(layer))
    return model.eval()


def without_tokens(model: nn.Module, formulation: str = "hidden"):
    return knockout(model, sources=[1, 3], targets=slice(3, None), formulation=formulation)


def gradient(model: nn.Module, e: Tensor, block=without_tokens) -> Tensor:
    """The gradient at embeddings of a logit in an intervention; backward outside of the block."""
    x = e.clone().requires_grad_()
    with block(model):
        score = model(inputs_embeds=x).logits[0, -1, 5]
    score.backward()
    return x.grad


@pytest.mark.parametrize("family", ["mamba", "jamba", "zamba", "falcon_mamba", "mamba2"])
def test_unified_edges_have_the_gradient_of_finite_differences(family):
    model = build(family)
    e = embed(model, ids(1, L))

    def block(model: nn.Module):
        return without_tokens(model, "unified")

    def score(e: Tensor) -> Tensor:
        with torch.no_grad(), block(model):
            return model(inputs_embeds=e).logits[0, -1, 5].double()

    d = torch.randn(e.shape, generator=torch.Generator().manual_seed(0))
    measured = (score(e + 1e-3 * d) - score(e - 1e-3 * d)) / 2e-3
    assert abs(measured - (gradient(model, e, block) * d).sum()) <= 1e-2 * abs(measured)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_a_wrapped_output_projection_has_the_gradient_of_the_plain_one(family):
    model, same = build(family), wrapped(build(family))
    e, (clean, corrupted) = embed(model, ids(1, L)), (ids(1, L), ids(1, L, seed=1))
    assert_close(gradient(same, e), gradient(model, e))
    effects = [
        attribution_patching(m, clean, corrupted, target=5, rule="gradient")["output"].effects
        for m in (same, model)
    ]
    assert_close(*effects)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # its name in transformers 4
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_what_checkpointing_computes_again_has_the_intervention_too(family, reentrant):
    model, same = build(family), build(family)
    same.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same.train()
    e = embed(model, ids(1, L))
    for block in (without_tokens, lambda m: circuit(m, [(0, 5, 2), (1, 5, 5)])):
        assert_close(gradient(same, e, block), gradient(model, e, block))


def test_rows_of_padding_have_no_gradient():
    model, mask = build("jamba"), padded("left", length=L, pads=2)
    x = embed(model, ids(2, L)).requires_grad_()
    with knockout(model, sources=3, targets=-1):
        model(inputs_embeds=x, attention_mask=mask).logits[:, -1, 5].sum().backward()
    assert x.grad.isfinite().all()
    alone = embed(model, ids(2, L))[1:, 2:].requires_grad_()
    with knockout(model, sources=1, targets=-1):
        model(inputs_embeds=alone).logits[0, -1, 5].backward()
    assert_close(x.grad[1, 2:], alone.grad[0])


def test_a_model_that_keeps_no_state_is_named():
    with (
        pytest.raises(UnsupportedModelError, match=r"'state'.*attention.*Patch 'output'"),
        patched(build("rwkv"), ids(1, L), component="state", tokens=2),
    ):
        pass


def test_a_model_that_writes_its_cache_in_place_has_gradients():
    model, clean, corrupted = build("rwkv"), ids(1, L), ids(1, L, seed=1)
    effects = [
        attribution_patching(
            model, clean, corrupted, target=5, rule="gradient", additional_forward_args=further
        )["output"].effects
        for further in ({"use_cache": True}, {"use_cache": False})
    ]
    assert_close(*effects)
