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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm import ops
from captum_ssm.operators._base import TokenOperator


@dataclass(frozen=True)
class DiagonalOperator(TokenOperator):
    """A diagonal recurrence with optional row and column factors and a convolution.

    The operator is ``diag(left) alpha diag(right) conv + diag(diagonal) conv``; one map per
    channel. All tensors are float32, or all float64.

    Args:
        dt (Tensor): ``(B, L, D)``, nonnegative decay steps.
        right (Tensor): ``(B, L, D)``, column factors (Delta for S6).
        A (Tensor): ``(D, N)``, nonpositive decay rates.
        B (Tensor): ``(B, L, G, N)``, input coefficients; channel d is in group ``d // (D // G)``.
        C (Tensor): ``(B, L, G, N)``, output coefficients.
        left (Tensor, optional): ``(B, L, D)``, row factors. Default: None
        conv (Tensor, optional): ``(D, K)``, causal taps applied before the recurrence.
            Default: None
        diagonal (Tensor, optional): ``(B, L, D)``, added on the diagonal, after the
            convolution. Default: None
    """

    dt: Tensor
    right: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    left: Tensor | None = None
    conv: Tensor | None = None
    diagonal: Tensor | None = None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.dt.shape[0]

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.dt.shape[1]

    @property
    def channels(self) -> int:  # type: ignore[override]
        return self.dt.shape[2]

    @property
    def maps(self) -> int:  # type: ignore[override]
        return self.dt.shape[2]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.dt.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.dt.device

    def apply(self, v: Tensor) -> Tensor:
        if self.conv is not None:
            v = causal_conv(v, self.conv)
        y = ops.diagonal_scan(v, self.dt, self.right, self.A, self.B, self.C, self.left)
        return y if self.diagonal is None else y + self.diagonal * v

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        if reduction not in (None, "mean"):
            raise ValueError(f"reduction is {reduction!r}; vecmat accepts 'mean' and None.")
        mean = reduction == "mean"
        u = ops.diagonal_vecmat(
            w, self.dt, self.right, self.A, self.B, self.C, self.left, self.conv, mean
        )
        if self.diagonal is None:
            return u
        if mean and w.dim() == 2:
            return u + self._band_vecmat(w)
        local = (w if w.dim() == 3 else w[..., None]) * self.diagonal
        if self.conv is not None:
            local = causal_conv_transpose(local, self.conv)
        return u + (local.mean(-1) if mean else local)

    def row_tile(self, start: int, stop: int) -> Tensor:
        tile = ops.diagonal_mean(
            self.dt, self.right, self.A, self.B, self.C, self.left, self.conv, start, stop
        )
        if self.diagonal is not None:
            index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
            self._add_band(tile, index, self._band())
        return tile

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        tile = ops.diagonal_rows(index, *self._slice(start, stop))
        if self.diagonal is not None:
            taps = self._taps()[start:stop]  # (m, K)
            at = self.diagonal[..., start:stop].transpose(1, 2)  # (B, m, L)
            self._add_band(tile, index, at[..., None] * taps[:, None, :])
        return tile

    def rows(self, index: Tensor, reduction: str | None = None) -> Tensor:
        if reduction != "mean" or index.shape[1] > 4:
            return super().rows(index, reduction)
        # A few rows of the mean: one reversed scan each, without the (B, D, R, L) rows.
        one_hot = torch.nn.functional.one_hot(index, self.length).to(self.dtype)  # (B, R, L)
        return torch.stack([self.vecmat(w, "mean") for w in one_hot.unbind(1)], 1)

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> DiagonalOperator:
        if self.conv is not None:
            raise ValueError("the operator already ends in a convolution; compose() once.")
        diagonal = self.diagonal
        if skip is not None:
            skip = skip.to(self.dtype).expand_as(self.dt)
            diagonal = skip if diagonal is None else diagonal + skip
        for factor in (left, right):
            if factor is not None and diagonal is not None:
                diagonal = diagonal * factor
        return DiagonalOperator(
            self.dt,
            self.right if right is None else self.right * right,
            self.A,
            self.B,
            self.C,
            _product(self.left, left),
            conv,
            diagonal,
        )

    def _slice(self, start: int, stop: int) -> tuple[Any, ...]:
        # The coefficients of some channels. Where they do not cover whole groups, the groups
        # are written out, one per channel.
        if (start, stop) == (0, self.channels):
            return self.dt, self.right, self.A, self.B, self.C, self.left, self.conv
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
            None if self.conv is None else self.conv[start:stop],
        )

    def _taps(self) -> Tensor:
        if self.conv is not None:
            return self.conv.flip(-1)  # (D, K), by lag
        return torch.ones(self.channels, 1, dtype=self.dtype, device=self.device)

    def _band(self) -> Tensor:
        # Channel mean of diag(diagonal) conv, by row and lag: (B, L, K).
        assert self.diagonal is not None
        return self.diagonal @ self._taps() / self.channels

    def _band_vecmat(self, w: Tensor) -> Tensor:
        band = w[..., None] * self._band()  # (B, L, K)
        out = torch.zeros_like(w)
        for lag in range(min(band.shape[-1], self.length)):
            out[:, : self.length - lag] += band[:, lag:, lag]
        return out

    def _add_band(self, tile: Tensor, index: Tensor, band: Tensor) -> None:
        # tile (B, [m,] R, L) += band (B, [m,] L, K) at the rows `index` and their K last columns.
        for lag in range(min(band.shape[-1], self.length)):
            column = index - lag  # (B, R)
            inside = column >= 0
            at, value = column.clamp(min=0), band[..., lag]
            if tile.dim() == 4:
                at, inside = (t[:, None].expand(tile.shape[:3]) for t in (at, inside))
                value = value.gather(2, index[:, None].expand(tile.shape[:3]))
            else:
                value = value.gather(1, index)
            tile.scatter_add_(-1, at[..., None], torch.where(inside, value, 0)[..., None])


