r"""Diagonal recurrences: S6, and with state size one RG-LRU, WKV and HGRN.

Per channel d and state n: :math:`h_t = e^{A_{dn} \Delta_{td}} h_{t-1} + B_{tn} r_{td} v_{td}`,
:math:`y_t = l_{td} \sum_n C_{tn} h_t`, so that

.. math::
    \alpha^d_{ij} = l_{id} \sum_n C_{in}
        \exp\Big(A_{dn} \sum_{k=j+1}^{i} \Delta_{kd}\Big) B_{jn} r_{jd}, \quad j \le i.

With :math:`r = \Delta` and :math:`l = 1` this is the hidden attention of Mamba (Ali et al.,
eq. 13); with a gate in l, an activation in r and a convolution behind it, the unified one
(Zimerman et al., eq. 9).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm import ops
from captum_ssm.operators._base import TokenOperator, check_rmatvec
from captum_ssm.operators.composed import product


@dataclass(frozen=True)
class DiagonalOperator(TokenOperator):
    """A diagonal recurrence with optional row and column factors.

    The operator is ``diag(left) alpha diag(right)``; one map per channel. All tensors are
    float32, or all float64.

    Args:
        dt (Tensor): ``(B, L, D)``, nonnegative decay steps.
        right (Tensor): ``(B, L, D)``, column factors (Delta for S6).
        A (Tensor): ``(D, N)``, nonpositive decay rates.
        B (Tensor): ``(B, L, G, N)``, input coefficients; channel d is in group ``d // (D // G)``.
        C (Tensor): ``(B, L, G, N)``, output coefficients.
        left (Tensor, optional): ``(B, L, D)``, row factors. Default: None

    Raises:
        ValueError, TypeError: at the first use, for tensors that do not fit together.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> v = torch.randn(1, 5, 4)
        >>> y = torch.einsum("bdij,bjd->bid", operator.matrix(), v)  # from whole maps
        >>> torch.testing.assert_close(operator.matvec(v), y)
        >>> operator.rows(torch.tensor([[4]]), "mean").shape  # the last row alone, in linear time
        torch.Size([1, 1, 5])
    """

    dt: Tensor
    right: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    left: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D = self.dt.shape
        return B, L, D, D

    @property
    def reference(self) -> Tensor:
        return self.dt

    def matvec(self, v: Tensor) -> Tensor:
        return ops.diagonal_scan(v, self.dt, self.right, self.A, self.B, self.C, self.left)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self.convolved_rmatvec(w, None, reduction)

    def row_tile(self, start: int, stop: int) -> Tensor:
        return self.convolved_row_tile(start, stop, None)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return self.convolved_map_rows(index, start, stop, None)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        return replace(
            self,
            left=product(self.left, left),
            right=self.right if right is None else self.right * right,
        )

    # The kernels fold a convolution in.

    def convolved_rmatvec(
        self, w: Tensor, taps: Tensor | None, reduction: str | None = None
    ) -> Tensor:
        mean = check_rmatvec(reduction)
        return ops.diagonal_vecmat(
            w, self.dt, self.right, self.A, self.B, self.C, self.left, taps, mean
        )

    def convolved_row_tile(self, start: int, stop: int, taps: Tensor | None) -> Tensor:
        return ops.diagonal_mean(
            self.dt, self.right, self.A, self.B, self.C, self.left, taps, start, stop
        )

    def convolved_map_rows(
        self, index: Tensor, start: int, stop: int, taps: Tensor | None
    ) -> Tensor:
        return ops.diagonal_rows(index, *self._slice(start, stop, taps))

    def _slice(self, start: int, stop: int, taps: Tensor | None) -> tuple[Any, ...]:
        # The coefficients of some channels. Where they do not cover whole groups, the groups
        # are written out, one per channel.
        if (start, stop) == (0, self.channels):
            return self.dt, self.right, self.A, self.B, self.C, self.left, taps
        size = self.channels // self.B.shape[2]
        first, last = start // size, (stop - 1) // size
        B, C = self.B[:, :, first : last + 1], self.C[:, :, first : last + 1]
        if first != last and (start % size or stop % size):
            group = torch.arange(start, stop, device=self.device) // size - first
            B, C = B[:, :, group], C[:, :, group]
        return (
            self.dt[..., start:stop],
            self.right[..., start:stop],
            self.A[start:stop],
            B,
            C,
            None if self.left is None else self.left[..., start:stop],
            None if taps is None else taps[start:stop],
        )
