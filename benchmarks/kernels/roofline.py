"""How close is each kernel to what this machine can do at all?

From first principles each operation has to read its arguments and write its result once, and to do
so many multiply-adds; the machine's bandwidth (copying 128 MiB) and rate of multiply-adds
(`torch.mm`, 1024 cubed) are measured by turns with each operation, on one thread. The roof is the
larger of the two times, `share` the roof over the time measured.

An exponential counts as 8, the multiplications and multiply-adds of the kernels' own polynomial. A
product with a state of N numbers counts N. A gradient's states are counted once more than the
scan's, where what it needs of them is computed again; not what checkpoints cost on top of that.

    python benchmarks/kernels/roofline.py --cpu-time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from _common import HEADS, arguments, layer, linear_attention
from _timing import keep, rounded, seconds

from captum_ssm import kernels

EXPONENTIAL = 8

# What an operation needs: its name, the call, the tensors it reads, multiply-adds.
Work = tuple[str, Callable[[], Any], tuple[Any, ...], float]


def limits() -> tuple[int, Callable[[], Any], int, Callable[[], Any]]:
    """Bytes and a copy that moves them; multiply-adds and a product that takes them."""
    x = torch.rand(2**25)
    y = torch.empty_like(x)
    a, b = torch.randn(2, 1024, 1024)
    out = torch.empty_like(a)
    return 8 * x.numel(), lambda: y.copy_(x), 1024**3, lambda: torch.mm(a, b, out=out)


def backward(family: str, v: torch.Tensor, c: Any) -> Callable[[], Any]:
    names = [name for name in vars(c) if name != "conv"]
    tensors = [v, *(getattr(c, name) for name in names)]
    op = getattr(torch.ops.captum_ssm, f"{family}_scan_backward")
    grad = torch.randn_like(v)
    wanted = [x is not None for x in tensors]
    return lambda: op(grad, *tensors, wanted)


def diagonal(length: int) -> Iterator[Work]:
    c = layer(length)
    # The steps are also the values' factor, one tensor; the gradients of both are written.
    given = (c.dt, c.B, c.C, c.A)
    v, w = torch.randn_like(c.dt), torch.rand(1, length)
    states = length * c.A.numel()
    scan = (EXPONENTIAL + 3) * states
    dense = replace(c, dt=c.dt / 100)
    yield "row", lambda: kernels.diagonal_rmatvec(w, c, mean=True), given, scan
    yield "matvec", lambda: kernels.diagonal_scan(v, c), (*given, v), scan
    yield "matrix, dense", lambda: kernels.diagonal_mean(dense), given, length * states / 2
    # The states again, and their gradients: of B, C, the exponents, the steps and the rates.
    work = (EXPONENTIAL + 3 + 7) * states
    yield "backward", backward("diagonal", v, c), (*given, v, v), work


def heads(length: int, heads: int, width: int, delta: bool = False, **kind: bool) -> Iterator[Work]:
    op = linear_attention(length, heads, width, delta=delta, **kind)
    c = kernels.LinearAttentionCoefficients(
        op.query, op.key, op.log_decay, op.erase, op.probe, op.bonus
    )
    given = (c.query, c.key, c.log_decay, c.probe)  # a delta rule erases what it writes
    v, w = torch.randn(1, length, heads, width), torch.rand(1, length, 1, 1)
    numbers = c.query.numel()  # of all keys
    decays = EXPONENTIAL * c.log_decay.numel()
    products = 2 + 2 * delta  # with a state, for each column and token
    row = decays + (products + 1) * numbers
    yield "row", lambda: kernels.linear_attention_rmatvec(w, c), given, row
    work = decays + products * numbers * width
    yield "matvec", lambda: kernels.linear_attention_scan(v, c), (*given, v), work
    work = length * numbers / 2 * (1 + 2 * delta)
    yield "matrix", lambda: kernels.linear_attention_mean(c), given, work
    products = 11 if delta else 5
    work = decays + products * numbers * width
    yield "backward", backward("linear_attention", v, c), (*given, v, v), work


def size(*tensors: Any) -> int:
    return sum(4 * x.numel() for x in tensors if x is not None)


def main() -> None:
    args = arguments(__doc__, "roofline")
    torch.set_num_threads(1)
    copied, copy, multiplied, product = limits()
    rows: list[dict[str, Any]] = []
    for kind in ("diagonal, 1536 channels of 16", *HEADS):
        for length in args.lengths or (1024, 2048):
            works = heads(length, **HEADS[kind]) if kind in HEADS else diagonal(length)
            for name, call, given, multiply_adds in works:
                result = call()
                moved = size(*given, *(result if isinstance(result, tuple) else (result,)))
                measured, copy_s, product_s = seconds(call, copy, product, repeats=args.repeats)
                by_memory = moved * copy_s / copied
                by_arithmetic = multiply_adds * product_s / multiplied
                roof = max(by_memory, by_arithmetic)
                row = {"kind": kind, "operation": name, "length": length}
                rows.append(
                    row
                    | {
                        "megabytes": moved / 1e6,
                        "gmultiply_adds": multiply_adds / 1e9,
                        "gb_per_s": copied / copy_s / 1e9,
                        "gmultiply_adds_per_s": multiplied / product_s / 1e9,
                        "bound": "memory" if by_memory > by_arithmetic else "arithmetic",
                        "roof_ms": 1e3 * roof,
                        "measured_ms": 1e3 * measured,
                        "share": roof / measured,
                    }
                )
                print(rounded(rows[-1]))
    keep(args, rows)


main()
