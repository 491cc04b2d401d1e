"""What the arguments alone tell: checked before anything is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from captum_ssm.cli.parser import listed
from captum_ssm.explanation import Explanation

# What files are written to: by explanations alone, or also by pictures of them.
DATA, PICTURES = (".html", ".json"), (".png", ".svg", ".pdf")


def add_output(parser: argparse._ActionsContainer, what: str) -> None:
    """The file that a command writes."""
    parser.add_argument("--output", type=Path, metavar="FILE", help=what)


def check_output(path: Path | None, endings: tuple[str, ...], name: str = "--output") -> None:
    """Raise unless a file of one of these kinds can be written there."""
    if path is None:
        return
    if path.suffix not in endings:
        raise ValueError(f"{name} is {path}; expected a name that ends in {listed(endings, 'or')}.")
    if not path.parent.is_dir():
        raise ValueError(
            f"{name} is {path}, and there is no folder {path.parent}; create it, or name another."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name} is {path}, which cannot be written; name another file.")


def check_file(path: Path | None) -> None:
    """Raise unless the file is there."""
    if path is not None and not path.is_file():
        raise ValueError(f"No such file: {path}. Expected the path of a file that exists.")


def check_text(text: str | None) -> None:
    """Raise for a text of which nothing can be read."""
    if text is not None and not text.strip():
        raise ValueError(f"--text is {text!r}, which is empty; expected a text.")


def numbers(text: str | None, name: str) -> list[int] | None:
    """Token ids such as ``"3,1,4"``.

    Raises:
        ValueError: for anything else, and where there is none.
    """
    if text is None:
        return None
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected token ids such as '3,1,4'.") from None
    if not ids:
        raise ValueError(f"{name} is {text!r}, which holds no token; give at least one.")
    if min(ids) < 0:
        raise ValueError(f"{name} is {text!r}; expected token ids from 0 on.")
    return ids


def write(
    explanation: Explanation,
    path: Path | None,
    units: str = "token",
    figure: Callable[[], Any] | None = None,
    dpi: int = 130,
) -> None:
    """A page, the data, a table or a picture, by the ending; nothing without a path."""
    if path is None:
        return
    if figure is not None and path.suffix in PICTURES:
        figure().savefig(path, dpi=dpi)
    elif path.suffix == ".json":
        explanation.save(path)
    elif path.suffix == ".csv":
        explanation.to_pandas(units).to_csv(path, index=False)
    else:
        explanation.to_html(path)
    print(f"\nwrote {path}")
