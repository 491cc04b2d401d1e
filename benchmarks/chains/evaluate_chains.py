"""Which record a chain of thought came from, by hops, and whether the answer rests on the thoughts.

    python benchmarks/chains/evaluate_chains.py chains-mamba2 answers-mamba2

Held-out chains that the model follows without a mistake are swapped (what does the answer follow?),
explained by hops, and compared with exact interventions. Results are written to results/.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from handing import SIGNS, WAYS, Rows, Swapped, handed_by, hops_of, methods, on_prompt
from lessons import TASKS, ChainTask
from report import report
from swaps import Subject, record_shares
from torch import Tensor

from captum_ssm import Trace
from captum_ssm.examples.chains import Puzzle, encode, make_puzzle

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _evaluating import interval
from _record import save
from _training import MODELS

RESULTS = Path(__file__).resolve().parent / "results"
SCORING_SEED = 30_007
SWAPPED = 100  # puzzles for the interventions, which cost little

Measured = dict[str, list[Any]]


def puzzles_of(subject: Subject, count: int, links: int) -> list[Puzzle]:
    """Held-out puzzles that the model answers without a mistake."""
    rng = random.Random(SCORING_SEED + links)
    found: list[Puzzle] = []
    for _ in range(20):
        drawn = [make_puzzle(rng, links=links, held_out=True) for _ in range(count)]
        right = subject.is_right(drawn).tolist()
        found += [puzzle for puzzle, is_right in zip(drawn, right, strict=True) if is_right]
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"the model answers only {len(found)} of {20 * count} chains right")


def interventions(subject: Subject, puzzles: list[Puzzle]) -> dict[str, Any]:
    """The shares of answers that follow a swapped thought, or a changed record."""
    links = len(puzzles[0].links)
    thoughts = range(links - 1) if subject.task.is_aloud else ()
    swaps = {f"thought {k + 1}": subject.after_swaps(puzzles, k) for k in thoughts}
    changes = {
        f"{name} chain, record {k + 1}": subject.after_changes(puzzles, k, mine)
        for name, mine in (("asked", True), ("other", False))
        for k in range(links)
    }
    return {
        kind: {
            where: {what: interval(hits.double()) for what, hits in found.items()}
            for where, found in table.items()
        }
        for kind, table in (("swapped", swaps), ("records", changes))
    }


def by_hop(traced: Trace, puzzle: Puzzle) -> dict[str, Tensor]:
    """Shares of each hop's relevance on the prompt, and what it hands on, ``(K + 1,)`` each."""
    records = record_shares(on_prompt(traced.relevance, traced.prompt), puzzle)
    last = len(puzzle.links) - 1
    right = torch.tensor([puzzle.links[max(0, last - k)] for k in range(traced.hops + 1)])
    at = torch.arange(traced.hops + 1)
    return {
        "right record": records[at, right],
        "rest of the chain": records[:, puzzle.links].sum(1) - records[at, right],
        "other chain": records[:, puzzle.others].sum(1),
        "largest is right": (records.argmax(1) == right).double(),
        "handed on": traced.handed_on,
    }


def summaries(traced: Trace, puzzle: Puzzle) -> dict[str, Tensor]:
    """Relevance of each record for the whole answer, ``(records,)``, by ways to sum the hops up."""
    alone = record_shares(on_prompt(traced.relevance, traced.prompt), puzzle)
    if not traced.hops:  # an answer at once: there is nothing to sum up
        return {"hop 0": alone[0]}
    return {
        "hop 0": alone[0],
        "sum over hops": record_shares(on_prompt(traced.total, traced.prompt), puzzle),
        "mean of normalized hops": alone.mean(0),
        "largest over normalized hops": alone.amax(0),
    }


def against_truth(shares: Tensor, puzzle: Puzzle) -> dict[str, Tensor]:
    """How a summary agrees with removing each record, which changes the answer or does not.

    ``order`` is the area under the ROC curve of the asked chain's records against the other's,
    ``distance`` the total variation between the shares and equal ones of the asked chain's.
    """
    mine, other = shares[puzzle.links], shares[puzzle.others]
    wins = (mine[:, None] > other).double() + 0.5 * (mine[:, None] == other).double()
    truth = torch.zeros_like(shares)
    truth[puzzle.links] = 1 / len(puzzle.links)
    whole = on_prompt(shares.clamp(min=0), len(shares))
    return {
        "order": wins.mean(),
        "whole chain first": (mine.min() > other.max()).double(),
        "distance": (whole - truth).abs().sum() / 2,
    }


