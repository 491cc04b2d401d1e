"""The operators of matrix-valued states against their naive forms, as test_ops.py does it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from test_ops import DEVICES, FORMS, KERNELS, assert_near, at, leaves, on_cuda, run_again
from torch import Tensor

from captum_ssm import ops

# batch, length, heads, states, columns
HEADS = [
    (1, 1, 1, 1, 1),
    (2, 2, 3, 5, 2),
    (1, 3, 2, 16, 40),
    (2, 31, 3, 7, 9),
    (1, 63, 2, 33, 1),
    (1, 65, 1, 4, 70),
    (2, 100, 3, 20, 17),
]
# decay per key dimension, delta rule, bonus
LINEAR_KINDS = list(itertools.product((False, True), repeat=3))
LINEAR = {
    "kernel": (ops.linear_scan, ops.linear_vecmat, ops.linear_rows, ops.linear_mean),
    "torch": (
        ops.linear_scan_torch,
        ops.linear_vecmat_torch,
        ops.linear_rows_torch,
        ops.linear_mean_torch,
    ),
}
LINEAR["cuda"] = tuple(map(on_cuda, LINEAR["kernel"]))


def make_linear(
    shape: tuple, kind: tuple[bool, bool, bool], dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(0)
    rand = functools.partial(torch.rand, generator=g, dtype=torch.float64)
    randn = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    per_key, delta, bonus = kind
    heads, states = shape[:3], shape[3]
    probe = torch.nn.functional.normalize(randn(*heads, states), dim=-1)
    write = probe * rand(*heads, 1)
    coefficients = [
        randn(*heads, states),
        write if delta else randn(*heads, states),
        -rand(*heads, states if per_key else 1),
        write if delta else None,
        probe if delta else None,
        randn(*heads) if bonus else None,
    ]
    return [None if x is None else x.to(dtype) for x in coefficients]


@functools.cache
def linear_case(
    shape: tuple, kind: tuple[bool, bool, bool], dtype: torch.dtype
) -> tuple[list[Tensor | None], Tensor]:
    """Coefficients, and the maps."""
    coefficients = make_linear(shape, kind, dtype)
    return coefficients, ops.naive_linear_matrix(*coefficients)


def linear_vectors(shape: tuple, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, row vectors shared by the heads, and rows in no order."""
    g = torch.Generator().manual_seed(1)
    v = torch.randn(*shape[:3], shape[4], generator=g, dtype=torch.float64).to(dtype)
    index = torch.randint(0, shape[1], (shape[0], shape[4]), generator=g)
    return v, v[:, :, :1].clone(), index


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("kind", LINEAR_KINDS, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_matches_naive(shape, kind, dtype, form):
    scan, vecmat, rows, mean = LINEAR[form]
    coefficients, matrix = linear_case(shape, kind, dtype)
    v, w, index = linear_vectors(shape, dtype)
    y = scan(v, *coefficients)
    assert y.dtype == dtype
    assert_near(y, torch.einsum("bhij,bjhp->bihp", matrix, v.double()))
    u = torch.einsum("bihp,bhij->bjhp", v.double(), matrix)
    assert_near(vecmat(v, *coefficients), u)
    u = torch.einsum("bip,bhij->bjhp", w[:, :, 0].double(), matrix)
    assert_near(vecmat(w, *coefficients), u)
    chosen = torch.stack([matrix[b][:, index[b]] for b in range(shape[0])])
    assert_near(rows(index, *coefficients), chosen)
    assert_near(mean(*coefficients), matrix.mean(1))
    start, stop = shape[1] // 3, shape[1] // 3 + 1
    part = mean(*coefficients, start=start, stop=stop)
    assert_near(part, matrix.mean(1)[:, start:stop])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("kind", LINEAR_KINDS, ids=str)
def test_extreme_decays(kind, columns, dtype, form):
    """Decays that underflow, that stay at one, and resets, which leave what follows exact."""
    scan, vecmat, rows, mean = LINEAR[form]
    shape = (1, 66, 3, 6, columns)
    coefficients = make_linear(shape, kind, dtype)
    decay = coefficients[2]
    decay[:, :, 0] = 0
    decay[:, ::2, 1] = -1e4
    decay[:, ::7, 2] = -torch.inf
    decay[:, 1::7, 2] = -1e-30
    v, _, index = linear_vectors(shape, dtype)
    # The PyTorch form subtracts sums of log decays: an eps of 1e4 times a chunk's resets.
    tolerance = 1e-10 if form == "torch" and dtype == torch.float64 else None
    for h in range(3):  # each by its own largest entry
        one = [None if x is None else x[:, :, h : h + 1] for x in coefficients]
        x = v[:, :, h : h + 1]
        assert_near(scan(x, *one), ops.naive_linear_scan(x, *one), tolerance)
        assert_near(vecmat(x, *one), ops.naive_linear_vecmat(x, *one), tolerance)
        assert_near(rows(index, *one), ops.naive_linear_rows(index, *one), tolerance)
        assert_near(mean(*one), ops.naive_linear_mean(*one), tolerance)


@pytest.mark.parametrize("columns", [1, 24])
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("form", KERNELS)
def test_a_slow_decay_does_not_drift(form, per_key, columns):
    """A rounded decay, repeated over thousands of steps, would; and a decay of one stays one."""
    scan, vecmat, rows, mean = LINEAR[form]
    shape = (1, 4096, 1, 4, columns)
    coefficients = make_linear(shape, (per_key, False, False), torch.float32)
    q, k, decay, *_ = coefficients
    v, _, _ = linear_vectors(shape, torch.float32)
    for step in (8e-4, 0.0):
        decay.fill_(-step)
        late = torch.arange(3500, 4096, 35)
        gap = late[:, None] - torch.arange(4096)
        matrix = (q[0, late, 0].double() @ k[0, :, 0].double().mT) * torch.exp(
            decay[0, 0, 0, 0].double() * gap
        )
        matrix *= gap >= 0
        assert_near(scan(v, *coefficients)[0, late, 0], matrix @ v[0, :, 0].double(), 5e-6)
        assert_near(rows(late, *coefficients)[0, 0], matrix)
        assert_near(mean(*coefficients, start=3500)[0, ::35], matrix)
        w = torch.zeros_like(v)
        w[0, late, 0] = v[0, late, 0]
        u = vecmat(w, *coefficients)
        assert_near(u[0, :, 0], matrix.mT @ v[0, late, 0].double(), 5e-6)


def test_coefficients_may_share_memory():
    """Heads that share queries and keys, and sliced heads, without a copy."""
    coefficients = make_linear((2, 40, 3, 6, 5), (True, True, False), torch.float32)
    shared = [None if x is None else x[:, :, :1].expand(-1, -1, 3, -1) for x in coefficients[:5]]
    v, _, index = linear_vectors((2, 40, 3, 6, 5), torch.float32)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    copied = [None if x is None else x.contiguous() for x in shared]
    assert torch.equal(ops.linear_scan(v, *shared), ops.linear_scan(v.contiguous(), *copied))
    assert torch.equal(ops.linear_rows(index, *shared), ops.linear_rows(index, *copied))
    last = [None if x is None else x[:, :, 2:] for x in coefficients]
    assert torch.equal(ops.linear_rows(index, *last), ops.linear_rows(index, *coefficients)[:, 2:])
    across = [None if x is None else x.mT.contiguous().mT for x in coefficients]
    assert torch.equal(ops.linear_scan(v, *across), ops.linear_scan(v, *coefficients))


@pytest.mark.parametrize("columns", [1, 3, 70])
@pytest.mark.parametrize("kind", LINEAR_KINDS, ids=str)
def test_number_of_threads_does_not_matter(kind, columns):
    """Few heads and a long sequence: columns or chunks of time are divided."""
    shape = (1, 3000, 2, 5, columns)
    coefficients = make_linear(shape, kind)
    coefficients[2] *= 1e-2
    v, w, index = linear_vectors(shape, torch.float64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 7):
            torch.set_num_threads(count)
            results.append(
                (
                    ops.linear_scan(v, *coefficients),
                    ops.linear_vecmat(w, *coefficients),
                    ops.linear_rows(index, *coefficients),
                    ops.linear_mean(*coefficients, start=1000, stop=1500),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


def test_rows_behind_the_last_one_asked_for_are_zero():
    coefficients = make_linear((1, 100, 2, 6, 1), (False, True, False))
    for columns in (1, 40):
        w = torch.zeros(1, 100, 1, columns, dtype=torch.float64)
        w[:, 50] = 1
        u = ops.linear_vecmat(w, *coefficients)
        assert bool((u[:, 51:] == 0).all())
        assert_near(u, ops.naive_linear_vecmat(w, *coefficients))
        assert bool((ops.linear_vecmat(0 * w, *coefficients) == 0).all())


def test_no_sequences():
    empty, decay = torch.zeros(0, 5, 2, 3), torch.zeros(0, 5, 2, 1)
    for mean in (ops.linear_mean, ops.linear_mean_torch):
        assert mean(empty, empty, decay).shape == (0, 5, 5)


@pytest.mark.parametrize("kind", [(False, False, True), (True, True, False)], ids=str)
def test_gradients(kind):
    shape = (2, 7, 2, 3, 2)
    coefficients = make_linear(shape, kind)
    v, w, index = linear_vectors(shape, torch.float64)
    v, w = v.requires_grad_(), w.requires_grad_()
    check = functools.partial(torch.autograd.gradcheck, nondet_tol=1e-12)
    assert check(lambda x: ops.linear_scan(x, *coefficients), v)
    assert check(ops.linear_scan, (v, *leaves(coefficients)))
    for x in (v, w):
        assert check(lambda x: ops.linear_vecmat(x, *coefficients), x)
        assert check(ops.linear_vecmat, (x, *leaves(coefficients)))
    assert check(functools.partial(ops.linear_rows, index), leaves(coefficients))
    assert check(functools.partial(ops.linear_mean, start=2, stop=6), leaves(coefficients))
    assert torch.autograd.gradgradcheck(
        lambda x: ops.linear_vecmat(x, *coefficients).square(), w, nondet_tol=1e-12
    )


@pytest.mark.parametrize("name", ["linear_scan", "linear_vecmat", "linear_rows", "linear_mean"])
@pytest.mark.parametrize("kind", [(False, False, False), (True, True, True)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(kind, name, device):
    shape = (2, 20, 3, 5, 9)
    coefficients = make_linear(shape, kind, torch.float32)
    v, w, index = linear_vectors(shape, torch.float32)
    first = {"linear_scan": v, "linear_vecmat": w}.get(name, index)
    if first.is_floating_point():
        first.requires_grad_()
    args = (*coefficients, 3, 9) if name == "linear_mean" else (first, *coefficients)
    torch.library.opcheck(getattr(torch.ops.captum_ssm, name).default, at(device, args))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiles_as_one_graph():
    shape = (1, 20, 3, 5, 9)
    coefficients = make_linear(shape, (True, True, False), torch.float32)
    v, w, index = linear_vectors(shape, torch.float32)
    v, w = v.requires_grad_(), w.requires_grad_()

    def everything(v: Tensor, w: Tensor) -> Tensor:
        y = ops.linear_scan(v * 2, *coefficients)
        u = ops.linear_vecmat(w.mT.contiguous().mT, *coefficients)
        rows = ops.linear_rows(index, *coefficients)
        return (y * u).sum() + (rows @ ops.linear_mean(*coefficients).mT).sum()

    expected = everything(v, w)
    expected_grads = torch.autograd.grad(expected, (v, w))
    actual = torch.compile(everything, fullgraph=True)(v, w)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad(actual, (v, w)), expected_grads, strict=True):
        torch.testing.assert_close(x, y)


def test_half_precision_accumulates_in_float32():
    coefficients = make_linear((1, 40, 2, 6, 9), (True, True, False), torch.bfloat16)
    single = [None if x is None else x.float() for x in coefficients]
    v, _, _ = linear_vectors((1, 40, 2, 6, 9), torch.bfloat16)
    y = ops.linear_scan(v, *coefficients)
    assert y.dtype == torch.float32
    assert torch.equal(y, ops.linear_scan(v.float(), *single))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 5, 4), r"query has shape \(2, 5, 4\); accepted: \(B, L, H, N\)"),
        (1, torch.zeros(2, 5, 3, 2), "key has shape .* that of query"),
        (2, torch.zeros(2, 5, 4), r"log_decay has shape .* \(2, 5, 4, 1\)"),
        (3, torch.zeros(2, 5, 4, 1), "erase has shape .* that of query"),
        (3, None, "erase and probe go together"),
        (5, torch.zeros(2, 5), r"bonus has shape .* \(2, 5, 4\)"),
    ],
)
def test_shapes_are_checked(position, value, message):
    coefficients = make_linear((2, 5, 4, 3, 2), (False, True, True), torch.float32)
    coefficients[position] = value
    with pytest.raises(ValueError, match=message):
        ops.linear_rows(torch.zeros(2, 1, dtype=torch.int64), *coefficients)


