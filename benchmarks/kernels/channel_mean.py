"""How close is the channel-mean matrix to this machine's matrix products, and how far from PyTorch?

One layer of a 130m-sized Mamba (1536 channels, 16 states). Useful work is L^2 D N flops: half
the square, two flops per term. The ceiling is torch.mm at 2048 cubed in the same run. With the
usual steps many states die within the sequence, and the kernel skips what has become zero; `dense`
is a layer of steps a hundred times smaller, in which every state lives to the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from _common import arguments, check, layer, mixer
from _opponents import published_loop, recursive_halving, row_recurrence
from _timing import keep, rounded, seconds

from captum_ssm import kernels
from captum_ssm.kernels.channel_mean import diagonal_mean_torch


def main() -> None:
    args = arguments(__doc__, "channel_mean")
    a, b = torch.randn(2, 2048, 2048)
    out = torch.empty_like(a)
    rows = []
    for length in args.lengths or (256, 512, 1024, 2048):
        plain = layer(length)
        whole = mixer(plain)
        dense = replace(plain, dt=plain.dt / 100)
        channels, states = plain.A.shape
        expected = kernels.diagonal_mean(plain)  # the first call of each side warms up
        error = check("recursive halving", recursive_halving(plain), expected)
        check("the PyTorch form", diagonal_mean_torch(plain), expected)
        check("the whole mixer", diagonal_mean_torch(whole), kernels.diagonal_mean(whole))
        check("dense", diagonal_mean_torch(dense), kernels.diagonal_mean(dense))

        kernel, dense_s, unified, mm, halving, form = seconds(
            lambda p=plain: kernels.diagonal_mean(p),
            lambda d=dense: kernels.diagonal_mean(d),
            lambda w=whole: kernels.diagonal_mean(w),
            lambda: torch.mm(a, b, out=out),
            lambda p=plain: recursive_halving(p),
            lambda p=plain: diagonal_mean_torch(p),
            repeats=args.repeats,
        )
        row: dict[str, object] = {
            "length": length,
            "kernel_ms": kernel * 1e3,
            "dense_ms": dense_s * 1e3,
            "dense_gflops": length**2 * channels * states / dense_s / 1e9,
            "mm_gflops": 2 * 2048**3 / mm / 1e9,
            "unified_over_kernel": unified / kernel,
            "halving_over_kernel": halving / kernel,
            "halving_over_dense": halving / dense_s,
            "torch_form_over_kernel": form / kernel,
            "difference": error,
        }
        row["dense_share_of_mm"] = row["dense_gflops"] / row["mm_gflops"]  # type: ignore[operator]
        if length <= 1024:
            check("row recurrence", row_recurrence(plain), expected)
            slow, again = seconds(
                lambda p=plain: row_recurrence(p),
                lambda p=plain: kernels.diagonal_mean(p),
                repeats=1,
            )
            row["row_recurrence_over_kernel"] = slow / again
        rows.append(row)
        print(rounded(row))
    # The triple loop is cubic in Python: a short sequence has to do.
    short = layer(64)
    check("published loop", published_loop(short), kernels.diagonal_mean(short))
    [loop] = seconds(lambda: published_loop(short), repeats=1)
    [kernel] = seconds(lambda: kernels.diagonal_mean(short), repeats=args.repeats)
    rows.append({"length": 64, "kernel_ms": kernel * 1e3, "loop_over_kernel": loop / kernel})
    print(rounded(rows[-1]))
    keep(args, rows)


main()
