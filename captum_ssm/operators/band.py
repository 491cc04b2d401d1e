"""Operators that reach no further than a convolution, and sums of operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm.operators._base import TokenOperator, check_vecmat


@dataclass(frozen=True)
class BandOperator(TokenOperator):
    """A diagonal behind an optional convolution, ``diag(diagonal) conv``: one map per channel.

    Skip connections and the bonus of WKV are such operators.

    Args:
        diagonal (Tensor): ``(B, L, D)``.
        conv (Tensor, optional): ``(D, K)``, causal taps as in :class:`torch.nn.Conv1d`.
            Default: None

    Examples::

        >>> skip = BandOperator(torch.rand(1, 5, 4))
        >>> skip.matrix().shape  # one diagonal matrix a channel
        torch.Size([1, 4, 5, 5])
    """

    diagonal: Tensor
    conv: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D = self.diagonal.shape
        return B, L, D, D

    @property
    def reference(self) -> Tensor:
        return self.diagonal

    def apply(self, v: Tensor) -> Tensor:
        return self.diagonal * (v if self.conv is None else causal_conv(v, self.conv))

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_vecmat(reduction)
        if mean and w.dim() == 2:
            return _shift_add(w[..., None] * self._mean_band())
        u = (w if w.dim() == 3 else w[..., None]) * self.diagonal
        if self.conv is not None:
            u = causal_conv_transpose(u, self.conv)
        return u.mean(-1) if mean else u

    def row_tile(self, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        return self._scatter(index, self._mean_band()[:, None])[:, 0]

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        at = self.diagonal[..., start:stop].transpose(1, 2)  # (B, m, L)
        return self._scatter(index, at[..., None] * self._taps()[start:stop, None, :])

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        if self.conv is not None and right is not None:
            scaled = self if left is None else BandOperator(self.diagonal * left, self.conv)
            return behind_conv(scaled, left, skip, right, conv)
        diagonal = self.diagonal
        for factor in (left, right):
            diagonal = diagonal if factor is None else diagonal * factor
        composed = BandOperator(diagonal, join_taps(self.conv, conv))
        return with_skip(composed, left, skip, right, conv)

    def _taps(self) -> Tensor:
        # By lag: (D, K).
        if self.conv is not None:
            return self.conv.flip(-1)
        return torch.ones(self.channels, 1, dtype=self.dtype, device=self.device)

    def _mean_band(self) -> Tensor:
        # The channel mean by row and lag: (B, L, K).
        return self.diagonal @ self._taps() / self.channels

    def _scatter(self, index: Tensor, band: Tensor) -> Tensor:
        # Rows index (B, R) of band (B, m, L, K), by row and lag, as (B, m, R, L).
        B, m, L, K = band.shape
        at = index[:, None, :, None].expand(B, m, -1, K)
        values = band.gather(2, at)  # (B, m, R, K)
        columns = at - torch.arange(K, device=index.device)
        values = torch.where(columns >= 0, values, 0)
        rows = torch.zeros(B, m, index.shape[1], L, dtype=band.dtype, device=band.device)
        return rows.scatter_add_(-1, columns.clamp(min=0), values)


@dataclass(frozen=True)
class SumOperator(TokenOperator):
    """The sum of operators with the same maps: both directions of a bidirectional mixer, ...

    Args:
        parts (tuple of TokenOperator): at least one.

    Examples::

        >>> one, other = BandOperator(torch.rand(1, 5, 4)), BandOperator(torch.rand(1, 5, 4))
        >>> total = SumOperator((one, other))
        >>> torch.testing.assert_close(total.matrix(), one.matrix() + other.matrix())
    """

    parts: tuple[TokenOperator, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.parts[0].sizes

    @property
    def reference(self) -> Tensor:
        return self.parts[0].reference

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self.parts)

    def apply(self, v: Tensor) -> Tensor:
        return sum_of([part.apply(v) for part in self.parts])

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return sum_of([part.vecmat(w, reduction) for part in self.parts])

    def row_tile(self, start: int, stop: int) -> Tensor:
        return sum_of([part.row_tile(start, stop) for part in self.parts])

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return sum_of([part.map_rows(index, start, stop) for part in self.parts])

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        parts = tuple(p.compose(left=left, right=right, conv=conv) for p in self.parts)
        return with_skip(SumOperator(parts), left, skip, right, conv)


@dataclass(frozen=True)
class ChainOperator(TokenOperator):
    """An operator behind another of one map per channel: ``first second``.

    Args:
        first (TokenOperator): the operator applied last, with one map per channel.
        second (BandOperator): the operator applied to the values.

    Examples::

        >>> conv = BandOperator(torch.ones(1, 5, 4), conv=torch.rand(4, 2))
        >>> chain = ChainOperator(BandOperator(torch.rand(1, 5, 4)), conv)
        >>> torch.testing.assert_close(chain.matrix(), chain.first.matrix() @ conv.matrix())
    """

    first: TokenOperator
    second: BandOperator

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.first.sizes

    @property
    def reference(self) -> Tensor:
        return self.first.reference

    @property
    def is_causal(self) -> bool:
        return self.first.is_causal

    def apply(self, v: Tensor) -> Tensor:
        return self.first.apply(self.second.apply(v))

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self.second.vecmat(self.first.vecmat(w), reduction)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        rows = self.first.map_rows(index, start, stop)  # (B, m, R, L)
        rows = rows * self.second.diagonal[..., start:stop].mT[:, :, None]
        if self.second.conv is None:
            return rows
        return conv_columns(rows, self.second.conv[start:stop, None])

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        first = self.first if left is None else self.first.compose(left=left)
        if self.second.conv is not None and right is not None:
            return behind_conv(ChainOperator(first, self.second), left, skip, right, conv)
        second = self.second.compose(right=right, conv=conv)
        assert isinstance(second, BandOperator)
        composed = ChainOperator(first, second)
        return with_skip(composed, left, skip, right, conv)


def behind_conv(
    scaled: TokenOperator,
    left: Tensor | None,
    skip: Tensor | None,
    right: Tensor,
    conv: Tensor | None,
) -> TokenOperator:
    """``scaled``, which ends in a convolution, with a column factor composed behind it."""
    chained = ChainOperator(scaled, BandOperator(right, conv))
    return with_skip(chained, left, skip, right, conv)


def with_skip(
    composed: TokenOperator,
    left: Tensor | None,
    skip: Tensor | None,
    right: Tensor | None,
    conv: Tensor | None,
) -> TokenOperator:
    """``composed`` plus ``diag(left skip right) conv``."""
    if skip is None:
        return composed
    shape = (composed.batch, composed.length, composed.channels)
    diagonal = skip.to(composed.dtype).expand(shape)
    for factor in (left, right):
        diagonal = diagonal if factor is None else diagonal * factor
    return SumOperator((composed, BandOperator(diagonal, conv)))


def causal_conv(v: Tensor, taps: Tensor) -> Tensor:
    """A causal depthwise convolution of ``v (B, L, D)`` with ``taps (D, K)``: ``(B, L, D)``."""
    if taps.shape[-1] > 8:
        padded = nn.functional.pad(v.transpose(1, 2), (taps.shape[-1] - 1, 0))
        out = nn.functional.conv1d(padded, taps[:, None, :], groups=taps.shape[0])
        return out.transpose(1, 2)
    # Tap by tap: torch's convolution wants time last, and for few taps the two copies cost more
    # than the work.
    out = v * taps[:, -1]
    for lag in range(1, min(taps.shape[-1], v.shape[1])):
        out[:, lag:].addcmul_(v[:, :-lag], taps[:, -1 - lag])
    return out


def causal_conv_transpose(w: Tensor, taps: Tensor) -> Tensor:
    """The adjoint of :func:`causal_conv`: ``(B, L, D)`` to ``(B, L, D)``."""
    return causal_conv(w.flip(1), taps).flip(1)


def conv_columns(rows: Tensor, taps: Tensor) -> Tensor:
    """Rows ``(..., L)`` times the matrix of a causal convolution with ``taps (..., K)``."""
    out = torch.zeros_like(rows)
    L, K = rows.shape[-1], taps.shape[-1]
    for lag in range(min(K, L)):
        out[..., : L - lag] += (rows * taps[..., K - 1 - lag, None])[..., lag:]
    return out


def join_taps(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The taps of two convolutions in a row: ``(D, K1)``, ``(D, K2)`` to ``(D, K1 + K2 - 1)``."""
    if first is None or second is None:
        return second if first is None else first
    K1, K2 = first.shape[1], second.shape[1]
    taps = first.new_zeros(first.shape[0], K1 + K2 - 1)
    for k in range(K1):
        taps[:, k : k + K2] += first[:, k, None] * second
    return taps


def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product of two factors, None standing for one."""
    return b if a is None else a if b is None else a * b


def _shift_add(band: Tensor) -> Tensor:
    # band (B, L, K), by row and lag, summed onto columns: (B, L).
    L, out = band.shape[1], torch.zeros_like(band[..., 0])
    for lag in range(min(band.shape[2], L)):
        out[:, : L - lag] += band[:, lag:, lag]
    return out


def sum_of(values: list[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
