"""mamba-ssm's and fla's own kernels on a GPU: does each frozen mixer agree with them?

Every class of mixers of both packages that a tiny model here holds, and those of transformers that
call these kernels, with random weights, in float32 and in bfloat16: how the mixer is known, and how
far its frozen operator is from what the package's kernels return, relative to its largest entry.
Then MambaLRP: its convergence delta relative to the sum of its absolute relevance, and how well the
relevance of tokens in bfloat16 agrees with that in float32 (cosine), of the same weights.

    python benchmarks/gpu_agreement.py --workers 8
    python benchmarks/gpu_agreement.py --package fla --only Comba

Each class runs in a process of its own, as most of the time goes into compiling Triton's kernels.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import multiprocessing
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from _record import RESULTS, save
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import census

Row = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDTH = 128
# Whole heads of 64 dimensions, and more tokens than one chunk of the kernels.
LENGTH = 150
FLA = {"hidden_size": WIDTH, "head_dim": 64, "state_size": 64, "num_slots": 64}
FLA |= {"expand_ratio": 64, "chunk_size": 64}
HEADS = {"d_state": 64, "headdim": 64}
MAMBA_SSM: dict[str, Any] = {"Mamba": {}, "Mamba2": HEADS, "Mamba2Simple": HEADS, "Mamba3": HEADS}
# Models of transformers that call kernels of the two packages where they are installed, and their
# options. The kernel of a convolution takes rows of a multiple of eight numbers.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
    "mamba2": dict(hidden_size=64, num_heads=8, head_dim=16, n_groups=1, state_size=16),
    "bamba": dict(
        hidden_size=64, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16
    ),
    "qwen3_next": {},
    "kimi_linear": {},
}


def names(package: str) -> list[str]:
    """What of a package is measured."""
    if importlib.util.find_spec(package) is None:
        return []
    if package == "transformers":
        return list(TRANSFORMERS)
    return list(MAMBA_SSM) if package == "mamba_ssm" else list(census.names_in("fla"))


def build(package: str, name: str) -> nn.Module:
    """A model with one class of mixers, float32, on the CPU."""
    from models import without_biases

    torch.manual_seed(0)
    if package == "transformers":
        from families import build as family

        return without_biases(family(name, **TRANSFORMERS[name]))
    if package == "mamba_ssm":
        file = {"Mamba": "mamba_simple", "Mamba2Simple": "mamba2_simple"}.get(name, name.lower())
        kind = getattr(importlib.import_module(f"mamba_ssm.modules.{file}"), name)
        return without_biases(census.OneLayer(kind(WIDTH, **MAMBA_SSM[name]), WIDTH))
    importlib.import_module("fla.layers")
    importlib.import_module("fla.layers.simple_gla")
    modules = [m for path, m in sys.modules.items() if path.startswith("fla.layers.")]
    kind = next(getattr(module, name) for module in modules if hasattr(module, name))
    return without_biases(census.fla_model(kind, **FLA))


def agreement(package: str, name: str) -> Row:
    """How the mixers of a class are known, their errors, and MambaLRP's, in each dtype."""
    from models import ids

    from captum_ssm import MambaLRP

    warnings.filterwarnings("ignore")
    row: Row = {"package": package, "class": name}
    relevance: dict[str, Tensor] = {}
    for kind, dtype in DTYPES.items():
        row[kind] = {"known": "not run"}
        try:
            with census.time_limit():
                model, tokens = build(package, name).to("cuda", dtype), ids(2, LENGTH).cuda()
                with torch.no_grad():
                    model(tokens)
                found = census.mixers_of(model, tokens, package)
                row[kind] = found.get(name, next(iter(found.values())))
                if "error" not in row[kind]:
                    continue
                of_tokens, delta = MambaLRP(model).attribute(
                    tokens, target=3, return_convergence_delta=True
                )
        except Exception as error:
            row[kind]["why"] = f"{type(error).__name__}: {census.first_line(error)}"
            continue
        whole = of_tokens.abs().sum(1).double()
        row[kind]["lrp_delta"] = float((delta.abs().double() / whole).max())
        relevance[kind] = of_tokens.double()
    if len(relevance) == 2:
        cosines = torch.cosine_similarity(*relevance.values(), dim=1)
        row["lrp_cosine_of_bfloat16"] = float(cosines.min())
    return row


def shown(row: Row) -> str:
    """A row in one line."""
    parts = [f"{row['package']:12} {row['class']:28}"]
    for kind in DTYPES:
        if kind in row:
            parts.append(f"{kind}: {census.shown(row[kind])}")
            if "lrp_delta" in row[kind]:
                parts.append(f"delta {row[kind]['lrp_delta']:.0e}")
    if "lrp_cosine_of_bfloat16" in row:
        parts.append(f"cosine {row['lrp_cosine_of_bfloat16']:.4f}")
    return " | ".join(parts)


def main() -> None:
    """Measure all, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", choices=("mamba_ssm", "fla", "transformers"), action="append")
    parser.add_argument("--only", nargs="+", help="classes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_agreement.json")
    args = parser.parse_args()
    wanted = [
        (package, name)
        for package in args.package or ("mamba_ssm", "transformers", "fla")
        for name in names(package)
        if not args.only or name in args.only
    ]
    spawn = multiprocessing.get_context("spawn")
    versions = {name: _version(name) for name in ("mamba_ssm", "causal_conv1d", "fla", "triton")}
    versions |= {"gpu": torch.cuda.get_device_name(), "transformers": _version("transformers")}
    rows: list[Row] = []
    with ProcessPoolExecutor(args.workers, spawn, max_tasks_per_child=1) as pool:
        for done in as_completed(pool.submit(_agreement, *one) for one in wanted):
            rows.append(done.result())
            print(shown(rows[-1]), flush=True)
            ordered = sorted(rows, key=lambda row: (row["package"], row["class"]))
            save(args.output, "gpu_agreement", ordered, **versions)


def _agreement(package: str, name: str) -> Row:
    # What kernels compute does not depend on which of their configurations is the fastest here.
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    autotuner.prune_configs = lambda self, _: [min(self.configs, key=_size)]
    return agreement(package, name)


def _size(config: Any) -> int:
    # What a configuration of a Triton kernel takes of shared memory grows with.
    sizes = [x for x in config.kwargs.values() if isinstance(x, int) and x > 0]
    return config.num_stages * math.prod(sizes)


def _version(package: str) -> str | None:
    found = importlib.util.find_spec(package)
    return None if found is None else str(importlib.import_module(package).__version__)


if __name__ == "__main__":
    main()
