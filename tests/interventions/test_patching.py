"""Patching: exact where it is, first order where it is that, and its errors."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from families import build, modeling_of, padded
from methods import assert_close
from models import Residual, embed, ids, randomize
from torch import Tensor

from captum_ssm import InputError, UnsupportedModelError
from captum_ssm.interventions import (
    activation_patching,
    attribution_patching,
    patched,
    value_zeroing,
)

L = 9
SCANS = {
    "mamba": ("mamba_selective_scan", "hidden_states", -1),
    "mamba2": ("mamba2_chunk_scan", "hidden_states", 1),
    "qwen3_next": ("torch_chunk_gated_delta_rule", "value", 1),
}


def pair(batch: int = 2, at: int = 2) -> tuple[Tensor, Tensor]:
    clean = ids(batch, L)
    corrupted = clean.clone()
    corrupted[:, at] = (clean[:, at] + 7) % 30 + 3
    return clean, corrupted


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_with_everything_patched_the_clean_logits_come_out_exactly(family):
    model, (clean, corrupted) = build(family), pair()
    with torch.no_grad():
        truth = model(clean).logits
        plain = model(corrupted).logits
        with patched(model, clean):
            found = model(corrupted).logits
        with patched(model, corrupted):
            assert torch.equal(model(corrupted).logits, plain)
    # The residual stream of the corrupted token begins with another embedding.
    same = [i for i in range(L) if i != 2]
    assert torch.equal(found[:, same], truth[:, same])
    assert not torch.equal(plain[:, 3:], truth[:, 3:])


@pytest.mark.parametrize("component", ["output", "values", "state"])
def test_patching_with_its_own_activations_changes_nothing(component, mamba):
    tokens = ids(2, L)
    where = 4 if component == "state" else None
    with torch.no_grad():
        plain = mamba(tokens).logits
        with patched(mamba, tokens, component=component, tokens=where):
            assert_close(mamba(tokens).logits, plain, 1e-6)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_outputs_are_patched_as_by_a_hook(family):
    model, (clean, corrupted) = build(family), pair()
    found = activation_patching(model, clean, corrupted, target=5, perturbations_per_eval=4)
    kept: dict[str, Tensor] = {}
    for w, path in enumerate(found.layers):
        module = model.get_submodule(path)

        def put(m, args, out, path=path, at=None):
            y = out[0] if isinstance(out, tuple) else out
            if at is None:
                kept[path] = y
                return None
            y = y.clone()
            y[:, at] = kept[path][:, at]
            return (y, *out[1:]) if isinstance(out, tuple) else y

        with torch.no_grad():
            hook = module.register_forward_hook(put)
            model(clean)
            hook.remove()
            plain = model(corrupted).logits[:, -1, 5]
            for t in (1, 2, 5, L - 1):
                hook = module.register_forward_hook(lambda m, a, y, t=t: put(m, a, y, at=t))
                effect = model(corrupted).logits[:, -1, 5] - plain
                hook.remove()
                torch.testing.assert_close(found.effects[:, w, t], effect, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        total = model(clean).logits[:, -1, 5] - plain
    torch.testing.assert_close(found.total, total)
    assert found.effects[:, :, :2].abs().max() <= 1e-5  # before the corrupted token
    assert list(found.rows(1)) == found.layers


@pytest.mark.parametrize("family", SCANS)
def test_values_are_patched_as_in_the_models_own_scan(family):
    model, (clean, corrupted) = build(family, num_hidden_layers=1, **ONE.get(family, {})), pair()
    name, role, axis = SCANS[family]
    modeling = modeling_of(model, name)
    original = getattr(modeling, name)
    kept: list[Tensor] = []

    def run(tokens: Tensor, at: int | None) -> Tensor:
        def scan(*args, **kwargs):
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            if at is None:
                kept.append(given[role])
            else:
                given[role] = given[role].clone()
                given[role].select(axis, at).copy_(kept[0].select(axis, at))
            return original(**given)

        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(patch.object(modeling, name, scan))
            for module in model.modules():
                own = {k: scan for k, f in module.__dict__.items() if f is original}
                stack.enter_context(patch.dict(module.__dict__, own))
            return model(tokens, use_cache=False).logits[:, -1, 5]

    run(clean, None)
    with torch.no_grad():
        plain = model(corrupted, use_cache=False).logits[:, -1, 5]
    found = activation_patching(
        model, clean, corrupted, target=5, component="values", layers=0, perturbations_per_eval=L
    )
    for t in (2, 3, 5, L - 1):
        truth = run(corrupted, t) - plain
        torch.testing.assert_close(found.effects[:, 0, t], truth, atol=2e-5, rtol=1e-3)
    assert found.effects[:, 0, 2:5].abs().min() > 1e-6


ONE = {"qwen3_next": {"layer_types": ["linear_attention"]}}


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_the_state_carries_all_of_the_past(family):
    # One layer: far behind the corrupted token, all that is left of it is in the state.
    model, (clean, corrupted) = (
        build(family, num_hidden_layers=1, **ONE.get(family, {})),
        pair(at=1),
    )
    with torch.no_grad():
        truth, plain = (model(x, use_cache=False).logits for x in (clean, corrupted))
        with patched(model, clean, component="state", tokens=6):
            found = model(corrupted, use_cache=False).logits
    assert torch.equal(found[:, :6], plain[:, :6])
    assert_close(found[:, 6:], truth[:, 6:])
    assert (plain[:, 6:] - truth[:, 6:]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "jamba"])
def test_gradients_are_patching_to_first_order(family):
    model = build(family)
    corrupted = embed(model, ids(2, 6))
    generator = torch.Generator().manual_seed(0)
    clean = corrupted + 1e-4 * torch.randn(corrupted.shape, generator=generator)
    components = ["output", "values", "state"]
    found = attribution_patching(
        model, clean, corrupted, target=5, rule="gradient", components=components
    )
    for component in components:
        truth = activation_patching(
            model, clean, corrupted, target=5, component=component, perturbations_per_eval=6
        )
        assert found[component].layers == truth.layers
        x, y = found[component].effects.flatten(), truth.effects.flatten()
        assert (x - y).norm() <= 0.05 * y.norm(), component


def test_relp_is_exact_where_the_rest_is_linear():
    model = randomize(Residual(2)).eval()
    clean, corrupted = pair()
    found = attribution_patching(model, clean, corrupted, target=5, rule="relp")
    truth = activation_patching(
        model, clean, corrupted, target=5, perturbations_per_eval=L, layers=1
    )
    torch.testing.assert_close(found["output"].effects[:, 1:], truth.effects, atol=1e-5, rtol=1e-4)
    # Half of the relevance of a gated product is the gate's.
    values = activation_patching(
        model, clean, corrupted, target=5, component="values", perturbations_per_eval=L, layers=1
    )
    half = values.effects / 2
    torch.testing.assert_close(found["values"].effects[:, 1:], half, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_relp_leaves_no_trace_and_follows_patching(family):
    model, (clean, corrupted) = build(family), pair()
    found = attribution_patching(model, clean, corrupted, target=5)
    assert all(p.grad is None for p in model.parameters())
    truth = activation_patching(model, clean, corrupted, target=5, perturbations_per_eval=L)
    assert found["output"].layers == truth.layers
    assert found["output"].effects.shape == truth.effects.shape
    torch.testing.assert_close(found["output"].total, truth.total)
    together = torch.stack([found["output"].effects.flatten(), truth.effects.flatten()])
    assert torch.corrcoef(together)[0, 1] > 0.5


def test_value_zeroing_is_what_a_hook_measures(mamba):
    tokens = ids(2, 6)
    modeling = modeling_of(mamba, "mamba_selective_scan")
    original, seen = modeling.mamba_selective_scan, {}
    mixer, block = mamba.backbone.layers[1].mixer, mamba.backbone.layers[1]
    hooks = [
        m.register_forward_hook(lambda m, a, y, n=n: seen.update({n: y}))
        for n, m in (("mixer", mixer), ("block", block))
    ]

    def run(j: int | None) -> dict[str, Tensor]:
        calls = 0

        def scan(v, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == 2 and j is not None:
                v = v.clone()
                v[..., j] = 0
            return original(v, *args, **kwargs)

        with patch.object(modeling, "mamba_selective_scan", scan), torch.no_grad():
            mamba(tokens)
        return dict(seen)

    plain = run(None)
    zeroed = [run(j) for j in range(6)]
    for hook in hooks:
        hook.remove()
    for name, at in (("mixer", None), ("block", "backbone.layers.1")):
        truth = torch.stack(
            [1 - torch.cosine_similarity(z[name], plain[name], -1) for z in zeroed], -1
        )
        found = value_zeroing(mamba, tokens, 1, at=at, perturbations_per_eval=4)
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("at", [None, "backbone.layers.0"])
def test_what_stays_zero_has_not_changed(at):
    model, tokens, mask = build("mamba").double(), ids(2, L), padded("left")
    found = value_zeroing(model, tokens, 0, at=at, additional_forward_args={"attention_mask": mask})
    alone = value_zeroing(model, tokens[1:, 4:], 0, at=at)
    assert found.dtype == torch.double
    assert not found[1, :4].any()
    torch.testing.assert_close(found[1:, 4:, 4:], alone)


def test_bad_input(mamba):
    clean, corrupted = pair()
    for options, error, match in (
        ({"component": "gate"}, ValueError, "component is 'gate'"),
        ({"layers": 4}, ValueError, "layers holds 4"),
        ({"perturbations_per_eval": 0}, ValueError, "perturbations_per_eval is 0"),
    ):
        with pytest.raises(error, match=match):
            activation_patching(mamba, clean, corrupted, target=5, **options)
    with pytest.raises(InputError, match="clean has shape"):
        activation_patching(mamba, clean[:, 1:], corrupted, target=5)
    jamba = build("jamba")
    for model, given, options, error, match in (
        (mamba, clean[:, 1:], {}, InputError, "returns a tensor of shape"),
        (mamba, clean, {"component": "state"}, InputError, "one per example"),
        (
            jamba,
            clean,
            {"component": "state", "layers": 1, "tokens": 3},
            UnsupportedModelError,
            "cannot be exchanged",
        ),
    ):
        with pytest.raises(error, match=match), patched(model, given, **options):
            model(corrupted)
    with pytest.raises(ValueError, match="rule is 'lrp'"):
        attribution_patching(mamba, clean, corrupted, target=5, rule="lrp")
    with pytest.raises(ValueError, match="at is 'nowhere'"):
        value_zeroing(mamba, clean, 0, at="nowhere")
    with pytest.raises(InputError, match="one vector per token"):
        value_zeroing(mamba, clean, 0, at="backbone.layers.0.mixer.conv1d")
    assert "forward" not in mamba.backbone.layers[0].mixer.__dict__
