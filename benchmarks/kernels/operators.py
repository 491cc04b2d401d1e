"""Time of a row, a matrix and a product with values (matvec), for each kind of operator.

Layers of the shapes people run: Mamba's diagonal recurrence, Mamba-2's scalar decay per head, a
decay per key dimension (GLA), the delta rule with either decay, several of its steps per token,
Mamba-3's trapezoidal rule, a padded batch that is packed; short convolutions, softmax attention,
and maps that are stored as they were measured, which are PyTorch alone. Each operator is first
checked against its naive form at a short length; then, in one run, a row of the channel mean in
linear time against the same row through the matrix, and row, matvec and matrix by the kernels
against the chunked PyTorch forms and, for matvec, the recurrence run token by token in PyTorch.

    python benchmarks/kernels/operators.py --cpu-time
    python benchmarks/kernels/operators.py --device cuda --output operators_gpu.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _common import HEADS, arguments, check, layer, linear_attention
from _timing import keep, rounded, seconds
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import channel_mean
from captum_ssm.kernels import diagonal as diagonal_kernels
from captum_ssm.kernels import linear_attention as linear_attention_kernels
from captum_ssm.operators import (
    DiagonalOperator,
    LinearAttentionOperator,
    PackedOperator,
    ScaledOperator,
    SkipOperator,
    SoftmaxOperator,
    SubstepOperator,
    SumOperator,
    TokenOperator,
    WeightsOperator,
)
from captum_ssm.utils.nested import map_tensors


def diagonal(length: int, channels: int = 1536) -> DiagonalOperator:
    return DiagonalOperator(**vars(layer(length, channels)))


def delta_product(length: int, heads: int, steps: int = 2) -> SubstepOperator:
    inner = linear_attention(steps * length, heads, 128, delta=True)
    return SubstepOperator(inner, steps)


def naive_delta_product(op: SubstepOperator) -> Tensor:
    rows = kernels.naive_linear_attention_matrix(op.inner)[:, :, op.steps - 1 :: op.steps]
    return torch.cat([rows[..., step :: op.steps] for step in range(op.steps)], 1)


def trapezoid(length: int, heads: int) -> LinearAttentionOperator:
    """Mamba-3: a token reads of itself only the half of what it writes that comes at once."""
    g = torch.Generator().manual_seed(0)
    bonus = torch.randn(1, length, heads, generator=g)
    return replace(linear_attention(length, heads, 64), bonus=bonus)


def trapezoid_of_rank(length: int, heads: int, rank: int = 4) -> SumOperator:
    """Mamba-3 with several inputs and outputs per head: each output reads each input's values."""
    part = trapezoid(length, heads * rank)
    weights = torch.rand(rank, 1, 1, part.channels, generator=torch.Generator().manual_seed(1))
    return SumOperator(tuple(ScaledOperator(part, right=w) for w in weights))


def naive_trapezoid_of_rank(op: SumOperator) -> Tensor:
    total = torch.zeros(())
    for part in op.parts:
        assert isinstance(part, ScaledOperator)
        assert isinstance(part.inner, LinearAttentionOperator)
        assert part.right is not None
        maps = kernels.naive_linear_attention_matrix(part.inner)
        total = total + maps.repeat_interleave(64, 1) * part.right.mT[:, :, None]
    return total


def placed(length: int, heads: int) -> PackedOperator:
    """Two examples, one of which is padded on the left to twice its length."""
    half = length // 2
    parts = tuple(linear_attention(size, heads, 64) for size in (length, length - half))
    at = (torch.arange(length), torch.arange(half, length))
    return PackedOperator(parts, (0, 1), at, (2, length))


def naive_placed(op: PackedOperator) -> Tensor:
    maps = torch.zeros(2, op.maps, op.length, op.length, dtype=torch.float64)
    for part, row, at in zip(op.parts, op.examples, op.positions, strict=True):
        assert isinstance(part, LinearAttentionOperator)
        maps[row, :, at[:, None], at] = kernels.naive_linear_attention_matrix(part)[0]
    return maps


def short_convolution(length: int, channels: int) -> TokenOperator:
    """LFM2's gated convolution, with its gates."""
    gate, written, taps = parts_of_short_convolution(length, channels)
    return SkipOperator(gate).convolved(taps).scaled(None, written)


