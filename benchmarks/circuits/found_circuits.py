"""How many edges `find_circuit` needs: before and after pruning, under mean ablation.

python benchmarks/circuits/found_circuits.py --examples 6
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from circuit_questions import load, questions

from captum_ssm.metrics import find_circuit

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _record import save

FOLDER = Path(__file__).resolve().parent / "results" / "found"
MAX_EDGES = 256


def found(name: str, count: int) -> list[dict[str, Any]]:
    """One row per question; others of the same task are what removed edges carry the mean of."""
    model, q = load(name), questions(name, count, 2)
    others = questions(name, 24, 3).ids
    rows = []
    for n in range(len(q)):
        start = time.process_time()
        circuit = find_circuit(
            model,
            q.ids[n : n + 1],
            q.answers[n : n + 1],
            reference_inputs=others,
            position=q.positions[n : n + 1],
            max_edges=MAX_EDGES,
        )
        rows.append(
            {
                "model": name,
                "question": n,
                "unpruned": circuit.unpruned,
                "edges": len(circuit),
                "faithfulness": round(circuit.faithfulness, 4),
                "reached": circuit.reached,
                "seconds": round(time.process_time() - start, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["stories-mamba", "copying-mamba2"])
    parser.add_argument("--examples", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = [row for name in args.models for row in found(name, args.examples)]
    save(FOLDER / "found.json", "found circuits", rows, cpu_time=True, max_edges=MAX_EDGES)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
