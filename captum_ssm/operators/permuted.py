"""Operators over tokens in another order, or over some of them.

A vision mixer scans an image's patches backwards, or down its columns. Each scan is an ordinary
recurrence over its own order of the tokens; the operator here gives it in the image's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm._lazy import cached_property
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


@dataclass(frozen=True)
class MovedOperator(AroundOperator):
    r"""An operator over some of the tokens, whose outputs land on the same tokens or on others.

    As in a mixer that scans padded windows, a part of the tokens, or that rolls what its scan
    returns by one token. Rows where nothing lands, and columns that are not read, are zero.

    Args:
        inner (TokenOperator): over l tokens of its own.
        enters (Tensor): ``(l,)`` int64, the token that each of them is made of; -1 for padding. No
            token twice.
        lands (Tensor): ``(l,)`` int64, the token that each output is; -1 for what is cropped. No
            token twice.
        tokens (int): L.

    Examples::

        >>> inner = SkipOperator(torch.ones(1, 3, 1))
        >>> later = MovedOperator(inner, torch.arange(3), torch.tensor([1, 2, -1]), 3)
        >>> later.matrix("mean")[0].tolist()
        [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """

    inner: TokenOperator
    enters: Tensor
    lands: Tensor
    tokens: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, _, D, M = self.inner.sizes
        return B, self.tokens, D, M

    @cached_property
    def is_causal(self) -> bool:
        before = torch.where(self.enters < 0, -1, self.enters).cummax(0).values
        return self.inner.is_causal and bool((before <= self.lands)[self.lands >= 0].all())

    @cached_property
    def position(self) -> Tensor:
        """``(L,)``: where the output is that lands on each token, l for none."""
        return place_of(self.lands, self.tokens)

    def matvec(self, v: Tensor) -> Tensor:
        return placed(self.inner.matvec(picked(v, self.enters)), self.lands, self.tokens)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        found = self.inner.rmatvec(picked(w, self.lands), reduction)
        return placed(found, self.enters, self.tokens)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        length = self.inner.length
        at = self.position[index]
        rows = self.inner.map_rows(at.clamp(max=length - 1), start, stop)
        rows = rows * (at < length)[:, None, :, None]
        back = place_of(self.enters, self.tokens)
        return nn.functional.pad(rows, (0, 1))[..., back]

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        left, right = (
            None if x is None else picked(x.expand(*self.sizes[:3]), at)
            for x, at in ((left, self.lands), (right, self.enters))
        )
        return MovedOperator(self.inner.scaled(left, right), self.enters, self.lands, self.tokens)


def place_of(at: Tensor, tokens: int) -> Tensor:
    """Where each of so many tokens is in ``at (l,)``, which holds -1 too; l for nowhere."""
    found = torch.full((tokens + 1,), len(at), device=at.device)
    found[at] = torch.arange(len(at), device=at.device)  # -1 writes to the last one
    return found[:tokens]


def picked(x: Tensor, at: Tensor, fill: float = 0) -> Tensor:
    """The tokens ``at (l,)`` of ``x (B, L, ...)``; ``fill`` for -1."""
    found = x[:, at]
    return found.masked_fill((at < 0).view(1, -1, *[1] * (x.dim() - 2)), fill)


def placed(x: Tensor, at: Tensor, tokens: int, fill: float = 0) -> Tensor:
    """``x (B, l, ...)`` laid at the tokens ``at (l,)`` of ``(B, L, ...)``; -1 for nowhere."""
    back = place_of(at, tokens)
    return picked(x, torch.where(back < len(at), back, -1), fill)
