"""Integers as users pass them: of Python, numpy or torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import InputError, brief


def as_index(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        return None


def index_in(value: Any, count: int) -> int | None:
    """An integer as an index of ``count`` things, from 0 on; None for anything else.

    It may be of Python, numpy or torch; a negative one counts from the end.
    """
    index = as_index(value)
    return index % count if index is not None and -count <= index < count else None


def pair_of(value: Any) -> tuple[int, int] | None:
    """Two integers of Python, numpy or torch as ints; None for anything else."""
    indices = [as_index(x) for x in value] if isinstance(value, Sequence) else []
    pair = [index for index in indices if index is not None]
    return (pair[0], pair[1]) if len(pair) == len(indices) == 2 else None


def count_of(name: str, value: Any, least: int, or_none: bool = False) -> Any:
    """A count as an int, where a user passed one; with ``or_none`` None stays None.

    Raises:
        InputError: for what is not an integer, and one below ``least``.
    """
    count = as_index(value)
    if (value is None and or_none) or (count is not None and count >= least):
        return count
    raise InputError(
        f"{name} is {brief(value)}; expected an integer from {least} on{', or None' * or_none}."
    )


def as_integers(value: Any, device: torch.device) -> Tensor | None:
    """Integers of Python, numpy or torch as an int64 tensor; None for anything else."""
    try:
        tensor = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_integer = not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )
    return tensor.long() if is_integer else None


def from_start(index: Tensor, count: int, told: str) -> Tensor:
    """Indices of ``count`` things from 0 on, or an InputError; negative ones count from the end."""
    if bool(((index < -count) | (index >= count)).any()):
        raise InputError(f"{told}: expected 0 .. {count - 1} (or -{count} .. -1 from the end).")
    return index % count


def example_index(example: Any, batch: int) -> int:
    """The index of one of ``batch`` examples, which may be negative, from the end.

    Raises:
        InputError: for anything else.
    """
    index = index_in(example, batch)
    if index is None:
        raise InputError(
            f"example is {brief(example)}; expected an index of the {batch} examples, 0 .. "
            f"{batch - 1} (or -{batch} .. -1 from the end)."
        )
    return index


def is_any_same(first: Any, other: Any) -> bool:
    """Whether two targets, or two positions, are the same in any example."""
    if first is None or other is None:
        return first is other
    if isinstance(first, tuple) or isinstance(other, tuple):  # indices of one entry
        return bool(first == other)
    left, right = (as_integers(x, torch.device("cpu")) for x in (first, other))
    if left is None or right is None:
        return False
    same = left == right
    return bool((same.flatten(1).all(1) if same.dim() > 1 else same).any())
