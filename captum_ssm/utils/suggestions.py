"""The known name that somebody most likely meant."""

from __future__ import annotations

from collections.abc import Iterable


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most similar; None where none reaches the cutoff, from 0 to 1."""
    from difflib import get_close_matches  # only where something is wrong

    return next(iter(get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A sentence to end a message with, after a space; empty where no name is close."""
    near = closest(name, known, cutoff)
    return "" if near is None else f" Did you mean {near!r}?"
