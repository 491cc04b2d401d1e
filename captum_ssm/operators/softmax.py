"""Softmax attention, the mixer between the recurrent ones in hybrid models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from captum_ssm.operators.base import FEW_ROWS
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.utils.memory import tile_entries


@dataclass(frozen=True)
class SoftmaxOperator(HeadOperator):
    """The attention probabilities of each query head, computed in tiles of rows.

    Args:
        query (Tensor): ``(B, H, L, N)``.
        key (Tensor): ``(B, H, L, N)``, repeated if query heads share one.
        scale (float): multiplies the scores.
        width (int): P, the channels of a head's values.
        bias (Tensor, optional): added to the scores, -inf for the pairs that are masked;
            broadcasts to ``(B, H, L, L)``. None means causal. Default: None
        softcap (float, optional): scores s become ``softcap * tanh(s / softcap)``. Default: None
        sinks (Tensor, optional): ``(H,)``, or ``(B, H, L, 1)``, a score per head, or per row of
            it, that takes part in the softmax without a value. Default: None

    Examples::

        >>> query, key = torch.randn(2, 1, 2, 5, 3)
        >>> operator = SoftmaxOperator(query, key, scale=3**-0.5, width=4)
        >>> v = torch.randn(1, 2, 5, 4)
        >>> y = nn.functional.scaled_dot_product_attention(query, key, v, is_causal=True)
        >>> torch.testing.assert_close(operator.matvec_heads(v), y)
    """

    query: Tensor
    key: Tensor
    scale: float
    width: int
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    axes = (("query", "BHLN"), ("key", "BHLN"), ("bias", "BHLN"), ("sinks", "D"))

    @property
    def is_causal(self) -> bool:
        return self.bias is None

    def without(self, pairs: Tensor) -> SoftmaxOperator:
        """The probabilities where some pairs of tokens are masked: each row is normalized anew.

        Args:
            pairs (Tensor): bool, broadcasts to ``(B, H, L, L)``, True for what is masked.
        """
        bias = self.bias
        if bias is None:
            later = torch.ones(self.length, self.length, device=self.device).triu(1).bool()
            bias = self.query.new_zeros(later.shape).masked_fill(later, -torch.inf)
        return replace(self, bias=torch.where(pairs, -torch.inf, bias))

    def matvec_heads(self, v: Tensor) -> Tensor:
        tiles = (self._tile(at, 0, self.maps) for at in self._tiles(self.maps))
        return torch.cat([tile @ v[:, :, : tile.shape[-1]] for tile in tiles], 2)

    def rmatvec_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        B, L, _ = self.heads
        asked = (w != 0).any(-1).any(1).any(0).nonzero()[:, 0]
        if asked.numel() <= FEW_ROWS:
            rows = self.map_rows(asked.expand(B, -1), start, stop)
            return rows.mT @ w[:, :, asked]
        out = w.new_zeros(B, stop - start, L, w.shape[-1])
        for at in self._tiles(stop - start):
            x = w[:, :, at]
            if bool((x != 0).any()):
                tile = self._tile(at, start, stop)
                out[:, :, : tile.shape[-1]] += tile.mT @ x
        return out

    def map_bounds(self) -> tuple[Tensor, Tensor]:
        B, L, H = self.heads
        ones = self.query.new_ones(B, L, H)
        return ones, ones

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        at = index[:, None, :, None].expand(-1, stop - start, -1, self.query.shape[-1])
        query = self.query[:, start:stop].gather(2, at)
        if index.shape[1] == 0:
            return query.new_zeros(*query.shape[:3], self.length)
        tile = self._probabilities(query, index, start, stop)
        return nn.functional.pad(tile, (0, self.length - tile.shape[-1]))

    def _tiles(self, heads: int) -> Iterator[slice]:
        B, L, _ = self.heads
        step = max(1, tile_entries(1 << 24) // (B * heads * L))
        for start in range(0, L, step):
            yield slice(start, min(L, start + step))

    def _tile(self, at: slice, start: int, stop: int) -> Tensor:
        index = torch.arange(at.start, at.stop, device=self.device).expand(self.batch, -1)
        return self._probabilities(self.query[:, start:stop, at], index, start, stop)

    def _probabilities(self, query: Tensor, index: Tensor, start: int, stop: int) -> Tensor:
        # Rows index (B, R) of the heads' maps: (B, h, R, columns), those that any causal row reads.
        first, last = (0, self.length) if self.bias is not None else _ends(index)
        scores = (query * self.scale) @ self.key[:, start:stop, :last].mT
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is None:
            later = torch.arange(first, last, device=self.device) > index[:, None, :, None]
            scores[..., first:].masked_fill_(later, -torch.inf)
            if self.sinks is None:
                return torch.softmax(scores, -1)
        else:
            bias = self.bias.expand(self.batch, self.bias.shape[1], self.length, self.length)
            if bias.shape[1] > 1:
                bias = bias[:, start:stop]
            at = index[:, None, :, None].expand(-1, bias.shape[1], -1, self.length)
            scores = scores + bias.gather(2, at)
        if self.sinks is None:
            # A row whose scores are all masked (padding) has only zeros, and no gradient.
            masked = scores.detach().amax(-1, keepdim=True).isneginf()
            if not bool(masked.any()):
                return torch.softmax(scores, -1)
            return torch.softmax(scores.masked_fill(masked, 0.0), -1).masked_fill(masked, 0.0)
        if self.sinks.dim() == 1:
            sinks = self.sinks[start:stop, None, None].expand(*scores.shape[:3], 1)
        else:
            at = index[:, None, :, None].expand(-1, stop - start, -1, 1)
            sinks = self.sinks[:, start:stop].gather(2, at)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]


def _ends(index: Tensor) -> tuple[int, int]:
    # The range that some rows lie in.
    low, high = index.aminmax()
    return int(low), int(high) + 1
