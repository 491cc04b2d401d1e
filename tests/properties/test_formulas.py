"""Each method against the papers' formulas, written out with explicit matrices in float64."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from families import build
from methods import MAPS, assert_close, each, each_method
from models import S6_FAMILIES, Classifier, Residual, ids, recast, s6_paths, tiny
from torch import Tensor, nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    TargetError,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.attr.maps.maps import MapOptions, MixerMap, raw_row, rollout_row
from captum_ssm.capture import Request
from captum_ssm.capture.freezing import freeze as frozen_model
from captum_ssm.mixers import find_mixers, registry
from captum_ssm.wiring.wiring import sequence

REDUCTIONS = ("mean", "max", "min", "prod")
OPTIONS = [
    {},
    *({"reduction": name} for name in REDUCTIONS[1:]),
    {"sign": "clamp"},
    {"sign": "absolute"},
    {"discard_ratio": 0.5},
    {"discard_ratio": 0.99},
    {"min_max": True},
    {"sign": "absolute", "normalize_rows": True},
    {"sign": "clamp", "min_max": True, "normalize_rows": True},
    {"reduction": "max", "sign": "clamp", "discard_ratio": 0.3, "normalize_rows": True},
    {"normalize_rows": True},
]


def named(options: dict) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "defaults"


def double(family: str = "mamba", **kwargs) -> torch.nn.Module:
    return recast(tiny(family, **kwargs), torch.float64)


def reduce_channels(maps: Tensor, reduction: str) -> Tensor:
    by_name = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin, "prod": Tensor.prod}
    return by_name[reduction](maps, 1)


def explicit_map(
    maps: Tensor, gradient: Tensor | None = None, *, reduction="mean", sign=None, **options
) -> Tensor:
    """One layer's map ``(B, L, L)``, from ``(B, D, L, L)``, without the row normalisation."""
    found = reduce_channels(maps, reduction)
    if gradient is not None:
        found = gradient[:, :, None] * found
    if sign == "clamp":
        found = found.clamp(min=0)
    if sign == "absolute":
        found = found.abs()
    out = []
    for matrix in found:
        ratio = options.get("discard_ratio", 0)
        if ratio:
            order = sorted(float(v) for v in matrix.abs().flatten() if v != 0)
            dropped = order[: int(ratio * len(order))]
            cut = dropped[-1] if dropped else 0.0
            matrix = torch.where(matrix.abs() > cut, matrix, 0)
        if options.get("min_max") and bool((matrix != 0).any()):
            kept = matrix[matrix != 0]
            span = kept.max() - kept.min()  # a lone entry has none, and becomes 0
            scaled = (matrix - kept.min()) / span if span > 0 else torch.zeros_like(matrix)
            matrix = torch.where(matrix != 0, scaled, 0)
        out.append(matrix)
    return torch.stack(out)


def explicit_rollout(maps: list[Tensor], gradients=None, **options) -> Tensor:
    B, _, L, _ = maps[0].shape
    rho = torch.eye(L, dtype=torch.float64).expand(B, L, L)
    for k, layer in enumerate(maps):
        gradient = None if gradients is None else gradients[k]
        beta = torch.eye(L, dtype=torch.float64) + explicit_map(layer, gradient, **options)
        if options.get("normalize_rows"):
            beta = beta / beta.sum(-1, keepdim=True)
        rho = beta @ rho
    return rho


def explicit_raw(maps: list[Tensor], **options) -> Tensor:
    found = []
    for layer in maps:
        matrix = explicit_map(layer, **options)
        if options.get("normalize_rows"):
            sums = matrix.sum(-1, keepdim=True)
            matrix = torch.where(sums == 0, 0, matrix / sums)  # an empty row stays empty
        found.append(matrix)
    return torch.stack(found).mean(0)


