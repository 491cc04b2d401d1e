"""Progress of work that takes long, and an estimate of how long; nothing for work that does not."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

from captum_ssm.utils.blocks import bound, contextmanager

T = TypeVar("T")

DELAY = 2.0  # seconds before a bar appears
LONG = 30.0  # seconds of work that are announced

_SHOW: ContextVar[bool | None] = ContextVar("captum_ssm_show_progress", default=None)
_LOGGER = logging.getLogger("captum_ssm")


@contextmanager
def showing(show: bool | None) -> Iterator[None]:
    """Bars of everything inside (True), or none (False); None leaves what was set around it."""
    with bound(_SHOW, _SHOW.get() if show is None else bool(show)):
        yield


class _Shown(tqdm):
    # Without the thread that tqdm starts for the whole process, and with a lock of its own, which
    # no thread of a parent process holds.
    monitor_interval = 0


_Shown.set_lock(threading.RLock())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _Shown.set_lock(threading.RLock()))


class Bar:
    """A bar, also a context manager, for work of a known ``total``.

    Unless :func:`showing` says otherwise, it appears after two seconds and on a terminal only.
    Work that will take more than half a minute is announced in one line of the log, so that it is
    also seen where there is no terminal.
    """

    def __init__(self, what: str, total: float) -> None:
        self.what, self.total, self.done = what, total, 0.0
        self._show = _SHOW.get()
        self._start, self._announces = time.monotonic(), self._show is not False
        self._shown = self._bar() if self._show else None

    def advance(self, count: float = 1) -> None:
        """To be called after each part of the work, with its share of the total."""
        self.done += count
        taken = time.monotonic() - self._start
        if self._shown is None and self._show is None and taken >= DELAY:
            self._shown = self._bar()
        elif self._shown is not None:
            self._shown.update(count)
        if not self._announces or taken < DELAY or self.done <= 0:
            return
        self._announces = False
        if taken * self.total / self.done > LONG:
            _LOGGER.warning("%s: about %.0f s in all.", self.what, taken * self.total / self.done)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.close()

    def _bar(self) -> _Shown:
        hidden = None if self._show is None else not self._show
        return _Shown(
            desc=self.what, total=self.total, initial=self.done, leave=False, disable=hidden
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def progress(items: Collection[T], what: str) -> Iterator[T]:
    """``items``, with a :class:`Bar`."""
    with Bar(what, len(items)) as bar:
        for item in items:
            yield item
            bar.advance()
