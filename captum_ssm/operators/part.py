"""Some examples and channels of an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.operators.base import TokenOperator
from captum_ssm.operators.heads import HeadOperator


def part_of(operator: TokenOperator, rows: Tensor, start: int, stop: int) -> TokenOperator:
    """The examples ``rows`` and the channels ``start .. stop - 1`` of an operator.

    Args:
        operator (TokenOperator): of any kind made by a form.
        rows (Tensor): ``(B,)`` int64, examples of the operator's batch; or ``(B, k)``, whose k
            examples' channels or heads are laid next to each other.
        start (int): the first channel; of an operator with heads, a head's first.
        stop (int): the channel after the last one.

    Raises:
        ValueError: for channels that are not whole heads, or an operator of another kind.

    Examples::

        >>> dt, (B, C) = torch.rand(2, 5, 4), torch.randn(2, 2, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> part_of(operator, torch.tensor([1]), 0, 2).matrix().shape
        torch.Size([1, 2, 5, 5])
    """
    is_whole = torch.equal(rows, torch.arange(operator.batch, device=rows.device))
    if is_whole and (start, stop) == (0, operator.channels):
        return operator
    width = operator.width if isinstance(operator, HeadOperator) else 1
    axes = dict(operator.axes if getattr(operator, "windows", 1) == 1 else ())
    if not axes or start % width or stop % width:
        raise ValueError(
            f"channels {start} .. {stop - 1} of a {type(operator).__name__} were asked for; "
            "expected whole heads of an operator that a form of scans makes."
        )
    source: Any = operator
    maps = slice(start // width, stop // width)
    if hasattr(source, "narrow"):  # groups of channels too
        source, maps = source.narrow(maps.start, maps.stop), slice(None)
    several = rows.shape[1] if rows.dim() == 2 else 1
    part: dict[str, Callable[[Any], Any]] = {
        "operator": lambda x: part_of(x, rows, start, stop),
        "operators": lambda x: tuple(part_of(inner, rows, start, stop) for inner in x),
        "B": lambda x: len(rows),
        "D": lambda x: x[maps].repeat(several, *[1] * (x.dim() - 1)),
        "BLD": lambda x: examples(x, rows, maps),
        "BHLN": lambda x: _of_heads(x, rows, maps),
    }
    values = {name: getattr(source, name) for name in axes}
    changed = {name: part[axes[name]](x) for name, x in values.items() if x is not None}
    return replace(operator, **changed)  # type: ignore[type-var]


def _of_heads(x: Tensor, rows: Tensor, heads: slice) -> Tensor:
    # Examples and heads of x (B', H, L, N), where one may stand for all.
    x = x[:, heads] if x.shape[1] > 1 else x.expand(-1, heads.stop - heads.start, -1, -1)
    if x.shape[0] == 1:
        return x.expand(len(rows), *x.shape[1:])
    return x[rows].flatten(1, 2) if rows.dim() == 2 else x[rows]


def examples(x: Tensor, rows: Tensor, channels: slice = slice(None)) -> Tensor:
    """The examples ``rows`` of ``x (B', L, D, ...)``, laid side by side if ``rows`` is ``(B, k)``.

    Args:
        x (Tensor): ``(B', L, D, ...)``.
        rows (Tensor): ``(B,)`` or ``(B, k)`` int64.
        channels (slice, optional): of each example. Default: all

    Examples::

        >>> examples(torch.randn(6, 5, 4), torch.arange(6).view(2, 3), slice(1, 3)).shape
        torch.Size([2, 5, 6])
    """
    some = x[:, :, channels][rows]
    return some.transpose(1, 2).flatten(2, 3) if rows.dim() == 2 else some