def parts_of_short_convolution(length: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    gate, written = torch.rand(2, 1, length, channels, generator=g)
    return gate, written, torch.randn(channels, 3, generator=g)


def naive_short_convolution(op: TokenOperator) -> Tensor:
    gate, written, taps = parts_of_short_convolution(op.length, op.channels)
    band = torch.zeros(op.channels, op.length, op.length)
    for lag, tap in enumerate(taps.flip(-1).mT):
        band += tap[:, None, None] * torch.ones(op.length - lag).diag(-lag)
    return gate.mT[..., None] * band * written.mT[:, :, None]


def weights(length: int, heads: int) -> WeightsOperator:
    g = torch.Generator().manual_seed(0)
    return WeightsOperator(torch.rand(1, heads, length, length, generator=g).tril(), width=64)


def softmax(length: int, heads: int, state: int) -> SoftmaxOperator:
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, heads, length, state, generator=g)
    return SoftmaxOperator(query, key, state**-0.5, state)


def naive_softmax(op: SoftmaxOperator) -> Tensor:
    scores = (op.query.double() @ op.key.double().mT) * op.scale
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1)


# By name: what makes it, its naive form, the sizes, and those at which it is checked.
Sizes = dict[str, Any]
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], Sizes, Sizes]] = {
    "diagonal, 1536 channels of 16": (diagonal, kernels.naive_diagonal_matrix, {}, {"channels": 32})
}
for _name, _sizes in HEADS.items():
    KINDS[_name] = linear_attention, kernels.naive_linear_attention_matrix, _sizes, {"heads": 2}
_delta = {"heads": 16, "width": 128, "per_key": True, "delta": True}
KINDS |= {
    "delta rule with a decay per key, 16 heads of 128, state 128": (
        linear_attention, kernels.naive_linear_attention_matrix, _delta, {"heads": 2},
    ),
    "delta product of 2 steps, 8 heads of 128, state 128": (
        delta_product, naive_delta_product, {"heads": 8}, {"heads": 1},
    ),
    "trapezoid, 24 heads of 64, state 128": (
        trapezoid, kernels.naive_linear_attention_matrix, {"heads": 24}, {"heads": 2},
    ),
    "trapezoid of rank 4, 4 heads of 64, state 128": (
        trapezoid_of_rank, naive_trapezoid_of_rank, {"heads": 4}, {"heads": 1},
    ),
    "decay per head of a padded batch, 24 heads of 64, state 128": (
        placed, naive_placed, {"heads": 24}, {"heads": 2},
    ),
    "short convolution of 3 taps, 2048 channels": (
        short_convolution, naive_short_convolution, {"channels": 2048}, {"channels": 8},
    ),
    "stored maps, 12 heads of 64": (weights, lambda op: op.weights, {"heads": 12}, {"heads": 2}),
    "softmax, 12 heads of 64": (
        softmax, naive_softmax, {"heads": 12, "state": 64}, {"heads": 2},
    ),
}  # fmt: skip


@contextlib.contextmanager
def torch_forms() -> Iterator[None]:
    """Operators use the PyTorch forms, as they do where the extension is missing."""
    forms = vars(channel_mean) | vars(diagonal_kernels) | vars(linear_attention_kernels)
    compiled = {name: f for name, f in vars(kernels).items() if f"{name}_torch" in forms}
    for name in compiled:
        setattr(kernels, name, forms[f"{name}_torch"])
    try:
        yield
    finally:
        for name, kernel in compiled.items():
            setattr(kernels, name, kernel)


