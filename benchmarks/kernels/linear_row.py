"""Does a row of a rollout cost linear time, and how does it compare with the matrix?

v^T E_d[alpha] of one layer of a 130m-sized Mamba by the backward scan, against the same through
the channel-mean matrix and through the PyTorch form of the scan.
"""

from __future__ import annotations

import torch
from _common import arguments, check, layer, mixer
from _timing import keep, rounded, seconds

from captum_ssm import kernels
from captum_ssm.kernels import diagonal


def main() -> None:
    args = arguments(__doc__, "linear_row")
    rows = []
    last = None
    for length in args.lengths or (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        plain = layer(length)
        w = torch.rand(1, length)
        row: dict[str, object] = {"length": length}

        def scan(p=plain, w=w):
            return kernels.diagonal_rmatvec(w, p, mean=True)

        if length <= 4096:
            whole = mixer(plain)
            check("matrix", w @ kernels.diagonal_mean(plain)[0], scan())
            check("PyTorch form", diagonal.diagonal_rmatvec_torch(w, plain, mean=True), scan())
            kernel, unified, matrix, form = seconds(
                scan,
                lambda w=w, p=whole: kernels.diagonal_rmatvec(w, p, mean=True),
                lambda w=w, p=plain: w @ kernels.diagonal_mean(p)[0],
                lambda w=w, p=plain: diagonal.diagonal_rmatvec_torch(w, p, mean=True),
                repeats=args.repeats,
            )
            row |= {
                "unified_over_kernel": unified / kernel,
                "matrix_over_kernel": matrix / kernel,
                "torch_form_over_kernel": form / kernel,
            }
        else:
            [kernel] = seconds(scan, repeats=args.repeats)
        row["kernel_ms"] = kernel * 1e3
        row["over_half_the_length"] = last and kernel / last
        last = kernel
        rows.append(row)
        print(rounded(row))
    keep(args, rows)


main()
