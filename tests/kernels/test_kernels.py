"""Every operation against its naive form, in every form, dtype and instruction set it has."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import DiagonalCoefficients, LinearAttentionCoefficients, channel_mean
from captum_ssm.kernels import diagonal as diagonal_module
from captum_ssm.kernels import distances as distances_module
from captum_ssm.kernels import linear_attention as linear_attention_module
from captum_ssm.kernels import taps as taps_module
from captum_ssm.kernels.weighted import weighted_rows_torch

FILES = [__file__, __file__.replace("test_kernels", "test_kernels_backward")]
Coefficients = DiagonalCoefficients | LinearAttentionCoefficients
TORCH_FORMS = vars(channel_mean) | vars(diagonal_module) | vars(linear_attention_module)
ON_CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", ON_CUDA]
KERNELS = ["kernel", ON_CUDA]
FORMS = [*KERNELS, "torch"]
# A processor that has more runs "kernel" with other instructions than these.
INSTRUCTION_SETS = ["avx2", "portable"]
ALL_FORMS = [*FORMS, *INSTRUCTION_SETS]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
rand = functools.partial(torch.rand, dtype=torch.float64)
randn = functools.partial(torch.randn, dtype=torch.float64)
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


# The operations of both recurrences, by what they mean for matrices (B, M, L, L) in float64.
def naive_scan(matrix: Tensor, v: Tensor, _: Coefficients) -> Tensor:
    return torch.einsum("bmij,bjm...->bim...", matrix, v.double())


def naive_rmatvec(matrix: Tensor, w: Tensor, _: Coefficients, mean: bool = False) -> Tensor:
    w = (w[..., None] if w.dim() == 2 else w).double()
    w = w.expand(*w.shape[:2], matrix.shape[1], *w.shape[3:])
    u = torch.einsum("bim...,bmij->bjm...", w, matrix)
    return u.mean(-1) if mean else u


def naive_mean(matrix: Tensor, _: Coefficients, start: int = 0, stop: int | None = None) -> Tensor:
    return matrix.mean(1)[:, start:stop]


def naive_rows(matrix: Tensor, index: Tensor, _: Coefficients) -> Tensor:
    return torch.stack([maps[:, i] for maps, i in zip(matrix, index, strict=True)])


NAIVE = {"scan": naive_scan, "rmatvec": naive_rmatvec, "mean": naive_mean, "rows": naive_rows}


def name_of(operation: str, args: Iterable[Any]) -> str:
    diagonal = any(isinstance(x, DiagonalCoefficients) for x in args)
    return f"{'diagonal' if diagonal else 'linear_attention'}_{operation}"


def run(form: str, operation: str, *args: Any) -> Tensor:
    name = name_of(operation, args)
    if form == "torch":
        return TORCH_FORMS[f"{name}_torch"](*args)
    with instructions_of(form):
        out = getattr(kernels, name)(*(at(form, args) if form == "cuda" else args))
    assert out.is_cuda == (form == "cuda")
    return out.cpu()


def instructions_of(form: str) -> AbstractContextManager[Any]:
    """The kernels use the instruction set that a form names, or the best one."""
    if form not in INSTRUCTION_SETS:
        return nullcontext()
    assert platform.machine() != "x86_64" or kernels.extension_loaded()
    return patch.dict(os.environ, CAPTUM_SSM_ISA=form)


def each(coefficients: Coefficients, change: Callable[[Tensor], Tensor]) -> Any:
    tensors = {k: change(x) for k, x in vars(coefficients).items() if x is not None}
    return replace(coefficients, **tensors)


def at(device: str, args: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments on a device; tensors that need gradients are leaves there."""

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(device).requires_grad_(x.requires_grad)
        return each(x, move) if is_dataclass(x) else x

    return tuple(map(move, args))


def flat(operation: str, args: Iterable[Any]) -> tuple[Any, list[Any]]:
    """The operation of torch.ops, and its arguments in the order of the schema."""
    op = getattr(torch.ops.captum_ssm, name_of(operation, args)).default
    [coefficients] = [vars(x) for x in args if is_dataclass(x)]
    names = [argument.name for argument in op._schema.arguments]
    others = [x for x in args if not is_dataclass(x)]
    given = dict(zip([n for n in names if n not in coefficients], others, strict=False))
    return op, [{"mean": False, **coefficients, **given}[n] for n in names]


def diagonal(
    batch: int,
    length: int,
    channels: int,
    states: int,
    groups: int,
    taps: int,
    left: bool,
    columns: bool = False,
) -> DiagonalCoefficients:
    torch.manual_seed(0)
    shape = (batch, length, channels)
    return DiagonalCoefficients(
        dt=rand(shape) * 0.3,
        right=randn(shape),
        A=-rand(channels, states) * 3,
        B=randn(batch, length, groups, states),
        C=randn(batch, length, groups, states),
        left=randn(shape) if left else None,
        conv=randn(channels, taps) if taps else None,
        columns=randn(shape) if columns else None,
    )


def linear_attention(
    batch: int, length: int, heads: int, states: int, kind: tuple[bool, bool, bool]
) -> LinearAttentionCoefficients:
    torch.manual_seed(0)
    per_key, delta, bonus = kind
    shape = (batch, length, heads)
    probe = torch.nn.functional.normalize(randn(*shape, states), dim=-1)
    write = probe * rand(*shape, 1)
    return LinearAttentionCoefficients(
        query=randn(*shape, states),
        key=write if delta else randn(*shape, states),
        log_decay=-rand(*shape, states if per_key else 1),
        erase=write if delta else None,
        probe=probe if delta else None,
        bonus=randn(*shape) if bonus else None,
    )


