"""Linear attention with decay, and the delta rule: recurrences on a matrix-valued state.

The equations are in :mod:`captum_ssm.kernels.linear_attention`. Without e and r this is linear
attention with a decay per head (Mamba-2, RetNet, lightning attention, mLSTM) or per key dimension
(GLA, HGRN2, RWKV-6). With them it is the delta rule (DeltaNet, Gated DeltaNet, Kimi Delta
Attention, RWKV-7): before a value is written, the state is read with r_t, and the result times
e_t is subtracted. The matrix is exact in both cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import LinearAttentionCoefficients
from captum_ssm.operators.base import TokenOperator
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.states import around, units_after, units_before


@dataclass(frozen=True)
class LinearAttentionOperator(LinearAttentionCoefficients, HeadOperator):
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
