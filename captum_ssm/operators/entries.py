"""Single entries of an operator's maps, where an equation gives them without a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from captum_ssm.kernels.diagonal_states import HUGE, decay
from captum_ssm.operators.base import TokenOperator
from captum_ssm.operators.diagonal import DiagonalOperator
from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.utils.memory import tile_entries


def entries(
    operator: TokenOperator, example: Tensor, target: Tensor, source: Tensor
) -> Tensor | None:
    """Some entries of every map; None for an operator that knows rows only.

    Args:
        operator (TokenOperator): a diagonal recurrence and linear attention know their entries,
            without a convolution, a delta rule or a bonus.
        example, target, source (Tensor): ``(E,)`` int64, of each entry; no source is after its
            target.

    Returns:
        Tensor, optional: ``(E, M)``.

    Examples::

        >>> dt, (B, C) = torch.rand(2, 5, 4), torch.randn(2, 2, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> some = entries(operator, *torch.tensor([[0, 1], [4, 2], [1, 2]]))
        >>> torch.testing.assert_close(some[0], operator.matrix()[0, :, 4, 1])
    """
    at: Callable[[Tensor, Tensor, Tensor], Tensor]
    if isinstance(operator, DiagonalOperator):
        if operator.conv is not None or operator.columns is not None:
            return None
        at, size = partial(_diagonal, operator), operator.A.numel()
    elif isinstance(operator, LinearAttentionOperator):
        if operator.erase is not None or operator.bonus is not None:
            return None
        at, size = partial(_linear_attention, operator), operator.query[0, 0].numel()
    else:
        return None
    step = max(1, tile_entries(1 << 24) // size)
    parts = zip(example.split(step), target.split(step), source.split(step), strict=True)
    return torch.cat([at(*part) for part in parts])


def _between(x: Tensor, example: Tensor, target: Tensor, source: Tensor) -> Tensor:
    # The sums of x (B, L, ...) over the tokens after a source, up to its target: (E, ...).
    spans = zip(example.tolist(), source.tolist(), target.tolist(), strict=True)
    return torch.stack([x[b, j + 1 : i + 1].sum(0) for b, j, i in spans])


def _linear_attention(
    o: LinearAttentionOperator, example: Tensor, target: Tensor, source: Tensor
) -> Tensor:
    # The product of query, decay and key, (E, H).
    left = _between(o.log_decay, example, target, source).exp()  # (E, H, 1 or N)
    return (o.query[example, target] * left * o.key[example, source]).sum(-1)


def _diagonal(o: DiagonalOperator, example: Tensor, target: Tensor, source: Tensor) -> Tensor:
    # The sum over states of read, decay and write, of channels in groups (E, G, D / G, N).
    groups = o.B.shape[2]
    dt = o.dt.clamp(max=HUGE)
    steps = _between(dt, example, target, source)  # (E, D)
    left = decay(steps[..., None] * o.A).unflatten(1, (groups, -1))
    read_write = (o.C[example, target] * o.B[example, source])[:, :, None]
    alpha = (left * read_write).sum(-1).flatten(1) * o.right[example, source]
    return alpha if o.left is None else alpha * o.left[example, target]
