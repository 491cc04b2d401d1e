"""What operators do with factors: products of those that may be missing, sums, lags, tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from captum_ssm.utils.memory import tile_entries


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


def sum_between(x: Tensor, example: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """The sums ``(E, ...)`` of ``x (B, L, ...)`` over the tokens after a source, up to a target."""
    spans = zip(example.tolist(), source.tolist(), target.tolist(), strict=True)
    return torch.stack([x[b, j + 1 : i + 1].sum(0) for b, j, i in spans])


def in_tiles(at: Callable[..., Tensor], size: int, *index: Tensor) -> Tensor:
    """``at(*index)`` of indices ``(E,)``, which takes ``size`` numbers each, a few at a time."""
    step = max(1, tile_entries(1 << 24) // size)
    parts = zip(*(entries.split(step) for entries in index), strict=True)
    return torch.cat([at(*part) for part in parts])
