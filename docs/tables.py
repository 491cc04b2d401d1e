"""Tables of measured numbers, from the results that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def write(folder: Path) -> None:
    """Write ``measured.md``, a section for each set of results there is."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [*map(_copying, _results("copying")), *map(_vision, _results("vision", "digits-*"))]
    row = BENCHMARKS / "results" / "linear_row.json"
    if row.exists():
        parts.append(_row(json.loads(row.read_text())))
    (folder / "measured.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _results(name: str, stems: str = "*") -> list[dict[str, Any]]:
    paths = sorted((BENCHMARKS / name / "results").glob(f"{stems}.json"))
    return [json.loads(path.read_text()) | {"name": path.stem} for path in paths]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _copying(found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            "all" if m["layer"] is None else str(m["layer"]),
            f"{m['hit']:.1%}",
            *(f"{m[key]:.3f}" for key in ("auc", "ap", "recall_at_k")),
        ]
        for name, m in found["methods"].items()
    ]
    rows.sort(key=lambda row: -float(row[2][:-1]))
    head = ["method", "layer", "within one", "AUC", "AP", "R@K"]
    return (
        f"### Copying: {found['model']}\n\n"
        f"{found['examples']} held-out strings of {found['length']} symbols, copied by a small "
        f"`{found['model_type']}` language model. *Within one*: how often the most relevant source "
        "token is the one copied, or its neighbour; AUC, average precision and recall at K of each "
        "row against those three. `python benchmarks/copying/evaluate.py` measures it anew.\n\n"
        + _table(head, rows)
    )


def _vision(found: dict[str, Any]) -> str:
    scores = found["scores"]
    keys = list(dict.fromkeys(key for row in scores.values() for key in row))
    rows = [
        [name, *(f"{row[key]['value']:.3g}" if key in row else "" for key in keys)]
        for name, row in scores.items()
    ]
    return (
        f"### Images: {found['name']}\n\n"
        "A small Vision Mamba on handwritten digits placed in larger images. "
        "`python benchmarks/vision/evaluate.py` measures it anew.\n\n"
        + _table(["method", *(key.replace("_", " ") for key in keys)], rows)
    )


def _row(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['length']:,}",
            f"{row['kernel_ms']:.1f} ms",
            f"{row['matrix_over_kernel']:.0f} x" if "matrix_over_kernel" in row else "",
            f"{row['torch_form_over_kernel']:.0f} x" if "torch_form_over_kernel" in row else "",
        ]
        for row in found["rows"]
    ]
    head = ["tokens", "a row", "the whole matrix, for its row", "a row in PyTorch"]
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    return (
        "### What a row costs\n\n"
        f"One layer's row, by {found['clock']} on {threads} of a CPU with {found['capability']}; "
        "the last two columns are times over the first. "
        "`python benchmarks/kernels/linear_row.py` measures it anew.\n\n" + _table(head, rows)
    )