def causal_conv(v: Tensor, taps: Tensor) -> Tensor:
    """A causal depthwise convolution of ``v (B, L, D)`` with ``taps (D, K)``: ``(B, L, D)``."""
    K = taps.shape[-1]
    padded = torch.nn.functional.pad(v.transpose(1, 2), (K - 1, 0))
    out = torch.nn.functional.conv1d(padded, taps[:, None, :], groups=taps.shape[0])
    return out.transpose(1, 2)


def causal_conv_transpose(w: Tensor, taps: Tensor) -> Tensor:
    """The adjoint of :func:`causal_conv`: ``(B, L, D)`` to ``(B, L, D)``."""
    return causal_conv(w.flip(1), taps).flip(1)


def naive_matrix(op: DiagonalOperator) -> Tensor:
    """Every map by the equation, term by term, in float64: ``(B, D, L, L)``. For tests."""
    dt, A = op.dt.double(), op.A.double()
    group = torch.arange(op.channels, device=op.device) // (op.channels // op.B.shape[2])
    B, C = op.B.double()[:, :, group], op.C.double()[:, :, group]  # (B, L, D, N)
    out = torch.zeros(op.batch, op.channels, op.length, op.length, dtype=torch.float64)
    for i in range(op.length):
        for j in range(i + 1):
            decay = torch.exp(A * dt[:, j + 1 : i + 1].sum(1)[..., None])  # (B, D, N)
            out[:, :, i, j] = (C[:, i] * decay * B[:, j]).sum(-1) * op.right.double()[:, j]
    if op.left is not None:
        out = out * op.left.double().transpose(1, 2)[..., None]
    if op.diagonal is not None:
        out = out + torch.diag_embed(op.diagonal.double().transpose(1, 2))
    if op.conv is not None:
        taps = torch.zeros_like(out[0])  # (D, L, L)
        for lag in range(min(op.conv.shape[1], op.length)):
            at = torch.arange(lag, op.length)
            taps[:, at, at - lag] = op.conv.double()[:, -1 - lag, None]
        out = out @ taps
    return out


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a * b
