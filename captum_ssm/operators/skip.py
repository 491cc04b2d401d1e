"""A diagonal, also after a convolution: skip connections, the bonus of WKV, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_ssm.kernels.convolution import causal_conv, causal_conv_transpose
from captum_ssm.operators.base import TokenOperator, check_rmatvec
from captum_ssm.operators.factors import lagged, product


@dataclass(frozen=True)
class SkipOperator(TokenOperator):
    """A diagonal: each token's own value, times a factor. One map per channel.

    Skip connections and the bonus of WKV are such operators.

    Args:
        diagonal (Tensor): ``(B, L, D)``.
        taps (Tensor, optional): ``(D, K)``, of a causal convolution before it. Default: None
        right (Tensor, optional): ``(B, L, D)``, column factors before the convolution.
            Default: None

    Examples::

        >>> skip = SkipOperator(torch.rand(1, 5, 4))
        >>> skip.matrix().shape  # one diagonal matrix per channel
        torch.Size([1, 4, 5, 5])
    """

    diagonal: Tensor
    taps: Tensor | None = None
    right: Tensor | None = None
    axes = (("diagonal", "BLD"), ("taps", "D"), ("right", "BLD"))

    def matvec(self, v: Tensor) -> Tensor:
        return self.diagonal * causal_conv(v if self.right is None else v * self.right, self.taps)

    # After a convolution it is a band matrix: a number for each row and lag.

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        if mean and w.dim() == 2:
            return _shift_add(w[..., None] * self._mean_band)
        u = (w if w.dim() == 3 else w[..., None]) * self.diagonal
        u = causal_conv_transpose(u, self.taps)
        u = u if self.right is None else u * self.right
        return u.mean(-1) if mean else u

    def row_tile(self, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        return _scatter(index, self._mean_band[:, None])[:, 0]

    def add_to_tile(self, tile: Tensor, start: int) -> None:
        stop = start + tile.shape[1]
        for lag, band in enumerate(self._mean_band[:, :stop].unbind(-1)):
            tile.diagonal(start - lag, 1, 2).add_(band[:, max(start, lag) :])

    def row_bounds(self) -> Tensor:
        return self._mean_band.abs().amax(-1) * self.channels

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        at = self.diagonal[..., start:stop].transpose(1, 2)  # (B, m, L)
        band = at[..., None] * self._by_lag[start:stop, None, :]
        if self.right is not None:
            lags = [x[..., start:stop].mT for x in self._lagged]
            band = band * torch.stack(lags, -1)
        return _scatter(index, band)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        if self.taps is not None:
            diagonal = self.diagonal if left is None else self.diagonal * left
            return SkipOperator(diagonal, self.taps, product(self.right, right))
        factor = product(left, right)
        return self if factor is None else SkipOperator(self.diagonal * factor)

    def with_taps(self, taps: Tensor, right: Tensor | None = None) -> TokenOperator | None:
        return SkipOperator(self.diagonal, taps, right) if self.taps is None else None

    @property
    def _by_lag(self) -> Tensor:
        # (D, K).
        if self.taps is not None:
            return self.taps.flip(-1)
        return torch.ones(self.channels, 1, dtype=self.dtype, device=self.device)

    @property
    def _lagged(self) -> list[Tensor]:
        # What right is at the token that each lag reads, (B, L, D) each.
        assert self.right is not None
        return [lagged(self.right, lag) for lag in range(self._by_lag.shape[1])]

    @property
    def _mean_band(self) -> Tensor:
        # The channel mean by row and lag: (B, L, K).
        if self.right is None:
            return self.diagonal @ self._by_lag / self.channels
        bands = []
        for lag, tap in enumerate(self._by_lag.mT):
            none = min(lag, self.length)  # tokens that have none so far before them
            read = self.right[:, : self.length - none]
            bands.append(pad((self.diagonal[:, none:] * read) @ tap, (none, 0)))
        return torch.stack(bands, -1) / self.channels


def _scatter(index: Tensor, band: Tensor) -> Tensor:
    # Rows index (B, R) of band (B, m, L, K), by row and lag, as (B, m, R, L).
    B, m, L, K = band.shape
    at = index[:, None, :, None].expand(B, m, -1, K)
    values = band.gather(2, at)  # (B, m, R, K)
    columns = at - torch.arange(K, device=index.device)
    values = torch.where(columns >= 0, values, 0)
    rows = torch.zeros(B, m, index.shape[1], L, dtype=band.dtype, device=band.device)
    return rows.scatter_add_(-1, columns.clamp(min=0), values)


def _shift_add(band: Tensor) -> Tensor:
    # band (B, L, K), by row and lag, summed onto columns: (B, L).
    L, out = band.shape[1], torch.zeros_like(band[..., 0])
    for lag in range(min(band.shape[2], L)):
        out[:, : L - lag] += band[:, lag:, lag]
    return out
