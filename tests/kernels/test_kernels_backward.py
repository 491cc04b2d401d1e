"""The gradients of the scans: the backward operations, in every form, dtype and instruction set.

``test_kernels.py`` checks by finite differences that the operations use them as they should.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_kernels import (
    ALL_FORMS,
    DEVICES,
    DTYPES,
    FORMS,
    KINDS,
    MIDDLE,
    SMALL,
    TORCH_FORMS,
    Coefficients,
    assert_near,
    at,
    each,
    instructions_of,
    leaf,
    name_of,
    sample,
)
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import DiagonalCoefficients, LinearAttentionCoefficients
from captum_ssm.kernels.diagonal_backward import diagonal_scan_backward_torch
from captum_ssm.kernels.linear_attention_backward import linear_attention_scan_backward_torch

BACKWARD_FORMS = {
    DiagonalCoefficients: diagonal_scan_backward_torch,
    LinearAttentionCoefficients: linear_attention_scan_backward_torch,
}
# Sums over channels and tokens: a few more roundings than the scans themselves.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-12}

# Batch, length, channels, states, groups, taps, left: lengths around the stretches of 32 steps;
# blocks of channels in one group, and across several.
DIAGONAL = [
    (1, 1, 1, 1, 1, 0, True),
    (2, 2, 17, 2, 1, 0, False),
    (1, 31, 5, 7, 5, 0, True),
    (2, 32, 33, 9, 3, 0, True),
    (1, 33, 48, 16, 3, 0, False),
    (2, 65, 40, 4, 8, 0, True),
]
# Batch, length, heads, states, columns: lengths around the spans of 8 tokens and chunks of 32.
HEADS = [
    (1, 1, 1, 1, 1),
    (2, 2, 1, 5, 2),
    (1, 8, 2, 16, 17),
    (2, 9, 3, 7, 1),
    (1, 33, 1, 9, 4),
    (1, 67, 2, 20, 33),
]
SAMPLES = [(shape, None) for shape in DIAGONAL] + list(itertools.product(HEADS, KINDS))


@functools.cache
def case(shape: tuple, kind: tuple | None, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """The coefficients, the values, and the gradient of the output."""
    s = sample(shape, kind, dtype)
    c = s.coefficients
    if kind is None:
        c = replace(c, conv=None, columns=None)
    return c, s.v, torch.randn(s.v.shape, dtype=torch.float64).to(dtype)


@functools.cache
def gradients_of(shape: tuple, kind: tuple | None, dtype: torch.dtype) -> list[Tensor | None]:
    """What every form of the backward operation should return of a case."""
    c, v, grad = case(shape, kind, dtype)
    return by_autograd(grad, v, c)


def tensors_of(c: Coefficients, v: Tensor) -> list[Tensor | None]:
    """The arguments that have gradients, in the order of the schema."""
    return [v, *(x for name, x in vars(c).items() if name not in ("conv", "columns"))]


def backward(
    form: str, grad: Tensor, v: Tensor, c: Any, wanted: Sequence[bool] | None = None
) -> list[Tensor]:
    if wanted is None:
        wanted = [x is not None for x in tensors_of(c, v)]
    if form == "torch":
        return list(BACKWARD_FORMS[type(c)](grad, v, c, wanted))
    op = getattr(torch.ops.captum_ssm, f"{name_of('scan', [c])}_backward")
    args = (grad, *tensors_of(c, v))
    with instructions_of(form):
        found = op(*(at(form, args) if form == "cuda" else args), wanted)
    return [x.cpu() for x in found]


def by_autograd(grad: Tensor, v: Tensor, c: Any) -> list[Tensor | None]:
    """The gradients in float64, by autograd through the chunked PyTorch form of the scan."""
    v, c = leaf(v.double()), each(c, lambda x: leaf(x.double()))
    leaves = [x for x in tensors_of(c, v) if x is not None]
    y = TORCH_FORMS[f"{name_of('scan', [c])}_torch"](v, c)
    options: dict[str, bool] = {"allow_unused": True, "materialize_grads": True}
    found = iter(torch.autograd.grad(y, leaves, grad.double(), **options))
    return [None if x is None else next(found) for x in tensors_of(c, v)]


def assert_gradients_near(
    actual: Sequence[Tensor], expected: Sequence[Tensor | None], tolerance: float
) -> None:
    for x, y in zip(actual, expected, strict=True):
        if y is None or y.numel() == 0:
            assert x.numel() == 0
        else:
            assert_near(x, y, tolerance)


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize(("shape", "kind"), SAMPLES, ids=str)
def test_gradient_matches_autograd(shape, kind, dtype, form):
    c, v, grad = case(shape, kind, dtype)
    found = backward(form, grad, v, c)
    assert all(x.dtype == dtype for x in found)
    assert form == "torch" or all(x.is_contiguous() for x in found)
    assert_gradients_near(found, gradients_of(shape, kind, dtype), TOLERANCE[dtype])


LONG = [
    ((1, 700, 5, 3, 1, 0, True), None),
    ((1, 600, 1, 5, 3), (True, True, False)),
    ((1, 600, 1, 5, 3), (False, False, True)),
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("shape", "kind"), LONG, ids=str)
def test_long_sequences_and_threads(shape, kind, threads):
    """Several stretches between checkpoints; the same result again. One thread is restored."""
    c, v, grad = case(shape, kind, torch.float32)
    torch.set_num_threads(threads)
    found = backward("kernel", grad, v, c)
    assert_gradients_near(found, by_autograd(grad, v, c), TOLERANCE[torch.float32])
    assert all(map(torch.equal, found, backward("kernel", grad, v, c)))


def test_states_of_several_segments():
    """More states than are kept at once: those of all segments but the last are computed again."""
    c, v, grad = case((1, 1900, 1, 256, 256), (False, True, False), torch.float64)
    assert_gradients_near(backward("kernel", grad, v, c), backward("torch", grad, v, c), 1e-11)


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1]], ids=str)
def test_what_is_erased_need_not_be_the_key(kind, dtype, form):
    c, v, grad = case((2, 67, 2, 20, 33), kind, dtype)
    assert c.erase is not None
    c = replace(c, erase=c.erase * torch.linspace(0.5, 1, 20, dtype=dtype))
    assert_gradients_near(backward(form, grad, v, c), by_autograd(grad, v, c), TOLERANCE[dtype])
    # Where it is, one tensor serves both.
    same = replace(c, erase=c.key)
    copied = replace(c, erase=c.key.clone())
    found, expected = backward(form, grad, v, same), backward(form, grad, v, copied)
    assert_gradients_near(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MIDDLE)
def test_only_what_is_wanted(name, form):
    c, v, grad = case(*MIDDLE[name], torch.float64)
    given = [x is not None for x in tensors_of(c, v)]
    everything = backward(form, grad, v, c)
    pairs = [given[:k] + [False] + given[k + 1 :] for k in range(len(given))]
    singles = [[k == j and given[k] for j in range(len(given))] for k in range(len(given))]
    for wanted in (*pairs, *singles):
        for x, full, want in zip(
            backward(form, grad, v, c, wanted), everything, wanted, strict=True
        ):
            if want:
                assert_near(x, full, 1e-14)
            else:
                assert x.shape == (0,)


@pytest.mark.parametrize("form", ["kernel", "torch"])
@pytest.mark.parametrize("name", MIDDLE)
def test_gradients_of_any_layout(name, form):
    c, v, grad = case(*MIDDLE[name], torch.float64)
    expected = backward(form, grad, v, c)

    def across(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    found = backward(form, across(grad), across(v), each(c, across))
    one = grad[..., :1].expand_as(grad)
    assert_gradients_near(found, expected, 1e-13)
    assert_gradients_near(backward(form, one, v, c), backward(form, one.contiguous(), v, c), 1e-13)


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
def test_gradients_at_extreme_steps(dtype, form):
    c, v, grad = case((1, 150, 6, 3, 1, 0, True), None, dtype)
    c = each(c, Tensor.clone)
    c.A[0] = 0  # channel 0 never decays
    c.dt[..., 1] = 0
    c.dt[:, ::2, 2] = 1e4
    c.dt[:, ::7, 3] = float("inf")
    c.dt[:, 50, 1:] = float("inf")
    found, expected = backward(form, grad, v, c), by_autograd(grad, v, c)
    assert_gradients_near(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_at_extreme_decays(kind, dtype, form):
    c, v, grad = case((1, 40, 3, 6, 2), kind, dtype)
    c = each(c, Tensor.clone)
    c.log_decay[:, :, 0] = 0
    c.log_decay[:, ::2, 1] = -1e3
    c.log_decay[:, ::7, 2] = -torch.inf
    tolerance = 1e-10 if dtype == torch.float64 else TOLERANCE[dtype]
    assert_gradients_near(backward(form, grad, v, c), by_autograd(grad, v, c), tolerance)


def test_heads_may_share_coefficients():
    c, v, grad = case((2, 40, 3, 6, 5), (True, True, False), torch.float64)
    shared = each(c, lambda x: x[:, :, :1].expand(-1, -1, 3, -1))
    copied = each(shared, Tensor.contiguous)
    found = backward("kernel", grad, v, shared)
    assert_gradients_near(found, backward("kernel", grad, v, copied), 1e-13)


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("operation", ["scan", "rmatvec"])
def test_gradients_of_half_precision_arguments(name, operation):
    """Computed in float32, returned in each argument's own dtype."""
    s = sample(*MIDDLE[name], torch.bfloat16)
    function = getattr(kernels, name_of(operation, [s.coefficients]))

    def gradients(change) -> list[Tensor]:
        v, c = leaf(change(s.v)), each(s.coefficients, lambda x: leaf(change(x)))
        leaves = [v, *(x for x in vars(c).values() if x is not None)]
        y = function(v, c)
        assert y.dtype == torch.float32
        return list(torch.autograd.grad(y.square().sum(), leaves))

    for x, y in zip(gradients(lambda x: x), gradients(Tensor.float), strict=True):
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, y.to(x.dtype))


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_gradients(device, name):
    c, v, grad = case(*MIDDLE[name], torch.float32)
    op = getattr(torch.ops.captum_ssm, f"{name_of('scan', [c])}_backward").default
    given = [x is not None for x in tensors_of(c, v)]
    args = at(device, (leaf(grad), *tensors_of(each(c, leaf), leaf(v))))
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for wanted in (given, [False, *given[1:]]):
        torch.library.opcheck(op, (*args, wanted), test_utils=utilities)


