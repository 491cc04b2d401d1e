"""Time and peak memory of each method, of a model in memory and offloaded to disk.

Eight layers of random weights in float32: Mamba, 26 MB per layer, and Jamba, which has an MLP in
each layer and attention in one of four. They are offloaded by accelerate's `disk_offload`. Each
side runs in a process of its own. The peak is what the resident set grows by over that of a process
without the model, pages of the weights' files included; times are the processor's, with the files
in the page cache. The script checks that both sides give the same relevance.

    python benchmarks/offloaded.py      # two minutes
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from _memory import in_a_process, status_mib
from _record import RESULTS, save

import captum_ssm.attr

LAYERS = 8
SIDES = ("in memory", "offloaded")


def mamba() -> Any:
    """Blocks of a mixer and a norm."""
    config = transformers.MambaConfig(
        vocab_size=1000, hidden_size=1024, num_hidden_layers=LAYERS, use_cache=False
    )
    return transformers.MambaForCausalLM(config)


def jamba() -> Any:
    """Blocks of a mixer or attention, and an MLP."""
    config = transformers.JambaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=1,
        mamba_dt_rank=64,
        use_mamba_kernels=False,
        use_cache=False,
    )
    return transformers.JambaForCausalLM(config)


MODELS = {"mamba": mamba, "jamba": jamba}


def measured(kind: str, side: str, length: int) -> list[dict[str, Any]]:
    """By method, in this process: the peak, the processor's seconds and the relevance."""
    warnings.simplefilter("ignore")
    methods = captum_ssm.attr.methods()
    ids = torch.randint(1, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    small = transformers.MambaConfig(vocab_size=1000, hidden_size=16, num_hidden_layers=1)
    tiny = transformers.MambaForCausalLM(small).eval()
    for method in methods.values():
        method(tiny).attribute(ids[:, :8], target=3)  # loads what is loaded once
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    without = status_mib("VmRSS")
    torch.manual_seed(0)
    model = MODELS[kind]().eval().requires_grad_(False)
    block = sum(p.nbytes for p in model.base_model.layers[0].parameters())
    weights = sum(p.nbytes for p in model.parameters())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if side == "offloaded":
            # As loaded, where weights require gradients.
            accelerate.disk_offload(model.requires_grad_(True), folder, execution_device="cpu")
        for name in ("forward", *methods):
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
            start = time.process_time()
            if name == "forward":
                with torch.no_grad():
                    found = model(ids).logits[0, -1]
            else:
                found = methods[name](model).attribute(ids, target=3)[0]
            rows.append(
                {
                    "model": kind,
                    "method": name,
                    "block_MiB": block / 2**20,
                    "weights_MiB": weights / 2**20,
                    "seconds": time.process_time() - start,
                    "peak_MiB": status_mib("VmHWM") - without,
                    "found": found.tolist(),
                }
            )
    return rows


def joined(here: dict[str, Any], away: dict[str, Any]) -> dict[str, Any]:
    """Both sides of one method, after a check that they agree."""
    found, expected = (torch.tensor(row["found"]) for row in (away, here))
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 1e-5:
        raise SystemExit(f"{here['model']}, {here['method']}: the sides differ by {error:.1e}.")
    row = {key: here[key] for key in ("model", "method", "block_MiB", "weights_MiB")}
    for side, one in zip(SIDES, (here, away), strict=True):
        row |= {f"{side}_s": one["seconds"], f"{side}_peak_MiB": one["peak_MiB"]}
    return row | {"difference": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SIDE"), help="in this process")
    parser.add_argument("--output", type=Path, default=RESULTS / "offloaded.json")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one, args.length)))
        return
    # What is freed is given back, so that each method starts from the same level.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    rows = []
    for kind in args.models:
        here, away = (
            in_a_process(__file__, kind, side, "--length", args.length, env=env) for side in SIDES
        )
        rows += [joined(*both) for both in zip(here, away, strict=True)]
    for row in rows:
        print(
            f"{row['model']:6} {row['method']:18} "
            f"{row['in memory_peak_MiB']:6.0f} MiB {row['in memory_s']:6.2f} s -> "
            f"{row['offloaded_peak_MiB']:6.0f} MiB {row['offloaded_s']:6.2f} s   "
            f"{row['difference']:.0e}"
        )
    details = {"tokens": args.length, "layers": LAYERS, "accelerate": accelerate.__version__}
    save(args.output, "offloaded", rows, cpu_time=True, **details)


if __name__ == "__main__":
    main()
