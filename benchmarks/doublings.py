"""How time and memory grow with the length, with and without the workspace of a call.

Random weights in the shape of mamba-130m (width 768, 1536 channels, 16 states), two layers. Each
length doubles the one before. The times of a method with the workspace
(`captum_ssm/utils/allocator.py`) and without it are taken by turns, in one process per method and
length and as a first call would find it: glibc has its defaults, and gives back what it kept of the
call before. Transformers' own scan does not fit into memory at these lengths, so that ours takes
its place, as in `end_to_end.py --fast-scan`.

    python benchmarks/doublings.py

Both sides have to return the same numbers, bit for bit.
"""

from __future__ import annotations

import ctypes
import json
import resource
from pathlib import Path
from typing import Any

import _timing
import torch
from _memory import in_a_process, status_mib
from end_to_end import fast_scan, model_of
from transformers.models.mamba import modeling_mamba

from captum_ssm import MambaAttribution, MambaLRP, MambaRollout
from captum_ssm.utils import allocator as _workspace

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rollout": (MambaRollout, {}),
    "lrp": (MambaLRP, {"target": 3}),
    "attribution": (MambaAttribution, {"target": 3, "tolerance": 1e-3}),
}
SIDES = ("without", "with")


def measured(name: str, layers: int, length: int, repeats: int) -> dict[str, Any]:
    """The least time of some calls, on each side, their page faults and peak memory."""
    modeling_mamba.mamba_selective_scan = fast_scan
    cls, options = METHODS[name]
    method = cls(model_of(layers).requires_grad_(False))
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    method.attribute(ids[:, :64], **options)
    allocator = {"without": None, "with": _workspace._allocator()}
    if allocator["with"] is None:
        raise SystemExit("the allocator is not built here")
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    found = {}
    for _ in range(repeats):
        for side in SIDES:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            _workspace._allocator = lambda side=side: allocator[side]
            before, start = resource.getrusage(resource.RUSAGE_SELF), _timing.clock()
            found[side] = method.attribute(ids, **options)
            seconds, after = _timing.clock() - start, resource.getrusage(resource.RUSAGE_SELF)
            runs[side].append(
                {
                    "s": seconds,
                    "system_s": after.ru_stime - before.ru_stime,
                    "page_faults": after.ru_minflt - before.ru_minflt,
                    "peak_MiB": status_mib("VmHWM"),
                }
            )
    if not torch.equal(found["with"], found["without"]):
        raise SystemExit(f"{name}: the workspace changes the result")
    row: dict[str, Any] = {"method": name, "length": length, "layers": layers}
    for side in SIDES:
        best = min(runs[side], key=lambda run: run["s"])
        row |= {f"{side}_{key}": value for key, value in best.items()}
    return row


def main() -> None:
    parser = _timing.options(__doc__, "doublings", repeats=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(12, 17)])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--one", action="store_true", help="in this process, print the result")
    args = _timing.parsed(parser)
    if args.one:
        length = args.lengths[0]
        repeats = args.repeats if length <= 1 << 14 else 1
        print(json.dumps(measured(args.methods[0], args.layers, length, repeats)))
        return
    rows: list[dict[str, Any]] = []
    for method in args.methods:
        before: dict[str, Any] = {}
        for length in args.lengths:
            shape = ("--layers", args.layers, "--lengths", length, "--repeats", args.repeats)
            clock = ["--cpu-time"] * args.cpu_time
            row = in_a_process(__file__, "--methods", method, *shape, *clock)
            if before:
                for side in SIDES:
                    row[f"{side}_doubling"] = row[f"{side}_s"] / before[f"{side}_s"]
            before = row
            rows.append(row)
            print(_timing.rounded(row), flush=True)
            _timing.keep(args, rows)


if __name__ == "__main__":
    main()
