"""Published checkpoints: how exactly, how fast and in how much memory they are explained.

    python benchmarks/checkpoints.py --by "your name"              # all, where a hub can be reached
    python benchmarks/checkpoints.py mamba-130m --dtypes float32
    python benchmarks/checkpoints.py my-model=/folder/of/a/checkpoint

For each checkpoint and each precision, in a process of its own: the largest reconstruction error
of its mixers, what MambaLRP and LaTIM leave of the score, times in forward passes, peak memory, and
the page of :func:`captum_ssm.explain`. Rows are added to ``results/checkpoints.json``, with the
date and who ran it; ``docs/checkpoints.md`` is made from them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from _memory import in_a_process, status_mib
from _record import RESULTS, processor

from captum_ssm import LaTIM, MambaLRP, explain, supported

CHECKPOINTS = {
    "mamba-130m": "state-spaces/mamba-130m-hf",
    "mamba2-130m": "AntonV/mamba2-130m-hf",
    "falcon-h1-0.5b": "tiiuae/Falcon-H1-0.5B-Base",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "rwkv7-0.1b": "fla-hub/rwkv7-0.1B-g1",
    "recurrentgemma-2b": "google/recurrentgemma-2b",
}
OWN_CODE = ("rwkv7-0.1b",)  # transformers has no such architecture: the hub's code needs fla
DTYPES = ("float32", "bfloat16")
TEXT = "The keys to the cabinet on the left are in the drawer. To open the cabinet, take the"
PACKAGES = ("captum_ssm", "captum", "torch", "transformers", "flash-linear-attention")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the median seconds of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - start)
    return found, sorted(seconds)[1]


def row(name: str, path: str, dtype: str, text: str, page: Path) -> dict[str, Any]:
    """All numbers of one checkpoint in one precision, and its page.

    The ``path`` is on the hub, or a folder; ``dtype`` is the precision of weights and computation.
    The likeliest next token of ``text`` is explained.
    """
    own = {"trust_remote_code": True} if name in OWN_CODE else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **own)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), **own
    ).eval()
    loaded = status_mib("VmRSS")
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits, forward = timed(lambda: model(ids, use_cache=False).logits)
    target = logits[0, -1].argmax()[None]
    found = {
        "checkpoint": name,
        "path": path,
        "dtype": dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": ids.shape[1],
        "forward_s": round(forward, 4),
        "loaded_mib": round(loaded),
    }
    support = supported(model, ids)
    found["mixers"] = len(support.mixers)
    found["largest_error"] = max(mixer.error for mixer in support.mixers)
    found["refused"] = {method: why for method, why in support.methods.items() if why}
    for label, method in (("lrp", MambaLRP(model)), ("latim", LaTIM(model))):
        if method.get_name() in found["refused"]:
            continue
        (_, delta), seconds = timed(
            lambda method=method: method.attribute(
                ids, target=target, return_convergence_delta=True
            )
        )
        found[f"{label}_delta"] = float((delta / logits[0, -1, target]).abs())
        found[f"{label}_forwards"] = round(seconds / forward, 2)
    explain(model, tokenizer, text).to_html(page)
    found["peak_mib"] = round(status_mib("VmHWM"))
    return found


def measured(name: str, path: str, dtype: str, text: str, page: Path) -> dict[str, Any]:
    """A row, or why there is none."""
    try:
        return row(name, path, dtype, text, page)
    except Exception as error:  # a hub that is not reached, a package that is not installed
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
        return {"checkpoint": name, "path": path, "dtype": dtype, "failed": why}


def installed() -> dict[str, str]:
    """The versions of the packages that matter and are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the record, in the place of older ones of the same checkpoint and person."""
    old = json.loads(path.read_text()) if path.exists() else []
    new = {(r["checkpoint"], r["dtype"], r["by"]) for r in rows}
    kept = [r for r in old if (r["checkpoint"], r["dtype"], r["by"]) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*kept, *rows], indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoints", nargs="*", default=list(CHECKPOINTS), metavar="NAME[=PATH]")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--by", default="", help="who runs it, for the table")
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoints.json")
    parser.add_argument("--pages", type=Path, default=Path("out"))
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    if args.one:
        *given, page = args.one
        print(json.dumps(measured(*given, page=Path(page))))
        return
    args.pages.mkdir(parents=True, exist_ok=True)
    rows = []
    for checkpoint in args.checkpoints:
        name, _, path = checkpoint.partition("=")
        path = path or CHECKPOINTS.get(name, "")
        if not path:
            parser.error(f"no checkpoint {name!r}; expected one of {list(CHECKPOINTS)}, NAME=PATH")
        for dtype in args.dtypes:
            page = args.pages / f"{name}-{dtype}.html"
            found = in_a_process(__file__, name, path, dtype, args.text, page)
            print(json.dumps(found, indent=1), flush=True)
            rows.append(
                {
                    "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
                    "by": args.by,
                    "processor": processor(),
                    "versions": installed(),
                    **found,
                }
            )
    keep(args.output, [found for found in rows if "failed" not in found])
    failed = [f"{r['checkpoint']}, {r['dtype']}: {r['failed']}" for r in rows if "failed" in r]
    if failed:
        raise SystemExit("\n".join(["not measured:", *failed]))


if __name__ == "__main__":
    main()
