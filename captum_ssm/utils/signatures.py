"""Signatures of functions, each worked out once: a run asks for them many times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

_KNOWN: WeakKeyDictionary[FunctionType, inspect.Signature] = WeakKeyDictionary()


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """As :func:`inspect.signature`, which is asked once for each plain function."""
    if not isinstance(function, FunctionType):
        return inspect.signature(function)
    known = _KNOWN.get(function)
    if known is None:
        known = _KNOWN[function] = inspect.signature(function)
    return known
