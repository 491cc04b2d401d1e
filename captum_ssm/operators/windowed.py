"""Operators over windows of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators._base import AroundOperator, TokenOperator


@dataclass(frozen=True)
class WindowedOperator(AroundOperator):
    """An operator over windows that lie in the batch, as one over all tokens: block-diagonal.

    Args:
        inner (TokenOperator): over ``(B W, l)`` tokens, the W windows of an example in a row.
        windows (int): W.

    Examples::

        >>> inner = SkipOperator(torch.rand(6, 5, 4))  # three windows of five tokens, two examples
        >>> operator = WindowedOperator(inner, 3)
        >>> operator.batch, operator.length
        (2, 15)
    """

    inner: TokenOperator
    windows: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D, M = self.inner.sizes
        return B // self.windows, L * self.windows, D, M

    def matvec(self, v: Tensor) -> Tensor:
        return self._join(self.inner.matvec(self._split(v)))

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self._join(self.inner.rmatvec(self._split(w), reduction))

    def row_tile(self, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        return self.rows(index, "mean")

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        B, R = index.shape
        length, W = self.inner.length, self.windows
        window = index // length
        inside = (index % length).repeat_interleave(W, 0)
        rows = self.inner.map_rows(inside, start, stop)  # (B W, m, R, l)
        own = window[:, None] == torch.arange(W, device=index.device)[:, None]  # (B, W, R)
        rows = rows * own.reshape(B * W, 1, R, 1)
        return rows.unflatten(0, (B, W)).permute(0, 2, 3, 1, 4).flatten(3)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        left, right = (
            None if x is None else self._split(x.expand(*self.sizes[:3])) for x in (left, right)
        )
        return WindowedOperator(self.inner.scaled(left, right), self.windows)

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.inner.length, *x.shape[2:])

    def _join(self, x: Tensor) -> Tensor:
        return x.reshape(self.batch, -1, *x.shape[2:])