def test_other_errors():
    coefficients = make_linear((2, 5, 4, 3, 2), (False, True, True), torch.float32)
    for apply in (ops.linear_scan, ops.linear_vecmat):
        with pytest.raises(ValueError, match=r"has shape \(2, 5, 2, 6\); accepted: \(B, L, H"):
            apply(torch.zeros(2, 5, 2, 6), *coefficients)
    with pytest.raises(IndexError, match=r"from 0 to 5; accepted: rows in \[0, 5\)"):
        ops.linear_rows(torch.tensor([0, 5]), *coefficients)
    for start, stop in ((-1, 3), (3, 3), (0, 6)):
        with pytest.raises(ValueError, match="accepted: 0 <= start < stop <= L"):
            ops.linear_mean(*coefficients, start=start, stop=stop)
    # torch.ops can be called without the wrappers' checks: the kernels guard memory themselves.
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.linear_rows(torch.tensor([[5], [0]]), *coefficients)
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.linear_scan(torch.zeros(2, 4, 4, 2), *coefficients)
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.linear_mean(*coefficients, 0, 6)
    coefficients[1] = coefficients[1][..., :2]
    with pytest.raises(RuntimeError):
        torch.ops.captum_ssm.linear_scan(torch.zeros(2, 5, 4, 2), *coefficients)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa):
    run_again("(matches_naive or extreme) and kernel", __file__, CAPTUM_SSM_ISA=isa)


def test_forced_torch_forms():
    run_again(
        "matches_naive and kernel and f64 or gradients or opcheck",
        __file__,
        CAPTUM_SSM_PURE_TORCH="1",
    )
