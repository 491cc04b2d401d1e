"""Linear attention with decay, and the delta rule: recurrences on a matrix-valued state.

The equations are in :mod:`captum_ssm.kernels.linear_attention`. Without e and r this is linear
attention with a decay per head (Mamba-2, RetNet, lightning attention, mLSTM) or per key dimension
(GLA, HGRN2, RWKV-6). With them it is the delta rule (DeltaNet, Gated DeltaNet, Kimi Delta
Attention, RWKV-7): before a value is written, the state is read with r_t, and the result times
e_t is subtracted. The matrix is exact in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import LinearAttentionCoefficients
from captum_ssm.operators.base import TokenOperator
from captum_ssm.operators.factors import in_tiles, sum_between
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.recurrence import StateOperator, for_each
from captum_ssm.operators.states import around, units_after, units_before


@dataclass(frozen=True)
class LinearAttentionOperator(LinearAttentionCoefficients, HeadOperator, StateOperator):
    """Linear attention with decay and an optional delta rule; one map per head.

    The other arguments are those of :class:`~captum_ssm.kernels.LinearAttentionCoefficients`.

    Args:
        width (int): P, the channels of a head.

    Raises:
        ValueError, TypeError: at the first use, for tensors whose shapes do not agree.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> operator = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> scores = torch.einsum("bihn,bjhn->bhij", query, key).tril()  # without any decay
        >>> torch.testing.assert_close(operator.matrix(), scores)
    """

    width: int = field(kw_only=True)
    written_by = ("key", "log_decay", "erase", "probe")
    axes = tuple((name, "BLD") for name in ("query", "key", "log_decay", "erase", "probe", "bonus"))

    @property
    def heads(self) -> tuple[int, int, int]:
        B, L, H, _ = self.query.shape
        return B, L, H

    def matvec_heads(self, v: Tensor) -> Tensor:
        return kernels.linear_attention_scan(v.transpose(1, 2), self).transpose(1, 2)

    def rmatvec_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        some = self.narrow(start, stop)
        return kernels.linear_attention_rmatvec(w.transpose(1, 2), some).transpose(1, 2)

    def between_states(self) -> TokenOperator:
        N = self.query.shape[-1]

        def quiet(x: Tensor | None) -> Tensor | None:
            return None if x is None else around(x, 0.0, 0.0, N)

        return LinearAttentionOperator(
            query=units_after(self.query),
            key=units_before(self.key),
            log_decay=around(self.log_decay, 0.0, 0.0, N),
            erase=quiet(self.erase),
            probe=quiet(self.probe),
            bonus=quiet(self.bonus),
            width=self.width,
        )

    def map_bounds(self) -> tuple[Tensor, Tensor] | None:
        if self.erase is not None:
            return None
        query, key = self.query.norm(dim=-1), self.key.norm(dim=-1)  # (B, L, H)
        if self.bonus is None:
            return query, key
        return torch.maximum(query, self.bonus.abs()), key.clamp(min=1)

    def entries(self, example: Tensor, target: Tensor, source: Tensor) -> Tensor | None:
        if self.erase is not None or self.bonus is not None:
            return None

        def at(example: Tensor, target: Tensor, source: Tensor) -> Tensor:
            left = sum_between(self.log_decay, example, target, source).exp()  # (E, H, 1 or N)
            return (self.query[example, target] * left * self.key[example, source]).sum(-1)

        return in_tiles(at, self.query[0, 0].numel(), example, target, source)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return kernels.linear_attention_rows(index, self.narrow(start, stop))

    def row_tile(self, start: int, stop: int) -> Tensor:
        return kernels.linear_attention_mean(self, start, stop)

    def weighted_tile(
        self,
        start: int,
        left: Tensor,
        right: Tensor | None,
        taps: Tensor | None,
        columns: Tensor | None,
    ) -> Tensor | None:
        if left.device.type != "cpu" or not kernels.extension_loaded():
            return None
        return kernels.linear_attention_weighted(left, right, taps, columns, self, start)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[2:], self.width)

    def reading(self, vector: Tensor) -> LinearAttentionOperator:
        return replace(self, query=vector.to(self.query).expand_as(self.query), bonus=None)

    def writing(self, vector: Tensor) -> LinearAttentionOperator:
        bonus = None if self.bonus is None else torch.zeros_like(self.bonus)
        return replace(self, key=vector.to(self.key).expand_as(self.key), bonus=bonus)

    def of_features(self, directions: Tensor) -> LinearAttentionOperator:
        F = len(directions)

        def spread(x: Tensor | None) -> Any:
            return None if x is None else for_each(x.repeat_interleave(self.width, 2), F, 2)

        key = spread(self.key)
        return LinearAttentionOperator(
            query=directions.movedim(2, 3).flatten(0, 2).expand_as(key),  # (F H P, N)
            key=key,
            log_decay=spread(self.log_decay),
            erase=spread(self.erase),
            probe=spread(self.probe),
            width=1,
        )

    def carried(self, state: Tensor, t: int) -> Tensor:
        state = state * self.log_decay[:, t, ..., None].exp()  # (B, H, N, P)
        if self.erase is None or self.probe is None:
            return state
        read = (self.probe[:, t, ..., None] * state).sum(-2, keepdim=True)
        return state - self.erase[:, t, ..., None] * read

    def decays(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.erase is not None:
            return None
        return self.key, self.log_decay, torch.ones_like(self.key[0, 0])

    def joined_states(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.unflatten(-1, (-1, self.width)) for part in parts], -2)

    def split_states(self, state: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.flatten(-2) for part in state.unbind(-2))
