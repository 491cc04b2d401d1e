"""MambaLRP and MambaAttribution on long inputs: time and peak memory of a 130m-shaped Mamba.

Random weights in the shape of mamba-130m (width 768, 1536 channels, 16 states). Each method runs in
a process of its own. Transformers' own scan does not fit into memory at these lengths (18 GiB per
layer at 65,536 tokens), so that ours takes its place, as in `end_to_end.py --fast-scan`. The peak
is that of the whole process, with the model and PyTorch.

    python benchmarks/long_gradients.py --layers 24 --lengths 65536 --tolerance 1e-3

`--tolerance` is that of MambaAttribution's rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from _memory import in_a_process, status_mib
from _record import RESULTS, save
from end_to_end import fast_scan, model_of
from transformers.models.mamba import modeling_mamba

from captum_ssm import MambaAttribution, MambaLRP


def measured(method: str, layers: int, length: int, tolerance: float) -> dict[str, Any]:
    """The seconds and the peak resident GiB of this process, which runs one method once."""
    modeling_mamba.mamba_selective_scan = fast_scan
    model = model_of(layers).requires_grad_(False)
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    with torch.no_grad():
        model(ids)
    forward = time.perf_counter() - start
    forward_peak = status_mib("VmHWM") / 1024
    start, processor = time.perf_counter(), time.process_time()
    if method == "lrp":
        MambaLRP(model).attribute(ids, target=3)
    else:
        MambaAttribution(model).attribute(ids, target=3, tolerance=tolerance)
    return {
        "method": method,
        "length": length,
        "layers": layers,
        "tolerance": tolerance if method == "attribution" else None,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "peak_GiB": status_mib("VmHWM") / 1024,
        "forward_s": forward,
        "forward_peak_GiB": forward_peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 65536])
    parser.add_argument("--methods", nargs="+", default=["lrp", "attribution"])
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--one", action="store_true", help="in this process, print the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "long_gradients.json")
    args = parser.parse_args()
    if args.one:
        found = measured(args.methods[0], args.layers, args.lengths[0], args.tolerance)
        print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for length in args.lengths:
        for method in args.methods:
            shape = ("--layers", args.layers, "--lengths", length, "--tolerance", args.tolerance)
            rows.append(in_a_process(__file__, "--methods", method, *shape))
            print(json.dumps(rows[-1], indent=1), flush=True)
            save(args.output, "long_gradients", rows)


if __name__ == "__main__":
    main()
