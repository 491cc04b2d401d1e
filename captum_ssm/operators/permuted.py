"""Operators over other tokens than the mixer's: in another order, over some of them, in windows.

A vision mixer scans an image's patches backwards, or down its columns. Each scan is an ordinary
recurrence over its own order of the tokens; the operator here gives it in the image's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm.operators.base import AroundOperator, TokenOperator
from captum_ssm.utils.lazy import cached_property

# Rows of a channel mean that are made for each that is asked for; of more, every map is cheaper.
MOST_BETWEEN = 8


class _OverTokens(AroundOperator):
    # Base of operators over tokens of their own, with what :class:`MovedOperator` takes.
    enters: Tensor
    lands: Tensor
    tokens: int

    @property
    def windows(self) -> int:
        """W."""
        return len(self.lands) // self.inner.length

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, _, D, M = self.inner.sizes
        return B // self.windows, self.tokens, D, M

    @cached_property
    def is_causal(self) -> bool:
        enters, lands = (x.view(self.windows, -1) for x in (self.enters, self.lands))
        before = enters.cummax(1).values
        return self.inner.is_causal and bool((before <= lands)[lands >= 0].all())

    @cached_property
    def position(self) -> Tensor:
        """``(L,)``: which of the outputs lands on each token, -1 for none."""
        return inverted(self.lands, self.tokens)

    def matvec(self, v: Tensor) -> Tensor:
        return self._joined(self.inner.matvec(self._split(v, self.enters)), self.position)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self._joined(self.inner.rmatvec(self._split(w, self.lands), reduction), self._read)

    def row_tile(self, start: int, stop: int) -> Tensor:
        W, length, at = self.windows, self.inner.length, self.position[start:stop]
        landed = at[at >= 0] % length
        first, last = (int(landed.min()), int(landed.max()) + 1) if len(landed) else (0, 1)
        if W * (last - first) > MOST_BETWEEN * (stop - start):
            index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
            return self._reduced(index, "mean")
        tile = self.inner.row_tile(first, last)[:, (at % length - first).clamp(0, last - first - 1)]
        rows = tile.unflatten(0, (-1, W))[:, :, None]  # (B, W, 1, R, l)
        return self._of_tokens(rows, at.expand(self.batch, -1))[:, 0]

    def row_bounds(self) -> Tensor:
        return self._joined(self.inner.row_bounds(), self.position)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        W, length = self.windows, self.inner.length
        at = self.position[index]  # (B, R)
        rows = self.inner.map_rows((at % length).repeat_interleave(W, 0), start, stop)
        return self._of_tokens(rows.unflatten(0, (-1, W)), at)

    def _of_tokens(self, rows: Tensor, at: Tensor) -> Tensor:
        # The rows (B, W, m, R, l) of every window, of which those of one window are asked for, by
        # positions (B, R): (B, m, R, L).
        window = torch.arange(self.windows, device=at.device)[:, None]
        is_in_it = at[:, None].div(self.inner.length, rounding_mode="floor") == window  # (B, W, R)
        if not bool(is_in_it.all()):
            rows = rows * is_in_it[:, :, None, :, None]
        return picked(rows.permute(0, 2, 3, 1, 4).flatten(3), self._read, axis=-1)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        left, right = (
            None if x is None else self._split(x.expand(*self.sizes[:3]), at)
            for x, at in ((left, self.lands), (right, self.enters))
        )
        return replace(self, inner=self.inner.scaled(left, right))  # type: ignore[type-var]

    @cached_property
    def _read(self) -> Tensor:
        # Where each token is read, (L,), -1 for nowhere.
        return self.position if self.enters is self.lands else inverted(self.enters, self.tokens)

    def _split(self, x: Tensor, at: Tensor) -> Tensor:
        return picked(x, at).reshape(-1, self.inner.length, *x.shape[2:])

    def _joined(self, x: Tensor, at: Tensor) -> Tensor:
        return picked(x.reshape(self.batch, -1, *x.shape[2:]), at)


@dataclass(frozen=True)
class MovedOperator(_OverTokens):
    r"""An operator over some of the tokens, whose outputs land on the same tokens or on others.

    A mixer may scan padded windows, or a part of the tokens, or roll what its scan returns by one
    token. Rows where nothing lands, and columns that are not read, are zero.

    Args:
        inner (TokenOperator): over ``(B W, l)`` tokens of its own, the W windows of an example in a
            row.
        enters (Tensor): ``(W l,)`` int64, the token that each of them is made of; -1 for padding.
            No token twice.
        lands (Tensor): ``(W l,)`` int64, the token that each output is; -1 for what is cropped. No
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


@dataclass(frozen=True)
class PermutedOperator(_OverTokens):
    r"""An operator over the tokens in another order: :math:`P^\top \alpha P`.

    Args:
        inner (TokenOperator): :math:`\alpha`, over the tokens in the order it scans them; or in
            windows of that order, as for :class:`MovedOperator`.
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
    axes = (("inner", "operator"),)

    @property
    def enters(self) -> Tensor:  # type: ignore[override]
        return self.order

    @property
    def lands(self) -> Tensor:  # type: ignore[override]
        return self.order

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return len(self.order)


def inverted(at: Tensor, tokens: int) -> Tensor:
    """Where each of so many tokens is in ``at (l,)``, which holds -1 too; -1 for nowhere."""
    inverse = torch.full((tokens + 1,), -1, device=at.device)
    inverse[at] = torch.arange(len(at), device=at.device)  # -1 writes to the last one
    return inverse[:tokens]


def picked(x: Tensor, at: Tensor, fill: float = 0, *, axis: int = 1) -> Tensor:
    """The tokens ``at (l,)`` of ``x (B, L, ...)``, or on another axis; ``fill`` for -1."""
    # On the last axis PyTorch's index_select is slow.
    tokens, is_none = x[..., at] if axis == -1 else x.index_select(axis, at.clamp(min=0)), at < 0
    if not bool(is_none.any()):
        return tokens
    shape = [1] * x.dim()
    shape[axis] = len(at)
    return tokens.masked_fill(is_none.view(shape), fill)


def scattered(x: Tensor, at: Tensor, tokens: int, fill: float = 0) -> Tensor:
    """``x (B, l, ...)`` laid at the tokens ``at (l,)`` of ``(B, L, ...)``; -1 for nowhere."""
    return picked(x, inverted(at, tokens), fill)
