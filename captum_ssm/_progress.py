"""A progress bar for work that takes long, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Callable[[float], None]]:
    """Yields what to call with how much is done, of ``total``."""
    with tqdm(desc=what, total=total, delay=3.0, leave=False, disable=None) as shown:
        yield shown.update


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """``items``, with a bar that appears after three seconds, on a terminal."""
    return tqdm(items, desc=what, total=total, delay=3.0, leave=False, disable=None)
