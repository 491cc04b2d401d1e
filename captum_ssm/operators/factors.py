"""What operators do with factors: products of those that may be missing, sums, and lags."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product of two factors, of which None stands for one."""
    return b if a is None else a if b is None else a * b


def sum_of(values: list[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    return functools.reduce(torch.add, values)


def lagged(x: Tensor, lag: int) -> Tensor:
    """What ``x (B, L, ...)`` is so many tokens earlier, later for a negative lag; else zero."""
    zeros = torch.zeros_like(x[:, : abs(lag)])
    if lag < 0:
        return torch.cat([x[:, -lag:], zeros], 1)
    return torch.cat([zeros, x[:, : x.shape[1] - zeros.shape[1]]], 1)