class Sample(NamedTuple):
    """What the operations are given."""

    coefficients: Any
    v: Tensor
    w: Tensor  # one row vector for all maps
    index: Tensor

    def calls(self, *ranges: tuple[int, ...]) -> list[tuple[str, tuple[Any, ...]]]:
        """Each operation with each kind of arguments, the mean of some ranges of rows."""
        c = self.coefficients
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("scan", (self.v, c)),
            ("rmatvec", (self.v, c)),
            ("rmatvec", (self.w, c)),
            *(("mean", (c, *rows)) for rows in ranges),
            ("rows", (self.index, c)),
        ]
        if isinstance(c, DiagonalCoefficients):
            calls += [("rmatvec", (x, c, True)) for x in (self.v, self.w)]
        return calls


@functools.cache
def sample(shape: tuple, kind: tuple | None = None, dtype: torch.dtype = torch.float64) -> Sample:
    """A sample of a diagonal recurrence, or of a kind of linear attention."""
    if kind is None:
        c, v, rows = diagonal(*shape), randn(shape[:3]), 5
        w = v[..., 0].clone()
    else:
        c, v, rows = linear_attention(*shape[:4], kind), randn(*shape[:3], shape[4]), shape[4]
        w = v[:, :, :1].clone()
    index = torch.randint(0, shape[1], (shape[0], rows))
    return Sample(each(c, lambda x: x.to(dtype)), v.to(dtype), w.to(dtype), index)


@functools.cache
def matrix(shape: tuple, kind: tuple | None, dtype: torch.dtype) -> Tensor:
    coefficients = sample(shape, kind, dtype).coefficients
    if kind is not None:
        return kernels.naive_linear_attention_matrix(coefficients)
    naive = kernels.naive_diagonal_matrix if shape[1] <= 100 else matrix_by_differences
    return naive(coefficients)


