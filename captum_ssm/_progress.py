"""Progress of work that takes long, and an estimate of how long; nothing for work that does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

DELAY = 2.0  # seconds before a bar appears
LONG = 30.0  # seconds of work that are announced

_SHOW: ContextVar[bool | None] = ContextVar("captum_ssm_show_progress", default=None)
_LOGGER = logging.getLogger("captum_ssm")


@contextmanager
def showing(show: bool | None) -> Iterator[None]:
    """Bars of everything inside (True), or none (False); None leaves what was set around it."""
    token = _SHOW.set(_SHOW.get() if show is None else bool(show))
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextmanager
def bar(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Yields what to call after each part of the work, with its share of ``total``.

    Unless :func:`showing` says otherwise, the bar appears after two seconds and on a terminal only.
    Work that will take more than half a minute is announced in one line of the log, so that it is
    also seen where there is no terminal.
    """
    show, start, done, told = _SHOW.get(), time.monotonic(), 0.0, False
    with tqdm(
        desc=what,
        total=total,
        delay=DELAY if show is None else 0.0,
        leave=False,
        disable=None if show is None else not show,
    ) as shown:

        def advance(count: float) -> None:
            nonlocal done, told
            shown.update(count)
            done += count
            taken = time.monotonic() - start
            if told or show is False or taken < DELAY or done <= 0:
                return
            told = True
            if taken * total / done > LONG:
                _LOGGER.warning("%s: about %.0f s in all.", what, taken * total / done)

        yield advance


def progress(items: Collection[T], what: str) -> Iterator[T]:
    """``items``, with a :func:`bar`."""
    with bar(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
