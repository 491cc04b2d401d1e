"""Operators made of others: sums, row and column factors, convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels.weighted import weighted_rows_torch
from captum_ssm.operators.base import AroundOperator, PartsOperator, TokenOperator, check_rmatvec
from captum_ssm.operators.conv import (
    conv_columns,
    depthwise_conv,
    depthwise_conv_transpose,
    join_taps,
    tap_columns,
)
from captum_ssm.operators.factors import product as product
from captum_ssm.operators.factors import sum_of as sum_of
from captum_ssm.operators.skip import SkipOperator as SkipOperator
from captum_ssm.utils.lazy import cached_property

# Rows of heads at a time, and entries of their maps, which should fit the caches.
ROWS, ENTRIES = 256, 1 << 22


@dataclass(frozen=True)
class SumOperator(PartsOperator):
    """The sum of operators, as the two directions of a bidirectional mixer.

    Where they do not have as many maps each, as attention next to a scan, it has one per channel.

    Args:
        parts (tuple of TokenOperator): at least one.

    Examples::

        >>> there, back = SkipOperator(torch.rand(1, 5, 4)), SkipOperator(torch.rand(1, 5, 4))
        >>> total = SumOperator((there, back))
        >>> torch.testing.assert_close(total.matrix(), there.matrix() + back.matrix())
    """

    parts: tuple[TokenOperator, ...]
    axes = (("parts", "operators"),)

    def __post_init__(self) -> None:
        if len({part.maps for part in self.parts}) > 1:
            parts = tuple(part.scaled(None, None) for part in self.parts)
            object.__setattr__(self, "parts", parts)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.parts[0].sizes

    def matvec(self, v: Tensor) -> Tensor:
        return sum_of([part.matvec(v) for part in self.parts])

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return sum_of([part.rmatvec(w, reduction) for part in self.parts])

    def row_tile(self, start: int, stop: int) -> Tensor:
        first, *others = self.parts
        tile = first.row_tile(start, stop)
        for part in others:
            part.add_to_tile(tile, start)
        return tile

    def add_to_tile(self, tile: Tensor, start: int) -> None:
        for part in self.parts:
            part.add_to_tile(tile, start)

    def row_bounds(self) -> Tensor:
        return sum_of([part.row_bounds() for part in self.parts])

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return sum_of([part.map_rows(index, start, stop) for part in self.parts])

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        return SumOperator(tuple(part.scaled(left, right) for part in self.parts))

    def convolved(self, taps: Tensor, grid: tuple[int, int] | None = None) -> TokenOperator:
        if grid is not None:
            return super().convolved(taps, grid)
        return SumOperator(tuple(part.convolved(taps) for part in self.parts))


@dataclass(frozen=True)
class ScaledOperator(AroundOperator):
    """``diag(left) alpha diag(right)``: one map per channel.

    For operators whose coefficients cannot include the factors: the P channels of a head share one
    matrix, but a gate or a norm differs between channels.

    Args:
        inner (TokenOperator): alpha.
        left (Tensor, optional): ``(B, L, D)``, row factors. Default: None
        right (Tensor, optional): ``(B, L, D)``, column factors. Default: None

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> inner = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> gate = torch.rand(1, 5, 8)
        >>> gated = ScaledOperator(inner, left=gate)  # one map per channel, with its gate
        >>> v = torch.randn(1, 5, 8)
        >>> torch.testing.assert_close(gated.matvec(v), gate * inner.matvec(v))
        >>> inner.matrix().shape, gated.matrix().shape
        (torch.Size([1, 2, 5, 5]), torch.Size([1, 8, 5, 5]))
    """

    inner: TokenOperator
    left: Tensor | None = None
    right: Tensor | None = None
    axes = (("inner", "operator"), ("left", "BLD"), ("right", "BLD"))

    @property
    def has_heads(self) -> bool:
        """Whether channels share a matrix."""
        return self.inner.maps < self.channels

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D, _ = self.inner.sizes
        return B, L, D, D

    def matvec(self, v: Tensor) -> Tensor:
        y = self.inner.matvec(v if self.right is None else v * self.right)
        return y if self.left is None else y * self.left

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        if self.left is not None:
            w = (w if w.dim() == 3 else w[..., None]) * self.left
        u = self.inner.rmatvec(w)
        if self.right is not None:
            u = u * self.right
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        P = self.inner.channels // self.inner.maps
        first, last = start // P, (stop - 1) // P
        rows = self.inner.map_rows(index, first, last + 1)
        if P > 1:
            rows = rows[:, torch.arange(start, stop, device=self.device) // P - first]
        if self.left is not None:
            at = index[..., None].expand(-1, -1, stop - start)
            rows = rows * self.left[..., start:stop].gather(1, at).mT[..., None]
        if self.right is not None:
            rows = rows * self.right[..., start:stop].mT[:, :, None]
        return rows  # (B, m, R, L)

    def row_bounds(self) -> Tensor:
        # Cauchy-Schwarz over the channels of a map.
        B, L, D, _ = self.sizes
        known, M = self.inner.map_bounds(), self.inner.maps
        ones = torch.ones(1, 1, 1, dtype=self.dtype, device=self.device)
        left, right = (
            (ones if x is None else x).expand(B, L, D).unflatten(-1, (M, -1)).norm(dim=-1)
            for x in (self.left, self.right)
        )
        if known is None:
            return torch.where(left.any(-1), torch.inf, 0.0).to(self.dtype)
        rows, columns = left * known[0], right * known[1]
        most = columns.cummax(1).values if self.is_causal else columns.amax(1, keepdim=True)
        return (rows * most).sum(-1)

    def row_tile(self, start: int, stop: int) -> Tensor:
        if not self.has_heads:
            return super().row_tile(start, stop)
        return self.convolved_row_tile(start, stop)

    def convolved_row_tile(
        self,
        start: int,
        stop: int,
        taps: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`row_tile`, of heads after a convolution with causal taps ``(D, K)``.

        ``columns (B, L, D)`` are factors before the convolution.
        """
        B, L, D, _ = self.sizes
        ones = torch.ones(1, 1, 1, dtype=self.dtype, device=self.device)
        left = (ones if self.left is None else self.left[:, start:stop]).expand(B, stop - start, D)
        # What has a graph is summed by what autograd knows.
        tensors = (self.left, self.right, taps, columns, self.inner.reference)
        has_graph = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in tensors
        )
        right = None if self.right is None else self.right.expand(B, L, D)
        if not has_graph:
            tile = self.inner.weighted_tile(start, left, right, taps, columns)
            if tile is not None:
                return tile
        by_lag = ones[0] if taps is None else taps.flip(-1)[:, :L].mT.contiguous()
        right = (ones if right is None else right).expand(B, L, D).mT.contiguous()
        sources = right * by_lag[:, None, :, None]  # (K, B, D, L)
        if columns is not None:
            before = columns.mT.contiguous()
            for lag in range(len(sources)):
                sources[lag, ..., lag:] *= before[..., : L - lag]
        weighted = weighted_rows_torch if has_graph else kernels.weighted_rows
        left, tiles = left / D, []
        for first in range(start, stop, ROWS):
            rows = left[:, first - start : first - start + ROWS]
            tiles.append(self._weighted(first, rows, sources, weighted))
        return torch.cat(tiles, 1) if len(tiles) > 1 else tiles[0]

    def _weighted(self, first: int, left: Tensor, sources: Tensor, weighted: Any) -> Tensor:
        # Rows from the first one on, of the sum over the maps.
        B, R, D = left.shape
        P = D // self.inner.maps
        index = torch.arange(first, first + R, device=self.device).expand(B, -1)
        last = first if self.is_causal else self.length
        parts = []
        for m, end in self.inner.map_tiles(R, ENTRIES):
            at = slice(m * P, end * P)
            rows = self.inner.map_rows(index, m, end)
            parts.append(weighted(rows, left[..., at], sources[:, :, at], last))
        return sum_of(parts)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        return ScaledOperator(self.inner, product(self.left, left), product(self.right, right))


