"""The texts of a file: one per line, or the rows of a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

TEXT, COLUMNS = ("text", "prompt"), ("target", "against")


class Texts(NamedTuple):
    """The texts of a file, and what is asked of each.

    Args:
        lines (list of int): the line of each text in the file, from 1 on.
        texts (list of str): what the model reads.
        asked (dict of str to list of str): ``target`` and ``against`` of each text, where the table
            has these columns.
    """

    lines: list[int]
    texts: list[str]
    asked: dict[str, list[str]]


def read_texts(path: Path) -> Texts:
    """The texts of a file, without blank lines.

    Raises:
        ValueError: for a file without a text, a table without a column of texts, or a row without
            a target where others have one.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            texts = _table(file, path) if path.suffix == ".csv" else _lines(file.read())
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"--input is {path}, which cannot be read as text in UTF-8: {error}."
        ) from error
    if not texts.texts:
        raise ValueError(f"--input is {path}, which holds no text; write one per line.")
    return texts


def read_messages(path: Path) -> Any:
    """A conversation, or several, of a JSON file, or a ValueError; ``explain`` checks them."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--messages is {path}, which is not JSON: {error}. Expected a list of messages "
            'such as [{"role": "user", "content": "..."}].'
        ) from error


def _lines(text: str) -> Texts:
    lines = {i: line for i, line in enumerate(text.splitlines(), 1) if line.strip()}
    return Texts(list(lines), list(lines.values()), {})


def _table(file: Iterable[str], path: Path) -> Texts:
    rows = csv.DictReader(file, strict=True)
    columns = list(rows.fieldnames or ())
    texts = [name for name in TEXT if name in columns]
    if not texts:
        raise ValueError(
            f"--input is {path}, with the columns {', '.join(columns) or '(none)'}; expected one "
            "that is named text, and target or against where each text has its own."
        )
    table = Texts([], [], {name: [] for name in COLUMNS if name in columns})
    for row in rows:
        if not (row[texts[0]] or "").strip():
            continue
        table.lines.append(rows.line_num)
        table.texts.append(row[texts[0]])
        for name, values in table.asked.items():
            if not row[name]:
                raise ValueError(
                    f"{path}, line {rows.line_num}: the column {name} is empty; fill it in all "
                    "rows, or remove it."
                )
            values.append(row[name])
    return table
