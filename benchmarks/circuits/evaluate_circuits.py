"""Which ranking of edges gives circuits that keep a model's answer, and only its answer.

    python benchmarks/circuits/evaluate_circuits.py copying-mamba --examples 24
    python benchmarks/circuits/evaluate_circuits.py            # all models; then the tables

One record per model in ``results``; ``tables.md`` is made of all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from circuit_questions import NAMES, Questions, load, questions
from circuit_rankings import maps, relevance
from circuit_tables import write_tables

from captum_ssm.interventions import Reference
from captum_ssm.metrics import CircuitFaithfulness, circuit_faithfulness

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _record import save
from _scan import fast_scan

RESULTS = Path(__file__).resolve().parent / "results"
KS = (1, 2, 5, 20, 100)
OTHERS = 24  # inputs over which an edge's mean is taken
SEED = 2
RELEVANCE = {
    "LRP contrast": ("lrp", "others"),
    "LRP logit": ("lrp", None),
    "EAP": ("gradient", None),
    "EAP-IG": ("integrated", None),
}
# All are run under two ablations, and these under two more.
ABLATIONS = ("zero", "mean")
MAIN = ("LRP contrast |E|", "LRP contrast, signed", "EAP |E|", "EAP-IG |E|")


def summary(found: CircuitFaithfulness) -> dict[str, Any]:
    """Mean curves, areas with intervals, and each example's mean over k of the answers kept."""
    curves = {"kept": found.kept, "removed": found.removed, "gap": found.gap}
    if found.control is not None:
        curves["control"] = found.control
    ends = ("kept_whole", "kept_none", "control_whole", "control_none", "whole", "none")
    return {
        "curves": {k: [round(x, 4) for x in v.nanmean(0).tolist()] for k, v in curves.items()},
        "area": {name: asdict(value) for name, value in found.estimate().items()},
        "each": [round(x, 4) for x in found.kept.mean(1).tolist()],
        **{name: round(float(getattr(found, name).mean()), 4) for name in ends},
    }


def plans(model: Any, q: Questions, seed: int) -> list[tuple[str, str, Any, Any]]:
    """Each ranking's name, its order, and edges for the answers and for the foils."""
    found: list[tuple[str, str, Any, Any]] = []
    for name, (rule, against) in RELEVANCE.items():
        edges, wrong = (relevance(model, q, a, rule, against) for a in (q.answers, q.foils))
        found += [(f"{name} |E|", "size", edges, wrong)]
        found += [(f"{name}, signed", "signed", edges, wrong)]
    for name, of in maps(model, q, seed).items():
        found.append((name, "size", of(q.answers), of(q.foils)))
    return found


def evaluate(name: str, count: int) -> list[dict[str, Any]]:
    """All rankings under all ablations."""
    model, q = load(name), questions(name, count, SEED)
    model.config.use_cache = False
    with fast_scan() if model.config.model_type == "mamba" else nullcontext():
        return _evaluated(name, model, q)


def _evaluated(name: str, model: Any, q: Questions) -> list[dict[str, Any]]:
    others = questions(name, OTHERS, SEED + 1).ids
    ablations: dict[str, dict[str, Any]] = {
        "zero": {},
        "mean": {"ablation": Reference.of(model, others)},
        "zero, coefficients of the whole run": {"coefficients": "whole"},
        "interchange": {"ablation": Reference.of(model, q.corrupted, mean=False)},
    }
    rows = []
    for ranking, by, edges, control in plans(model, q, SEED):
        for ablation, options in ablations.items():
            if ranking not in MAIN and ablation not in ABLATIONS:
                continue
            found = circuit_faithfulness(
                model,
                q.ids,
                edges,
                q.answers,
                q.foils,
                ks=KS,
                by=by,
                control=control,
                position=q.positions,
                **options,
            )
            print(name, ranking, ablation, found.estimate()["kept"], flush=True)
            rows.append({"ranking": ranking, "ablation": ablation, **summary(found)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names, or folders of checkpoints")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--tables", action="store_true", help="only make the tables anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in [] if args.tables else args.models or NAMES:
        start = time.process_time()
        rows = evaluate(name, args.examples)
        save(
            RESULTS / f"{Path(name).name}.json",
            "circuits",
            rows,
            model=Path(name).name,
            examples=args.examples,
            ks=KS,
            cpu_time=True,
            seconds=round(time.process_time() - start),
            transformers=transformers.__version__,
        )
        print(name, f"{time.process_time() - start:.0f} s", flush=True)
    write_tables(RESULTS)


if __name__ == "__main__":
    main()
