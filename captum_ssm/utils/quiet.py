"""Warnings of a run that is not the one that is explained, left out in the thread that runs it.

:class:`warnings.catch_warnings` exchanges the filters of the whole process, and two threads that
leave it in another order than they entered it leave the wrong ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from captum_ssm.utils.blocks import WhileOpen, bound, contextmanager

_IS_QUIET: ContextVar[bool] = ContextVar("captum_ssm_quiet", default=False)


class _InThisThread:
    # In the place of a filter's pattern: matches any message, where the thread is to be quiet.
    def match(self, message: str) -> bool:
        return _IS_QUIET.get()


_FILTER: Any = ("ignore", _InThisThread(), Warning, None, 0)


def _put() -> None:
    if _FILTER not in warnings.filters:
        warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]


def _put_back() -> None:
    if _FILTER in warnings.filters:
        warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]


_FILTERED = WhileOpen(_put, _put_back)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings in this thread."""
    with _FILTERED.block(), bound(_IS_QUIET, True):
        yield
