r"""Diagonal recurrences: S6, and with state size one RG-LRU, WKV and HGRN.

Per channel d and state n: :math:`h_t = e^{A_{dn} \Delta_{td}} h_{t-1} + B_{tn} r_{td} v_{td}`,
:math:`y_t = l_{td} \sum_n C_{tn} h_t`, so that

.. math::
    \alpha^d_{ij} = l_{id} \sum_n C_{in}
        \exp\Big(A_{dn} \sum_{k=j+1}^{i} \Delta_{kd}\Big) B_{jn} r_{jd}, \quad j \le i.

With :math:`r = \Delta` and :math:`l = 1` this is the hidden attention of Mamba (Ali et al.,
eq. 13); with a gate in l, an activation in r and a convolution before it, the unified one
(Zimerman et al., eq. 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import DiagonalCoefficients
from captum_ssm.kernels.diagonal_states import HUGE, decay
from captum_ssm.operators.base import TokenOperator, check_rmatvec
from captum_ssm.operators.factors import in_tiles, lagged, product, sum_between, sum_of
from captum_ssm.operators.recurrence import StateOperator, for_each
from captum_ssm.operators.states import around, units_after, units_before


@dataclass(frozen=True)
class DiagonalOperator(DiagonalCoefficients, StateOperator):
    """A diagonal recurrence with optional row and column factors; one map per channel.

    The operator is ``diag(left) alpha diag(right) conv diag(columns)``. The arguments are those
    of :class:`~captum_ssm.kernels.DiagonalCoefficients`, all float32 or all float64.

    Raises:
        ValueError, TypeError: at the first use, for tensors whose shapes do not agree.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> v = torch.randn(1, 5, 4)
        >>> y = torch.einsum("bdij,bjd->bid", operator.matrix(), v)  # from whole maps
        >>> torch.testing.assert_close(operator.matvec(v), y)
        >>> operator.rows(torch.tensor([[4]]), "mean").shape  # the last row alone, in linear time
        torch.Size([1, 1, 5])
    """

    written_by = ("dt", "right", "B")
    axes = (
        *((name, "BLD") for name in ("dt", "right", "B", "C", "left", "columns")),
        *(("A", "D"), ("conv", "D")),
    )

    def matvec(self, v: Tensor) -> Tensor:
        return kernels.diagonal_scan(v, self)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return kernels.diagonal_rmatvec(w, self, check_rmatvec(reduction))

    def row_tile(self, start: int, stop: int) -> Tensor:
        return kernels.diagonal_mean(self, start, stop)

    def row_bounds(self) -> Tensor:
        # Cauchy-Schwarz over the channels of a group; decays are at most one.
        taps = self.right.new_ones(self.channels, 1) if self.conv is None else self.conv
        columns = sum_of(
            [
                self._group_norms(lagged(self.right, -lag) * tap, self.columns)
                * lagged(self.B.abs(), -lag)
                for lag, tap in enumerate(taps.flip(-1)[:, : self.length].mT)
            ]
        )
        left = torch.ones_like(self.dt) if self.left is None else self.left
        rows = self._group_norms(left) * self.C.abs()  # (B, L, G, N)
        return (rows * columns.cummax(1).values).sum((2, 3))

    def _group_norms(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        x = x if factor is None else x * factor
        return x.unflatten(-1, (self.B.shape[2], -1)).norm(dim=-1, keepdim=True)  # (B, L, G, 1)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return kernels.diagonal_rows(index, self.narrow(start, stop))

    def entries(self, example: Tensor, target: Tensor, source: Tensor) -> Tensor | None:
        if self.conv is not None or self.columns is not None:
            return None
        dt, groups = self.dt.clamp(max=HUGE), self.B.shape[2]

        def at(example: Tensor, target: Tensor, source: Tensor) -> Tensor:
            # The sum over states of read, decay and write, of channels in groups (E, G, D / G, N).
            steps = sum_between(dt, example, target, source)  # (E, D)
            left = decay(steps[..., None] * self.A).unflatten(1, (groups, -1))
            read_write = (self.C[example, target] * self.B[example, source])[:, :, None]
            alpha = (left * read_write).sum(-1).flatten(1) * self.right[example, source]
            return alpha if self.left is None else alpha * self.left[example, target]

        return in_tiles(at, self.A.numel(), example, target, source)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        right = self.right if right is None else self.right * right
        return replace(self, left=product(self.left, left), right=right)

    def between_states(self) -> TokenOperator | None:
        if self.conv is not None:
            return None
        N = self.A.shape[1]
        left = None if self.left is None else around(self.left, 1.0, 1.0, N)
        dt, right = around(self.dt, 0.0, 0.0, N), around(self.right, 1.0, 0.0, N)
        return DiagonalOperator(dt, right, self.A, units_before(self.B), units_after(self.C), left)

    def with_taps(self, taps: Tensor, right: Tensor | None = None) -> TokenOperator:
        return replace(self, conv=taps, columns=right)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.A.shape[1]

    def reading(self, vector: Tensor) -> DiagonalOperator:
        return replace(self, C=vector.to(self.C).expand_as(self.C), left=None)

    def writing(self, vector: Tensor) -> DiagonalOperator:
        B, right = vector.to(self.B).expand_as(self.B), torch.ones_like(self.right)
        return replace(self, B=B, right=right, columns=None)

    def of_features(self, directions: Tensor) -> DiagonalOperator:
        F, size = len(directions), self.channels // self.B.shape[2]
        write = for_each(self.B.repeat_interleave(size, 2), F, 2)
        return replace(
            self,
            dt=for_each(self.dt, F),
            right=for_each(self.right, F),
            A=for_each(self.A, F, 0),
            B=write,
            C=directions.flatten(0, 1).expand_as(write),
            left=None,
            conv=for_each(self.conv, F, 0),
            columns=for_each(self.columns, F),
        )

    def carried(self, state: Tensor, t: int) -> Tensor:
        return state * torch.exp(self.A * self.dt[:, t, :, None])

    def decays(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.conv is not None:
            return None
        written = self.B.repeat_interleave(self.channels // self.B.shape[2], 2)
        return written * self.right[..., None], -self.dt[..., None], -self.A

    def joined_states(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([*parts], -1)

    def split_states(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.unbind(-1)


def one_state(dt: Tensor, right: Tensor, left: Tensor | None = None) -> DiagonalOperator:
    """The recurrence ``h_t = exp(-dt_t) h_{t-1} + right_t v_t``, one state per channel."""
    ones = torch.ones(*dt.shape[:2], 1, 1, dtype=dt.dtype, device=dt.device)
    return DiagonalOperator(dt, right, -ones.new_ones(dt.shape[-1], 1), ones, ones, left)
