"""What do the instruction sets gain over each other, and float64 over float32 lose?

Each runs in its own process, as kernels are chosen once. The lines printed are one channel-mean
matrix (L = 512) and one backward scan (L = 8192) of a 130m-sized layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch
from _common import arguments, layer, save, seconds

from captum_ssm import kernels

SETS = ("avx512", "avx2", "portable")


def measure(repeats: int) -> dict[str, float]:
    short, long = layer(512), layer(8192)
    w = torch.rand(1, 8192)
    double = replace(short, **{k: x.double() for k, x in vars(short).items() if x is not None})
    mean, scan, mean64 = seconds(
        lambda: kernels.diagonal_mean(short),
        lambda: kernels.diagonal_rmatvec(w, long, mean=True),
        lambda: kernels.diagonal_mean(double),
        repeats=repeats,
    )
    return {"mean_ms": mean * 1e3, "scan_ms": scan * 1e3, "mean_float64_ms": mean64 * 1e3}


def main() -> None:
    args = arguments(__doc__)
    if "CAPTUM_SSM_ISA" in os.environ:
        print(json.dumps(measure(args.repeats)))
        return
    rows = []
    for name in SETS:
        result = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**os.environ, "CAPTUM_SSM_ISA": name},
            capture_output=True,
            text=True,
            check=True,
        )
        row = {"set": name, **json.loads(result.stdout)}
        rows.append(row)
        print(
            f"{name:9}: matrix {row['mean_ms']:7.1f} ms, in float64 {row['mean_float64_ms']:7.1f}; "
            f"scan {row['scan_ms']:6.1f} ms"
        )
    save("instruction_sets", args, rows)


main()