def in_torch(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch_forms():
            return function()

    return call


def token_by_token(op: TokenOperator, v: Tensor) -> Tensor:
    """The recurrence as it is written down, one token at a time."""
    if isinstance(op, DiagonalOperator):
        state = v.new_zeros(*op.dt.shape[::2], op.A.shape[1])
        rows = []
        for t in range(op.length):
            write = (op.right[:, t] * v[:, t])[..., None] * op.B[:, t]
            state = torch.exp(op.dt[:, t, :, None] * op.A) * state + write
            rows.append((state * op.C[:, t]).sum(-1))
        return torch.stack(rows, 1)
    if isinstance(op, SubstepOperator):
        found = []
        for step, part in enumerate(v.chunk(op.steps, -1)):
            spread = v.new_zeros(op.batch, op.inner.length, op.inner.channels)
            spread[:, step :: op.steps] = part
            found.append(token_by_token(op.inner, spread)[:, op.steps - 1 :: op.steps])
        return torch.cat(found, -1)
    if isinstance(op, PackedOperator):
        out = torch.zeros_like(v)
        for part, row, at in zip(op.parts, op.examples, op.positions, strict=True):
            out[row, at] = token_by_token(part, v[row : row + 1, at])[0]
        return out
    if isinstance(op, SumOperator):
        return torch.stack([token_by_token(part, v) for part in op.parts]).sum(0)
    if isinstance(op, ScaledOperator):
        assert op.right is not None
        return token_by_token(op.inner, v * op.right)
    assert isinstance(op, LinearAttentionOperator)
    x = v.unflatten(-1, (op.maps, op.width))
    state = v.new_zeros(op.batch, op.maps, op.query.shape[-1], op.width)
    rows = []
    for t in range(op.length):
        before = state
        state = op.log_decay[:, t].exp()[..., None] * state
        if op.erase is not None and op.probe is not None:
            found = torch.einsum("bhn,bhnp->bhp", op.probe[:, t], state)
            state = state - op.erase[:, t, :, :, None] * found[:, :, None]
        state = state + op.key[:, t, :, :, None] * x[:, t, :, None]
        read = state if op.bonus is None else before
        row = torch.einsum("bhn,bhnp->bhp", op.query[:, t], read)
        rows.append(row if op.bonus is None else row + op.bonus[:, t, :, None] * x[:, t])
    return torch.stack(rows, 1).flatten(2)


def has_kernels(op: TokenOperator) -> bool:
    """Whether there is a recurrence in an operator, which the kernels compute."""
    parts = getattr(op, "parts", (getattr(op, "inner", None),))
    if isinstance(op, (DiagonalOperator, LinearAttentionOperator)):
        return True
    return any(has_kernels(part) for part in parts if part is not None)


def measured(op: TokenOperator, name: str, repeats: int, device: str) -> dict[str, float]:
    """Times of one operator, and relative to them those of the forms in PyTorch."""
    query = torch.zeros(op.batch, op.length, device=device)
    query[:, -1] = 1.0
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(op.batch, op.length, op.channels, generator=generator).to(device)
    calls: dict[str, Callable[[], Tensor]] = {
        "row": lambda: op.rmatvec(query, "mean"),
        "matrix": lambda: op.matrix("mean"),
        "matvec": lambda: op.matvec(v),
    }
    row, matrix = seconds(calls["row"], calls["matrix"], repeats=repeats)
    (matvec,) = seconds(calls["matvec"], repeats=repeats)
    found = {"row_ms": 1e3 * row, "matrix_ms": 1e3 * matrix, "matvec_ms": 1e3 * matvec}
    found["matrix_over_row"] = matrix / row
    if not has_kernels(op):
        return found
    for what, kernel in calls.items():
        check(f"{name}, {what}", kernel(), in_torch(kernel)(), 1e-5)
        others = [in_torch(kernel)]
        if what == "matvec":
            others.append(lambda: token_by_token(op, v))
            check(name, kernel(), others[1](), 1e-4)
        times = seconds(kernel, *others, repeats=2 if what == "matrix" else repeats)
        found[f"torch_{what}_over_{what}"] = times[1] / times[0]
        if what == "matvec":
            found |= {"matvec_ms": 1e3 * times[0], "loop_over_matvec": times[2] / times[0]}
    return found


def main() -> None:
    args = arguments(__doc__, "operators")
    there = partial(map_tensors, lambda x: x.to(args.device))
    rows = []
    for name, (make, naive, sizes, small) in KINDS.items():
        tiny = make(70, **{**sizes, **small})
        check(name, there(tiny).matrix(), naive(tiny), 1e-5)
        for length in args.lengths or (1024, 2048):
            op = there(make(length, **sizes))
            found = measured(op, name, args.repeats, args.device)
            rows.append({"kind": name, "length": length, **found})
            print(rounded(rows[-1]))
    keep(args, rows)


if __name__ == "__main__":
    main()
