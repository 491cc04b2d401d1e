"""What lies between mixers: orders, stages, branches, transports, and what is refused."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import wild
from families import build
from methods import METHODS, assert_close, each
from models import ids, made, tiny
from stacks import FLIP, SHUFFLE, E, Merging, Stack, attention, in_order, mixer, shift, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.capture import Request, freeze
from captum_ssm.capture.substitute import FrozenStandIns
from captum_ssm.graph.fast_products import RankOneProducts
from captum_ssm.graph.points import Point, gradients, visit_gradients
from captum_ssm.graph.reachability import is_closed
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.models import BidirectionalMamba
from captum_ssm.utils.nested import tensors_in
from captum_ssm.wiring import mixing_test

THROUGH_LAYERS = [MambaRollout, MambaAttribution, UnifiedImplicitAttention, RawAttention]


@pytest.fixture(autouse=True)
def as_if_wide(monkeypatch):
    """Measured by products of rank one, as models of real widths are."""
    monkeypatch.setattr(mixing_test, "_WIDE", 0)


def matrix(module: nn.Module, x: Tensor) -> Tensor:
    """The channel mean of a mixer's map on tokens ``x``, ``(B, L, L)``, in their order."""
    call = MixerCall("mixer", module, (x,), {}, module(x))
    return find_adapter(module)(call).recurrence.matrix("mean")


def permuted(values: Tensor, order: Tensor) -> Tensor:
    """A map over tokens ``x[:, order]`` as one over the tokens x."""
    back = torch.argsort(order)
    return values[:, back][:, :, back]


@torch.no_grad()
def product_in_order(model: Stack, x: Tensor, order: Tensor) -> Tensor:
    rho = torch.eye(x.shape[1], dtype=x.dtype)
    for norm, (one, two) in zip(model.norms, model.mixers, strict=True):
        seen = norm(x)
        maps = matrix(one, seen) + permuted(matrix(two, seen[:, order]), order)
        rho = rho + maps @ rho
        x = x + model.update(seen, one, two)
    return rho


