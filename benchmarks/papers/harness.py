"""What the papers' scripts share: their options, where they run, data sets, and their tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from captum_ssm.metrics import Interval

RESULTS = Path(__file__).resolve().parent / "results"
WAIT = timedelta(days=2)  # one process may be long done before another


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, help="this many samples; default: all")
    parser.add_argument("--methods", nargs="+", help="those whose names hold one of these")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder")
    return parser


def required(name: str) -> Any:
    """An optional package, or an exit that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise SystemExit(
            f"{name} is not installed; the papers' scripts need it, in the repository's folder: "
            'pip install ".[papers]"'
        ) from None


def processes(cpu: bool) -> Any:
    """The processes started by torchrun, one without it, as accelerate sees them."""
    accelerate = required("accelerate")
    wait = accelerate.InitProcessGroupKwargs(timeout=WAIT)
    return accelerate.Accelerator(cpu=cpu, kwargs_handlers=[wait])


def dataset(
    name: str, configuration: str | None, split: str, limit: int | None, seed: int | None = None
) -> Any:
    """Samples of a data set, by hub name, or of local files: a folder, or one .parquet or .json(l).

    ``split`` is that of the data set, or of a folder that names its files by split. With ``seed``,
    samples are shuffled first: where they are sorted by class, the first ones say little.
    """
    datasets = required("datasets")
    path = Path(name)
    if path.is_file():
        kind = {"jsonl": "json"}.get(path.suffix[1:], path.suffix[1:])
        found = datasets.load_dataset(kind, data_files=name, split="train")
    elif path.is_dir():
        found = datasets.load_dataset(name, split=split)
    else:
        found = datasets.load_dataset(name, configuration, split=split)
    if seed is not None:
        found = found.shuffle(seed=seed)
    return found if limit is None else found.select(range(min(limit, len(found))))


def report(
    accelerator: Any,
    output: Path,
    name: str,
    about: Mapping[str, Any],
    scores: Mapping[str, Mapping[str, Interval]],
    paper: Mapping[str, Mapping[str, float]],
    columns: Mapping[str, tuple[str, float]],
    notes: str,
    curves: Any = None,
) -> None:
    """Writes ``<name>.json`` and ``<name>.md`` and prints the table; the first process does.

    ``about`` says what was run: model, data, how many samples. ``scores`` are estimates by method
    and column, ``paper`` the paper's numbers in the table's unit, and ``columns``, by key, the
    heading and what a score is multiplied by in the table. ``curves`` go into the .json alone.
    """
    if not accelerator.is_main_process:
        return
    versions = {package: version(package) for package in ("captum_ssm", "captum", "transformers")}
    versions |= {"torch": torch.__version__, "python": platform.python_version()}
    record = {
        "about": {**about, "versions": versions},
        "scores": {
            method: {key: dataclasses.asdict(e) for key, e in row.items()}
            for method, row in scores.items()
        },
        "paper": paper,
    }
    if curves is not None:
        record["curves"] = curves
    lines = table(scores, paper, columns)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    facts = "; ".join(f"{key} {value}" for key, value in about.items())
    (output / f"{name}.md").write_text(f"# {name}\n\n{facts}\n\n{notes}\n\n{lines}\n")
    print(f"{facts}\n\n{notes}\n\n{lines}\n\nwritten to {output / name}.md and .json")


def table(
    scores: Mapping[str, Mapping[str, Interval]],
    paper: Mapping[str, Mapping[str, float]],
    columns: Mapping[str, tuple[str, float]],
) -> str:
    """A Markdown table, one row per method, the paper's numbers in round brackets."""
    head = ["Method", *(heading for heading, _ in columns.values())]
    lines = [_row(head), "|---" + "|---:" * len(columns) + "|"]
    for method, row in scores.items():
        cells = [method]
        for key, (_, unit) in columns.items():
            e, known = row[key], paper.get(method, {}).get(key)
            digits = 1 if unit == 100 else 3
            value, low, high = (f"{unit * v:.{digits}f}" for v in (e.value, e.low, e.high))
            cells.append(f"{value} [{low}, {high}]" + ("" if known is None else f" ({known})"))
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
