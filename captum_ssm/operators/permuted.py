"""Operators over tokens in another order.

A vision mixer scans an image's patches backwards, or down its columns. Each scan is an ordinary
recurrence over its own order of the tokens; the operator here gives it in the image's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from captum_ssm.operators._base import AroundOperator, TokenOperator


@dataclass(frozen=True)
class PermutedOperator(AroundOperator):
    r"""An operator over the tokens in another order: :math:`P^\top \alpha P`.

    Args:
        inner (TokenOperator): :math:`\alpha`, over the tokens in the order it scans them.
        order (Tensor): ``(L,)`` int64, a permutation; the t-th token of ``inner`` is token
            ``order[t]``. For a backward scan it is reversed.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> forward = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> backward = PermutedOperator(forward, torch.arange(5).flip(0))
        >>> torch.testing.assert_close(backward.matrix(), forward.matrix().flip(2, 3))
    """

    inner: TokenOperator
    order: Tensor

    @property
    def is_causal(self) -> bool:
        return False

    @cached_property
    def position(self) -> Tensor:
        """``(L,)``: the position of each token in the scan, the inverse of ``order``."""
        return torch.argsort(self.order)

    def matvec(self, v: Tensor) -> Tensor:
        return self.inner.matvec(v[:, self.order])[:, self.position]

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self.inner.rmatvec(w[:, self.order], reduction)[:, self.position]

    def row_tile(self, start: int, stop: int) -> Tensor:
        rows = self.position[start:stop]
        first, last = int(rows.min()), int(rows.max()) + 1
        if last - first <= 2 * (stop - start):
            # The scan's rows are close together, as in a backward scan.
            tile = self.inner.row_tile(first, last)[:, rows - first]
        else:
            tile = self.inner.rows(rows.expand(self.batch, -1), "mean")
        return tile[..., self.position]

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.map_rows(self.position[index], start, stop)[..., self.position]

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        inner = self.inner.scaled(self._in_scan(left), self._in_scan(right))
        return PermutedOperator(inner, self.order)

    def _in_scan(self, factor: Tensor | None) -> Tensor | None:
        return None if factor is None else factor.expand(*self.sizes[:3])[:, self.order]
