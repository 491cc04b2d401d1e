"""Attributes that had another name in an earlier release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def renamed(**names: str) -> Callable[[Any, str], NoReturn]:
    """A ``__getattr__`` for a class: old names raise an error that has the new one.

    Args:
        names: for each old name the new one.
    """

    def missing(value: Any, name: str) -> NoReturn:
        kind = type(value).__name__
        if name in names:
            raise AttributeError(f"{kind}.{name} is now {kind}.{names[name]}.", name=name)
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name)

    return missing
