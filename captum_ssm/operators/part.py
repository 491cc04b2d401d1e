"""Some examples and channels of an operator."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.operators._base import TokenOperator
from captum_ssm.operators.composed import (
    ConvolvedOperator,
    ScaledOperator,
    SkipOperator,
    SumOperator,
)
from captum_ssm.operators.diagonal import DiagonalOperator
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.operators.permuted import PermutedOperator
from captum_ssm.operators.softmax import SoftmaxOperator
from captum_ssm.operators.toeplitz import ToeplitzOperator
from captum_ssm.operators.weights import WeightsOperator


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
    whole = rows.dim() == 1 and torch.equal(rows, torch.arange(len(rows), device=rows.device))
    whole = whole and len(rows) == operator.batch
    several = rows.shape[1] if rows.dim() == 2 else 1
    if whole and (start, stop) == (0, operator.channels):
        return operator
    if isinstance(operator, DiagonalOperator):
        found = operator.narrow(start, stop)
        coefficients = _at(found, rows, ("dt", "right", "B", "C", "left"))
        return DiagonalOperator(**coefficients | {"A": found.A.repeat(several, 1)})
    if isinstance(operator, SumOperator):
        return SumOperator(tuple(part_of(part, rows, start, stop) for part in operator.parts))
    if isinstance(operator, ConvolvedOperator):
        inner = part_of(operator.inner, rows, start, stop)
        taps = operator.taps[start:stop]
        taps = taps.repeat(several, *[1] * (taps.dim() - 1))
        return ConvolvedOperator(inner, taps, operator.grid)
    if isinstance(operator, PermutedOperator):
        return PermutedOperator(part_of(operator.inner, rows, start, stop), operator.order)
    if isinstance(operator, SkipOperator):
        return SkipOperator(examples(operator.diagonal, rows, slice(start, stop)))
    if isinstance(operator, ToeplitzOperator):
        return ToeplitzOperator(operator.kernel[start:stop].repeat(several, 1), len(rows))
    if isinstance(operator, ScaledOperator):
        factors = [
            None if x is None else examples(x, rows, slice(start, stop))
            for x in (operator.left, operator.right)
        ]
        return ScaledOperator(part_of(operator.inner, rows, start, stop), *factors)
    if not isinstance(operator, HeadOperator) or start % operator.width or stop % operator.width:
        raise ValueError(
            f"channels {start} .. {stop - 1} of a {type(operator).__name__} were asked for; "
            "expected whole heads of an operator that a form of scans makes."
        )
    heads = slice(start // operator.width, stop // operator.width)
    if isinstance(operator, LinearAttentionOperator):
        some = operator.narrow(heads.start, heads.stop)
        names = tuple(field.name for field in fields(some))
        return LinearAttentionOperator(**_at(some, rows, names), width=operator.width)

    def of_heads(x: Tensor) -> Tensor:  # (B', H, ...)
        x = x[:, heads] if x.shape[1] > 1 else x.expand(-1, heads.stop - heads.start, -1, -1)
        found = x[rows] if x.shape[0] > 1 else x.expand(len(rows), *x.shape[1:])
        return found.flatten(1, 2) if rows.dim() == 2 and x.shape[0] > 1 else found

    if isinstance(operator, WeightsOperator):
        return WeightsOperator(of_heads(operator.weights), operator.width)
    assert isinstance(operator, SoftmaxOperator)
    sinks = operator.sinks
    if sinks is not None:
        sinks = sinks[heads].repeat(several) if sinks.dim() == 1 else of_heads(sinks)
    return replace(
        operator,
        query=of_heads(operator.query),
        key=of_heads(operator.key),
        bias=None if operator.bias is None else of_heads(operator.bias),
        sinks=sinks,
    )


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
    found = x[:, :, channels][rows]
    return found.transpose(1, 2).flatten(2, 3) if rows.dim() == 2 else found


def _at(coefficients: Any, rows: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    found = {field.name: getattr(coefficients, field.name) for field in fields(coefficients)}
    return {
        name: examples(value, rows) if name in names and value is not None else value
        for name, value in found.items()
    }
