"""Knockout of edges against brute force, and where it must not go wrong silently."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import wild
from edges import SCANS, removed_by_hand
from families import FAMILIES, HYBRIDS, WITHOUT_STATE, build, padded, skip_what_fails_by_itself
from methods import assert_close
from models import embed, ids, recast, tiny
from torch import Tensor, nn

import captum_ssm
from captum_ssm import (
    InputError,
    MambaLRP,
    RawAttention,
    ReconstructionError,
    UnsupportedModelError,
)
from captum_ssm.interventions import knockout

L = 11


def edges(mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Other sources and targets in each of two examples, so that some edges stay in each row."""
    sources, targets = torch.zeros(2, L), torch.zeros(2, L)
    sources[0, [2, 5]] = 1
    sources[1, 4:7] = 1
    targets[0, 3:] = 1
    targets[1, [4, 9]] = 1
    return sources, targets


def test_every_recurrence_has_an_oracle():
    assert set(SCANS) == set(FAMILIES) - set(WITHOUT_STATE)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize(("family", "side"), [*itertools.product(SCANS, (None, "left", "right"))])
def test_knockout_is_brute_force(family, side):
    skip_what_fails_by_itself(family, L, side)
    model, tokens = build(family), ids(2, L)
    inputs = {} if side is None else {"attention_mask": padded(side, length=L)}
    sources, targets = edges()
    for renormalize in (False, True) if family in HYBRIDS else (False,):
        with (
            torch.no_grad(),
            knockout(
                model,
                sources=sources.bool(),
                targets=targets.bool(),
                renormalize=renormalize,
            ),
        ):
            found = model(tokens, **inputs).logits
        with torch.no_grad(), removed_by_hand(family, model, sources, targets, renormalize):
            truth = model(tokens, **inputs).logits
        with torch.no_grad():
            plain = model(tokens, **inputs).logits
        real = 1.0 if side is None else inputs["attention_mask"][..., None]
        assert ((truth - plain) * real).abs().max() > 1e-3 * plain.abs().max()
        assert_close(found * real, truth * real)


@pytest.mark.parametrize("family", SCANS)
def test_without_a_source_nothing_changes_at_all(family):
    model, tokens = build(family), ids(2, L)
    with torch.no_grad():
        plain = model(tokens).logits
        for formulation in ("hidden", "unified"):
            for none in ({"sources": []}, {"targets": []}, {"heads": []}):
                with knockout(model, formulation=formulation, **none):
                    assert torch.equal(model(tokens).logits, plain)
        assert torch.equal(model(tokens).logits, plain)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_rows_before_the_targets_stay_bit_by_bit(family):
    model, tokens = build(family), ids(2, L)
    with torch.no_grad():
        plain = model(tokens).logits
        with knockout(model, sources=2, targets=slice(6, None)):
            found = model(tokens).logits
    assert torch.equal(found[:, :6], plain[:, :6])
    assert (found[:, 6:] != plain[:, 6:]).any()


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "rwkv"])
def test_all_edges_out_of_a_token_are_its_values_at_zero(family):
    # All layers but the first, which reads the token alone: the same as zeros for its values.
    model, tokens = build(family), ids(2, L)
    sources, targets = torch.zeros(2, L), torch.ones(2, L)
    sources[:, 4] = 1
    targets[:, 4] = 0
    with torch.no_grad(), knockout(model, sources=4, targets=targets.bool()):
        found = model(tokens).logits
    with torch.no_grad(), removed_by_hand(family, model, sources, targets):
        assert_close(found, model(tokens).logits)


def test_keeping_edges_is_removing_the_others(mamba):
    tokens = ids(2, L)
    with torch.no_grad():
        plain = mamba(tokens).logits
        with knockout(mamba, keep=True):
            assert_close(mamba(tokens).logits, plain)
        with knockout(mamba, sources=slice(0, 4), layers=0):
            removed = mamba(tokens).logits
        with knockout(mamba, sources=slice(4, None), layers=0, keep=True):
            assert_close(mamba(tokens).logits, removed)
        with knockout(mamba, sources=[], keep=True):
            nothing = mamba(tokens).logits
        with knockout(mamba):
            assert_close(nothing, mamba(tokens).logits)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_heads_add_up_in_one_layer(family):
    # Before the norm and the output projection edges add up; with one layer, after them too.
    model, tokens = build(family), ids(1, L)
    captured = []
    path, module = next(
        (n, m) for n, m in model.named_modules() if type(m).__name__.endswith(("Mixer",))
    )
    hook = module.register_forward_hook(lambda m, a, y: captured.append(y))
    try:
        with torch.no_grad():
            model(tokens)
            maps = 4 if family == "mamba2" else 32
            for heads in (slice(0, 1), slice(1, None), None):
                with knockout(model, sources=2, layers=path, heads=heads, formulation="unified"):
                    model(tokens)
            plain, *found = captured
            with (
                pytest.raises(InputError, match=f"heads holds {maps}, outside the {maps}"),
                knockout(model, layers=path, heads=maps),
            ):
                model(tokens)
    finally:
        hook.remove()
    one, rest, all_of = (y - plain for y in found)
    assert_close(one + rest, all_of)


