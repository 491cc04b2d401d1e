"""A progress bar for work that takes long, and only then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """``items``, with a bar that appears after three seconds, on a terminal."""
    return tqdm(items, desc=what, total=total, delay=3.0, leave=False, disable=None)


def counter(what: str, total: int) -> tqdm[None]:
    """Such a bar, a context manager whose ``update()`` counts one more of ``total``."""
    return tqdm(desc=what, total=total, delay=3.0, leave=False, disable=None)
