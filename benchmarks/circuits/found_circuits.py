"""How many edges `find_circuit` needs, by each way to prune, under mean ablation.

    python benchmarks/circuits/found_circuits.py stories-mamba copying-mamba2 --examples 60

One record per model in ``results/found``; ``found.md`` is made of all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from circuit_questions import load, questions
from circuit_tables import table

from captum_ssm.interventions import Reference
from captum_ssm.metrics import bootstrap, find_circuit

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _record import save

FOLDER = Path(__file__).resolve().parent / "results" / "found"
MAX_EDGES = 64
WAYS: dict[str, bool | str] = {
    "by rank": False,
    "by relevance": "relevance",
    "by runs": "runs",
    "by both": True,
}


def found(name: str, count: int) -> list[dict[str, Any]]:
    """One row per question; others of the same task are what removed edges carry the mean of."""
    model, q = load(name), questions(name, count, 2)
    others = Reference.of(model, questions(name, 24, 3).ids)
    rows = []
    for n in range(len(q)):
        of, row = slice(n, n + 1), {"question": n}
        for way, prune in WAYS.items():
            start = time.process_time()
            circuit = find_circuit(
                model,
                q.ids[of],
                q.answers[of],
                reference_inputs=others,
                position=q.positions[of],
                max_edges=MAX_EDGES,
                prune=prune,
            )
            seconds = time.process_time() - start
            faithfulness = round(circuit.faithfulness, 4)
            row[way] = [len(circuit), faithfulness, circuit.reached, round(seconds, 2)]
        rows.append(row)
        print(name, row, flush=True)
    return rows


def write_table(folder: Path) -> None:
    """``found.md`` of all records in a folder."""
    body = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        sizes = {
            way: torch.tensor([row[way][0] for row in record["rows"]]).double() for way in WAYS
        }
        for way, size in sizes.items():
            fewer = bootstrap(sizes["by rank"] - size)
            times = torch.tensor([row[way][3] for row in record["rows"]])
            reached = sum(row[way][2] for row in record["rows"])
            body.append(
                [
                    record["model"],
                    way,
                    f"{size.median():g}",
                    str(bootstrap(size)),
                    str(fewer),
                    f"{times.mean():.1f} s",
                    f"{reached} of {len(record['rows'])}",
                ]
            )
    head = ["model", "pruned", "median", "edges", "fewer than by rank", "time", "reached"]
    text = (
        "# How many edges suffice\n\nMeans over questions with 95% intervals; processor time of a "
        "search. `found_circuits.py` makes this table of the records in this folder.\n\n"
    )
    (folder / "found.md").write_text(text + table(head, body) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["stories-mamba", "copying-mamba2"])
    parser.add_argument("--examples", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in args.models:
        rows = found(name, args.examples)
        target = FOLDER / f"{name}.json"
        save(target, "found circuits", rows, model=name, cpu_time=True, max_edges=MAX_EDGES)
    write_table(FOLDER)


if __name__ == "__main__":
    main()