def matrix_by_differences(c: DiagonalCoefficients, rows: Tensor | None = None) -> Tensor:
    """Maps (or some rows of them) in float64 from differences of sums: fine for moderate steps."""
    c = each(c, lambda x: x.double())
    length, channels = c.dt.shape[1:]
    rows = torch.arange(length) if rows is None else rows
    group = torch.arange(channels) // (channels // c.B.shape[2])
    total = c.dt.cumsum(1).transpose(1, 2)  # (B, D, L)
    gap = (total[..., rows, None] - total[..., None, :]).clamp(min=0)
    out = torch.zeros_like(gap)
    for n in range(c.A.shape[1]):
        read, write = (x[..., n][..., group].transpose(1, 2) for x in (c.C[:, rows], c.B))
        out = out + read[..., None] * torch.exp(c.A[:, n, None, None] * gap) * write[..., None, :]
    out = out * c.right.transpose(1, 2)[..., None, :] * (rows[:, None] >= torch.arange(length))
    if c.left is not None:
        out = out * c.left[:, rows].transpose(1, 2)[..., None]
    if c.conv is not None:
        K = c.conv.shape[1]
        late = torch.nn.functional.pad(out, (0, K - 1))
        lags = (late[..., m : m + length] * c.conv[:, K - 1 - m, None, None] for m in range(K))
        out = sum(lags, torch.zeros(()))
    return out if c.columns is None else out * c.columns.transpose(1, 2)[..., None, :]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """The largest error, relative to the largest entry."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).abs().max()
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    assert error <= tolerance * expected.abs().max().clamp(min=1e-300), error / expected.abs().max()


# Batch, length, channels, states, groups, taps, left, columns.
DIAGONAL = [
    (1, 1, 1, 1, 1, 0, False),
    (2, 2, 4, 3, 2, 4, True),
    (1, 3, 6, 16, 3, 2, True),
    (2, 31, 5, 7, 1, 1, False),
    (1, 33, 3, 2, 3, 40, True),
    (2, 63, 6, 5, 1, 4, True),
    (1, 64, 40, 1, 1, 0, True),
    (1, 65, 34, 4, 2, 3, False),
    (1, 100, 5, 20, 5, 4, True),
    (1, 90, 2, 150, 1, 2, False),
    # Long enough for several tiles of every size.
    (1, 700, 3, 4, 1, 4, True),
    (1, 1200, 3, 2, 1, 0, False),
    (2, 577, 4, 3, 2, 20, True),
    # With factors of the columns.
    (1, 1, 1, 1, 1, 0, False, True),
    (2, 31, 5, 7, 1, 1, False, True),
    (2, 63, 6, 5, 2, 4, True, True),
    (1, 33, 3, 2, 3, 40, True, True),
    (1, 700, 3, 4, 1, 4, True, True),
    (2, 577, 4, 3, 2, 20, False, True),
]
# Batch, length, heads, states, columns.
HEADS = [
    (1, 1, 1, 1, 1),
    (2, 2, 3, 5, 2),
    (1, 3, 2, 16, 40),
    (2, 31, 3, 7, 9),
    (1, 63, 2, 33, 1),
    (1, 65, 1, 4, 70),
    (2, 100, 3, 20, 17),
]
# A decay per key dimension, the delta rule, a bonus.
KINDS = list(itertools.product((False, True), repeat=3))
SAMPLES = [(shape, None) for shape in DIAGONAL] + list(itertools.product(HEADS, KINDS))
SMALL = {
    "diagonal": ((2, 4, 4, 2, 2, 3, True, True), None),
    "diagonal, plain": ((1, 5, 3, 1, 1, 0, False), None),
    "bonus": ((2, 4, 2, 3, 2), (False, False, True)),
    "delta": ((2, 4, 2, 3, 2), (True, True, False)),
}
MIDDLE = {
    "diagonal": ((2, 40, 6, 3, 2, 4, True, True), None),
    "diagonal, plain": ((2, 40, 6, 3, 2, 0, False), None),
    "linear attention": ((2, 20, 3, 5, 9), (False, False, False)),
    "delta, bonus": ((2, 20, 3, 5, 9), (True, True, True)),
}


def test_the_naive_matrix_agrees_with_a_second_oracle():
    for shape in DIAGONAL[:6]:
        for c in (diagonal(*shape), replace(diagonal(*shape), conv=None)):
            assert_near(matrix_by_differences(c), kernels.naive_diagonal_matrix(c))


@functools.cache
def expected(shape: tuple, kind: tuple | None, dtype: torch.dtype) -> list[tuple[str, Any, Tensor]]:
    """Calls of every operation, some of them twice, and what each form should return."""
    s, maps, length = sample(shape, kind, dtype), matrix(shape, kind, dtype), shape[1]
    third = length // 3
    ranges = {(), (0, 1), (length - 1, length), (third, third + 1), (third, max(1, 2 * third))}
    calls = s.calls(*(r for r in ranges if not r or r[0] < r[1]))
    calls.append(("rows", (torch.arange(length).expand(shape[0], -1), s.coefficients)))
    return [(operation, args, NAIVE[operation](maps, *args)) for operation, args in calls]


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize(("shape", "kind"), SAMPLES, ids=str)
def test_matches_the_matrix(shape, kind, dtype, form):
    calls = expected(shape, kind, dtype)
    if form == "torch" and shape[1] > 100:
        calls = calls[:-1]  # not every row
    for operation, args, wanted in calls:
        out = run(form, operation, *args)
        assert out.dtype == dtype
        assert_near(out, wanted)


@pytest.mark.parametrize("name", MIDDLE)
def test_the_same_rows_of_every_sequence(name):
    c, v, *_ = sample(*MIDDLE[name])
    rows = torch.tensor([3, 0, 19])
    assert torch.equal(
        run("kernel", "rows", rows, c), run("kernel", "rows", rows.expand(len(v), -1), c)
    )


def assert_some_rows_near(form, c, v, maps, some, start, tolerance=None):
    """Some rows of long maps; the mean is asked for from ``start`` on."""
    w = torch.zeros_like(v).index_copy(1, some, v[:, some])
    shared = w[..., 0] if v.dim() == 3 else w[:, :, :1]
    assert_near(run(form, "scan", v, c)[:, some], naive_scan(maps, v, c), tolerance)
    assert_near(run(form, "rows", some, c), maps)
    late = some >= start
    tail = run(form, "mean", c, start)
    assert_near(tail[:, some[late] - start], maps[:, :, late].mean(1))
    calls = [(w,), (shared,)] + [(w, True), (shared, True)] * (v.dim() == 3)
    for x, *mean in calls:
        expected = naive_rmatvec(maps, x[:, some], c, *mean)
        assert_near(run(form, "rmatvec", x, c, *mean), expected, tolerance)


@pytest.mark.parametrize("steps", [1.0, 300.0, 0.0, "constant"])
@pytest.mark.parametrize("form", KERNELS)
def test_precision_at_4096(form, steps):
    """Float32 stays within 2e-6 of float64 however slowly or fast the states decay."""
    s = sample((1, 4096, 8, 4, 1, 4, True), None, torch.float32)
    # A rounded decay, repeated, would drift.
    dt = torch.full_like(s.v, 1e-3) if steps == "constant" else s.coefficients.dt * steps
    c = replace(s.coefficients, dt=dt)
    some = torch.cat([torch.arange(0, 4096, 127), torch.tensor([4095])])
    maps = matrix_by_differences(c, some)
    for start in (0, 4096 - 256):
        assert_some_rows_near(form, c, s.v, maps, some, start)


@pytest.mark.parametrize("columns", [1, 24])
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("form", KERNELS)
def test_a_slow_decay_does_not_drift(form, per_key, columns):
    """A rounded decay, repeated over thousands of steps, would; and a decay of one stays one."""
    s = sample((1, 4096, 1, 4, columns), (per_key, False, False), torch.float32)
    late = torch.arange(3500, 4096, 35)
    gap = late[:, None] - torch.arange(4096)
    for step in (8e-4, 0.0):
        decay = torch.full_like(s.coefficients.log_decay, -step)
        c = replace(s.coefficients, log_decay=decay)
        scores = c.query[0, late, 0].double() @ c.key[0, :, 0].double().mT
        scores *= torch.exp(decay[0, 0, 0, 0].double() * gap) * (gap >= 0)
        assert_some_rows_near(form, c, s.v, scores[None, None], late, 3500, 5e-6)


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
def test_extreme_steps(dtype, form):
    """Decays that underflow, that stay at one, and resets, which leave what follows exact."""
    s = sample((1, 150, 6, 3, 1, 4, True), None, dtype)
    c = each(s.coefficients, Tensor.clone)
    c.A[0] = 0  # channel 0 never decays
    c.dt[..., 1] = 0
    c.dt[:, ::2, 2] = 1e4
    c.dt[:, ::7, 3] = float("inf")
    c.dt[:, 50, :] = float("inf")
    c.dt[:, 100, 4] = 1e30
    c.A[4] = -1e-3
    c.dt[..., 5] *= 1e-40 if dtype == torch.float64 else 1e-38
    maps = kernels.naive_diagonal_matrix(c)
    for operation, args in s._replace(coefficients=c).calls(()):
        assert_near(run(form, operation, *args), NAIVE[operation](maps, *args))
    rows = run(form, "rows", torch.arange(150)[None], c)
    for d in range(6):  # each by its own largest entry
        assert_near(rows[:, d], maps[:, d])


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extreme_decays(kind, columns, dtype, form):
    s = sample((1, 66, 3, 6, columns), kind, dtype)
    c = each(s.coefficients, Tensor.clone)
    c.log_decay[:, :, 0] = 0
    c.log_decay[:, ::2, 1] = -1e4
    c.log_decay[:, ::7, 2] = -torch.inf
    c.log_decay[:, 1::7, 2] = -1e-30
    # The PyTorch form subtracts sums of log decays: an eps of 1e4 times a chunk's resets.
    tolerance = 1e-10 if form == "torch" and dtype == torch.float64 else None
    for h in range(3):  # each by its own largest entry
        one, v = c.narrow(h, h + 1), s.v[:, :, h : h + 1]
        maps = kernels.naive_linear_attention_matrix(one)
        for operation, args in Sample(one, v, v, s.index).calls(()):
            assert_near(run(form, operation, *args), NAIVE[operation](maps, *args), tolerance)


@pytest.mark.parametrize("form", ["kernel", *INSTRUCTION_SETS])
@pytest.mark.parametrize("taps", [0, 4, 40])
@DTYPES
def test_entries_are_exact_until_they_underflow(dtype, taps, form):
    """States that die between two stretches of tokens are left out: not one entry too early."""
    if not kernels.extension_loaded():
        pytest.skip("the PyTorch forms stop at exp(-60)")
    # Positive terms, so that an entry is as exact as its parts; how many tokens each state lives.
    c = each(diagonal(1, 400, 3, 5, 1, taps, True), lambda x: x.to(dtype).abs() + 0.1)
    life = torch.tensor([[90.0], [200.0], [350.0]]) * torch.tensor([0.9, 1.0, 0.5, 0.8, 0.3])
    span = 87.0 if dtype == torch.float32 else 708.0
    c = replace(c, A=(-span / life / c.dt.mean().float()).to(dtype))
    maps = matrix_by_differences(c)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    smallest = 100 * torch.finfo(dtype).tiny / tolerance  # what is lost may be a normal number
    for operation, args in (("rows", (torch.arange(400)[None], c)), ("mean", (c,))):
        wanted = NAIVE[operation](maps, *args)
        counts = wanted > smallest
        assert counts.any()
        relative = (run(form, operation, *args).double() / wanted - 1)[counts].abs().max()
        assert relative < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MIDDLE)
def test_half_precision_accumulates_in_float32(name, dtype):
    half = sample(*MIDDLE[name], dtype)
    if isinstance(half.coefficients, DiagonalCoefficients):  # A is usually kept in float32
        A = half.coefficients.A.float()
        half = half._replace(coefficients=replace(half.coefficients, A=A))
    c = each(half.coefficients, Tensor.float)
    single = Sample(c, half.v.float(), half.w.float(), half.index)
    pairs = zip(half.calls(()), single.calls(()), strict=True)
    for (operation, args), (_, expected) in pairs:
        out = run("kernel", operation, *args)
        assert out.dtype == torch.float32
        assert torch.equal(out, run("kernel", operation, *expected))


@pytest.mark.parametrize("name", MIDDLE)
def test_float64_anywhere_means_float64(name):
    c = sample(*MIDDLE[name], torch.float32).coefficients
    for key, x in vars(c).items():
        if x is not None:
            one = replace(c, **{key: x.double()})
            assert run("kernel", "mean", one).dtype == torch.float64


@pytest.mark.parametrize("form", ["kernel", "torch"])
@pytest.mark.parametrize("name", MIDDLE)
def test_any_layout(name, form):
    def strided(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def across(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    s, maps = sample(*MIDDLE[name]), matrix(*MIDDLE[name], torch.float64)
    for change in (strided, across):
        other = Sample(each(s.coefficients, change), change(s.v), change(s.w), s.index)
        assert not other.v.is_contiguous()
        for operation, args in other.calls(()):
            assert_near(run(form, operation, *args), NAIVE[operation](maps, *args))


def test_coefficients_may_share_memory():
    """Heads that share queries and keys, and sliced heads, without a copy."""
    s = sample((2, 40, 3, 6, 5), (True, True, False), torch.float32)
    c, v = s.coefficients, s.v.transpose(1, 2).contiguous().transpose(1, 2)
    shared = each(c, lambda x: x[:, :, :1].expand(-1, -1, 3, -1))
    copied = each(shared, Tensor.contiguous)
    scan, rows = kernels.linear_attention_scan, kernels.linear_attention_rows
    assert torch.equal(scan(v, shared), scan(v.contiguous(), copied))
    assert torch.equal(rows(s.index, shared), rows(s.index, copied))
    assert torch.equal(rows(s.index, c.narrow(2, 3)), rows(s.index, c)[:, 2:])
    across = each(c, lambda x: x.mT.contiguous().mT)
    assert torch.equal(scan(v, across), scan(v, c))


@pytest.mark.parametrize("form", ["kernel", "torch"])
@pytest.mark.parametrize("name", SMALL)
def test_no_rows_and_no_sequences(name, form):
    s = sample(*SMALL[name])
    rows = run(form, "rows", s.index[:, :0], s.coefficients)
    assert rows.shape == (*s.v.shape[::2][:2], 0, s.v.shape[1])
    empty = {k: x[:0] for k, x in vars(s.coefficients).items() if x is not None and x.dim() > 2}
    c = replace(s.coefficients, **empty)
    none = Sample(c, s.v[:0], s.w[:0], s.index[:0])
    for (operation, args), (_, full) in zip(none.calls(()), s.calls(()), strict=True):
        out = run(form, operation, *args)
        assert out.shape == (0, *run(form, operation, *full).shape[1:])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1, 5000, 5, 3, 1, 4, True), None),
        *(((1, 3000, 2, 5, columns), kind) for kind in KINDS for columns in (1, 3, 70)),
    ],
    ids=str,
)
def test_number_of_threads_does_not_matter(shape, kind):
    """Few maps and a long sequence: columns or chunks of time are divided among many threads.

    The fixture ``one_thread`` restores their number.
    """
    s = sample(shape, kind)
    if isinstance(s.coefficients, LinearAttentionCoefficients):
        decay = s.coefficients.log_decay * 1e-2
        s = s._replace(coefficients=replace(s.coefficients, log_decay=decay))
    results = []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        results.append([run("kernel", op, *args) for op, args in s.calls((900, 1500))])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_near(actual, expected)


def test_a_deterministic_result():
    c = each(diagonal(1, 600, 20, 4, 1, 4, True), Tensor.float)
    first = kernels.diagonal_mean(c)
    assert all(torch.equal(kernels.diagonal_mean(c), first) for _ in range(3))


def test_rows_after_the_last_one_asked_for_are_zero():
    c = linear_attention(1, 100, 2, 6, (False, True, False))
    maps = kernels.naive_linear_attention_matrix(c)
    for columns in (1, 40):
        w = torch.zeros(1, 100, 1, columns, dtype=torch.float64)
        w[:, 50] = 1
        u = kernels.linear_attention_rmatvec(w, c)
        assert bool((u[:, 51:] == 0).all())
        assert_near(u, naive_rmatvec(maps, w, c))
        assert bool((kernels.linear_attention_rmatvec(0 * w, c) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_delta_rule_that_takes_away_what_it_writes(dtype):
    c = each(linear_attention(2, 43, 2, 5, (False, True, False)), lambda x: x.to(dtype))
    c = replace(c, erase=c.key)
    own = replace(c, erase=c.key.clone())  # another tensor with the same numbers
    index = torch.arange(43).expand(2, -1)
    maps = kernels.linear_attention_rows(index, c)
    assert_near(maps, kernels.linear_attention_rows(index, own))
    assert_near(maps, kernels.naive_linear_attention_matrix(c).to(dtype))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("name", SMALL)
def test_gradients(name):
    s = sample(*SMALL[name])
    once, twice = (
        functools.partial(check, nondet_tol=1e-12)
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck)
    )
    leaves = {k: leaf(x) for k, x in vars(s.coefficients).items() if x is not None}
    for operation, args in s.calls((1, 3)):

        def of_coefficients(*tensors, operation=operation, args=args):
            c = type(s.coefficients)(**dict(zip(leaves, tensors[-len(leaves) :], strict=True)))
            given = [c if x is s.coefficients else x for x in args]
            return run("kernel", operation, *tensors[: -len(leaves)], *given)

        if args[0] is s.coefficients or not args[0].is_floating_point():
            assert once(of_coefficients, tuple(leaves.values()))
            continue
        first = leaf(args[0])
        assert once(functools.partial(of_coefficients, args=args[1:]), (first, *leaves.values()))

        def alone(x, operation=operation, rest=args[1:]):
            return run("kernel", operation, x, *rest)

        assert once(alone, first)  # by the operation's adjoint
        if operation == "rmatvec":
            assert twice(lambda x, f=alone: f(x).square(), first)


def test_gradients_of_the_torch_forms_cross_tiles():
    """The blocks of the PyTorch form of the mean are joined without breaking the graph."""
    c = each(diagonal(1, 300, 2, 2, 1, 3, True, True), leaf)
    weight = torch.randn(1, 300, 300, dtype=torch.float64)
    tensors = list(vars(c).values())
    blocked = torch.autograd.grad((kernels.diagonal_mean(c) * weight).sum(), tensors)
    dense = matrix_by_differences(c).mean(1)
    for x, y in zip(blocked, torch.autograd.grad((dense * weight).sum(), tensors), strict=True):
        assert_near(x, y, 1e-11)


@pytest.mark.parametrize("operation", NAIVE)
@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("device", DEVICES)
# From torch 2.14 its own check looks at gradients that are not kept.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_opcheck(device, name, operation):
    s = sample(*MIDDLE[name], torch.float32)
    s = s._replace(v=leaf(s.v), w=leaf(s.w))
    for _, args in [call for call in s.calls((3, 9)) if call[0] == operation]:
        op, tensors = flat(operation, args)
        torch.library.opcheck(op, at(device, tensors))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["diagonal", "delta, bonus"])
def test_compiles_as_one_graph(name, backend):
    s = sample(*MIDDLE[name])
    tensors, family = vars(s.coefficients), name_of("", [s.coefficients])
    scan, rmatvec, mean, rows = (getattr(kernels, family + operation) for operation in NAIVE)
    options = {"mean": True} if name == "diagonal" else {}

    def everything(v: Tensor, w: Tensor) -> Tensor:
        c = type(s.coefficients)(**tensors)
        y = scan(v * 2, c) * 2
        u = rmatvec(w.mT.contiguous().mT, c, **options)
        maps = rows(s.index, c) @ mean(c, start=10, stop=20).mT[:, None]
        return y.sum() + u.square().sum() + (maps * v.mean() * w.mean()).sum()

    v, w = leaf(s.v), leaf(s.w)
    expected = everything(v, w)
    expected_grads = torch.autograd.grad(expected, (v, w))
    actual = torch.compile(everything, fullgraph=True, backend=backend)(v, w)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad(actual, (v, w)), expected_grads, strict=True):
        torch.testing.assert_close(x, y)


D = each(diagonal(2, 5, 4, 2, 2, 3, True), Tensor.float)
H = each(linear_attention(2, 5, 4, 3, (False, True, True)), Tensor.float)
V, W, THREE = torch.zeros(2, 5, 4), torch.zeros(2, 5, 2, 6), torch.zeros(2, 5, 3, 2)


@pytest.mark.parametrize(
    ("operation", "args", "error", "message"),
    [
        *(
            ("mean", (replace(coefficients, **{name: value}),), ValueError, message)
            for coefficients, name, value, message in [
                (D, "dt", torch.zeros(2, 5), r"dt has shape \(2, 5\); expected \(B, L, D\)"),
                (D, "right", torch.zeros(2, 5, 3), "right has shape .* that of dt"),
                (D, "A", torch.zeros(3, 2), "A has shape .* D = 4"),
                (D, "B", torch.zeros(2, 5, 2), r"B has shape .* \(B, L, G, N\)"),
                (D, "B", torch.zeros(2, 5, 1, 3), "B has shape .* N = 2"),
                (D, "C", torch.zeros(2, 5, 4, 2), "C has shape .* that of B"),
                (D, "left", torch.zeros(1, 5, 4), "left has shape"),
                (D, "conv", torch.zeros(3, 4), r"conv has shape .* \(D, K\)"),
                (H, "query", V, r"query has shape \(2, 5, 4\); expected \(B, L, H, N\)"),
                (H, "key", torch.zeros(2, 5, 3, 2), "key has shape .* that of query"),
                (H, "log_decay", V, r"log_decay has shape .* \(2, 5, 4, 1\)"),
                (H, "erase", torch.zeros(2, 5, 4, 1), "erase has shape .* that of query"),
                (H, "erase", None, "only probe is given; expected both erase and probe"),
                (H, "bonus", torch.zeros(2, 5), r"bonus has shape .* \(2, 5, 4\)"),
            ]
        ),
        *(
            (operation, (*args, coefficients, *rest), error, message)
            for coefficients in (D, H)
            for operation, args, rest, error, message in [
                ("mean", (), (-1, 3), ValueError, "expected 0 <= start < stop <= L"),
                ("mean", (), (3, 3), ValueError, "expected 0 <= start < stop <= L"),
                ("mean", (), (0, 6), ValueError, "expected 0 <= start < stop <= L"),
                ("rows", (torch.tensor([0, 5]),), (), IndexError, r"from 0 to 5; .* in \[0, 5\)"),
                ("rows", (torch.zeros(2, 1),), (), TypeError, r"index is torch\.float32"),
                ("rows", (torch.zeros(3, 1).long(),), (), ValueError, "index has shape"),
            ]
        ),
        ("mean", (replace(D, B=THREE, C=THREE),), ValueError, "3 groups; .* divisor of D = 4"),
        ("scan", (V[:, :4], D), ValueError, "v has shape"),
        ("rmatvec", (V[:, :, 0, None], D), ValueError, "w has shape"),
        ("scan", (V.long(), D), TypeError, r"v is torch\.int64; expected float16"),
        ("scan", (V, replace(D, A=[1.0])), TypeError, "A is a list"),
        ("scan", (V.to("meta"), D), ValueError, "different devices"),
        ("scan", (W, H), ValueError, r"has shape \(2, 5, 2, 6\); expected \(B, L, H"),
        ("rmatvec", (W, H), ValueError, r"has shape \(2, 5, 2, 6\); expected \(B, L, H"),
    ],
)
def test_arguments_are_checked(operation, args, error, message):
    with pytest.raises(error, match=message):
        run("kernel", operation, *args)


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        *(("mean", (coefficients, 0, 6)) for coefficients in (D, H)),
        *(("rows", (torch.tensor([[5], [0]]), coefficients)) for coefficients in (D, H)),
        ("mean", (replace(D, right=D.right[:, :4]), 0, 5)),
        ("scan", (torch.zeros(2, 4, 4, 2), H)),
        ("scan", (torch.zeros(2, 5, 4, 2), replace(H, key=H.key[..., :2]))),
    ],
)
def test_the_kernels_guard_memory_themselves(operation, args):
    """torch.ops can be called without the checks of the functions."""
    op, tensors = flat(operation, args)
    with pytest.raises(RuntimeError):
        op(*tensors)


# Batch, maps, channels per map, rows, length, columns, taps.
TAP_SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 1, 2, 5, 5, 8),
    (1, 2, 4, 3, 33, 17, 4),
    (2, 5, 2, 3, 100, 100, 4),
    (1, 4, 1, 2, 130, 64, 3),
    (1, 1, 3, 1, 65, 65, 1),
]


def naive_taps(rows: Tensor, values: Tensor, left: Tensor | None, columns: int) -> Tensor:
    taps, _, channels, length = values.shape
    rows = rows.double().repeat_interleave(channels // rows.shape[1], 1)
    out = torch.zeros(*rows.shape[:3], columns, dtype=torch.float64)
    for k in range(taps):
        for j in range(min(columns, length - k)):
            out[..., j] += rows[..., j + k] * values[k, ..., j + k].double()[..., None]
    return out if left is None else out * left.double()[..., None]


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize("with_left", [False, True])
@pytest.mark.parametrize("shape", TAP_SHAPES, ids=str)
def test_taps_match_the_definition(shape, with_left, dtype, form):
    B, M, P, R, L, C, K = shape
    rows = torch.randn(B, M, R, L).to(dtype)
    values = torch.randn(K, B, M * P, L).to(dtype)
    left = torch.randn(B, M * P, R).to(dtype) if with_left else None
    device = "cuda" if form == "cuda" else "cpu"
    # Part of a larger tensor, as LaTIM fills it; what lies around it stays.
    whole = torch.full((B, M * P + 2, R, C), float("nan"), dtype=dtype, device=device)
    function = taps_module.tap_rows_torch if form == "torch" else kernels.tap_rows
    with instructions_of(form):
        function(*at(device, (rows, values, left)), whole[:, 1:-1])
    whole = whole.cpu()
    expected = naive_taps(rows, values, left, C)
    assert_near(whole[:, 1:-1], expected, 1e-6 if dtype == torch.float32 else 1e-14)
    assert whole[:, 0].isnan().all()
    assert whole[:, -1].isnan().all()


def test_taps_of_any_layout():
    rows, values = torch.randn(2, 3, 7, 4).mT, torch.randn(2, 2, 7, 3).mT
    out = torch.empty(2, 3, 4, 7)
    kernels.tap_rows(rows, values, None, out)
    torch.testing.assert_close(out.double(), naive_taps(rows, values, None, 7), atol=1e-6, rtol=0)


# Batch, tokens, maps, rows, width.
DISTANCE_SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 2, 5, 7),
    (1, 5, 3, 8, 16),
    (2, 4, 8, 9, 33),
    (1, 33, 1, 3, 64),
    (1, 2, 40, 17, 100),
]


@pytest.mark.parametrize("form", ALL_FORMS)
@DTYPES
@pytest.mark.parametrize("shape", DISTANCE_SHAPES, ids=str)
def test_distances_match_the_definition(shape, dtype, form):
    B, C, M, R, E = shape
    # The arguments may have any layout.
    maps, values = randn(B, M, R, C).permute(0, 3, 1, 2).to(dtype), randn(B, C, E, M).mT.to(dtype)
    outputs = randn(B, R, E).to(dtype)
    function = kernels.map_distances
    if form == "torch":
        function = distances_module.map_distances_torch
    with instructions_of(form):
        found = function(*at("cuda" if form == "cuda" else "cpu", (maps, values, outputs))).cpu()
    vectors = torch.einsum("bcmr,bcme->brce", maps.double(), values.double())
    expected = (vectors - outputs.double()[:, :, None]).abs().sum(-1)
    assert found.dtype == dtype
    assert_near(found, expected, 1e-6 if dtype == torch.float32 else 1e-14)


def test_the_torch_form_of_distances_takes_blocks(monkeypatch):
    args = randn(2, 7, 3, 4), randn(2, 7, 3, 5), randn(2, 4, 5)
    whole = distances_module.map_distances_torch(*args)
    monkeypatch.setattr(distances_module, "_BLOCK", 90)
    torch.testing.assert_close(distances_module.map_distances_torch(*args), whole)


def run_again(selection: str, **environment: str) -> None:
    """Run tests of this file, and of gradients, in a fresh process: kernels are chosen anew.

    The PyTorch forms themselves are the same there: of tests in several forms ``-kernel]``
    selects those that call the kernels.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *FILES, "-k", selection],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def weighted_arguments(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal rows from the L - R-th on, and what they are weighed by."""
    batch, maps, width, rows, length, taps = shape
    torch.manual_seed(0)
    maps_of_rows = randn(batch, maps, length, length).tril()[:, :, length - rows :]
    left, sources = randn(batch, rows, maps * width), randn(taps, batch, maps * width, length)
    return maps_of_rows.to(dtype), left.to(dtype), sources.to(dtype)


# Batch, maps, channels of each, rows, length, taps.
WEIGHTED = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 5, 3, 3, 6),
    (1, 2, 4, 33, 70, 4),
    (2, 1, 9, 8, 64, 1),
    (1, 3, 16, 130, 131, 3),
    (1, 1, 2, 16, 96, 40),
]


@pytest.mark.parametrize("form", ["kernel", "torch", *INSTRUCTION_SETS])
@DTYPES
@pytest.mark.parametrize("shape", WEIGHTED, ids=str)
def test_weighted_rows_match_the_definition(shape, dtype, form):
    rows, left, sources = weighted_arguments(shape, dtype)
    batch, maps, width, count, length, taps = shape
    each = rows.double().repeat_interleave(width, 1) * left.double().mT[..., None]
    weighed = each * sources.double()[:, :, :, None]  # (K, B, D, R, L)
    total = torch.zeros(batch, count, length, dtype=torch.float64)
    for k in range(min(taps, length)):
        total[..., : length - k] += weighed[k, ..., k:].sum(1)
    function = kernels.weighted_rows
    if form == "torch":
        function = weighted_rows_torch
    with instructions_of(form):
        for last in (length - count, length):
            found = function(rows, left, sources, last)
            assert found.dtype == dtype
            assert_near(found, total)
        wide = torch.cat([sources, sources], 2)[:, :, : maps * width]  # not contiguous
        assert torch.equal(function(rows, left, wide, length), found)


# What the operations of tensors alone, which have no gradient, may be given.
TAPS = (torch.randn(1, 2, 3, 9), torch.randn(2, 1, 4, 9), None, torch.zeros(1, 4, 3, 6))
DISTANCES = (torch.randn(1, 4, 2, 3), torch.randn(1, 4, 2, 5), torch.randn(1, 3, 5))
PLAIN = {
    "tap_rows": TAPS,
    "map_distances": DISTANCES,
    "weighted_rows": (*weighted_arguments((2, 2, 3, 4, 9, 2)), 5),
}


def changed(operation: str, changes: dict[int, Any]) -> list[Any]:
    return [changes.get(k, x) for k, x in enumerate(PLAIN[operation])]


@pytest.mark.parametrize(
    ("operation", "changes"),
    [("tap_rows", {2: torch.randn(1, 4, 3)}), *((name, {}) for name in PLAIN)],
)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_operations_without_gradients(device, operation, changes):
    arguments = at(device, changed(operation, changes))
    torch.library.opcheck(getattr(torch.ops.captum_ssm, operation), arguments)


@pytest.mark.parametrize(
    ("operation", "changes", "error", "message"),
    [
        ("tap_rows", {0: torch.zeros(1, 3, 3, 9)}, ValueError, "rows has shape"),
        ("tap_rows", {0: torch.zeros(9)}, ValueError, "rows has shape"),
        (
            "tap_rows",
            {0: torch.zeros(1, 2, 3, 5), 1: torch.zeros(2, 1, 4, 5)},
            ValueError,
            "rows has shape",
        ),
        ("tap_rows", {1: torch.zeros(2, 1, 3, 9)}, ValueError, "values has shape"),
        ("tap_rows", {2: torch.zeros(1, 3, 4)}, ValueError, "left has shape"),
        ("tap_rows", {1: TAPS[1].double()}, TypeError, "one dtype"),
        ("map_distances", {0: torch.zeros(4, 2, 3)}, ValueError, "maps has shape .* 4 dimensions"),
        ("map_distances", {1: torch.zeros(1, 4, 3, 5)}, ValueError, "values has shape"),
        ("map_distances", {2: torch.zeros(1, 4, 5)}, ValueError, "outputs has shape"),
        ("map_distances", {2: torch.zeros(3, 5)}, ValueError, "outputs has shape .* 3 dimensions"),
        ("map_distances", {1: DISTANCES[1].double()}, TypeError, "one dtype"),
        ("weighted_rows", {0: torch.zeros(2, 2, 4)}, ValueError, "rows has shape .* 4 dimensions"),
        ("weighted_rows", {1: torch.zeros(2, 4, 5)}, ValueError, "left has shape .* of M = 2"),
        ("weighted_rows", {2: torch.zeros(2, 2, 6, 8)}, ValueError, r"sources has .* \(2, 6, 9\)"),
        ("weighted_rows", {2: torch.zeros(2, 2, 6, 9).double()}, TypeError, "expected one dtype"),
    ],
)
def test_their_arguments_are_checked(operation, changes, error, message):
    with pytest.raises(error, match=message):
        getattr(kernels, operation)(*changed(operation, changes))


@pytest.mark.skipif(not kernels.extension_loaded(), reason="no kernels")
@pytest.mark.parametrize(
    ("operation", "changes", "message"),
    [
        ("tap_rows", {3: torch.empty(1, 4, 9, 3).mT}, "contiguous"),
        ("tap_rows", {1: TAPS[1][..., :8], 3: torch.empty(1, 4, 3, 9)}, "do not agree"),
        ("tap_rows", {1: TAPS[1].double(), 3: torch.empty(1, 4, 3, 9)}, "one dtype"),
        ("map_distances", {1: torch.zeros(1, 4, 2, 4)}, "do not agree"),
        ("map_distances", {2: torch.zeros(1, 2, 5)}, "do not agree"),
        ("map_distances", {1: DISTANCES[1].double()}, "one dtype"),
        ("weighted_rows", {0: torch.zeros(2, 2, 4)}, "captum_ssm"),
        ("weighted_rows", {1: torch.zeros(2, 4, 5)}, "captum_ssm"),
        ("weighted_rows", {2: torch.zeros(2, 2, 6, 8)}, "captum_ssm"),
        ("weighted_rows", {2: torch.zeros(2, 2, 6, 9).double()}, "captum_ssm"),
    ],
)
def test_their_kernels_guard_memory_themselves(operation, changes, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.captum_ssm, operation)(*changed(operation, changes))


def test_forced_torch_forms():
    """Every operation of every kind of recurrence; tests in the form "torch" have their shapes."""
    calls = "(any_layout or test_extreme_steps) and -kernel]"
    run_again(calls, CAPTUM_SSM_PURE_TORCH="1")


@pytest.mark.slow
def test_forced_torch_forms_have_gradients():
    others = " and not ".join(INSTRUCTION_SETS)
    run_again(f"(test_gradients or opcheck) and not {others}", CAPTUM_SSM_PURE_TORCH="1")


def test_missing_extension_warns_once():
    program = """
import sys, warnings
sys.modules["captum_ssm._C"] = None
import torch
from captum_ssm import kernels
x = torch.ones(1, 3, 2)
b = torch.ones(1, 3, 1, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        y = kernels.diagonal_scan(x, kernels.DiagonalCoefficients(x, x, -torch.ones(2, 1), b, b))
assert not kernels.extension_loaded()
assert y.isfinite().all()
[warning] = [w for w in caught if issubclass(w.category, kernels.ExtensionWarning)]
assert "pip install --no-deps" in str(warning.message)
assert warning.filename == "<string>", warning.filename
"""
    subprocess.run([sys.executable, "-c", program], check=True)