def test_unified_edges_are_those_of_the_whole_mixer(mamba):
    # With every component: what is left of the mixer is what does not depend on the source.
    tokens = ids(1, L)
    maps = captum_ssm.hidden_attention(mamba, tokens, formulation="unified")
    path = next(iter(maps))
    mixer = mamba.get_submodule(path)
    seen = []
    hooks = [
        mixer.in_proj.register_forward_hook(lambda m, a, y: seen.append(y)),
        mixer.register_forward_hook(lambda m, a, y: seen.append(y)),
    ]
    with torch.no_grad():
        mamba(tokens)
        u, plain = seen[0].chunk(2, -1)[0], seen[1]
        with knockout(mamba, sources=3, targets=[5, 8], layers=path, formulation="unified"):
            mamba(tokens)
        lost = plain - seen[3]
        for hook in hooks:
            hook.remove()
        edge = maps[path][0, :, :, 3] * u[0, 3][:, None]  # (D, L)
        truth = torch.zeros_like(plain)
        truth[0, [5, 8]] = mixer.out_proj(edge.T)[[5, 8]]
    assert_close(lost, truth)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_gradients_go_through_the_coefficients_too(family):
    model, tokens = build(family), ids(1, 6)
    e = embed(model, tokens)

    def score(e: Tensor) -> Tensor:
        with knockout(model, sources=[1, 3], targets=slice(3, None)):
            return model(inputs_embeds=e).logits[0, -1, 5]

    x = e.clone().requires_grad_()
    (g,) = torch.autograd.grad(score(x), x)
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(e.shape, generator=generator)
    with torch.no_grad():
        measured = (score(e + 1e-3 * d).double() - score(e - 1e-3 * d).double()) / 2e-3
    assert abs(measured - (g * d).sum()) <= 1e-2 * abs(measured)


def test_captums_methods_around_it(mamba):
    from captum.attr import LayerIntegratedGradients, Occlusion

    def forward(ids: Tensor) -> Tensor:
        with knockout(mamba, sources=2, layers=[0, 1]):
            return mamba(ids).logits[:, -1]

    tokens = ids(1, 6)
    lig = LayerIntegratedGradients(forward, mamba.get_input_embeddings())
    found, delta = lig.attribute(
        tokens, torch.zeros_like(tokens), target=5, n_steps=64, return_convergence_delta=True
    )
    assert found.isfinite().all()
    assert abs(delta) <= 0.05 * (forward(tokens)[0, 5] - forward(0 * tokens)[0, 5]).abs()
    with knockout(mamba, sources=2):
        occluded = Occlusion(lambda e: mamba(inputs_embeds=e).logits[:, -1]).attribute(
            embed(mamba, tokens), (1, 16), target=5
        )
    assert occluded.isfinite().all()


def test_our_own_methods_are_refused_inside(mamba):
    for method in (RawAttention, MambaLRP):
        with (
            pytest.raises(UnsupportedModelError, match="inside of the block"),
            knockout(mamba, sources=1),
        ):
            method(mamba).attribute(ids(), target=5)
        assert method(mamba).attribute(ids(), target=5).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, mamba):
    tokens = ids(2, L)
    with torch.no_grad():
        with knockout(mamba, sources=3):
            truth = mamba(tokens).logits
        other = recast(mamba, dtype)
        with knockout(other, sources=3):
            found = other(tokens).logits
    assert_close(found.float(), truth, 0.1 if dtype == torch.bfloat16 else 1e-5)


def test_under_autocast(mamba):
    tokens = ids(2, L)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), knockout(mamba, sources=3):
        found = mamba(tokens).logits
    with torch.no_grad(), knockout(mamba, sources=3):
        assert_close(found.float(), mamba(tokens).logits, 0.1)


def test_models_of_images():
    from captum_ssm.models import SS2D, BidirectionalMamba

    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    for mixer in (
        BidirectionalMamba(16, state=4, bimamba_type="v2"),
        BidirectionalMamba(16, state=4, bimamba_type="v1"),
        SS2D(16, grid=(3, 4)),
    ):
        model = nn.Sequential(mixer)
        with torch.no_grad():
            plain = model(x)
            with knockout(model, sources=[]):
                assert torch.equal(model(x), plain)
            with knockout(model, sources=5, targets=[0, 11]):
                found = model(x)
            changed = (found - plain).abs().amax((0, 2)) > 1e-6
            assert changed.nonzero().flatten().tolist() == [0, 11]  # from both sides
            # All edges gone: what is left is each token's own skip.
            with knockout(model):
                whole = model(x)
                assert_close(model(x.flip(0)), whole.flip(0))


