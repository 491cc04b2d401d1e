"""MambaLRP of long texts in segments, on a 130m-shaped Mamba: memory, time, and equality.

Random weights in the shape of mamba-130m (width 768, 24 layers). Before anything is measured, the
same script explains `--equal` tokens as a whole and in segments; in float64 both have to agree to
1e-5, with this library's scan in the model, as that of transformers computes in float32. (In
float32 relevance through 24 random layers is rounded by about 3e-4, in segments or not:
`--rounding` prints how far each is from float64.) Then each of `--lengths` runs in a process of its
own. The peak is that of the process while it explains, minus what it held with the model loaded.

    OMP_NUM_THREADS=1 nice -n 10 python benchmarks/segments.py --lengths 65536 262144 \
        --out benchmarks/results/segments.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _memory import in_a_process, status_mib
from _record import save
from end_to_end import fast_scan
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba import modeling_mamba

from captum_ssm.attr import MambaLRP

LIMIT_MIB = 4096  # in addition to the model
EQUAL = 1e-5


def model_of(layers: int) -> MambaForCausalLM:
    """A model of mamba-130m's shape with random weights."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=768, num_hidden_layers=layers, vocab_size=50280)
    return MambaForCausalLM(config).eval()


def text_of(tokens: int) -> torch.Tensor:
    """Random ids, ``(1, tokens)``."""
    return torch.randint(0, 50280, (1, tokens), generator=torch.Generator().manual_seed(1))


def measured(layers: int, tokens: int, segment: int) -> dict[str, Any]:
    """Time and peak of one explanation, in this process."""
    model, ids = model_of(layers), text_of(tokens)
    before, start, used = status_mib("VmRSS"), time.perf_counter(), time.process_time()
    relevance, delta = MambaLRP(model).attribute(
        ids, target=7, segment=segment or None, return_convergence_delta=True, show_progress=False
    )
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "segment": segment or None,
        "seconds": round(seconds, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "extra_peak_mib": round(status_mib("VmHWM") - before),
        "sum": float(relevance.double().sum()),
        "delta": float(delta),
    }


def differences(layers: int, tokens: int, segment: int, rounding: bool) -> dict[str, float]:
    """How far relevance in segments is from that of the whole, relative to its norm.

    In float64; with ``rounding`` also how far both are from it in float32.
    """
    model, ids = model_of(layers), text_of(tokens)

    def both() -> list[torch.Tensor]:
        method = MambaLRP(model)
        return [method.attribute(ids, target=7, segment=one).double() for one in (None, segment)]

    narrow = both() if rounding else []
    model = model.double()
    # The scan of transformers computes parts of it in float32.
    modeling_mamba.mamba_selective_scan = fast_scan
    whole, parts = both()
    names = ("float32_whole_from_float64", "float32_segments_from_float64")
    found = {"segments_from_whole": float((whole - parts).norm() / whole.norm())}
    return found | {
        name: float((x - whole).norm() / whole.norm())
        for name, x in zip(names, narrow, strict=False)
    }


def main() -> None:
    """Measure each length, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--segment", type=int, default=1024, help="0 is the text as a whole")
    parser.add_argument("--equal", type=int, default=8192, help="tokens of the comparison; 0: none")
    parser.add_argument("--rounding", action="store_true", help="compare float32 with float64")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
        return
    details: dict[str, Any] = {"layers": args.layers}
    rows = []
    if args.equal:
        details["equal_at"] = args.equal
        found = differences(args.layers, args.equal, args.segment, args.rounding)
        details |= found
        print(f"{args.equal} tokens: {found}", flush=True)
        if not found["segments_from_whole"] <= EQUAL:
            sys.exit(f"segments are not equal to the whole: expected at most {EQUAL:.0e}")
    for tokens in args.lengths:
        row = in_a_process(__file__, args.layers, tokens, args.segment)
        rows.append(row)
        print(row, flush=True)
        if row["extra_peak_mib"] > LIMIT_MIB:
            print(f"more than {LIMIT_MIB} MiB")
        if args.out:
            save(args.out, "segments", rows, **details)


if __name__ == "__main__":
    main()
