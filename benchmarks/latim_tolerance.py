"""How much faster is LaTIM's ALTI-Logit with a tolerance, and how wrong?

On trained models of this repository and on random weights in the shape of mamba-130m, on random
tokens: the time of `LaTIM.attribute` with `tolerance=0`, which makes the vector of every pair of
tokens, and with others, alternating in one run; the l1 distance of the two results; and the bound
on it that `attribute` returns. Stops where the distance is above the bound. "run" is one layer's
ALTI-Logit, which takes the same run of the model with its gradient, and no vectors. "medium" is
after `torch.set_float32_matmul_precision("medium")`: vectors in bfloat16, not held by the bound.

    python benchmarks/latim_tolerance.py --cpu-time
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from _timing import keep, options, parsed, turns
from end_to_end import model_of
from torch import Tensor

from captum_ssm import LaTIM

MODELS = Path(__file__).resolve().parents[1] / "tutorials" / "models"
TRAINED = ("copying-mamba", "copying-mamba2", "stories-mamba", "stories-mamba2", "passkey-mamba")


def tokens(model: Any, length: int) -> Tensor:
    """Random ids, ``(1, length)``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (1, length), generator=generator)


def compare(
    latim: LaTIM, ids: Tensor, tolerances: list[float], options: dict[str, Any], repeats: int
) -> list[dict[str, float]]:
    """Times, distances and bounds, one row per tolerance."""
    sides = [(one, precision) for precision in ("highest", "medium") for one in (0.0, *tolerances)]
    found = {}

    def side(one: float, precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        found[one, precision] = latim.attribute(
            ids, tolerance=one, return_error_bound=True, **options
        )
        torch.set_float32_matmul_precision("highest")

    run, *times = turns(
        lambda: latim.attribute(ids, layer=-1, **options),
        *(partial(side, *each) for each in sides),
        repeats=repeats,
    )
    seconds = dict(zip(sides, times, strict=True))
    exact_seconds = times[0]
    exact, _ = found[sides[0]]
    rows = []
    for one, precision in sides[1:]:
        relevance, bound = found[one, precision]
        distance = float((relevance - exact).abs().sum())
        # Both are rounded: the exact one too.
        allowed = float(bound) + 1e-5 * float(exact.abs().sum())
        if precision == "highest" and distance > allowed:
            raise SystemExit(f"a distance of {distance:.2e} is above the bound {float(bound):.2e}")
        taken = seconds[one, precision]
        rows.append(
            {
                "tolerance": one,
                "precision": precision,
                "seconds": statistics.median(taken),
                "exact_seconds": statistics.median(exact_seconds),
                "run_seconds": statistics.median(run),
                "times_faster": statistics.median(
                    a / b for a, b in zip(exact_seconds, taken, strict=True)
                ),
                "times_faster_without_run": statistics.median(
                    (a - r) / (b - r) for a, b, r in zip(exact_seconds, taken, run, strict=True)
                ),
                "distance": distance,
                "bound": float(bound),
                "relevance": float(exact.abs().sum()),
            }
        )
    return rows


def main() -> None:
    parser = options(__doc__, "latim_tolerance", repeats=3)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6, help="of the model in 130m's shape")
    parser.add_argument("--tolerances", type=float, nargs="+", default=[1e-2, 1e-3])
    parser.add_argument("--activation", default="gate")
    parser.add_argument("--only", nargs="+", default=[*TRAINED, "130m-shaped"])
    args = parsed(parser)
    rows = []
    for name in args.only:
        if name in TRAINED:
            model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        else:
            model = model_of(args.layers)
        ids = tokens(model, args.length)
        with torch.no_grad():
            target = int(model(ids).logits[0, -1].argmax())
        asked = {"target": target, "activation": args.activation}
        for row in compare(LaTIM(model), ids, args.tolerances, asked, args.repeats):
            rows.append({"model": name, "length": args.length, **row})
            print(
                f"{name}, {args.length} tokens, {row['precision']}, {row['tolerance']:g}: "
                f"{row['seconds']:.2f} s, {row['times_faster']:.1f} times faster "
                f"({row['times_faster_without_run']:.1f} without the run); distance "
                f"{row['distance']:.1e} of {row['relevance']:.1e}, bound {row['bound']:.1e}",
                flush=True,
            )
    details = {"layers": args.layers, "activation": args.activation}
    keep(args, rows, transformers=transformers.__version__, **details)


if __name__ == "__main__":
    main()