@pytest.mark.parametrize("kind", [wild.Mixer, wild.Backward])
def test_a_mixer_that_no_adapter_knows(kind, monkeypatch):
    torch.manual_seed(0)
    model, x = wild.Stack(kind(), kind()).eval(), torch.randn(2, L, 6)
    with pytest.raises(UnsupportedModelError, match="supported"), knockout(model, sources=1):
        model(x)
    captum_ssm.supported(model, x)
    sources, targets = edges()
    with torch.no_grad(), knockout(model, sources=sources.bool(), targets=targets.bool()):
        found = model(x)
    if kind is wild.Backward:
        sources, targets = sources.flip(1), targets.flip(1)
    original = wild.scan

    def scan(x: Tensor, *others: Tensor) -> Tensor:
        own = others[-1] * x * sources[..., None]
        left = original(x * (1 - sources[..., None]), *others) + own
        return torch.where(targets[..., None] != 0, left, original(x, *others))

    monkeypatch.setattr(wild, "scan", scan)
    with torch.no_grad():
        assert_close(found, model(x))
    monkeypatch.undo()
    with pytest.raises(UnsupportedModelError, match="no gradient goes"), knockout(model, sources=1):
        model(x.clone().requires_grad_())


def test_a_norm_that_is_only_measured_is_refused():
    torch.manual_seed(0)
    model, x = wild.Stack(wild.Normed()).eval(), torch.randn(2, L, 6)
    captum_ssm.supported(model, x)
    with (
        pytest.raises(UnsupportedModelError, match="norm after this mixer's scan"),
        torch.no_grad(),
        knockout(model, sources=1),
    ):
        model(x)
    with torch.no_grad(), knockout(model, sources=1, formulation="unified"):
        assert model(x).isfinite().all()


def state_of(model: nn.Module) -> list:
    return [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), sorted(m.__dict__))
        for m in model.modules()
    ]


def test_bad_input_leaves_the_model_as_it_was(mamba):
    before, tokens = state_of(mamba), ids(2, L)
    for options, error, match in (
        ({"sources": L}, InputError, rf"sources holds \[?{L}\]?, outside the {L} tokens"),
        ({"targets": [0, -L - 1]}, InputError, "targets holds"),
        ({"sources": torch.ones(3, L, dtype=torch.bool)}, InputError, "mask of shape"),
        ({"sources": 1.5}, TypeError, "sources is 1.5"),
        ({"layers": 2}, ValueError, "layers holds 2; this model has 2 mixers"),
        ({"layers": "backbone"}, ValueError, "or a path: backbone.layers.0.mixer"),
        ({"layers": []}, ValueError, "names none"),
        ({"formulation": "both"}, ValueError, "formulation is 'both'"),
        ({"formulation": "unified", "renormalize": True}, ValueError, "renormalize=True"),
    ):
        with pytest.raises(error, match=match), knockout(mamba, **options):
            mamba(tokens)
        assert state_of(mamba) == before
    with (
        pytest.raises(UnsupportedModelError, match="did not reach backbone"),
        knockout(mamba, sources=1),
    ):
        pass
    with (
        pytest.raises(ValueError, match="is edited by another intervention"),
        knockout(mamba, sources=1),
        knockout(mamba, sources=2, layers=-1),
    ):
        mamba(tokens)
    with pytest.raises(ZeroDivisionError), knockout(mamba, sources=1):
        raise ZeroDivisionError
    with (
        pytest.raises(UnsupportedModelError, match="holds no token mixer"),
        knockout(nn.Linear(2, 2)),
    ):
        pass
    assert state_of(mamba) == before
    with torch.no_grad(), knockout(mamba, sources=1, layers=0), knockout(mamba, layers=1):
        mamba(tokens)  # of different layers


@pytest.mark.parametrize("is_known", [False, True])
def test_a_mixer_that_computes_something_else_is_found_out(is_known):
    model = tiny("mamba")
    if is_known:  # its output projection is
        with knockout(model, sources=1):
            model(ids())
    model.backbone.layers[1].mixer.out_proj.register_forward_pre_hook(
        lambda m, args: (args[0] * torch.linspace(0.5, 1.5, 32),)
    )
    with (
        pytest.raises(ReconstructionError, match="the frozen operator of"),
        knockout(model, sources=1),
    ):
        model(ids())
    with knockout(model, sources=1, check=False):
        model(ids())


def test_threads_do_not_meet(mamba):
    tokens = ids(2, L)
    with torch.no_grad():
        plain = mamba(tokens).logits
        with knockout(mamba, sources=3):
            truth = mamba(tokens).logits
    wrong: list[str] = []
    start = threading.Barrier(4)

    def knocked() -> None:
        start.wait()
        for _ in range(8):
            with torch.no_grad(), knockout(mamba, sources=3):
                if not torch.equal(mamba(tokens).logits, truth):
                    wrong.append("knockout")

    def free() -> None:
        start.wait()
        for _ in range(8):
            with torch.no_grad():
                if not torch.equal(mamba(tokens).logits, plain):
                    wrong.append("plain")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda run: run(), (knocked, free, knocked, free)))
    assert not wrong
