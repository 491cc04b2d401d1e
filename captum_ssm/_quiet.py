"""Warnings of a run that is not the one that is explained, left out in the thread that runs it.

:class:`warnings.catch_warnings` exchanges the filters of the whole process, and two threads that
leave it in another order than they entered it leave the wrong ones.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from captum_ssm._copies import bound, undo

_IS_QUIET: ContextVar[bool] = ContextVar("captum_ssm_quiet", default=False)
_LOCK = threading.Lock()
_USERS: set[object] = set()


class _InThisThread:
    # In the place of a filter's pattern: matches any message, where the thread is to be quiet.
    def match(self, message: str) -> bool:
        return _IS_QUIET.get()


_FILTER: Any = ("ignore", _InThisThread(), Warning, None, 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings in this thread."""
    with ExitStack() as stack:
        user = object()
        undo(stack, _leave, user)
        _enter(user)
        stack.enter_context(bound(_IS_QUIET, True))
        yield


def _enter(user: object) -> None:
    with _LOCK:
        _USERS.add(user)
        if _FILTER not in warnings.filters:
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]


def _leave(user: object) -> None:
    with _LOCK:
        _USERS.discard(user)
        if not _USERS and _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
