"""Which record each hop finds, by what takes the place of a word that the model wrote.

    python benchmarks/chains/swapped_words.py chains-mamba2

Chains that the model continues without a mistake, followed back by MambaLRP. The exact swap puts in
what stands at the same place of the other chain, and leaves the signs as they are; the other ways
know nothing of the task.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from evaluate_chains import RESULTS, by_hop, interval, puzzles_of
from lessons import TASKS, ChainTask
from swaps import Subject
from torch import Tensor

from captum_ssm import MambaLRP, trace
from captum_ssm.examples.chains import LINKS, Puzzle, encode, other_thought
from captum_ssm.interventions import swap_effects

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _record import save
from _training import MODELS

CANDIDATES = (1, 3, 8)
KEPT = ("right record", "largest is right", "handed on")


def exact(model: Any, prompt: Tensor, words: Tensor, puzzle: Puzzle) -> Tensor:
    """Effects of each thought that is swapped for the other chain's."""
    others = words.clone()
    for k in range(len(puzzle.thoughts)):
        others[2 * k] = encode([other_thought(puzzle, k).thoughts[k]])[0]
    return swap_effects(model, prompt, words, others=others)


def likeliest(model: Any, prompt: Tensor, words: Tensor) -> Tensor:
    """Effects of every word, signs too, that is swapped for the likeliest other token."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, words])[None], use_cache=False).logits[0]
    logits = logits[len(prompt) - 1 : -1].scatter(1, words[:, None], -torch.inf)
    return swap_effects(model, prompt, words, others=logits.argmax(1))


def measured(model: Any, puzzles: list[Puzzle]) -> list[dict[str, Any]]:
    """A row for each way to swap."""
    ways: dict[str, Any] = {
        "no swaps: relevance": lambda *_: "relevance",
        "every word, the likeliest other": lambda ids, _: likeliest(model, *ids),
    }
    for count in CANDIDATES:
        ways[f"words that depend on the prompt, {count} candidate(s)"] = (
            lambda ids, _, count=count: swap_effects(model, *ids, candidates=count)
        )
    ways["the thoughts, exact"] = lambda ids, puzzle: exact(model, *ids, puzzle)
    rows = []
    for way, effects in ways.items():
        found: dict[str, list[Tensor]] = {name: [] for name in KEPT}
        for puzzle in puzzles:
            ids = torch.tensor(encode(puzzle.prompt)), torch.tensor(encode(puzzle.aloud))
            how = {"span": (-2, -2), "hops": LINKS - 1, "signs": "positive"}
            traced = trace(MambaLRP(model), *ids, through=effects(ids, puzzle), **how)
            for name, values in by_hop(traced, puzzle).items():
                if name in found:
                    found[name].append(values)
        row = {"way": way} | {
            name: [interval(torch.stack(values)[:, hop].double()) for hop in range(LINKS)]
            for name, values in found.items()
        }
        right = [f"{100 * value:.0f}%" for value, *_ in row["largest is right"]]
        print(f"{way}: {', '.join(right)}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--folder", type=Path, default=MODELS)
    parser.add_argument("--examples", type=int, default=50, help="puzzles explained")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in args.models:
        task = TASKS[name.split("-")[0]]
        assert isinstance(task, ChainTask)
        model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / name).eval()
        subject = Subject(model.requires_grad_(False), task)
        rows = measured(model, puzzles_of(subject, args.examples, task.links))
        details = {"model": name, "examples": args.examples}
        save(RESULTS / f"swapped-words-{name}.json", "chains", rows, **details)


if __name__ == "__main__":
    main()