@dataclass(frozen=True)
class ConvolvedOperator(AroundOperator):
    """An operator after a depthwise convolution, ``alpha conv diag(right)``: one map per channel.

    Args:
        inner (TokenOperator): alpha, with one map per channel.
        taps (Tensor): ``(D, K)``, causal along the tokens as in :class:`torch.nn.Conv1d`; or
            ``(D, Kh, Kw)`` with odd Kh and Kw, centered on the patches of an image as a
            zero-padded :class:`torch.nn.Conv2d`.
        grid (tuple of int, optional): (H, W) of the image's patches, H W = L, for 2-D taps.
            Default: None
        right (Tensor, optional): ``(B, L, D)``, column factors before the convolution.
            Default: None

    Raises:
        ValueError: for an operator with fewer maps than channels.

    Examples::

        >>> inner, taps = SkipOperator(torch.rand(1, 6, 4)), torch.rand(4, 3, 3)
        >>> operator = ConvolvedOperator(inner, taps, grid=(2, 3))
        >>> images = torch.randn(1, 4, 2, 3)
        >>> after = nn.functional.conv2d(images, taps[:, None], padding=1, groups=4)
        >>> y = operator.matvec(images.flatten(2).mT)
        >>> torch.testing.assert_close(y, inner.matvec(after.flatten(2).mT))
    """

    inner: TokenOperator
    taps: Tensor
    grid: tuple[int, int] | None = None
    right: Tensor | None = None
    axes = (("inner", "operator"), ("taps", "D"), ("right", "BLD"))

    def __post_init__(self) -> None:
        if self.inner.maps != self.inner.channels:
            raise ValueError(
                f"the operator has {self.inner.maps} maps for {self.inner.channels} channels; "
                "expected one map per channel, as a depthwise convolution has. Call "
                "operator.scaled(None, None) first."
            )

    @property
    def is_causal(self) -> bool:
        return self.grid is None and self.inner.is_causal

    def matvec(self, v: Tensor) -> Tensor:
        v = v if self.right is None else v * self.right
        return self.inner.matvec(depthwise_conv(v, self.taps, self.grid))

    @cached_property
    def joined(self) -> TokenOperator | None:
        """It as one operator, if the inner one computes causal taps too."""
        return self.inner.with_taps(self.taps, self.right) if self.grid is None else None

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        if self.joined is not None:
            return self.joined.rmatvec(w, reduction)
        mean = check_rmatvec(reduction)
        u = depthwise_conv_transpose(self.inner.rmatvec(w), self.taps, self.grid)
        u = u if self.right is None else u * self.right
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        if self.joined is not None:
            return self.joined.map_rows(index, start, stop)
        rows = self.inner.map_rows(index, start, stop)
        rows = conv_columns(rows, self.taps[start:stop], self.grid)
        return rows if self.right is None else rows * self.right[..., start:stop].mT[:, :, None]

    def row_tile(self, start: int, stop: int) -> Tensor:
        if self.joined is not None:
            return self.joined.row_tile(start, stop)
        inner = self.inner
        if isinstance(inner, ScaledOperator) and (self.grid is not None or not inner.has_heads):
            return super().row_tile(start, stop)
        if isinstance(inner, ScaledOperator):
            return inner.convolved_row_tile(start, stop, self.taps, self.right)
        # Each tap moves the columns of one channel mean.
        tile = torch.zeros(
            self.batch, stop - start, self.length, dtype=self.dtype, device=self.device
        )
        for part, at in self._by_tap:
            tile.index_add_(-1, at.clamp(min=0), part.row_tile(start, stop))
        return tile

    def add_to_tile(self, tile: Tensor, start: int) -> None:
        if self.joined is not None:
            self.joined.add_to_tile(tile, start)
        else:
            super().add_to_tile(tile, start)

    def row_bounds(self) -> Tensor:
        if self.joined is not None:
            return self.joined.row_bounds()
        return sum_of([part.row_bounds() for part, _ in self._by_tap])

    @property
    def _by_tap(self) -> Iterator[tuple[TokenOperator, Tensor]]:
        # An operator for each tap, and the columns (L,) that its own are part of, -1 for none.
        for tap, at in tap_columns(self.taps, self.length, self.grid):
            factor = torch.where(at[:, None] >= 0, tap, 0).expand(*self.sizes[:3])
            if self.right is not None:
                factor = factor * self.right[:, at.clamp(min=0)]
            yield self.inner.scaled(None, factor), at

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        inner = self.inner if left is None else self.inner.scaled(left, None)
        # A column factor acts before the convolution, so it is not part of `inner`.
        right = product(self.right, None if right is None else right.expand(*self.sizes[:3]))
        return ConvolvedOperator(inner, self.taps, self.grid, right)

    def convolved(self, taps: Tensor, grid: tuple[int, int] | None = None) -> TokenOperator:
        if grid is None and self.grid is None and self.right is None:
            return ConvolvedOperator(self.inner, join_taps(self.taps, taps))
        return super().convolved(taps, grid)