def gated_gradients(model, target: Tensor, position: int, **inputs) -> list[Tensor]:
    """Eq. 24's gradient, by hooks on the inputs of the output projections: ``(B, L)`` a layer."""
    gated, hooks = [], []
    for path in s6_paths(model):
        layer = model.get_submodule(path).out_proj

        def keep(module, args):
            y = args[0] if args[0].requires_grad else args[0].requires_grad_()
            gated.append(y)
            return (y,)

        hooks.append(layer.register_forward_pre_hook(keep))
    try:
        logits = model(**inputs).logits[:, position]
        score = logits[torch.arange(len(logits)), target].sum()
        gradients = torch.autograd.grad(score, gated)
    finally:
        for hook in hooks:
            hook.remove()
    return [g.double().mean(-1) for g in gradients]


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.slow), 17])
def test_rollout_is_the_product_of_matrices(length, options):
    model, tokens = double(layers=3), ids(2, length)
    maps = list(hidden_attention(model, tokens).values())
    truth = explicit_rollout(maps, **options)
    explain = MambaRollout(model)
    assert_close(explain.rollout(tokens, **options), truth)
    for position in (0, length // 2, length - 1):
        row = explain.attribute(tokens, position=position, **options)
        assert row.dtype == torch.float64
        assert_close(row, truth[:, position])


def test_a_row_of_rollout_in_linear_time_at_length_64():
    model, tokens = double(layers=3), ids(1, 64)
    truth = explicit_rollout(list(hidden_attention(model, tokens).values()))
    for position in (0, 31, 63):
        assert_close(MambaRollout(model).attribute(tokens, position=position), truth[:, position])
    # The rows are signed and far from the identity's: nothing here is close by being trivial.
    assert (truth < -0.01).any()
    assert (truth[:, -1, :-1].abs().max() > 0.01).all()


@pytest.mark.parametrize("start", [0, 1, 2, -1, -3])
def test_start_layer(start):
    model, tokens = double(layers=3), ids(2, 9)
    maps = list(hidden_attention(model, tokens).values())[start:]
    explain, truth = MambaRollout(model), explicit_rollout(maps)
    assert_close(explain.rollout(tokens, start_layer=start), truth)
    assert_close(explain.attribute(tokens, start_layer=start), truth[:, -1])
    gradient = MambaAttribution(model)
    whole = gradient.rollout(tokens, target=3, start_layer=start)
    assert_close(gradient.attribute(tokens, target=3, start_layer=start), whole[:, -1])
    gradients = gated_gradients(model, torch.tensor([3, 3]), -1, input_ids=tokens)[start:]
    assert_close(whole, explicit_rollout(maps, gradients, sign="clamp"))


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_raw_attention_is_the_mean_of_rows(options):
    model, tokens = double(layers=3), ids(2, 17)
    truth = explicit_raw(list(hidden_attention(model, tokens).values()), **options)
    explain = RawAttention(model)
    for position in (0, 8, 16):
        assert_close(explain.attribute(tokens, position=position, **options), truth[:, position])


PATH = "backbone.layers.1.mixer"
CHOSEN = [(0, [0]), ([1], [1]), ([-1], [2]), ([2, 0], [2, 0]), (PATH, [1]), ([PATH, 2], [1, 2])]


@pytest.mark.parametrize(("chosen", "indices"), CHOSEN)
def test_raw_attention_of_chosen_layers(chosen, indices):
    model, tokens = double(layers=3), ids(2, 9)
    maps = hidden_attention(model, tokens)
    paths = [list(maps)[i] for i in indices]
    truth = explicit_raw([maps[path] for path in paths])
    assert_close(RawAttention(model).attribute(tokens, layers=chosen), truth[:, -1])
    assert list(hidden_attention(model, tokens, layers=chosen)) == paths


@each([RawAttention, MambaRollout])
def test_class_agnostic_methods_ignore_the_target(method):
    model, tokens = tiny(), ids(2, 9)
    plain = method(model).attribute(tokens)
    for target in (3, torch.tensor([5, 6]), 10**6, "anything"):
        assert torch.equal(method(model).attribute(tokens, target=target), plain)
    there = method(model).attribute(tokens, target=(1, 4))  # but for its position
    assert torch.equal(there, method(model).attribute(tokens, position=1))


@pytest.mark.parametrize("family", S6_FAMILIES)
@pytest.mark.parametrize("length", [1, pytest.param(3, marks=pytest.mark.slow), 9])
def test_mamba_attribution_is_eq_24(family, length):
    model, tokens = tiny(family), ids(2, length)
    target = torch.tensor([3, 8])
    maps = hidden_attention(model, tokens, layers=s6_paths(model))
    explain = MambaAttribution(model)
    for position in {length // 2, length - 1}:
        gradients = gated_gradients(model, target, position, input_ids=tokens)
        truth = explicit_rollout([m.double() for m in maps.values()], gradients, sign="clamp")
        chosen = {"target": target, "position": position}
        if family in ("mamba", "falcon_mamba"):
            assert_close(explain.attribute(tokens, **chosen).double(), truth[:, position], 1e-4)
            assert_close(explain.rollout(tokens, **chosen).double(), truth, 1e-4)
        else:  # a hybrid's attention layers are in the product too
            paths = list(hidden_attention(model, tokens))
            products = [
                explain.rollout(tokens, start_layer=k, **chosen).double() for k in range(len(paths))
            ]
            products.append(torch.eye(length, dtype=torch.float64).expand(2, -1, -1))
            steps = frozen_model(Request.of(model, None, tokens)).wiring.steps
            last = max((k for k, step in enumerate(steps) if step.is_aside), default=-1)
            after = [k for k, path in enumerate(maps) if paths.index(path) > last]
            assert after
            for k in after:
                # The product from a layer on, times the inverse of the product after it. Before
                # Zamba's attention, which reads the embeddings too, there is no such product.
                path = list(maps)[k]
                index = paths.index(path)
                ours = torch.linalg.solve(products[index + 1], products[index])
                alone = explicit_rollout([maps[path].double()], [gradients[k]], sign="clamp")
                assert_close(ours, alone, 1e-4)


@pytest.mark.parametrize("options", [o for o in OPTIONS if "sign" not in o], ids=named)
@pytest.mark.parametrize("sign", [None, "clamp", "absolute"])
def test_options_of_mamba_attribution(options, sign):
    model, tokens, target = double(), ids(2, 9), torch.tensor([3, 8])
    maps = list(hidden_attention(model, tokens).values())
    gradients = gated_gradients(model, target, 5, input_ids=tokens)
    truth = explicit_rollout(maps, gradients, sign=sign, **options)
    explain = MambaAttribution(model)
    chosen = {"target": target, "position": 5, "sign": sign, **options}
    assert_close(explain.rollout(tokens, **chosen), truth)
    assert_close(explain.attribute(tokens, **chosen), truth[:, 5])


@pytest.mark.parametrize("components", [None, ("gate", "skip"), ("conv",), ()], ids=str)
@pytest.mark.parametrize("options", [{}, OPTIONS[-2], {"start_layer": 1}], ids=named)
def test_unified_implicit_attention_takes_the_place_of_hidden_attention(components, options):
    model, tokens, target = double(layers=3), ids(2, 9), torch.tensor([3, 8])
    unified = {"formulation": "unified", "components": components}
    maps = list(hidden_attention(model, tokens, **unified).values())
    gradients = gated_gradients(model, target, 5, input_ids=tokens)
    start = options.get("start_layer", 0)
    maps, gradients = maps[start:], gradients[start:]
    choices = {k: v for k, v in options.items() if k != "start_layer"}
    explain = UnifiedImplicitAttention(model)
    chosen = {"components": components, **options}

    raw = explain.attribute(tokens, position=5, aggregation="raw", **chosen)
    assert_close(raw, explicit_raw(maps, **choices)[:, 5])
    truth = explicit_rollout(maps, **choices)
    rollout = {"aggregation": "rollout", **chosen}
    assert_close(explain.attribute(tokens, position=5, **rollout), truth[:, 5])
    assert_close(explain.rollout(tokens, **rollout), truth)
    truth = explicit_rollout(maps, gradients, **{"sign": "clamp", **choices})
    chosen |= {"target": target, "position": 5}
    assert_close(explain.attribute(tokens, **chosen), truth[:, 5])
    assert_close(explain.rollout(tokens, **chosen), truth)


def test_the_target_decides():
    model, tokens = tiny(), ids(1, 9)
    explain = MambaAttribution(model)
    one, other = (explain.attribute(tokens, target=t) for t in (3, 4))
    assert (one - other).abs().max() > 1e-2 * one.abs().max()


def test_tokens_after_the_query_do_not_matter():
    model, tokens = tiny(), ids(1, 9)
    for method in MAPS:
        row = method(model).attribute(tokens, target=3, position=4)
        short = method(model).attribute(tokens[:, :5], target=3)
        assert (row[:, 5:] == 0).all()
        torch.testing.assert_close(row[:, :5], short, atol=1e-5, rtol=1e-4)


@each(MAPS)
def test_position_in_every_form(method):
    model, tokens = tiny(), ids(3, 9)
    explain = method(model)

    def rows(position, target=4):
        return explain.attribute(tokens, target=target, position=position)

    truth = torch.stack([rows(p)[b] for b, p in enumerate((2, 8, 5))])
    same = partial(torch.testing.assert_close, atol=1e-6, rtol=1e-5)
    for position in (torch.tensor([2, 8, 5]), [2, 8, 5], torch.tensor([-7, -1, 5])):
        same(rows(position), truth)
    for position in (torch.tensor(2), -7):
        same(rows(position), rows(2))
    same(rows(-1), rows(None))
    assert not torch.allclose(rows(2), rows(3))
    if method in (MambaAttribution, UnifiedImplicitAttention):
        same(rows(None, target=(2, 4)), rows(2))
        same(rows(None, target=[(2, 4), (8, 4), (5, 4)]), truth)


@each(MAPS)
def test_a_mean_pooled_model_is_explained_by_the_mean_of_its_rows(method):
    model, tokens = Classifier("mean"), ids(2, 9)
    explain = method(model)
    # With the same target, hence the same gradients, at each position.
    rows = [explain.attribute(tokens, target=3, position=p) for p in range(9)]
    mean = torch.stack(rows).mean(0)
    torch.testing.assert_close(explain.attribute(tokens, target=3), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", S6_FAMILIES)
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
def test_reductions_and_rows_of_hidden_attention(family, formulation):
    model, tokens = tiny(family), ids(2, 9)

    def maps(**options):
        options |= {"layers": s6_paths(model)[-1], "formulation": formulation}
        (found,) = hidden_attention(model, tokens, **options).values()
        return found

    full = maps()
    assert full.shape == (2, 32, 9, 9)
    assert (full.triu(1) == 0).all()  # no token sees a later one
    for reduction in REDUCTIONS:
        assert_close(maps(reduction=reduction), reduce_channels(full, reduction), 1e-5)
    index = torch.tensor([[0, 8, 3], [5, 5, 1]])
    truth = torch.stack([full[b][:, index[b]] for b in range(2)])
    assert_close(maps(rows=index), truth)
    assert_close(maps(rows=[0, -1]), full[:, :, [0, 8]])
    assert_close(maps(rows=-2), full[:, :, [7]])
    for reduction in REDUCTIONS:
        assert_close(maps(rows=index, reduction=reduction), reduce_channels(truth, reduction))


@pytest.mark.parametrize("family", S6_FAMILIES)
def test_components_of_unified_attention(family):
    # Each factor in turn, against the composition by hand.
    model, tokens = tiny(family), ids(2, 9)
    path = s6_paths(model)[0]

    def maps(**options):
        return hidden_attention(model, tokens, layers=path, **options)[path]

    def unified(*components):
        return maps(formulation="unified", components=components)

    bare, hidden = unified(), maps()
    assert_close(bare, hidden)

    def factor(found, dim):
        # By the largest entry of each row or column: others may be next to nothing.
        largest = bare.abs().argmax(dim, keepdim=True)
        return found.gather(dim, largest) / bare.gather(dim, largest)

    gate = factor(unified("gate"), -1)  # a number a row
    right = factor(unified("activation"), -2)  # a number a column
    assert_close(unified("gate"), gate * bare, 1e-5)
    assert_close(unified("activation"), bare * right, 1e-5)
    assert ((right > 0) & (right < 1)).all()  # a sigmoid
    skip = unified("skip") - bare
    assert_close(skip, torch.diag_embed(skip.diagonal(dim1=-2, dim2=-1)), 1e-6)
    module = model.get_submodule(path)
    assert_close(skip[0, :, 4, 4], module.D.detach().flatten(), 1e-4)
    taps = module.conv1d.weight.detach()[:, 0].flip(-1)  # by lag
    conv = sum(
        tap[:, None, None] * torch.diag(torch.ones(9 - lag), -lag)
        for lag, tap in enumerate(taps.unbind(-1))
    )
    assert_close(unified("conv"), bare @ conv)
    everything = unified("conv", "activation", "gate", "norm", "skip")
    own = torch.diag_embed(module.D.detach().flatten()[:, None].expand(32, 9))
    assert_close(everything, gate * (bare + own) * right @ conv, 1e-4)
    assert_close(maps(formulation="unified"), unified("conv", "activation", "gate", "norm"))


def test_a_length_of_one_has_nothing_but_itself():
    model, tokens = tiny(), ids(1, 1)
    found = MambaRollout(model).attribute(tokens).item()
    maps = hidden_attention(model, tokens).values()
    assert math.isclose(found, math.prod(1 + float(m.mean()) for m in maps), rel_tol=1e-5)


def test_small_sequential_updates_are_layers_of_their_own():
    model, x = Residual(3).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    for mixer in model.mixers:
        mixer.out_proj.weight.data *= 0.1
    rho = torch.eye(9, dtype=torch.float64)
    for matrix in hidden_attention(model, x, reduction="mean").values():
        rho = (torch.eye(9) + matrix) @ rho
    assert_close(MambaRollout(model).rollout(x), rho)
    row = MambaRollout(model).attribute(x, position=8)
    assert_close(row.sum(-1), rho[:, 8])


def test_mixers_side_by_side_share_a_layer():
    model, tokens = build("falcon_h1"), ids(2, 9)
    rho = torch.eye(9)
    maps = list(hidden_attention(model, tokens, reduction="mean").values())
    for first, second in zip(maps[::2], maps[1::2], strict=True):
        rho = (torch.eye(9) + first + second) @ rho
    assert_close(MambaRollout(model).rollout(tokens), rho)


def test_rows_whose_entries_cancel_are_not_divided():
    class Cancelling:
        """A layer's map whose first row sums to minus one, and whose second to zero."""

        parts = ()
        values = torch.tensor([[[-1.0, 0, 0], [1.0, -1, 0], [1.0, 1, 1]]])

        def row_sums(self) -> Tensor:
            return self.values.sum(-1)

        def rmatvec(self, w: Tensor) -> Tensor:
            return torch.einsum("bi,bij->bj", w, self.values)

    def grids(count: int) -> SimpleNamespace:
        query, wiring = [torch.tensor([[0.0, 0.0, 1.0]])], sequence(count, 3)
        frozen = SimpleNamespace(require_query=lambda: query)
        return SimpleNamespace(
            frozen=frozen,
            wiring=wiring,
            options=MapOptions(normalize_rows=True),
            at=lambda _: Cancelling(),
            streams=lambda step, _: {step},
            steps=range(count),
        )

    for read in (rollout_row, raw_row):
        (row,) = read(grids(2))
        assert row.isfinite().all()
    # Row 0 of I + M holds nothing after the division, row 2 a quarter of each of its entries.
    (once,) = rollout_row(grids(1))
    torch.testing.assert_close(once, torch.tensor([[0.25, 0.25, 0.5]]))


def test_a_rollout_of_every_token_needs_no_readout():
    # The output depends on no token differentiably, so a query cannot be found.
    model = Classifier("mean")
    for method in (MambaRollout, UnifiedImplicitAttention):
        options = {"aggregation": "rollout"} if method is UnifiedImplicitAttention else {}
        explain = method(lambda t: model(t).detach().round(), model)
        assert explain.rollout(ids(2, 7), **options).shape == (2, 7, 7)
        with pytest.raises(ValueError, match=r"the output depends on|target does not depend"):
            explain.attribute(ids(2, 7), target=1)
        assert explain.rollout(ids(2, 7), **options).shape == (2, 7, 7)


CALLS = {
    "raw attention": lambda m, t: RawAttention(m).attribute(t),
    "rollout": lambda m, t: MambaRollout(m).attribute(t, normalize_rows=True),
    "rollout of every token": lambda m, t: MambaRollout(m).rollout(t),
    "attribution": lambda m, t: MambaAttribution(m).attribute(t, 4),
    "attribution of every token": lambda m, t: MambaAttribution(m).rollout(t, 4),
    "attribution, unchecked": lambda m, t: MambaAttribution(m, check=False).attribute(t, 4),
    "unified": lambda m, t: UnifiedImplicitAttention(m).attribute(t, 4),
    "latim": lambda m, t: LaTIM(m).attribute(t, 4, return_convergence_delta=True),
    "latim, a layer": lambda m, t: LaTIM(m).attribute(t, layer=0, aggregation="l2"),
    "latim, errors": lambda m, t: LaTIM(m).layer_errors(t),
    "latim, logits": lambda m, t: LaTIM(m).interactions(t, aggregation="alti_logit"),
    "mamba-lrp": lambda m, t: MambaLRP(m).attribute(t, 4, return_convergence_delta=True),
    "mamba-lrp, unchecked": lambda m, t: MambaLRP(m, check=False).attribute(t, 4),
    "maps": lambda m, t: hidden_attention(m, t),
    "maps within a limit": lambda m, t: hidden_attention(m, t, memory_limit=1 << 30),
}


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "rwkv"])
@pytest.mark.parametrize("name", CALLS)
def test_an_adapter_runs_once_per_layer_and_call(name, family, monkeypatch):
    model, runs = build(family), Counter()
    for kind, freeze in dict(registry._REGISTRY).items():

        def counted(call, freeze=freeze):
            runs[call.path] += 1
            return freeze(call)

        counted.__module__ = freeze.__module__
        monkeypatch.setitem(registry._REGISTRY, kind, counted)
    CALLS[name](model, ids(2, 7))
    layers = [0] if "a layer" in name else range(len(list(find_mixers(model))))
    assert len(runs) == len(layers)
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("method", [MambaAttribution, LaTIM, UnifiedImplicitAttention, MambaLRP])
@pytest.mark.parametrize("family", ["mamba", "zamba"])
def test_check_is_a_comparison_and_nothing_else(method, family):
    model, tokens = tiny(family), ids(2, 7)
    found, unchecked = (
        method(model, check=check).attribute(tokens, target=4) for check in (True, False)
    )
    assert torch.equal(found, unchecked)


def test_rows_that_carry_little_are_not_made(monkeypatch):
    model, tokens = double(), ids(2, 40)
    made: list[slice] = []
    rows = MixerMap._rows

    def seen(self: MixerMap, at: slice) -> Tensor:
        made.append(at)
        return rows(self, at)

    monkeypatch.setattr(MixerMap, "_rows", seen)
    method = MambaAttribution(model, memory_limit=40_000)  # tiles of few rows
    exact = method.attribute(tokens, target=3)
    all_rows = len(made)
    made.clear()
    near = method.attribute(tokens, target=3, tolerance=0.2)
    assert 0 < len(made) < all_rows
    # A row whose weight is left out stays where it is.
    assert float((near - exact).abs().sum()) <= 0.5 * float(exact.abs().sum())
    made.clear()
    again = method.attribute(tokens, target=3, tolerance=0.0)
    torch.testing.assert_close(again, exact, rtol=0, atol=0)
    assert len(made) == all_rows


@each_method
def test_a_target_names_the_position(method):
    model, x = tiny("mamba"), ids(2, 9)
    found = method(model).attribute(x, target=(5, 3))
    assert torch.equal(found, method(model).attribute(x, target=3, position=5))
    found = method(model).attribute(x, target=[(5, 3), (7, 2)])
    places = torch.tensor([5, 7])
    assert torch.equal(found, method(model).attribute(x, target=[3, 2], position=places))
    with pytest.raises(TargetError, match="give one of them"):
        method(model).attribute(x, target=(5, 3), position=5)


@pytest.mark.parametrize("method", [MambaAttribution, UnifiedImplicitAttention])
def test_a_target_is_read_from_its_own_tokens(method):
    """Two answers of one text: one is read from its end, the other from its third token."""

    class Answers(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny("mamba")

        def forward(self, tokens):
            logits = self.model(tokens).logits
            return torch.stack([logits[:, -1, 5], logits[:, 2, 6]], 1)

    model, tokens = Answers(), ids(2, 7)
    found = method(model).attribute(tokens, target=1)
    assert bool((found[:, 3:] == 0).all())
    torch.testing.assert_close(found, method(model.model).attribute(tokens, target=(2, 6)))