class Series(nn.Module):
    """Two mixers in series: alone, or in a branch that residual streams go around."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.first, self.one, self.two, self.last = (mixer() for _ in range(4))
        self.head = nn.Linear(E, 5)

    def given(self, x: Tensor) -> list[Tensor]:
        """What each mixer is given, and the head."""
        x = x + self.first(x)
        one = self.one(x).sigmoid()  # on each token by itself
        y = self.two(one) + (one if self.inner else 0) + (x if self.outer else 0)
        return [x, one, y, y + self.last(y)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.given(x)[-1])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_mixers_in_series(outer, inner, normalize):
    model, x = made(Series(outer, inner)), tokens()
    with torch.no_grad():
        after_first, given, y, _ = model.given(x)
        mixers = [model.first, model.one, model.two, model.last]
        seen = [x, after_first, given, y]
        first, one, two, last = map(matrix, mixers, seen)
    eye = torch.eye(7, dtype=x.dtype)

    def normalized(m: Tensor, streams: int) -> Tensor:
        return 1 / (streams + m.sum(-1, keepdim=True)) if normalize else torch.ones_like(m[..., :1])

    before = normalized(first, 1) * (eye + first)
    inside = normalized(one, 0) * one @ before
    branch = two @ inside + inner * inside + outer * before
    rho = normalized(last, 1) * (eye + last) @ (normalized(two, outer + inner) * branch)
    rollout = MambaRollout(model)
    assert_close(rollout.rollout(x, normalize_rows=normalize), rho, 1e-12)
    row = rollout.attribute(x, position=5, normalize_rows=normalize)
    assert_close(row.sum(-1), rho[:, 5], 1e-12)
    found = [stage.around for stage in freeze(Request.of(model, None, x)).wiring.steps]
    assert found == [(0,), (), (0,) * inner + (1,) * outer, (0,)]
    with pytest.raises(ValueError, match="no residual stream around it"):
        LaTIM(model).attribute(x, target=(5, 1))


def test_a_gate_is_no_residual_stream():
    class Gated(Series):
        def given(self, x):
            y = self.two(self.one(x)) * x.sigmoid()
            return [x, y, y, x + y]

    frozen = freeze(Request.of(made(Gated(1, 0)), None, tokens()))
    assert [stage.around for stage in frozen.wiring.steps] == [(), (1,)]


def test_streams_that_differ_are_refused():
    class Forked(Series):
        def given(self, x):
            y = self.one(x)
            return [self.two(y) + self.last(x + y)]

    with pytest.raises(UnsupportedModelError, match=r"one returns tokens .* expected the same"):
        MambaRollout(made(Forked(0, 0))).attribute(tokens())


@pytest.mark.parametrize("order", [FLIP, SHUFFLE], ids=["backwards", "shuffled"])
def test_orders_are_decoded(order):
    model, x = made(Stack(in_order(order))), tokens()
    rho = product_in_order(model, x, order)
    assert_close(MambaRollout(model).rollout(x), rho, 1e-12)
    assert_close(MambaRollout(model).attribute(x, position=2).sum(-1), rho[:, 2], 1e-12)
    frozen = freeze(Request.of(model, None, x))
    found = [None if layer.order is None else layer.order[0].tolist() for layer in frozen.layers]
    assert found == [None, order.tolist()] * 2
    assert [layer.step for layer in frozen.layers] == [0, 0, 1, 1]
    # The maps of single mixers come back in the model's order too.
    maps = hidden_attention(model, x, reduction="mean")
    with torch.no_grad():
        truth = permuted(matrix(model.mixers[0][1], model.norms[0](x)[:, order]), order)
    assert_close(maps["mixers.0.1"], truth, 1e-12)


@each(METHODS)
def test_every_method_reads_what_the_gradient_reads(method):
    model, x = made(Stack(in_order(FLIP))), tokens()
    options = {"sign": None} if method in (MambaAttribution, UnifiedImplicitAttention) else {}
    found = method(model).attribute(x, target=(2, 1), **options).abs().sum(-1)
    assert bool((found > 1e-12).all())  # the query reads both sides


@each([method for method in METHODS if method is not LaTIM])
def test_a_reversed_model_is_explained_in_the_order_of_its_input(method):
    # Turned round as a whole, whatever the length: relevance is that of the body, turned round.
    class Reversed(nn.Module):
        def __init__(self, body, beyond):
            super().__init__()
            self.body, self.beyond = body, beyond

        def forward(self, x):
            return self.body(x) if x.shape[1] <= self.beyond else self.body(x.flip(1)).flip(1)

    body = made(Stack(lambda x, one: one(x), mixers=1))
    for length, beyond in ((7, 0), (40, 32)):
        x = tokens(1, length)
        truth = method(body).attribute(x, target=1, position=length - 3).flip(1)
        found = method(Reversed(body, beyond)).attribute(x.flip(1), target=1, position=2)
        assert_close(found, truth, 1e-9)


def test_latim_follows_a_residual_stream_in_another_order():
    body, x = made(Stack(lambda x, one: one(x), mixers=1)), tokens()
    there = LaTIM(body).attribute(x.flip(1), target=(2, 1), activation="gate").flip(1)
    flipped = LaTIM(lambda x: body(x.flip(1)).flip(1), body)
    assert_close(flipped.attribute(x, target=(4, 1), activation="gate"), there, 1e-9)
    with pytest.raises(UnsupportedModelError, match="another order"):
        flipped.attribute(x, target=(4, 1), layer=0, aggregation="l2")


@pytest.mark.parametrize("pair", [(0, 5), (5, 0), (6, 2), (3, 4)])
def test_one_token_that_reads_one_other_is_seen(pair):
    here, there = pair

    def swap(x, one, two):
        x = x.clone()
        x[:, here] = x[:, here] + 0.1 * x[:, there].clone()
        return one(x) + two(x)

    wiring = freeze(Request.of(made(Stack(swap)), None, tokens(1, 7)), query=False).wiring
    assert wiring.neighbor_share > 0


@each([MambaAttribution, UnifiedImplicitAttention])
def test_with_gradients_the_whole_length_is_looked_at(method):
    class Reversed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return self.body(x) if x.shape[1] <= 32 else self.body(x.flip(1)).flip(1)

    body, x = made(Stack(lambda x, one: one(x), mixers=1)), tokens(1, 300)
    truth = method(body).attribute(x, target=(290, 1)).flip(1)
    assert_close(method(Reversed(body)).attribute(x.flip(1), target=(9, 1)), truth, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_orders_in_half_precision(dtype):
    model = made(Stack(in_order(SHUFFLE))).to(dtype)
    frozen = freeze(Request.of(model, None, tokens().to(dtype)), check=False)
    assert frozen.layers[3].order.tolist() == [SHUFFLE.tolist()]


def test_small_updates_one_after_the_other_are_stages():
    model = made(Stack(lambda x, one: one(x), layers=3, mixers=1))
    model.norms = nn.ModuleList(nn.Identity() for _ in range(3))
    x, rho = tokens(), torch.eye(7, dtype=torch.float64)
    with torch.no_grad():
        for (one,) in model.mixers:
            one.out_proj.weight.mul_(1e-9)
    frozen = freeze(Request.of(model, None, x))
    assert [layer.step for layer in frozen.layers] == [0, 1, 2]
    with torch.no_grad():
        for (one,) in model.mixers:
            rho, x = rho + matrix(one, x) @ rho, x + one(x)
    assert_close(MambaRollout(model).rollout(tokens()), rho, 1e-12)


def test_mixers_side_by_side():
    frozen = freeze(Request.of(build("falcon_h1"), None, ids(2, 9)))
    assert [layer.step for layer in frozen.layers] == [0, 0, 1, 1]
    assert frozen.wiring.is_simple


def test_changes_in_place_and_a_module_called_twice():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mixer, self.head = nn.LayerNorm(E), mixer(), nn.Linear(E, 5)

        def forward(self, x):
            x = x.clone()
            for _ in range(3):
                x += self.mixer(self.norm(x))
                x *= 1.5
            return self.head(x)

    model, x = made(InPlace()), tokens()
    rho, h = torch.eye(7, dtype=torch.float64), tokens()
    with torch.no_grad():
        for _ in range(3):
            seen = model.norm(h)
            rho, h = rho + matrix(model.mixer, seen) @ rho, 1.5 * (h + model.mixer(seen))
    assert_close(MambaRollout(model).rollout(x), rho, 1e-12)
    assert [layer.name for layer in freeze(Request.of(model, None, x)).layers] == [
        "mixer",
        "mixer:1",
        "mixer:2",
    ]


def test_towers_do_not_read_one_another():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.there, self.back = (nn.ModuleList(mixer() for _ in range(2)) for _ in range(2))
            self.head = nn.Linear(2 * E, 5)

        def forward(self, x):
            a, b = x, x.flip(1)
            for one, two in zip(self.there, self.back, strict=True):
                a, b = a + one(a), b + two(b)
            return self.head(torch.cat([a, b.flip(1)], -1))

    model, x = made(Towers()), tokens()
    rows = []
    with torch.no_grad():
        for tower, order in ((model.there, torch.arange(7)), (model.back, FLIP)):
            rho, h = torch.eye(7, dtype=torch.float64), x[:, order]
            for one in tower:
                rho, h = rho + matrix(one, h) @ rho, h + one(h)
            rows.append(permuted(rho, order))
        # The head reads each by its half of the channels.
        sizes = torch.stack([half.norm() for half in model.head.weight.chunk(2, 1)])
    there, back = sizes / sizes.sum()
    expected = there * rows[0] + back * rows[1]
    assert_close(MambaRollout(model).rollout(x), expected, 1e-12)
    row = MambaRollout(model).attribute(x, position=2).sum(-1)
    assert_close(row, expected[:, 2], 1e-12)


def test_windows_in_the_batch():
    def windows(x, one):
        return one(x.unflatten(1, (3, 4)).flatten(0, 1)).unflatten(0, (-1, 3)).flatten(1, 2)

    model, x = made(Stack(windows, mixers=1)), tokens(2, 12)
    rho, h = torch.eye(12, dtype=torch.float64), x
    with torch.no_grad():
        for norm, (one,) in zip(model.norms, model.mixers, strict=True):
            seen = norm(h)
            parts = matrix(one, seen.unflatten(1, (3, 4)).flatten(0, 1)).unflatten(0, (2, 3))
            maps = torch.stack([torch.block_diag(*example) for example in parts])
            rho, h = rho + maps @ rho, h + windows(seen, one)
    assert_close(MambaRollout(model).rollout(x), rho, 1e-12)
    assert_close(MambaRollout(model).attribute(x, position=6).sum(-1), rho[:, 6], 1e-12)
    # More channels than maps and other reductions go through the windows as well.
    found = MambaRollout(model).attribute(x, position=6, sign="absolute").sum(-1)
    assert bool((found[:, 4:7] > 0).all())
    for method in (MambaAttribution, UnifiedImplicitAttention, MambaLRP):
        assert method(model).attribute(x, target=(6, 1)).isfinite().all()


def test_tokens_that_are_merged_are_carried_by_a_transport():
    model, x = made(Merging()), tokens(2, 8)
    frozen = freeze(Request.of(model, None, x))
    ((stage, link),) = frozen.wiring.steps[1].reads
    T = link.transport.matrix()
    assert stage == 0
    assert T.shape == (2, 4, 8)
    assert_close(T.sum(-1), torch.ones(2, 4), 1e-12)
    # A token reads its three neighbors and no other: the zeros are exact.
    near = (2 * torch.arange(4)[:, None] - torch.arange(8)).abs() <= 1
    assert torch.equal(T > 0, near.expand(2, -1, -1))
    # The shares are those of the kernel's squared norms, up to the sampling.
    taps = model.merge.weight.detach().square().sum((0, 1))
    assert_close(T[:, 1, 1:4], (taps / taps.sum()).expand(2, -1), 0.2)
    with torch.no_grad():
        h = x + model.first(x)
        M1, M2 = matrix(model.first, x), matrix(model.second, model.merge(h.mT).mT)
        eye = torch.eye(8, dtype=x.dtype), torch.eye(4, dtype=x.dtype)
        rho = (eye[1] + M2) @ T @ (eye[0] + M1)
    assert_close(MambaRollout(model).rollout(x), rho, 1e-12)
    # A row is carried without the matrix: the same shares, sampled anew.
    row = MambaRollout(model).attribute(x).sum(-1)
    assert_close(row, rho.mean(1), 0.15)
    w = torch.tensor([[0.5, -1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0]], dtype=x.dtype)
    assert_close(link.transport.rmatvec(w).sum(1), w.sum(1), 1e-9)
    exact = link.transport.matrix(probes=2000)
    assert_close(link.transport.rmatvec(w, probes=2000), torch.einsum("bt,bts->bs", w, exact), 0.02)
    # An example of a batch gets what it gets by itself.
    assert_close(MambaRollout(model).attribute(x[1:]).sum(-1), row[1:], 1e-9)
    for method in (RawAttention, MambaAttribution, UnifiedImplicitAttention, MambaLRP, LaTIM):
        assert method(model).attribute(x, target=1).shape == x.shape
    with pytest.raises(UnsupportedModelError, match="different tokens"):
        LaTIM(model).attribute(x, target=1, layer=0, aggregation="l2")


def test_a_token_that_is_dropped_gets_nothing():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer, self.head = mixer(), nn.Linear(E, 5)

        def forward(self, x):
            return self.head(x[:, 1:] + self.mixer(x[:, 1:]))

    model, x = made(Dropping()), tokens()
    row = MambaRollout(model).attribute(x, position=4).sum(-1)
    with torch.no_grad():
        truth = (torch.eye(6, dtype=x.dtype) + matrix(model.mixer, x[:, 1:]))[:, 4]
    assert_close(row[:, 1:], truth, 1e-12)
    assert bool((row[:, 0] == 0).all())


def test_a_little_mixing_by_no_mixer_is_said():
    model, x = made(Stack(shift)), tokens()
    for method in THROUGH_LAYERS:
        with pytest.warns(UserWarning, match="which the maps do not show"):
            method(model).attribute(x, target=(3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MambaLRP(model).attribute(x, target=(3, 1))
        hidden_attention(model, x)


def recurrence(x, one, two):
    h, out = torch.zeros_like(x[:, 0]), []
    for token in one(x).unbind(1):
        h = 0.5 * h + token
        out.append(h)
    return torch.stack(out, 1) + two(x)


def elsewhere(x, one, two):
    return one(x).flip(1) + two(x)


@cache
def updated_by(update):
    """One model for several methods, since what is searched for once is remembered."""
    return made(Stack(update))


@each(THROUGH_LAYERS)
@pytest.mark.parametrize("update", [attention, recurrence, elsewhere])
def test_mixing_by_no_mixer_is_refused(method, update):
    model, x = updated_by(update), tokens()
    with pytest.raises(UnsupportedModelError, match=r"mixers\.\d\.\d.*MambaLRP goes through"):
        method(model).attribute(x, target=(3, 1))
    assert hidden_attention(model, x)  # each mixer's own map is right all the same


def gated(x, one, two):
    h, out = 0, []
    for token in x.unbind(1):
        h = 0.5 * token.tanh() * h + token
        out.append(h)
    return torch.stack(out, 1) + two(x)


@pytest.mark.parametrize("update", [attention, recurrence, elsewhere, gated])
def test_mamba_lrp_warns_of_what_it_cannot_hold_constant(update):
    model, x = updated_by(update), tokens()
    for _ in range(2):
        if update is not gated:  # what is linear has no coefficients
            MambaLRP(model).attribute(x, target=(3, 1))
            continue
        with pytest.warns(UserWarning, match="coefficients are not held constant"):
            MambaLRP(model).attribute(x, target=(3, 1))


def test_a_token_shift_is_no_reason_to_refuse():
    def shifted(x, one):
        return one(x) + 5 * F.pad(x, (0, 0, 1, 0))[:, :-1]

    model, x = made(Stack(shifted, mixers=1)), tokens()
    with pytest.warns(UserWarning, match=r"read up to ([5-9]\d|100)\.\d%"):
        MambaRollout(model).attribute(x)


@pytest.mark.parametrize("strength", [0.0, 1e-9])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_a_product_over_the_tokens(strength, tokens_first):
    # Each token reads the one before by a matrix product, or none does.
    over = torch.eye(7).double() + strength * torch.diag(torch.ones(6), -1)

    def update(x, one):
        y = one(x)
        return (over @ y[0])[None] if tokens_first else (y.mT @ over.mT).mT

    model = made(Stack(update, mixers=1))
    with torch.no_grad():
        wiring = freeze(Request.of(model, None, tokens(1))).wiring
    assert (wiring.neighbor_share > 0) == (strength > 0)
    assert wiring.is_simple


def test_products_of_rank_one_keep_the_zeros():
    mlp = nn.Sequential(nn.Linear(E, 4 * E), nn.SiLU(), nn.Linear(4 * E, E)).double()
    x = tokens().requires_grad_()
    root, leaf = Point.of(mlp(x) - mlp(x.flip(1)).flip(1)), Point.of(x)
    seed = torch.zeros(14, E, dtype=x.dtype)
    seed[3, 0] = 1
    (true,) = gradients([root], [seed], [leaf])
    with RankOneProducts():
        (found,) = gradients([root], [seed], [leaf])
    # What two equal branches cancel is found all the same.
    assert_close(true, torch.zeros_like(true), 1e-12)
    assert torch.equal((found != 0).all(1), torch.arange(14) == 3)
    assert not bool(found[torch.arange(14) != 3].any())


def test_products_of_one_matrix_cancel_where_they_are_alike():
    first, second = (nn.Linear(E, E).double() for _ in range(2))
    x = tokens().requires_grad_()
    leaf = Point.of(x)
    for later, reaches in (
        (x + first(x).relu() - first(x).relu(), True),
        (first(x) - nn.functional.linear(x, first.weight), False),
        (second(first(x)) - second(first(x) + 1), False),
        (second(first(second(x))) - first(second(second(x))), True),
    ):
        root = Point.of(later)
        with RankOneProducts(alike=True):
            (gradient,) = gradients([root], [root.noise()], [leaf])
        assert bool((gradient != 0).all()) == bool((gradient != 0).any()) == reaches


class Several(NamedTuple):
    tokens: Tensor
    state: None


class ReturnsSeveral(BidirectionalMamba):
    def forward(self, x: Tensor) -> Several:
        return Several(super().forward(x), None)


@pytest.mark.parametrize("method", METHODS)
def test_a_mixer_may_return_a_named_tuple(method):
    def update(x, one):
        y = one(x)
        return y.tokens if isinstance(y, Several) else y

    model, x = made(Stack(update, mixers=1)), tokens()
    expected = method(model).attribute(x, target=(3, 1))
    for (one,) in model.mixers:
        one.__class__ = ReturnsSeveral
    assert_close(method(model).attribute(x, target=(3, 1)), expected)


def test_gradients_that_are_visited_are_the_same():
    # Each layer reads all before it, by a residual stream. The third leaf is a root as well.
    x = tokens().requires_grad_()
    roots, leaves = [], []
    for layer in [nn.Linear(E, E).double() for _ in range(4)]:
        leaves.append(x := x * 1)
        roots.append(given := layer(x) if len(leaves) != 3 else x)
        x = x + given.tanh()
    apart = tokens().requires_grad_() * 1  # which no root reads
    roots, leaves = ([Point.of(one) for one in points] for points in (roots, [*leaves, apart]))
    generator = torch.Generator().manual_seed(0)
    seeds = [root.noise(generator) for root in roots]
    expected = gradients(roots, seeds, leaves)
    seen: dict[int, Tensor] = {}
    visit_gradients(
        roots,
        [partial(torch.clone, seed) for seed in seeds],
        leaves,
        lambda i, gradient: seen.update({i: gradient.clone()}),
    )
    assert expected.pop() is None
    assert sorted(seen) == list(range(len(expected)))
    for i, one in enumerate(expected):
        torch.testing.assert_close(seen[i], one)


def test_examples_in_orders_of_their_own_are_refused():
    def turned(x):
        return torch.stack([one.flip(0) if b else one for b, one in enumerate(x)])

    def each_way(x, one, two):
        return one(x) + turned(two(turned(x)))

    model, x = made(Stack(each_way)), tokens()
    with pytest.raises(UnsupportedModelError, match="one example at a time"):
        MambaRollout(model).attribute(x)
    assert MambaRollout(model).attribute(x[:1]).isfinite().all()


@each(THROUGH_LAYERS[:1] + THROUGH_LAYERS[3:])
def test_a_model_that_turns_gradients_off(method):
    model, x = made(Stack(in_order(FLIP))), tokens()
    truth = method(model).attribute(x, position=2)
    quiet = torch.no_grad()(lambda x: model(x))
    assert_close(method(quiet, model).attribute(x, position=2), truth, 1e-12)

    class Detached(Stack):
        def forward(self, x):
            for norm, own in zip(self.norms, self.mixers, strict=True):
                x = (x + self.update(norm(x), *own)).detach()
            return self.head(x)

    hidden = made(Detached(in_order(FLIP)))
    with pytest.raises(UnsupportedModelError, match=r"do not come from the input|hidden"):
        method(hidden).attribute(x, position=2)


def test_ids_that_are_embedded_in_another_order_are_refused():
    model, given = tiny(), ids(1, 7)
    backwards = lambda t: model(t.flip(1)).logits.flip(1)  # noqa: E731
    with pytest.raises(UnsupportedModelError, match="in another order"):
        MambaRollout(backwards, model).attribute(given)


@each(METHODS)
def test_weights_are_left_as_they_were(method):
    model, x = updated_by(attention), tokens()
    model.mixers[0][0].requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    for _ in range(2):
        with suppress(UnsupportedModelError):
            method(model).attribute(x, target=(3, 1))
        assert [p.requires_grad for p in model.parameters()] == flags
    model.requires_grad_(True)


@pytest.mark.parametrize("method", [MambaAttribution, UnifiedImplicitAttention])
@pytest.mark.parametrize("kind", [wild.Mixer, wild.BothWays, wild.Normed])
def test_the_graph_of_a_measured_mixer_may_be_one_node(method, kind, monkeypatch):
    model, x = wild.Stack(kind(), kind(), kind()).eval(), torch.randn(2, 7, 6)
    with_it = method(model).attribute(x, target=(4, 1))
    applied = []
    own = FrozenStandIns._hidden
    monkeypatch.setattr(
        FrozenStandIns, "_hidden", lambda self, call: applied.append(call) or call.result
    )
    torch.testing.assert_close(method(model).attribute(x, target=(4, 1)), with_it)
    assert len(applied) == 3
    hidden = own(FrozenStandIns(), applied[0])
    assert "_Recomputed" in hidden.grad_fn.name()
    x = next(tensors_in(applied[0].args))
    grads = [
        torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (hidden, applied[0].result)
    ]
    torch.testing.assert_close(*grads)


class Remembers(wild.Mixer):
    """Also reads tokens that it is not given, but finds."""

    found = None

    def forward(self, x):
        y = super().forward(x)
        return y if self.found is None else y + 0.1 * self.found


def test_a_mixer_that_reads_what_it_is_not_given_keeps_its_graph():
    mixer, x = Remembers(), torch.randn(1, 7, 6, requires_grad=True)
    mixer.found, tokens = x.sin(), 2 * x
    own = {id(p) for p in mixer.parameters()}
    call = MixerCall("mixer", mixer, (tokens,), {}, mixer(tokens))
    assert not is_closed(call.result, [tokens], own)
    assert FrozenStandIns()._hidden(call) is call.result
    mixer.found = None
    call = MixerCall("mixer", mixer, (tokens,), {}, mixer(tokens))
    assert is_closed(call.result, [tokens], own)
    assert FrozenStandIns()._hidden(call) is not call.result
    assert not is_closed(call.result, [tokens], own - {id(mixer.D)})
