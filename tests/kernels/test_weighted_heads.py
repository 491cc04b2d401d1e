"""Channel means of weighted heads against naive matrices, also where states decay to zero."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from test_kernels import (
    DTYPES,
    HEADS,
    INSTRUCTION_SETS,
    KINDS,
    assert_near,
    each,
    instructions_of,
    linear_attention,
    matrix,
    randn,
    sample,
)
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import LinearAttentionCoefficients
from captum_ssm.kernels.weighted_heads import linear_attention_weighted_torch

TAPS = 4
# Which of the factors of rows after, taps and columns there are.
GIVEN = [(True, True, True), (False, False, False), (True, False, False), (False, True, True)]

Weights = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def weights(
    sizes: tuple[int, ...], given: tuple[bool, ...], dtype: torch.dtype, taps: int = TAPS
) -> Weights:
    B, L, D = sizes
    shapes = [(B, L, D), (D, taps), (B, L, D)]
    others = [randn(x).to(dtype) if g else None for x, g in zip(shapes, given, strict=True)]
    return (randn(B, L, D).to(dtype), *others)


def defined(maps: Tensor, given: Weights) -> Tensor:
    """The mean over channels, by the matrices of all channels in float64."""
    left, right, taps, columns = (None if x is None else x.double() for x in given)
    _, L, D = left.shape
    each_map = maps.repeat_interleave(D // maps.shape[1], 1) * left.mT[..., None]
    if right is not None:
        each_map = each_map * right.mT[:, :, None]
    if taps is not None:
        conv = torch.zeros(D, L, L, dtype=torch.float64)
        for lag, tap in enumerate(taps.flip(-1)[:, :L].mT):
            conv.diagonal(-lag, 1, 2).copy_(tap[:, None].expand(-1, L - lag))
        each_map = each_map @ conv
    return (each_map if columns is None else each_map * columns.mT[:, :, None]).mean(1)


@pytest.mark.parametrize("form", ["kernel", "torch", *INSTRUCTION_SETS])
@DTYPES
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_weighted_heads_match_the_matrix(shape, kind, dtype, form):
    c = sample(shape, kind, dtype).coefficients
    batch, length, heads, _, width = shape
    for given in GIVEN:
        some = weights((batch, length, heads * width), given, dtype)
        found = weighted(form, *some, c)
        expected = defined(matrix(shape, kind, dtype), some)
        assert found.dtype == dtype
        assert_near(found, expected)
        start = length // 3
        part = weighted(form, some[0][:, start : start + 40], *some[1:], c, start)
        assert_near(part, expected[:, start : start + 40])


def weighted(form: str, *args: Any) -> Tensor:
    if form == "torch":
        return linear_attention_weighted_torch(*args)
    with instructions_of(form):
        return kernels.linear_attention_weighted(*args)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_of_weighted_heads(threads):
    """More rows than one task takes, more taps than tokens in a span, two sequences."""
    c = each(linear_attention(2, 700, 2, 20, (False, True, False)), lambda x: x.float())
    some = weights((2, 700, 18), (True, True, True), torch.float32, taps=9)
    maps = kernels.linear_attention_rows(torch.arange(700), each(c, lambda x: x.double()))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_near(kernels.linear_attention_weighted(*some, c), defined(maps, some))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["kernel", *INSTRUCTION_SETS])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_states_that_decay_to_zero(kind, form):
    """What comes after a block's state has become zero is zero, and what enters later is not."""
    c = linear_attention(1, 400, 2, 20, kind)
    decay = c.log_decay.clone()
    decay[:, :, 0] *= 20  # the first head forgets, the second one does so in two places
    decay[:, 150] = -torch.inf
    decay[:, 303] = -torch.inf
    c = each(LinearAttentionCoefficients(**{**vars(c), "log_decay": decay}), lambda x: x.float())
    naive = kernels.naive_linear_attention_matrix(c)
    index = torch.arange(400)
    with instructions_of(form):
        rows = kernels.linear_attention_rows(index, c)
        assert_near(rows, naive)
        assert not rows[..., 304:, :302].any()  # a bonus reads before the decay
        assert_near(kernels.linear_attention_mean(c), naive.mean(1))
        for given in GIVEN:
            some = weights((1, 400, 10), given, torch.float32)
            assert_near(kernels.linear_attention_weighted(*some, c), defined(naive, some))


