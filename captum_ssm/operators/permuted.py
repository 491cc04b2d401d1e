"""Operators over tokens in another order, and behind a convolution over an image.

A vision mixer scans an image's patches backwards, or down its columns. Each scan is an ordinary
recurrence over its own order of the tokens; these wrappers show it in the image's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_ssm.operators._base import TokenOperator, check_vecmat
from captum_ssm.operators.band import (
    behind_conv,
    causal_conv,
    causal_conv_transpose,
    with_skip,
)


@dataclass(frozen=True)
class PermutedOperator(TokenOperator):
    r"""An operator whose tokens are taken in another order: :math:`P^\top \alpha P`.

    Args:
        inner (TokenOperator): :math:`\alpha`, over the tokens in the order it scans them.
        order (Tensor): ``(L,)`` int64, a permutation; the t-th token of ``inner`` is token
            ``order[t]``. Reversed for a backward scan.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> forward = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> backward = PermutedOperator(forward, torch.arange(5).flip(0))
        >>> torch.testing.assert_close(backward.matrix(), forward.matrix().flip(2, 3))
    """

    inner: TokenOperator
    order: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.inner.sizes

    @property
    def reference(self) -> Tensor:
        return self.inner.reference

    @property
    def is_causal(self) -> bool:
        return False

    @cached_property
    def place(self) -> Tensor:
        """``(L,)``: the place of each token in the scan, the inverse of ``order``."""
        return torch.argsort(self.order)

    def apply(self, v: Tensor) -> Tensor:
        return self.inner.apply(v[:, self.order])[:, self.place]

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self.inner.vecmat(w[:, self.order], reduction)[:, self.place]

    def row_tile(self, start: int, stop: int) -> Tensor:
        rows = self.place[start:stop]
        first, last = int(rows.min()), int(rows.max()) + 1
        if last - first <= 2 * (stop - start):
            # The scan's rows lie close together, as they do when it runs backwards.
            tile = self.inner.row_tile(first, last)[:, rows - first]
        else:
            tile = self.inner.rows(rows.expand(self.batch, -1), "mean")
        return tile[..., self.place]

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.map_rows(self.place[index], start, stop)[..., self.place]

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        inner = self.inner.compose(left=self._in_scan(left), right=self._in_scan(right))
        composed: TokenOperator = PermutedOperator(inner, self.order)
        if conv is not None:
            # Causal in the outer order, which it is not in the scan's.
            composed = ConvolvedOperator(composed, conv)
        return with_skip(composed, left, skip, right, conv)

    def _in_scan(self, factor: Tensor | None) -> Tensor | None:
        return None if factor is None else factor.expand(*self.sizes[:3])[:, self.order]


@dataclass(frozen=True)
class ConvolvedOperator(TokenOperator):
    """An operator behind a depthwise convolution, ``alpha conv``: one map per channel.

    For operators that can't fold a convolution into themselves.

    Args:
        inner (TokenOperator): alpha, with one map per channel.
        taps (Tensor): ``(D, K)``, causal along the tokens as in :class:`torch.nn.Conv1d`; or
            ``(D, Kh, Kw)`` with odd Kh and Kw, centred on the patches of an image as a
            zero-padded :class:`torch.nn.Conv2d`.
        grid (tuple of int, optional): (H, W) of the image's patches, H W = L, for 2-D taps.
            Default: None

    Raises:
        ValueError: for an operator of fewer maps than channels.

    Examples::

        >>> inner, taps = BandOperator(torch.rand(1, 6, 4)), torch.rand(4, 3, 3)
        >>> operator = ConvolvedOperator(inner, taps, grid=(2, 3))
        >>> images = torch.randn(1, 4, 2, 3)
        >>> behind = nn.functional.conv2d(images, taps[:, None], padding=1, groups=4)
        >>> y = operator.apply(images.flatten(2).mT)
        >>> torch.testing.assert_close(y, inner.apply(behind.flatten(2).mT))
    """

    inner: TokenOperator
    taps: Tensor
    grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.inner.maps != self.inner.channels:
            raise ValueError(
                f"the operator has {self.inner.maps} maps for {self.inner.channels} channels; a "
                "depthwise convolution needs one map per channel (compose it first)."
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.inner.sizes

    @property
    def reference(self) -> Tensor:
        return self.inner.reference

    @property
    def is_causal(self) -> bool:
        return self.grid is None and self.inner.is_causal

    def apply(self, v: Tensor) -> Tensor:
        return self.inner.apply(depthwise_conv(v, self.taps, self.grid))

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_vecmat(reduction)
        u = depthwise_conv_transpose(self.inner.vecmat(w), self.taps, self.grid)
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        rows = self.inner.map_rows(index, start, stop)  # (B, m, R, L)
        B, m, R, L = rows.shape
        flat = rows.permute(0, 2, 3, 1).reshape(B * R, L, m)
        flat = depthwise_conv_transpose(flat, self.taps[start:stop], self.grid)
        return flat.reshape(B, R, L, m).permute(0, 3, 1, 2)

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        inner = self.inner if left is None else self.inner.compose(left=left)
        composed: TokenOperator = ConvolvedOperator(inner, self.taps, self.grid)
        if right is not None:
            return behind_conv(composed, left, skip, right, conv)
        if conv is not None:
            composed = ConvolvedOperator(composed, conv)
        return with_skip(composed, left, skip, right, conv)


def depthwise_conv(v: Tensor, taps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """A depthwise convolution of ``v (B, L, D)``, causal or over an image: ``(B, L, D)``.

    Args:
        v (Tensor): ``(B, L, D)``.
        taps (Tensor): ``(D, K)``, or ``(D, Kh, Kw)`` for an image.
        grid (tuple of int, optional): (H, W) with H W = L, for an image. Default: None
    """
    if grid is None:
        return causal_conv(v, taps)
    image = v.mT.unflatten(-1, grid)  # (B, D, H, W)
    padding = (taps.shape[-2] // 2, taps.shape[-1] // 2)
    out = nn.functional.conv2d(image, taps[:, None], padding=padding, groups=taps.shape[0])
    return out.flatten(2).mT


def depthwise_conv_transpose(
    w: Tensor, taps: Tensor, grid: tuple[int, int] | None = None
) -> Tensor:
    """The adjoint of :func:`depthwise_conv`: ``(B, L, D)`` to ``(B, L, D)``."""
    if grid is None:
        return causal_conv_transpose(w, taps)
    # Odd taps in the middle of their padding: the adjoint has them turned round.
    return depthwise_conv(w, taps.flip(-2, -1), grid)
