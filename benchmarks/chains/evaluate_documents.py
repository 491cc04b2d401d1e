"""Which document an answer is from, and who gave the order: shares of parts against the truth.

    python benchmarks/chains/evaluate_documents.py documents-mamba2

Held-out prompts that the model answers right, with and without an order or a remark among their
documents. The order is taken away or weakened to a remark, to see that the answer follows it; then
each method's shares of the prompt's parts are compared with the part that the answer is from.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from handing import Rows, methods
from lessons import greedy
from report import document_report
from torch import Tensor
from transformers import PreTrainedModel

from captum_ssm.examples.documents import IDS, Documents, make_documents
from captum_ssm.metrics import part_shares

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _evaluating import interval
from _record import save
from _training import MODELS

RESULTS = Path(__file__).resolve().parent / "results"
SCORING_SEED = 30_008
KINDS = ("plain", "remark", "order")


def encoded(words: list[str]) -> Tensor:
    """The ids of words."""
    return torch.tensor([IDS[word] for word in words])


def is_answer(model: PreTrainedModel, drawn: Documents, answer: list[str]) -> bool:
    """Whether the model continues a prompt with an answer."""
    written = greedy(model, encoded(drawn.prompt)[None], len(answer))[0]
    return torch.equal(written, encoded(answer))


def answered(model: PreTrainedModel, kind: str, count: int) -> list[Documents]:
    """Held-out prompts of one kind that the model answers right."""
    rng = random.Random(f"{SCORING_SEED} {kind}")
    found: list[Documents] = []
    for _ in range(3 * count):
        drawn = make_documents(rng, kind=kind, held_out=True)
        if is_answer(model, drawn, drawn.answer):
            found.append(drawn)
        if len(found) == count:
            return found
    raise SystemExit(f"the model answers only {len(found)} of {3 * count} prompts right")


def interventions(model: PreTrainedModel, prompts: list[Documents]) -> dict[str, list[float]]:
    """What becomes of obeyed orders, as shares of prompts."""
    found: dict[str, list[bool]] = defaultdict(list)
    for drawn in prompts:
        weak = replace(drawn, is_order=False)
        gone = replace(weak, extra=None, host=None)
        others = [k for k in range(len(drawn.facts)) if k != drawn.asked]
        asked = replace(drawn, asked=others[0])
        found["the order is removed: the asked document"].append(
            is_answer(model, gone, gone.answer)
        )
        found["it becomes a remark: the asked document"].append(is_answer(model, weak, weak.answer))
        found["another question: still the order"].append(is_answer(model, asked, drawn.answer))
    return {name: interval(torch.tensor(hits).double()) for name, hits in found.items()}


def scored(rows: Tensor, drawn: Documents, signs: str) -> dict[str, float]:
    """How the shares of a prompt's parts agree with where its answer is from."""
    P = len(drawn.prompt)
    rivals = {name: part for name, part in drawn.parts.items() if name != "question"}
    shares = part_shares(rows[:, :P], drawn.parts, signs=signs, resamples=200)
    right = shares[drawn.source]
    best = max((shares[name].value, name) for name in rivals)[1]
    others = [shares[name] for name in rivals if name != drawn.source]
    extra = {"order", "remark"} & drawn.parts.keys()
    return {
        "right part": right.value,
        "its share of tokens": len(drawn.parts[drawn.source]) / P,
        "order or remark": sum(shares[name].value for name in extra),
        "question": shares["question"].value,
        "largest is right": float(best == drawn.source),
        "interval above all others": float(all(right.low > other.high for other in others)),
        "interval of another above it": float(any(other.low > right.high for other in others)),
    }


def explained(rows: Rows, prompts: list[Documents], signs: str) -> dict[str, list[float]]:
    """One method on prompts of one kind, with intervals over prompts."""
    found: dict[str, list[float]] = defaultdict(list)
    for drawn in prompts:
        matrix = rows(encoded(drawn.prompt), encoded(drawn.answer[:-1]))
        for what, value in scored(matrix, drawn, signs).items():
            found[what].append(value)
    return {what: interval(torch.tensor(values)) for what, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--folder", type=Path, default=MODELS)
    parser.add_argument("--examples", type=int, default=50, help="prompts of each kind")
    parser.add_argument("--signs", default="positive")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in args.models:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(args.folder / name)
        model = loaded.eval().requires_grad_(False)
        prompts = {kind: answered(model, kind, args.examples) for kind in KINDS}
        row = {
            "model": name,
            "examples": args.examples,
            "signs": args.signs,
            "interventions": interventions(model, prompts["order"]),
            "methods": {
                method: {kind: explained(rows, prompts[kind], args.signs) for kind in KINDS}
                for method, rows in methods(model)
            },
        }
        save(
            args.output / f"{name}.json", "documents", [row], transformers=transformers.__version__
        )
        (args.output / f"{name}.md").write_text(document_report(row))


if __name__ == "__main__":
    main()