def effects(subject: Subject, puzzle: Puzzle) -> list[Swapped]:
    """The effects of thoughts and of records on each thought and on the answer."""
    words = range(0, 2 * len(puzzle.links), 2) if subject.task.is_aloud else [0]
    return [subject.effects(puzzle, word) for word in words]


def agreement(rows: Tensor, puzzle: Puzzle, swapped: list[Swapped]) -> dict[str, Tensor]:
    """How rows agree with direct effects: swapped thoughts and changed records, for each word.

    ``correlation`` is Pearson's over thoughts and records, the mean over the words of the chain;
    ``thought`` is how often the thought of the largest relevance has the largest effect.
    """
    P = len(puzzle.prompt)
    found: dict[str, list[Tensor]] = {"correlation": [], "records only": [], "thought": []}
    for k, (thoughts, records) in enumerate(swapped):
        row = rows[2 * k]
        mine, theirs = row[P : P + 2 * k : 2], record_shares(row, puzzle)
        for name, pair in (
            ("correlation", (torch.cat([mine, theirs]), torch.cat([thoughts, records]))),
            ("records only", (theirs, records)),
        ):
            both = torch.stack([part.double() for part in pair])
            found[name].append(torch.corrcoef(both)[0, 1].nan_to_num())
        if k > 1:
            found["thought"].append((mine.argmax() == thoughts.argmax()).double())
    return {name: torch.stack(values).mean() for name, values in found.items() if values}


def explained(
    rows: Rows, subject: Subject, puzzles: list[Puzzle], swapped: list[list[Swapped]], hops: int
) -> dict[str, Any]:
    """All of one method: ways to hand relevance on, by signs, with intervals over puzzles."""
    ways = WAYS if subject.task.is_aloud else WAYS[:1]
    handed: dict[tuple[str, str], Measured] = defaultdict(lambda: defaultdict(list))
    weighed: dict[tuple[str, str, str], Measured] = defaultdict(lambda: defaultdict(list))
    direct: Measured = defaultdict(list)
    for puzzle, known in zip(puzzles, swapped, strict=True):
        words = subject.task.continuation(puzzle)[:-1]
        ids = (torch.tensor(encode(part)) for part in (puzzle.prompt, words))
        matrix, P = rows(*ids).double(), len(puzzle.prompt)
        for what, value in agreement(matrix, puzzle, known).items():
            direct[what].append(value)
        for way, signs in product(ways, SIGNS):
            traced = hops_of(handed_by(way, matrix, P, known), P, signs, hops)
            for what, values in by_hop(traced, puzzle).items():
                handed[way, signs][what].append(values)
            for summary, shares in summaries(traced, puzzle).items():
                for what, value in against_truth(shares, puzzle).items():
                    weighed[way, signs, summary][what].append(value)
    return {
        "direct effects": {what: interval(values) for what, values in direct.items()},
        "hops": [
            {"way": way, "signs": signs}
            | {
                what: [interval(torch.stack(values)[:, k]) for k in range(hops + 1)]
                for what, values in found.items()
            }
            for (way, signs), found in handed.items()
        ],
        "summaries": [
            {"way": way, "signs": signs, "summary": summary}
            | {what: interval(values) for what, values in found.items()}
            for (way, signs, summary), found in weighed.items()
        ],
    }


def evaluated(name: str, folder: Path, examples: int) -> dict[str, Any]:
    """Everything about one model."""
    task = TASKS[name.split("-")[0]]
    assert isinstance(task, ChainTask)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name).eval()
    subject = Subject(model.requires_grad_(False), task)
    puzzles = puzzles_of(subject, max(examples, SWAPPED), task.links)
    row = {
        "model": name,
        "links": task.links,
        "aloud": task.is_aloud,
        "examples": examples,
        "interventions": interventions(subject, puzzles[:SWAPPED]),
        "methods": {},
    }
    hops = task.links - 1 if task.is_aloud else 0
    known = [effects(subject, puzzle) for puzzle in puzzles[:examples]]
    for method, rows in methods(model):
        found = explained(rows, subject, puzzles[:examples], known, hops)
        row["methods"][method] = found
        print(name, method, "done", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--folder", type=Path, default=MODELS)
    parser.add_argument("--examples", type=int, default=50, help="puzzles explained")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in args.models:
        row = evaluated(name, args.folder, args.examples)
        save(args.output / f"{name}.json", "chains", [row], transformers=transformers.__version__)
        (args.output / f"{name}.md").write_text(report(row))


if __name__ == "__main__":
    main()
