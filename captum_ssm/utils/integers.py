"""Integers as users pass them: of Python, numpy or torch."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def as_index(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        return None


def as_integers(value: Any, device: torch.device) -> Tensor | None:
    """Integers of Python, numpy or torch as an int64 tensor; None for anything else."""
    try:
        found = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return found.long() if is_integer else None
