"""The operators against their naive forms, in every form and instruction set they have."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from captum_ssm import ops

# batch, length, channels, states, groups, taps, left
SHAPES = [
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
]
# Long enough for several tiles of every size.
LONG = [
    (1, 700, 3, 4, 1, 4, True),
    (1, 1200, 3, 2, 1, 0, False),
    (2, 577, 4, 3, 2, 20, True),
]
KERNELS = ["kernel", pytest.param("cuda", marks=pytest.mark.cuda)]
FORMS = [*KERNELS, "torch"]


def on_cuda(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of CUDA tensors, from and to the CPU."""

    def run(*args: object, **options: object) -> Tensor:
        out = function(*at("cuda", args), **options)
        assert out.is_cuda
        return out.cpu()

    return run


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def at(device: str, args: Iterable[object]) -> tuple[object, ...]:
    """The arguments on a device; tensors that need gradients are leaves there."""
    return tuple(
        x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in args
    )


FUNCTIONS = {
    "kernel": (ops.diagonal_scan, ops.diagonal_vecmat, ops.diagonal_mean, ops.diagonal_rows),
    "torch": (
        ops.diagonal_scan_torch,
        ops.diagonal_vecmat_torch,
        ops.diagonal_mean_torch,
        ops.diagonal_rows_torch,
    ),
}
FUNCTIONS["cuda"] = tuple(map(on_cuda, FUNCTIONS["kernel"]))
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def make(
    batch: int,
    length: int,
    channels: int,
    states: int,
    groups: int,
    taps: int,
    left: bool,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=g, dtype=torch.float64)
    randn = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    shape = (batch, length, channels)
    coefficients = [
        rand(shape) * 0.3,
        randn(shape),
        -rand(channels, states) * 3,
        randn(batch, length, groups, states),
        randn(batch, length, groups, states),
        randn(shape) if left else None,
        randn(channels, taps) if taps else None,
    ]
    return [None if x is None else x.to(dtype) for x in coefficients]


def matrix_by_differences(dt, right, A, Bm, Cm, left=None, conv=None, rows=None) -> Tensor:
    """Maps (or some rows of them) in float64 from differences of sums: fine for moderate steps."""
    dt, right, A, Bm, Cm = (x.double() for x in (dt, right, A, Bm, Cm))
    length, channels = dt.shape[1:]
    rows = torch.arange(length) if rows is None else rows
    group = torch.arange(channels) // (channels // Bm.shape[2])
    total = dt.cumsum(1).transpose(1, 2)  # (B, D, L)
    gap = (total[..., rows, None] - total[..., None, :]).clamp(min=0)
    out = torch.zeros_like(gap)
    for n in range(A.shape[1]):
        c, b = (x[..., n][..., group].transpose(1, 2) for x in (Cm[:, rows], Bm))
        out += c[..., :, None] * torch.exp(A[:, n, None, None] * gap) * b[..., None, :]
    out *= right.transpose(1, 2)[..., None, :]
    out = out * (rows[:, None] >= torch.arange(length))
    if left is not None:
        out = out * left.double()[:, rows].transpose(1, 2)[..., None]
    if conv is not None:
        taps = conv.shape[1]
        late = torch.nn.functional.pad(out, (0, taps - 1))
        out = sum(
            late[..., m : m + length] * conv.double()[:, taps - 1 - m, None, None]
            for m in range(taps)
        )
    return out


