"""Every kind of operator against its naive form: the equation, term by term, in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from captum_ssm.kernels import naive_diagonal_matrix, naive_linear_attention_matrix
from captum_ssm.operators import (
    ConvolvedOperator,
    DiagonalOperator,
    JoinedOperator,
    LinearAttentionOperator,
    MovedOperator,
    PackedOperator,
    PermutedOperator,
    ScaledOperator,
    SkipOperator,
    SoftmaxOperator,
    SubstepOperator,
    SumOperator,
    TokenOperator,
    WeightsOperator,
)
from captum_ssm.operators.part import examples, part_of

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100)
B, D, H, N = 2, 6, 3, 4
WIDTH = D // H
TOLERANCE = {torch.float64: 2e-12, torch.float32: 2e-6}
FACTORS = ("left", "skip", "right", "conv")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def make_diagonal(L: int, **changes: Tensor) -> DiagonalOperator:
    coefficients = {
        "dt": torch.rand(B, L, D, dtype=torch.float64),
        "right": normal(B, L, D),
        "A": -torch.rand(D, N, dtype=torch.float64),
        "B": normal(B, L, 2, N),
        "C": normal(B, L, 2, N),
    }
    return DiagonalOperator(**(coefficients | changes))


def make_linear(
    L: int, decay: str = "head", delta: bool = False, bonus: bool = False, extreme: bool = False
) -> LinearAttentionOperator:
    per = 1 if decay == "head" else N
    log_decay = -torch.rand(B, L, H, per, dtype=torch.float64)
    if extreme:
        log_decay = torch.tensor([0.0, -1e4, -0.3]).double()[torch.randint(3, log_decay.shape)]
    probe = torch.nn.functional.normalize(normal(B, L, H, N), dim=-1)
    beta = torch.rand(B, L, H, 1, dtype=torch.float64)
    return LinearAttentionOperator(
        query=normal(B, L, H, N),
        key=probe * beta if delta else normal(B, L, H, N),
        log_decay=log_decay,
        width=WIDTH,
        erase=probe * beta if delta else None,
        probe=probe if delta else None,
        bonus=normal(B, L, H) if bonus else None,
    )


def make_softmax(L: int, **changes: object) -> SoftmaxOperator:
    return SoftmaxOperator(normal(B, H, L, N), normal(B, H, L, N), 0.6, WIDTH, **changes)


def make_placed(L: int) -> PackedOperator:
    """The first example padded on the left, the second one on the right."""
    lengths = (max(1, L - 3), max(1, L - 5))
    parts = tuple(
        part_of(make_linear(length, delta=True), torch.tensor([row]), 0, D)
        for row, length in enumerate(lengths)
    )
    at = (torch.arange(L - lengths[0], L), torch.arange(lengths[1]))
    return PackedOperator(parts, (0, 1), at, (B, L))


def arange_back(L: int) -> Tensor:
    return torch.arange(L).flip(0)


def window_bias(L: int, window: int = 5, padding: int = 0) -> Tensor:
    """A causal window, the first tokens of the last row being padding."""
    distance = torch.arange(L)[:, None] - torch.arange(L)
    allowed = ((distance >= 0) & (distance < window)).expand(B, 1, L, L).clone()
    allowed[-1, :, :, :padding] = False
    return torch.zeros(B, 1, L, L, dtype=torch.float64).masked_fill(~allowed, -torch.inf)


KINDS = {
    "diagonal": make_diagonal,
    "diagonal, all factors": lambda L: ConvolvedOperator(
        make_diagonal(L, left=normal(B, L, D)), normal(D, 7)
    ),
    "diagonal, extreme": lambda L: make_diagonal(
        L, dt=torch.tensor([0.0, 1e4, 0.3]).double()[torch.randint(3, (B, L, D))]
    ),
    "skip": lambda L: SkipOperator(normal(B, L, D)),
    "band": lambda L: ConvolvedOperator(SkipOperator(normal(B, L, D)), normal(D, 3)),
    "sum": lambda L: SumOperator((make_diagonal(L), KINDS["band"](L))),
    "sum of heads": lambda L: SumOperator((make_linear(L), make_softmax(L))),
    "sum of heads and channels": lambda L: SumOperator((make_softmax(L), make_diagonal(L))),
    "heads side by side": lambda L: JoinedOperator(
        tuple(
            part_of(make_linear(L), torch.arange(B), n * WIDTH, (n + 1) * WIDTH) for n in (0, 1, 2)
        )
    ),
    "head decay": make_linear,
    "key decay": lambda L: make_linear(L, "key"),
    "bonus": lambda L: make_linear(L, bonus=True),
    "bonus, key decay": lambda L: make_linear(L, "key", bonus=True),
    "delta": lambda L: make_linear(L, delta=True),
    "delta, key decay": lambda L: make_linear(L, "key", delta=True),
    "delta, bonus": lambda L: make_linear(L, delta=True, bonus=True),
    "head decay, extreme": lambda L: make_linear(L, extreme=True),
    "key decay, extreme": lambda L: make_linear(L, "key", extreme=True),
    "delta, extreme": lambda L: make_linear(L, "key", delta=True, extreme=True),
    "softmax": make_softmax,
    "softmax, window": lambda L: make_softmax(L, bias=window_bias(L)),
    "softmax, padding": lambda L: make_softmax(L, bias=window_bias(L, padding=3)),
    "softmax, bias per head": lambda L: make_softmax(L, bias=normal(1, H, L, L)),
    "softmax, softcap": lambda L: make_softmax(L, softcap=1.5),
    "softmax, sinks": lambda L: make_softmax(L, sinks=normal(H)),
    "weights": lambda L: WeightsOperator(normal(B, H, L, L), WIDTH),
    "substeps": lambda L: SubstepOperator(
        part_of(make_linear(3 * L, delta=True), torch.arange(B), 0, WIDTH), 3
    ),
    "placed": make_placed,
    "placed, convolved": lambda L: make_placed(L).compose(right=normal(B, L, D), conv=normal(D, 3)),
    **{
        f"convolved over an image, {K} x {K}": lambda L, K=K: ConvolvedOperator(
            make_diagonal(L), normal(D, K, K), grid_of(L)
        )
        for K in (1, 3, 5)
    },
    "band between factors": lambda L: KINDS["band"](L).scaled(normal(B, L, D), normal(B, L, D)),
    "diagonal, conv between factors": lambda L: (
        make_diagonal(L)
        .compose(left=normal(B, L, D), right=normal(B, L, D), conv=normal(D, 4))
        .scaled(None, normal(B, L, D))
    ),
    "head decay, conv between factors": lambda L: (
        make_linear(L)
        .compose(left=normal(B, L, D), right=normal(B, L, D), conv=normal(D, 4))
        .scaled(None, normal(B, L, D))
    ),
    "image between factors": lambda L: ConvolvedOperator(
        make_diagonal(L), normal(D, 3, 3), grid_of(L)
    ).scaled(None, normal(B, L, D)),
    "softmax, long conv": lambda L: make_softmax(L).compose(conv=normal(D, 7)),
    "head decay, long conv": lambda L: make_linear(L).compose(conv=normal(D, 7)),
    "permuted": lambda L: PermutedOperator(make_diagonal(L), torch.randperm(L)),
    "reversed heads": lambda L: PermutedOperator(make_linear(L, delta=True), arange_back(L)),
    "reversed, convolved": lambda L: ConvolvedOperator(
        PermutedOperator(make_diagonal(L), arange_back(L)), normal(D, 3)
    ),
    # Its terms are positive: products over maps of what cancels could not be compared.
    "convolved twice": lambda L: ConvolvedOperator(
        ConvolvedOperator(SkipOperator(uniform(B, L, D)), uniform(D, 7)), uniform(D, 3)
    ),
    "scaled before a convolution": lambda L: ScaledOperator(
        KINDS["convolved twice"](L), uniform(B, L, D), uniform(B, L, D)
    ),
    "between two convolutions": lambda L: ConvolvedOperator(
        KINDS["scaled before a convolution"](L), uniform(D, 3)
    ),
    "scaled diagonal": lambda L: ScaledOperator(make_diagonal(L), right=normal(B, L, D)),
    "scaled diagonal, conv": lambda L: ConvolvedOperator(KINDS["scaled diagonal"](L), normal(D, 3)),
    "scaled": lambda L: ScaledOperator(make_linear(L), normal(B, L, D), normal(B, L, D)),
    "scaled, conv": lambda L: ConvolvedOperator(KINDS["scaled"](L), normal(D, 4)),
    "scaled delta": lambda L: ScaledOperator(make_linear(L, delta=True), left=normal(B, L, D)),
    "scaled softmax": lambda L: ScaledOperator(make_softmax(L), right=normal(B, L, D)),
}


def grid_of(L: int) -> tuple[int, int]:
    """The rows and columns of an image of ``L`` tokens, as square as they can be."""
    rows = max(n for n in range(1, L + 1) if L % n == 0 and n * n <= L)
    return rows, L // rows


def conv_matrix(taps: Tensor, L: int, grid: tuple[int, int] | None = None) -> Tensor:
    """The matrix of a convolution, ``(D, L, L)``: of each token's unit image, or entry by entry."""
    K = taps.shape[1]
    if grid is not None:
        units = torch.eye(L, dtype=taps.dtype).view(L, 1, *grid)
        return torch.conv2d(units, taps[:, None], padding=K // 2).flatten(2).permute(1, 2, 0)
    matrix = torch.zeros(taps.shape[0], L, L, dtype=torch.float64)
    for i in range(L):
        for j in range(max(0, i - K + 1), i + 1):
            matrix[:, i, j] = taps[:, K - 1 - (i - j)]
    return matrix


def dense(
    matrix: Tensor,
    left: Tensor | None = None,
    skip: Tensor | None = None,
    right: Tensor | None = None,
    conv: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """``diag(left) (matrix + diag(skip)) diag(right) conv diag(columns)``, ``(B, D, L, L)``."""
    L = matrix.shape[-1]
    if skip is not None:
        matrix = matrix + torch.diag_embed(skip.expand(B, L, D).mT)
    if left is not None:
        matrix = left.mT[..., None] * matrix
    if right is not None:
        matrix = matrix * right.mT[:, :, None]
    matrix = matrix if conv is None else matrix @ conv_matrix(conv, L)
    return matrix if columns is None else matrix * columns.mT[:, :, None]


def test_a_sum_of_heads_and_channels_has_a_map_per_channel():
    heads, channels = make_softmax(9), make_diagonal(9)
    expected = heads.matrix().repeat_interleave(WIDTH, 1) + channels.matrix()
    for parts in ((heads, channels), (channels, heads)):
        torch.testing.assert_close(SumOperator(parts).matrix(), expected)
        for reduction, reduced in (("mean", expected.mean(1)), ("max", expected.amax(1))):
            torch.testing.assert_close(SumOperator(parts).matrix(reduction), reduced)


def test_heads_and_channels_side_by_side_have_a_map_per_channel():
    heads, channels = make_softmax(9), make_diagonal(9)
    expected = torch.cat([heads.matrix().repeat_interleave(WIDTH, 1), channels.matrix()], 1)
    both, v = JoinedOperator((heads, channels)), normal(B, 9, 2 * D)
    torch.testing.assert_close(both.matrix(), expected)
    torch.testing.assert_close(both.matrix("mean"), expected.mean(1))
    torch.testing.assert_close(both.matvec(v), torch.einsum("bdij,bjd->bid", expected, v))
    torch.testing.assert_close(
        both.rmatvec(v, "mean"), torch.einsum("bdij,bid->bj", expected, v) / (2 * D)
    )


def naive_maps(op: TokenOperator) -> Tensor:
    """Every map, ``(B, M, L, L)``."""
    if isinstance(op, SumOperator | JoinedOperator):
        parts = [naive_maps(part) for part in op.parts]
        return torch.cat(parts, 1) if isinstance(op, JoinedOperator) else sum(parts)
    if isinstance(op, SkipOperator):
        return dense(torch.diag_embed(op.diagonal.mT), conv=op.taps, columns=op.right)
    if isinstance(op, PermutedOperator):
        place = torch.argsort(op.order)
        return naive_maps(op.inner)[:, :, place][..., place]
    if isinstance(op, ConvolvedOperator):
        maps = per_channel(naive_maps(op.inner)) @ conv_matrix(op.taps, op.length, op.grid)
        return dense(maps, right=op.right)
    if isinstance(op, ScaledOperator):
        maps = per_channel(naive_maps(op.inner), op.channels)
        return dense(maps, left=op.left, right=op.right)
    if isinstance(op, DiagonalOperator):
        return naive_diagonal_matrix(op)
    if isinstance(op, SoftmaxOperator):
        return naive_softmax(op).nan_to_num(0.0)
    if isinstance(op, WeightsOperator):
        return op.weights.clone()
    if isinstance(op, SubstepOperator):
        rows = naive_maps(op.inner)[:, :, op.steps - 1 :: op.steps]
        return torch.cat([rows[..., step :: op.steps] for step in range(op.steps)], 1)
    if isinstance(op, PackedOperator):
        maps = torch.zeros(B, op.maps, op.length, op.length, dtype=op.dtype)
        for part, example, at in zip(op.parts, op.examples, op.positions, strict=True):
            maps[example, :, at[:, None], at] = naive_maps(part)[0]
        return maps
    assert isinstance(op, LinearAttentionOperator)
    return naive_linear_attention_matrix(op)


def naive_softmax(op: SoftmaxOperator) -> Tensor:
    """Every head's probabilities, row by row, in float64: ``(B, H, L, L)``."""
    B, L, H = op.heads
    out = torch.zeros(B, H, L, L, dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        s = (op.key[b, h].double() @ op.query[b, h, i].double()) * op.scale
        if op.softcap is not None:
            s = op.softcap * torch.tanh(s / op.softcap)
        if op.bias is None:
            s[i + 1 :] = -torch.inf
        else:
            s = s + op.bias.expand(B, H, L, L)[b, h, i].double()
        e = torch.exp(s - s.max())
        rest = 0.0 if op.sinks is None else torch.exp(op.sinks[h].double() - s.max())
        out[b, h, i] = e / (e.sum() + rest)
    return out


def per_channel(maps: Tensor, channels: int = D) -> Tensor:
    return maps.repeat_interleave(channels // maps.shape[1], 1)


def recast(op: TokenOperator, dtype: torch.dtype) -> TokenOperator:
    """The operator with its coefficients in another dtype."""

    def cast(value: object) -> object:
        if torch.is_tensor(value):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, TokenOperator):
            return recast(value, dtype)
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    fields = {f.name: cast(getattr(op, f.name)) for f in dataclasses.fields(op)}
    return dataclasses.replace(op, **fields)


def close(found: Tensor, truth: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> None:
    """Equal up to rounding of the largest entry, or of ``scale`` where terms cancel."""
    assert found.dtype == dtype
    assert found.shape == truth.shape
    assert bool(torch.isfinite(found).all())
    largest = float((truth if scale is None else scale).abs().max().clamp(min=1e-3))
    assert float((found - truth).abs().max()) <= TOLERANCE[dtype] * largest


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_an_operator_does_follows_from_its_matrix(kind, length):
    exact = KINDS[kind](length)
    maps = naive_maps(exact)
    M = maps.shape[1]
    alpha, mean = per_channel(maps), maps.mean(1)
    index = torch.randint(length, (B, min(length, 6)))
    rows = maps.gather(2, index[:, None, :, None].expand(-1, M, -1, length))
    v, w, w2 = normal(B, length, D), normal(B, length, D), normal(B, length)
    columns = normal(B, length)
    image = torch.einsum("bdij,bjd->bid", alpha, v)
    adjoint = torch.einsum("bid,bdij->bjd", w, alpha)
    assert not exact.is_causal or not maps.triu(1).any()
    flat = torch.einsum("bi,bdij->bjd", w2, alpha)
    sums = torch.einsum("bij,bj->bi", mean, columns)
    # What rounding is measured against: the same sums without cancellation.
    size = alpha.abs().sum(-1).max().clamp(min=1) * 4
    for dtype in (torch.float64, torch.float32):
        op = recast(exact, dtype)
        assert (op.batch, op.length, op.channels, op.maps) == (B, length, D, M)
        close(op.matrix(), maps, dtype)
        close(op.matrix("mean"), mean, dtype, maps)
        close(op.row_tile(length // 3, length), mean[:, length // 3 :], dtype, maps)
        close(op.rows(index), rows, dtype, maps)
        close(op.map_rows(index, M // 3, M), rows[:, M // 3 :], dtype, maps)
        close(op.rows(index, "mean"), rows.mean(1), dtype, maps)
        close(op.rows(index[:, :2], "mean"), rows[:, :, :2].mean(1), dtype, maps)
        close(op.rows(index, "max"), rows.amax(1), dtype, maps)
        close(op.rows(index, "min"), rows.amin(1), dtype, maps)
        close(op.rows(index, "prod"), rows.prod(1), dtype)
        close(op.matvec(v.to(dtype)), image, dtype, size)
        close(op.rmatvec(w.to(dtype)), adjoint, dtype, size)
        close(op.rmatvec(w.to(dtype), "mean"), adjoint.mean(-1), dtype, size)
        close(op.rmatvec(w2.to(dtype)), flat, dtype, size)
        close(op.rmatvec(w2.to(dtype), "mean"), flat.mean(-1), dtype, size)
        close(op.row_sums(), mean.sum(-1), dtype, size)
        close(op.row_sums(columns.to(dtype)), sums, dtype, size)
        assert not op.rmatvec(torch.zeros(B, length, dtype=dtype), "mean").any()


@pytest.mark.parametrize("kind", KINDS)
def test_compose_is_the_dense_product(kind):
    L = 35
    op = KINDS[kind](L)
    maps = per_channel(naive_maps(op))
    factors = {
        "left": normal(B, L, D),
        "skip": normal(D),
        "right": normal(B, L, D),
        "conv": normal(D, 4),
    }
    for size in range(5):
        for names in itertools.combinations(FACTORS, size):
            chosen = {name: factors[name] for name in names}
            composed = op.compose(**chosen)
            truth = dense(maps, **chosen)
            assert composed.maps == (D if names or op.maps == D else composed.maps)
            close(per_channel(composed.matrix()), truth, torch.float64)
            v, w = normal(B, L, D), normal(B, L, D)
            close(composed.matvec(v), torch.einsum("bdij,bjd->bid", truth, v), torch.float64)
            close(composed.rmatvec(w), torch.einsum("bid,bdij->bjd", w, truth), torch.float64)
            close(composed.matrix("mean"), truth.mean(1), torch.float64)


@pytest.mark.parametrize(
    "kind", ["diagonal", "head decay", "softmax", "band", "sum of heads", "scaled, conv"]
)
def test_composing_twice(kind):
    L = 17
    op = KINDS[kind](L)
    first = {"left": normal(B, L, D), "skip": normal(D), "conv": normal(D, 3)}
    second = {"left": normal(B, L, D), "skip": normal(B, L, D), "conv": normal(D, 4)}
    truth = dense(dense(per_channel(naive_maps(op)), **first), **second)
    twice = op.compose(**first).compose(**second)
    close(twice.matrix(), truth, torch.float64)
    close(twice.matrix("mean"), truth.mean(1), torch.float64)


@pytest.mark.parametrize("kind", ["head decay", "key decay", "delta", "delta, key decay"])
def test_thousands_of_tokens_of_slow_decay_stay_exact(kind):
    # Cumulative decays leave float32's range many times over.
    L = 3000
    torch.manual_seed(1)
    op = recast(KINDS[kind](L), torch.float32)
    op = dataclasses.replace(op, log_decay=op.log_decay * 0.05)
    truth = recast(op, torch.float64)
    w = torch.zeros(B, L)
    w[:, -1] = 1
    for found, expected in (
        (op.rmatvec(w, "mean"), truth.rmatvec(w.double(), "mean")),
        (op.matvec(torch.ones(B, L, D)), truth.matvec(torch.ones(B, L, D, dtype=torch.float64))),
    ):
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_reductions_over_tiles_of_maps(monkeypatch):
    # As many tiles as maps: the reductions have to be carried across.
    for kind in ("diagonal", "head decay", "scaled", "softmax"):
        op = KINDS[kind](17)
        whole = {name: op.matrix(name) for name in ("max", "min", "prod", "mean")}
        tiles = [(m, m + 1) for m in range(op.maps)]
        monkeypatch.setattr(
            type(op), "map_tiles", lambda self, rows, most=0, tiles=tiles: iter(tiles)
        )
        for name, truth in whole.items():
            close(op.matrix(name), truth, torch.float64)


@pytest.mark.parametrize("kind", ["diagonal", "band", "sum", "head decay", "scaled"])
def test_unknown_reductions_are_refused(kind):
    op = KINDS[kind](3)
    with pytest.raises(ValueError, match="median"):
        op.rmatvec(normal(B, 3), "median")
    with pytest.raises(ValueError, match="median"):
        op.matrix("median")


@pytest.mark.parametrize("make", [make_diagonal, make_linear])
def test_examples_of_an_operator_side_by_side(make):
    operator, rows = make(9), torch.tensor([[1, 0]])
    whole = operator.matrix()
    found = part_of(SumOperator((operator, operator)), rows, 0, operator.channels).matrix()
    torch.testing.assert_close(found[0], 2 * whole[[1, 0]].flatten(0, 1))
    v = normal(B, 9, D)
    part = part_of(operator, rows, 0, operator.channels)
    torch.testing.assert_close(part.matvec(examples(v, rows)), examples(operator.matvec(v), rows))


def test_a_part_of_directions_and_skips():
    order = torch.arange(9).flip(0)
    parts = (PermutedOperator(make_diagonal(9), order), SkipOperator(normal(B, 9, D)))
    found = part_of(SumOperator(parts), torch.tensor([1]), 2, 4)
    torch.testing.assert_close(found.matrix(), SumOperator(parts).matrix()[1:, 2:4])


@pytest.mark.parametrize("windows", [1, 2, 12])
@pytest.mark.parametrize("order", ["as they are", "back", "shuffled"])
def test_channel_means_over_other_tokens(windows, order):
    # Some tokens enter nowhere, some outputs land nowhere.
    l, tokens = 24 // windows, 26
    inner = part_of(make_diagonal(l), torch.arange(2 * windows) % 2, 0, D)
    inner = inner.scaled(normal(2 * windows, l, D), None)
    orders = {"as they are": torch.arange, "back": arange_back, "shuffled": torch.randperm}
    enters, lands = (orders[order](tokens)[:24].clone() for _ in range(2))
    enters[::5], lands[::7] = -1, -1
    expected = torch.zeros(2, tokens, tokens, dtype=torch.float64)
    means = naive_maps(inner).mean(1).unflatten(0, (2, windows))
    for w, i, j in itertools.product(range(windows), range(l), range(l)):
        to, of = int(lands[w * l + i]), int(enters[w * l + j])
        if to >= 0 and of >= 0:
            expected[:, to, of] += means[:, w, i, j]
    operator = MovedOperator(inner, enters, lands, tokens)
    close(operator.matrix("mean"), expected, torch.float64)
    for start in range(0, tokens, 5):
        stop = min(tokens, start + 5)
        close(operator.row_tile(start, stop), expected[:, start:stop], torch.float64)


@pytest.mark.parametrize("kind", ["permuted", "reversed, convolved", "placed, convolved"])
def test_edges_need_no_map_of_every_channel(kind, monkeypatch):
    L = 40
    operator = KINDS[kind](L).compose(left=normal(B, L, D), conv=normal(D, 3))
    operator = operator.scaled(None, normal(B, L, D))
    expected = operator.matrix().mean(1)

    def no_rows(*_: object) -> Tensor:
        raise AssertionError("rows of every channel were computed")

    monkeypatch.setattr(DiagonalOperator, "map_rows", no_rows)
    monkeypatch.setattr(TokenOperator, "_reduced", no_rows)
    close(operator.row_tile(0, L), expected, torch.float64)


def test_a_head_s_channel_mean_has_gradients():
    operator = make_linear(7)
    gate, taps, columns = normal(B, 7, D), normal(D, 3), normal(B, 7, D)

    def mean(*factors: Tensor) -> Tensor:
        gate, taps, columns = factors
        return operator.compose(left=gate, conv=taps).scaled(None, columns).row_tile(2, 7)

    assert torch.autograd.gradcheck(mean, [x.requires_grad_() for x in (gate, taps, columns)])


@pytest.mark.parametrize("decays", [1, 3])
def test_entries_of_linear_attention_are_those_of_its_maps(decays):
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 6, 2, 3)
    decay = -torch.rand(2, 6, 2, decays)
    decay[0, 3] = -torch.inf  # forgets everything before it
    operator = LinearAttentionOperator(query, key, decay, width=4)
    example, target, source = torch.tensor([[0, 1, 0, 1], [5, 5, 4, 2], [1, 2, 3, 2]])
    some = operator.entries(example, target, source)
    expected = operator.matrix()[example, :, target, source]
    torch.testing.assert_close(some, expected, atol=1e-6, rtol=1e-5)
    assert float(some[0].abs().max()) == 0
    with_bonus = dataclasses.replace(operator, bonus=torch.ones(2, 6, 2))
    assert with_bonus.entries(example, target, source) is None