@pytest.mark.parametrize("name", ["diagonal, plain", "delta"])
def test_second_derivatives(name):
    """Values and coefficients have them, through the PyTorch form of the backward operation."""
    s = sample(*SMALL[name])
    leaves = {k: leaf(x) for k, x in vars(s.coefficients).items() if x is not None}
    for operation in ("scan", "rmatvec"):
        function = getattr(kernels, name_of(operation, [s.coefficients]))

        def squared(v, *tensors, function=function):
            c = type(s.coefficients)(**dict(zip(leaves, tensors, strict=True)))
            return function(v, c).square()

        assert torch.autograd.gradgradcheck(squared, (leaf(s.v), *leaves.values()), fast_mode=True)


@pytest.mark.parametrize("form", ["kernel", "torch"])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_no_sequences(name, form):
    c, v, grad = case(*SMALL[name], torch.float32)
    empty = replace(c, **{k: x[:0] for k, x in vars(c).items() if x is not None and x.dim() > 2})
    for x, y in zip(backward(form, grad[:0], v[:0], empty), tensors_of(empty, v[:0]), strict=True):
        assert x.shape == (y.shape if y is not None else (0,))
        assert not x.any()


@pytest.mark.skipif(not kernels.extension_loaded(), reason="no kernels")
@pytest.mark.parametrize("name", ["diagonal, plain", "delta"])
def test_the_backward_kernels_guard_memory_themselves(name):
    c, v, grad = case(*SMALL[name], torch.float32)
    given = [x is not None for x in tensors_of(c, v)]
    with pytest.raises(RuntimeError, match="as many"):
        backward("kernel", grad, v, c, given[:-1])
    with pytest.raises(RuntimeError, match="missing"):
        backward("kernel", grad, v, c, [True] * len(given))
    with pytest.raises(RuntimeError, match="must"):
        backward("kernel", grad[:, :2], v, c)
    with pytest.raises(RuntimeError, match="dtype"):
        backward("kernel", grad.double(), v, c)