@functools.cache
def case(shape: tuple, dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Coefficients, and the maps without and with the convolution."""
    coefficients = make(*shape, dtype=dtype)
    matrix = ops.naive_diagonal_matrix if shape[1] <= 100 else matrix_by_differences
    return coefficients, matrix(*coefficients[:6]), matrix(*coefficients)


def vectors(shape: tuple, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    v = torch.randn(shape[:3], generator=g, dtype=torch.float64).to(dtype)
    return v, v[..., 0].contiguous()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """The largest error, relative to the largest entry."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).abs().max()
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    assert error <= tolerance * expected.abs().max().clamp(min=1e-300), error / expected.abs().max()


# ---- values ---------------------------------------------------------------------------------


def test_naive_forms_agree_with_the_second_oracle():
    for shape in SHAPES[:6]:
        coefficients, plain, full = case(shape, torch.float64)
        assert_near(matrix_by_differences(*coefficients[:6]), plain)
        assert_near(matrix_by_differences(*coefficients), full)
        v, w = vectors(shape, torch.float64)
        assert_near(
            ops.naive_diagonal_scan(v, *coefficients[:6]), torch.einsum("bdij,bjd->bid", plain, v)
        )
        u = torch.einsum("bi,bdij->bjd", w, full)
        assert_near(ops.naive_diagonal_vecmat(w, *coefficients), u)
        assert_near(ops.naive_diagonal_vecmat(w, *coefficients, mean=True), u.mean(-1))
        assert_near(ops.naive_diagonal_mean(*coefficients, start=0, stop=1), full.mean(1)[:, :1])
        index = torch.zeros(shape[0], 1, dtype=torch.int64)
        assert_near(ops.naive_diagonal_rows(index, *coefficients), full[:, :, :1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("shape", SHAPES + LONG, ids=str)
def test_matches_naive(shape, dtype, form):
    scan, vecmat, mean, rows = FUNCTIONS[form]
    coefficients, plain, full = case(shape, dtype)
    batch, length = shape[:2]
    v, w = vectors(shape, dtype)

    y = scan(v, *coefficients[:6])
    assert y.dtype == dtype
    assert_near(y, torch.einsum("bdij,bjd->bid", plain, v.double()))

    u = torch.einsum("bid,bdij->bjd", v.double(), full)
    assert_near(vecmat(v, *coefficients), u)
    assert_near(vecmat(v, *coefficients, mean=True), u.mean(-1))
    u = torch.einsum("bi,bdij->bjd", w.double(), full)
    assert_near(vecmat(w, *coefficients), u)
    assert_near(vecmat(w, *coefficients, mean=True), u.mean(-1))

    assert_near(mean(*coefficients), full.mean(1))
    for start, stop in ((0, 1), (length - 1, length), (length // 3, max(1, 2 * length // 3))):
        if start < stop:
            part = mean(*coefficients, start=start, stop=stop)
            assert_near(part, full.mean(1)[:, start:stop])

    g = torch.Generator().manual_seed(2)
    index = torch.randint(0, length, (batch, 5), generator=g)
    chosen = torch.stack([full[b][:, index[b]] for b in range(batch)])
    assert_near(rows(index, *coefficients), chosen)
    every = torch.arange(length).expand(batch, -1)
    if form != "torch" or length <= 100:
        assert_near(rows(every, *coefficients), full)
    if form != "torch":
        assert torch.equal(rows(torch.arange(length), *coefficients), rows(every, *coefficients))


@pytest.mark.parametrize("steps", [1.0, 300.0, 0.0, "constant"])
@pytest.mark.parametrize("form", KERNELS)
def test_precision_at_4096(form, steps):
    """Float32 stays within 2e-6 of float64 however slowly or fast the states decay."""
    scan, vecmat, mean, rows = FUNCTIONS[form]
    length, channels = 4096, 8
    coefficients = make(1, length, channels, 4, 1, 4, True, torch.float32)
    dt = coefficients[0]
    if steps == "constant":
        dt.fill_(1e-3)  # a rounded decay, repeated, would drift
    else:
        dt *= steps
    some = torch.cat([torch.arange(0, length, 127), torch.tensor([length - 1])])
    expected = matrix_by_differences(*coefficients, rows=some)

    assert_near(mean(*coefficients)[:, some], expected.mean(1))
    last = mean(*coefficients, start=length - 256)
    assert_near(last[:, -1], expected.mean(1)[:, -1])
    assert_near(rows(some, *coefficients), expected)

    v, w = vectors((1, length, channels), torch.float32)
    plain = matrix_by_differences(*coefficients[:6], rows=some)
    y = torch.einsum("bdij,bjd->bid", plain, v.double())
    assert_near(scan(v, *coefficients[:6])[:, some], y)
    w = torch.zeros_like(w).index_copy(1, some, w[:, some])
    u = torch.einsum("bi,bdij->bjd", w[:, some].double(), expected)
    assert_near(vecmat(w, *coefficients), u)
    assert_near(vecmat(w, *coefficients, mean=True), u.mean(-1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_extreme_steps(dtype, form):
    """Decays that underflow, that stay at one, and resets, which leave what follows exact."""
    scan, vecmat, mean, rows = FUNCTIONS[form]
    shape = (1, 150, 6, 3, 1, 4, True)
    coefficients = make(*shape, dtype=dtype)
    dt, A = coefficients[0], coefficients[2]
    A[0] = 0  # channel 0 never decays
    dt[..., 1] = 0
    dt[:, ::2, 2] = 1e4
    dt[:, ::7, 3] = float("inf")
    dt[:, 50, :] = float("inf")
    dt[:, 100, 4] = 1e30
    A[4] = -1e-3
    dt[..., 5] *= 1e-40 if dtype == torch.float64 else 1e-38
    expected = ops.naive_diagonal_matrix(*coefficients)
    plain = ops.naive_diagonal_matrix(*coefficients[:6])
    v, w = vectors(shape, dtype)
    assert_near(scan(v, *coefficients[:6]), torch.einsum("bdij,bjd->bid", plain, v.double()))
    u = torch.einsum("bi,bdij->bjd", w.double(), expected)
    assert_near(vecmat(w, *coefficients), u)
    assert_near(mean(*coefficients), expected.mean(1))
    for d in range(6):  # each by its own largest entry
        part = rows(torch.arange(150)[None], *coefficients)[:, d]
        assert_near(part, expected[:, d])


@pytest.mark.parametrize("taps", [0, 4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_entries_are_exact_until_they_underflow(dtype, taps):
    """States that die between two stretches of tokens are left out: not one entry too early."""
    if not ops.extension_loaded():
        pytest.skip("the PyTorch forms stop at exp(-60)")
    length = 400
    coefficients = make(1, length, 3, 5, 1, taps, True, dtype)
    # Positive terms, so that an entry is as exact as its parts; how many tokens each state lives.
    coefficients = [None if x is None else x.abs() + 0.1 for x in coefficients]
    life = torch.tensor([[90.0], [200.0], [350.0]]) * torch.tensor([0.9, 1.0, 0.5, 0.8, 0.3])
    span = 87.0 if dtype == torch.float32 else 708.0
    coefficients[2] = (-span / life / coefficients[0].mean().float()).to(dtype)
    exact = [None if x is None else x.double() for x in coefficients]
    expected = ops.naive_diagonal_matrix(*exact)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    smallest = 100 * torch.finfo(dtype).tiny / tolerance  # what is lost may be a normal number
    for found, wanted in (
        (ops.diagonal_rows(torch.arange(length)[None], *coefficients), expected),
        (ops.diagonal_mean(*coefficients), expected.mean(1)),
    ):
        counts = wanted > smallest
        assert counts.any()
        relative = (found.double() / wanted - 1)[counts].abs().max()
        assert relative < tolerance


def test_half_precision_accumulates_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        coefficients = make(1, 80, 6, 3, 1, 4, True, dtype)
        full = [None if x is None else x.float() for x in coefficients]
        full[2] = coefficients[2] = full[2]  # A is usually kept in float32
        v, w = vectors((1, 80, 6), dtype)
        for half, single in (
            (ops.diagonal_mean(*coefficients), ops.diagonal_mean(*full)),
            (ops.diagonal_scan(v, *coefficients[:6]), ops.diagonal_scan(v.float(), *full[:6])),
            (ops.diagonal_vecmat(w, *coefficients), ops.diagonal_vecmat(w.float(), *full)),
        ):
            assert half.dtype == torch.float32
            assert torch.equal(half, single)


def test_float64_anywhere_means_float64():
    coefficients = make(1, 20, 4, 2, 1, 0, False, torch.float32)
    coefficients[2] = coefficients[2].double()
    assert ops.diagonal_mean(*coefficients).dtype == torch.float64


def test_any_layout():
    shape = (2, 40, 6, 3, 2, 4, True)
    coefficients, _, full = case(shape, torch.float64)
    strided = [
        None if x is None else x.transpose(0, 1).contiguous().transpose(0, 1) for x in coefficients
    ]
    assert not strided[0].is_contiguous()
    assert_near(ops.diagonal_mean(*strided), full.mean(1))


def test_no_rows():
    coefficients = make(1, 10, 4, 2, 1, 0, False)
    for rows in (ops.diagonal_rows, ops.diagonal_rows_torch):
        out = rows(torch.zeros(1, 0, dtype=torch.int64), *coefficients)
        assert out.shape == (1, 4, 0, 10)


def test_number_of_threads_does_not_matter():
    """Few channels and a long sequence: chunks of time run in parallel from three threads on."""
    shape = (1, 5000, 5, 3, 1, 4, True)
    coefficients = make(*shape, dtype=torch.float64)
    v, w = vectors(shape, torch.float64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(
                (
                    ops.diagonal_scan(v, *coefficients[:6]),
                    ops.diagonal_vecmat(w, *coefficients),
                    ops.diagonal_vecmat(w, *coefficients, mean=True),
                    ops.diagonal_mean(*coefficients, start=900, stop=1300),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_near(actual, expected)


def test_a_deterministic_result():
    coefficients = make(1, 600, 20, 4, 1, 4, True, torch.float32)
    first = ops.diagonal_mean(*coefficients)
    for _ in range(3):
        assert torch.equal(ops.diagonal_mean(*coefficients), first)


# ---- gradients, tracing ---------------------------------------------------------------------


def leaves(coefficients: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.clone().requires_grad_() for x in coefficients]


@pytest.mark.parametrize("shape", [(2, 7, 4, 2, 2, 3, True), (1, 9, 3, 1, 1, 0, False)], ids=str)
def test_gradients(shape):
    coefficients = make(*shape)
    v, w = vectors(shape, torch.float64)
    v.requires_grad_()
    w.requires_grad_()
    check = functools.partial(torch.autograd.gradcheck, nondet_tol=1e-12)
    assert check(lambda x: ops.diagonal_scan(x, *coefficients[:6]), v)
    for mean in (False, True):
        for x in (v, w):
            assert check(lambda x, m=mean: ops.diagonal_vecmat(x, *coefficients, mean=m), x)
    assert check(ops.diagonal_scan, (v, *leaves(coefficients[:6])))
    assert check(ops.diagonal_vecmat, (w, *leaves(coefficients)))
    assert check(ops.diagonal_mean, (*leaves(coefficients), 2, 6))
    index = torch.tensor([[0, 6]]).expand(shape[0], -1)
    assert check(functools.partial(ops.diagonal_rows, index), leaves(coefficients))


def test_gradients_of_the_torch_forms_cross_tiles():
    """The blocks of the PyTorch form of the mean are joined without breaking the graph."""
    shape = (1, 300, 2, 2, 1, 3, True)
    coefficients = leaves(make(*shape))
    weight = torch.randn(1, 300, 300, dtype=torch.float64)
    tensors = [x for x in coefficients if x is not None]
    blocked = torch.autograd.grad((ops.diagonal_mean(*coefficients) * weight).sum(), tensors)
    dense = matrix_by_differences(*coefficients).mean(1)
    for x, y in zip(blocked, torch.autograd.grad((dense * weight).sum(), tensors), strict=True):
        assert_near(x, y, 1e-11)


def test_second_derivatives_of_the_linear_argument():
    shape = (1, 8, 3, 2, 1, 3, True)
    coefficients = make(*shape)
    v, _ = vectors(shape, torch.float64)
    v.requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: ops.diagonal_vecmat(x, *coefficients).square(), v, nondet_tol=1e-12
    )


def opcheck_cases() -> list[tuple[object, tuple[object, ...]]]:
    shape = (2, 40, 6, 3, 2, 4, True)
    coefficients = make(*shape, dtype=torch.float32)
    v, w = vectors(shape, torch.float32)
    index = torch.tensor([[0, 3], [39, 5]])
    ns = torch.ops.captum_ssm
    return [
        (ns.diagonal_scan, (v.requires_grad_(), *coefficients[:6])),
        (ns.diagonal_scan, (v, *coefficients[:5], None)),
        (ns.diagonal_vecmat, (v, *coefficients, False)),
        (ns.diagonal_vecmat, (w.requires_grad_(), *coefficients, True)),
        (ns.diagonal_mean, (*coefficients, 3, 30)),
        (ns.diagonal_rows, (index, *coefficients[:6], None)),
    ]


@pytest.mark.parametrize(("op", "args"), opcheck_cases(), ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(op, args, device):
    torch.library.opcheck(op.default, at(device, args))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiles_as_one_graph():
    shape = (1, 40, 6, 3, 1, 4, True)
    coefficients = make(*shape, dtype=torch.float32)
    v, w = vectors(shape, torch.float32)
    v.requires_grad_()
    w.requires_grad_()

    def everything(v: Tensor, w: Tensor) -> Tensor:
        y = ops.diagonal_scan(v, *coefficients[:6])
        u = ops.diagonal_vecmat(w, *coefficients, mean=True)
        matrix = ops.diagonal_mean(*coefficients, start=10, stop=20)
        rows = ops.diagonal_rows(torch.tensor([[1, 2]]), *coefficients)
        return (y * 2).sum() + (u * u).sum() + (matrix @ w[0]).sum() + (rows @ w[0]).sum()

    expected = everything(v, w)
    expected_grads = torch.autograd.grad(expected, (v, w))
    actual = torch.compile(everything, fullgraph=True)(v, w)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad(actual, (v, w)), expected_grads, strict=True):
        torch.testing.assert_close(x, y)


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 5), r"dt has shape \(2, 5\); accepted: \(B, L, D\)"),
        (1, torch.zeros(2, 5, 3), "right has shape .* that of dt"),
        (2, torch.zeros(3, 2), "A has shape .* D = 4"),
        (3, torch.zeros(2, 5, 2), r"Bm has shape .* \(B, L, G, N\)"),
        (3, torch.zeros(2, 5, 1, 3), "Bm has shape .* N = 2"),
        (4, torch.zeros(2, 5, 4, 2), "Cm has shape .* that of Bm"),
        (5, torch.zeros(1, 5, 4), "left has shape"),
        (6, torch.zeros(3, 4), r"conv has shape .* \(D, K\)"),
    ],
)
def test_shapes_are_checked(position, value, message):
    coefficients = make(2, 5, 4, 2, 2, 3, True, torch.float32)
    coefficients[position] = value
    with pytest.raises(ValueError, match=message):
        ops.diagonal_mean(*coefficients)


def test_other_errors():
    coefficients = make(2, 5, 4, 2, 2, 3, True, torch.float32)
    v, _ = vectors((2, 5, 4), torch.float32)
    with pytest.raises(ValueError, match="3 groups, which do not divide the 4 channels"):
        ops.diagonal_mean(*coefficients[:3], torch.zeros(2, 5, 3, 2), torch.zeros(2, 5, 3, 2))
    with pytest.raises(ValueError, match="v has shape"):
        ops.diagonal_scan(v[:, :4], *coefficients[:6])
    with pytest.raises(ValueError, match="w has shape"):
        ops.diagonal_vecmat(v[:, :, 0, None], *coefficients)
    with pytest.raises(TypeError, match=r"v is torch\.int64; accepted: float16"):
        ops.diagonal_scan(v.long(), *coefficients[:6])
    with pytest.raises(TypeError, match="A is a list"):
        ops.diagonal_scan(v, *coefficients[:2], [1.0], *coefficients[3:6])
    with pytest.raises(ValueError, match="different devices"):
        ops.diagonal_scan(v.to("meta"), *coefficients[:6])
    for start, stop in ((-1, 3), (3, 3), (0, 6)):
        with pytest.raises(ValueError, match="accepted: 0 <= start < stop <= L"):
            ops.diagonal_mean(*coefficients, start=start, stop=stop)
    with pytest.raises(IndexError, match=r"from 0 to 5; accepted: rows in \[0, 5\)"):
        ops.diagonal_rows(torch.tensor([0, 5]), *coefficients)
    with pytest.raises(TypeError, match=r"index is torch\.float32"):
        ops.diagonal_rows(torch.zeros(2, 1), *coefficients)
    with pytest.raises(ValueError, match="index has shape"):
        ops.diagonal_rows(torch.zeros(3, 1, dtype=torch.int64), *coefficients)


def test_the_kernels_guard_memory_themselves():
    """torch.ops can be called without the wrappers' checks."""
    coefficients = make(2, 5, 4, 2, 2, 3, True, torch.float32)
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.diagonal_mean(*coefficients, 0, 6)
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.diagonal_rows(torch.tensor([[5], [0]]), *coefficients)
    coefficients[1] = coefficients[1][:, :4]
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.diagonal_mean(*coefficients, 0, 5)


# ---- the extension --------------------------------------------------------------------------


def run_again(selection: str, file: str = __file__, **environment: str) -> None:
    """Run tests of a file in a fresh process, where kernels are chosen anew."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", file, "-k", selection],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa):
    assert platform.machine() != "x86_64" or ops.extension_loaded()
    run_again(
        "(test_matches_naive or test_extreme) and kernel or test_entries and f32",
        CAPTUM_SSM_ISA=isa,
    )


def test_forced_torch_forms():
    run_again(
        "test_matches_naive and kernel and f64 or test_gradients or test_opcheck or test_extreme",
        CAPTUM_SSM_PURE_TORCH="1",
    )


def test_missing_extension_warns_once():
    program = """
import sys, warnings
sys.modules["captum_ssm._C"] = None
import torch
from captum_ssm import ops
x = torch.ones(1, 3, 2)
b = torch.ones(1, 3, 1, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        y = ops.diagonal_scan(x, x, x, -torch.ones(2, 1), b, b)
assert not ops.extension_loaded()
assert y.isfinite().all()
[warning] = [w for w in caught if issubclass(w.category, ops.ExtensionWarning)]
assert "pip install --no-build-isolation" in str(warning.message)
assert warning.filename == "<string>", warning.filename
"""
    subprocess.run([sys.executable, "-c", program], check=True)