SMALL_WEIGHTS = functools.partial(weights, (2, 4, 4), dtype=torch.float64, taps=2)


@pytest.mark.parametrize("given", GIVEN[:2], ids=str)
def test_gradients_of_weighted_heads(given):
    c = sample((2, 4, 2, 3, 2), (True, True, False)).coefficients
    tensors = [x for x in (*SMALL_WEIGHTS(given), *vars(c).values()) if x is not None]
    present = [x is not None for x in (*SMALL_WEIGHTS(given), *vars(c).values())]

    def function(*some: Tensor) -> Tensor:
        left = iter(some)
        args = [next(left) if there else None for there in present]
        return torch.ops.captum_ssm.linear_attention_weighted(*args, 0)

    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in tensors])


def test_opcheck_of_weighted_heads():
    c = sample((2, 4, 2, 3, 2), (True, True, False)).coefficients
    for given in GIVEN[:2]:
        arguments = (*SMALL_WEIGHTS(given), *vars(c).values(), 0)
        torch.library.opcheck(torch.ops.captum_ssm.linear_attention_weighted, arguments)


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, randn(2, 4, 5), ValueError, "left has shape .* a multiple of 2 heads"),
        (1, randn(2, 3, 4), ValueError, r"right has shape .* \(2, 4, 4\)"),
        (2, randn(5, 2), ValueError, r"taps has shape .* with D = 4"),
        (3, randn(2, 4, 6), ValueError, r"columns has shape .* \(2, 4, 4\)"),
        (0, randn(2, 6, 4), ValueError, "start and stop are 0 and 6"),
    ],
)
def test_arguments_of_weighted_heads_are_checked(place, value, error, message):
    c = sample((2, 4, 2, 3, 2), (True, True, False)).coefficients
    arguments: list[Any] = [*SMALL_WEIGHTS((True, True, True)), c]
    arguments[place] = value
    with pytest.raises(error, match=message):
        kernels.linear_attention_weighted(*arguments)
    arguments[4:] = [*vars(c).values(), 0]
    with pytest.raises(RuntimeError, match="captum_ssm"):
        torch.ops.captum_ssm.linear_attention_weighted(*arguments)


def test_weighted_heads_of_any_layout():
    """Weights and coefficients that are not contiguous."""
    c = sample((2, 31, 3, 7, 9), (True, True, True), torch.float32).coefficients
    some = weights((2, 31, 27), (True, True, True), torch.float32)
    expected = kernels.linear_attention_weighted(*some, c)
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in some if x is not None]
    across = each(c, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(kernels.linear_attention_weighted(*strided, across), expected)


def test_products_of_operators_use_the_weighted_heads():
    """The operator of edges gives the same with a graph, which takes autograd's products."""
    from captum_ssm.operators import LinearAttentionOperator

    c = sample((2, 31, 3, 7, 9), (False, True, False), torch.float32).coefficients
    left, right, taps, columns = weights((2, 31, 27), (True, True, True), torch.float32)
    operator = LinearAttentionOperator(**vars(c), width=9)
    for with_taps, with_columns in itertools.product((False, True), repeat=2):
        whole = operator.scaled(left, right)
        whole = whole.convolved(taps) if with_taps else whole
        whole = whole.scaled(None, columns) if with_columns else whole
        found = whole.row_tile(5, 20)
        graph = whole.scaled(torch.ones_like(left).requires_grad_(), None).row_tile(5, 20)
        assert graph.requires_grad
        assert not found.requires_grad
        assert_near(found, graph.detach())
        assert_near(found, whole.matrix().mean(1)[:, 5:20])
