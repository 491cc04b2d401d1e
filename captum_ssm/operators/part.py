"""Some examples and channels of an operator."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.operators._base import TokenOperator
from captum_ssm.operators.composed import ConvolvedOperator, ScaledOperator, SumOperator
from captum_ssm.operators.diagonal import DiagonalOperator
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.operators.softmax import SoftmaxOperator


def part_of(operator: TokenOperator, rows: Tensor, start: int, stop: int) -> TokenOperator:
    """The examples ``rows`` and the channels ``start .. stop - 1`` of an operator.

    Args:
        operator (TokenOperator): of any kind made by a form.
        rows (Tensor): ``(B,)`` int64, examples of the operator's batch.
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
    whole = torch.equal(rows, torch.arange(operator.batch, device=rows.device))
    if whole and (start, stop) == (0, operator.channels):
        return operator
    if isinstance(operator, DiagonalOperator):
        found = operator.narrow(start, stop)
        return DiagonalOperator(**_at(found, rows, ("dt", "right", "B", "C", "left")))
    if isinstance(operator, SumOperator):
        return SumOperator(tuple(part_of(part, rows, start, stop) for part in operator.parts))
    if isinstance(operator, ConvolvedOperator):
        inner = part_of(operator.inner, rows, start, stop)
        return ConvolvedOperator(inner, operator.taps[start:stop], operator.grid)
    if isinstance(operator, ScaledOperator):
        factors = [
            None if x is None else x[rows][..., start:stop] for x in (operator.left, operator.right)
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
    assert isinstance(operator, SoftmaxOperator)
    bias = operator.bias
    if bias is not None:
        bias = bias[rows] if bias.shape[0] > 1 else bias
        bias = bias[:, heads] if bias.shape[1] > 1 else bias
    return replace(
        operator,
        query=operator.query[rows][:, heads],
        key=operator.key[rows][:, heads],
        bias=bias,
        sinks=None if operator.sinks is None else operator.sinks[heads],
    )


def _at(coefficients: Any, rows: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    found = {field.name: getattr(coefficients, field.name) for field in fields(coefficients)}
    return {
        name: value[rows] if name in names and value is not None else value
        for name, value in found.items()
    }
