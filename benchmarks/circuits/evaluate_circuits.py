"""Which ranking of edges gives circuits that keep a model's answer, and only its answer.

    python benchmarks/circuits/evaluate_circuits.py copying-mamba --examples 24
    python benchmarks/circuits/evaluate_circuits.py            # all models; then the tables
    python benchmarks/circuits/evaluate_circuits.py stories-mamba --length 512 --examples 24

One record per model in ``results``; ``tables.md`` is made of all of them. Long stories, of which
the questions are those that the model answers right, are in ``results/long``, and models that are
not in the repository in ``results/other_trainings``.
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
from circuit_questions import NAMES, Questions, answered, load, questions
from circuit_rankings import maps, relevance
from circuit_tables import write_tables
from torch import Tensor

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


def evaluate(name: str, count: int, length: int | None) -> tuple[list[dict[str, Any]], int]:
    """All rankings under all ablations, and of how many questions."""
    model, q = load(name), questions(name, count, SEED, length=length)
    model.config.use_cache = False
    with fast_scan() if model.config.model_type == "mamba" else nullcontext():
        if length is not None:
            q = answered(model, q)
        others = questions(name, OTHERS, SEED + 1, length=length).ids
        return _evaluated(name, model, q, others), len(q)


def _evaluated(name: str, model: Any, q: Questions, others: Tensor) -> list[dict[str, Any]]:
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


def folder_of(name: str, length: int | None) -> Path:
    """Where the record of a model goes: tables are made of models that are asked the same."""
    if length is not None:
        return RESULTS / "long"
    return RESULTS / "other_trainings" if Path(name).is_dir() else RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names, or folders of checkpoints")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--length", type=int, help="words of a story. Default: about 50")
    parser.add_argument("--tables", action="store_true", help="only make the tables anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in [] if args.tables else args.models or NAMES:
        results = folder_of(name, args.length)
        start = time.process_time()
        rows, count = evaluate(name, args.examples, args.length)
        save(
            results / f"{Path(name).name}.json",
            "circuits",
            rows,
            model=Path(name).name,
            examples=count,
            asked=args.examples,
            length=args.length,
            ks=KS,
            cpu_time=True,
            seconds=round(time.process_time() - start),
            transformers=transformers.__version__,
        )
        print(name, f"{time.process_time() - start:.0f} s", flush=True)
    for folder in sorted({path.parent for path in RESULTS.rglob("*.json")} - {RESULTS / "found"}):
        write_tables(folder)


if __name__ == "__main__":
    main()
