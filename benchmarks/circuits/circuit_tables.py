"""The tables of `evaluate_circuits.py`, made of its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from captum_ssm.metrics import bootstrap

PAIRS = (
    ("LRP contrast |E|", "EAP |E|"),
    ("LRP contrast |E|", "EAP-IG |E|"),
    ("LRP contrast, signed", "LRP contrast |E|"),
    ("LRP contrast |E|", "LRP logit |E|"),
    ("LRP contrast |E|", "gradient x hidden attention"),
    ("LRP contrast |E|", "LaTIM l1, reach"),
)
COLUMNS = (("kept", "zero"), ("kept", "mean"), ("removed", "zero"), ("control", "zero"),
           ("control", "mean"), ("gap", "zero"), ("gap", "mean"))  # fmt: skip
TITLES = {
    "kept": "answer kept",
    "removed": "answer without the edges",
    "control": "foil, by edges for the foil",
    "gap": "gap to the model",
}
Rows = dict[tuple[str, str], dict[str, Any]]


def write_tables(folder: Path) -> None:
    """``tables.md`` of all records in a folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = {
        record["model"]: {(row["ranking"], row["ablation"]): row for row in record["rows"]}
        for record in records
    }
    counts = ", ".join(f"{record['model']} {record['examples']}" for record in records)
    ks = ", ".join(map(str, records[0]["ks"]))
    parts = [
        "# Circuits",
        "`evaluate_circuits.py` makes these tables of the records in this folder. Questions: "
        f"{counts}. k = {ks}. Areas are over log k.",
        "## Areas, mean over the models",
        _areas(found),
        "## By ablation, mean over the models",
        _ablations(found),
        "## Answer kept with the k largest edges only, zero ablation",
        *(_curves(found, k, n) for n, k in enumerate(records[0]["ks"]) if k in (1, 5, 20)),
        "## Paired differences of the share kept, mean over k, with 95% intervals over questions",
        _paired(found),
    ]
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _rankings(found: dict[str, Rows]) -> list[str]:
    return list(dict.fromkeys(ranking for rows in found.values() for ranking, _ in rows))


def _over_models(found: dict[str, Rows], ranking: str, ablation: str, what: str) -> str:
    values = [
        rows[ranking, ablation]["area"][what]["value"]
        for rows in found.values()
        if (ranking, ablation) in rows
    ]
    return f"{sum(values) / len(values):.2f}" if values else ""


def _areas(found: dict[str, Rows]) -> str:
    head = ["ranking", *(f"{TITLES[what]}, {ablation}" for what, ablation in COLUMNS)]
    return table(
        head,
        [
            [name, *(_over_models(found, name, ablation, what) for what, ablation in COLUMNS)]
            for name in _rankings(found)
        ],
    )


def _ablations(found: dict[str, Rows]) -> str:
    names = list(dict.fromkeys(ablation for rows in found.values() for _, ablation in rows))
    shown = [n for n in _rankings(found) if all((n, a) in r for r in found.values() for a in names)]
    columns = [(what, ablation) for what in ("kept", "gap") for ablation in names]
    head = ["ranking", *(f"{TITLES[what]}, {ablation}" for what, ablation in columns)]
    rows = [[n, *(_over_models(found, n, a, what) for what, a in columns)] for n in shown]
    return table(head, rows)


def _curves(found: dict[str, Rows], k: int, n: int) -> str:
    def cell(rows: Rows, name: str) -> str:
        return f"{rows[name, 'zero']['curves']['kept'][n]:.2f}"

    body = [[name, *(cell(rows, name) for rows in found.values())] for name in _rankings(found)]
    for label, key in (("no edge", "kept_none"), ("all edges", "kept_whole")):
        values = (next(iter(rows.values()))[key] for rows in found.values())
        body.append([label, *(f"{value:.2f}" for value in values)])
    return table([f"k = {k}", *found], body)


def _paired(found: dict[str, Rows]) -> str:
    body = []
    for first, second in PAIRS:
        cells = []
        for ablation in ("zero", "mean"):
            one, other = (
                torch.cat([torch.tensor(rows[name, ablation]["each"]) for rows in found.values()])
                for name in (first, second)
            )
            cells.append(str(bootstrap(one - other)))
        body.append([f"{first} minus {second}", *cells])
    return table(["", "zero", "mean"], body)
