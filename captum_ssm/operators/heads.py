"""Operators with one map per head, and the whole mixer around such a map.

A head of width P carries P channels through the same matrix. A gate, a norm or a convolution is
different in each of them, so the composed operator has one map per channel again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm.operators._base import TokenOperator, check_vecmat
from captum_ssm.operators.band import (
    behind_conv,
    causal_conv,
    causal_conv_transpose,
    conv_columns,
    join_taps,
    product,
    with_skip,
)


class HeadOperator(TokenOperator):
    """One map per head. A subclass says how heads act on ``(B, H, L, P)`` tensors.

    Attributes:
        width (int): P, the channels of a head.

    Raises:
        ValueError: for a ``reduction`` that is not accepted.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> operator = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> isinstance(operator, HeadOperator), operator.maps, operator.channels
        (True, 2, 8)
    """

    width: int

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int, int]:
        """(B, L, H)."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, H = self.heads
        return B, L, H * self.width, H

    @abstractmethod
    def apply_heads(self, v: Tensor) -> Tensor:
        """Each head's map times ``v (B, H, L, P)``: ``(B, H, L, P)``."""

    @abstractmethod
    def vecmat_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        """Transposed maps of the heads ``start .. stop - 1`` times ``w (B, 1 or h, L, P)``."""

    def apply(self, v: Tensor) -> Tensor:
        return self._join(self.apply_heads(self._split(v)))

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_vecmat(reduction)
        if w.dim() == 2:
            rows = self.vecmat_heads(w[:, None, :, None], 0, self.maps)[..., 0]  # (B, H, L)
            if mean:
                return rows.mean(1)
            return rows.transpose(1, 2).repeat_interleave(self.width, -1)
        u = self._join(self.vecmat_heads(self._split(w), 0, self.maps))
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        one_hot = nn.functional.one_hot(index, self.length).to(self.dtype)  # (B, R, L)
        return self.vecmat_heads(one_hot.mT[:, None], start, stop).mT

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        return with_skip(ComposedOperator(self, left, right, conv), left, skip, right, conv)

    def _split(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.maps, self.width)).transpose(1, 2)

    def _join(self, v: Tensor) -> Tensor:
        return v.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class ComposedOperator(TokenOperator):
    """``diag(left) alpha diag(right) conv`` around an operator with one map per head.

    Args:
        inner (HeadOperator): alpha.
        left (Tensor, optional): ``(B, L, D)``, row factors. Default: None
        right (Tensor, optional): ``(B, L, D)``, column factors. Default: None
        conv (Tensor, optional): ``(D, K)``, causal taps. Default: None

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> inner = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> gate = torch.rand(1, 5, 8)
        >>> gated = ComposedOperator(inner, left=gate)  # a map a channel: the gate differs in each
        >>> v = torch.randn(1, 5, 8)
        >>> torch.testing.assert_close(gated.apply(v), gate * inner.apply(v))
        >>> inner.matrix().shape, gated.matrix().shape
        (torch.Size([1, 2, 5, 5]), torch.Size([1, 8, 5, 5]))
    """

    inner: HeadOperator
    left: Tensor | None = None
    right: Tensor | None = None
    conv: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D, _ = self.inner.sizes
        return B, L, D, D

    @property
    def reference(self) -> Tensor:
        return self.inner.reference

    @property
    def is_causal(self) -> bool:
        return self.inner.is_causal

    def apply(self, v: Tensor) -> Tensor:
        if self.conv is not None:
            v = causal_conv(v, self.conv)
        y = self.inner.apply(v if self.right is None else v * self.right)
        return y if self.left is None else y * self.left

    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_vecmat(reduction)
        if self.left is not None:
            w = (w if w.dim() == 3 else w[..., None]) * self.left
        u = self.inner.vecmat(w)
        if self.right is not None:
            u = u * self.right
        if self.conv is not None:
            u = causal_conv_transpose(u, self.conv)
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        P = self.inner.width
        first, last = start // P, (stop - 1) // P
        head = torch.arange(start, stop, device=self.device) // P - first
        rows = self.inner.map_rows(index, first, last + 1)[:, head]  # (B, m, R, L)
        if self.left is not None:
            at = index[..., None].expand(-1, -1, stop - start)
            rows = rows * self.left[..., start:stop].gather(1, at).mT[..., None]
        if self.right is not None:
            rows = rows * self.right[..., start:stop].mT[:, :, None]
        if self.conv is not None:
            rows = conv_columns(rows, self.conv[start:stop, None])
        return rows

    def row_tile(self, start: int, stop: int) -> Tensor:
        # The mean over a head's channels of left_i right_j conv_lag is a matrix product of inner
        # dimension P; one for each tap, all on the same rows of the head's map.
        B, L, D, _ = self.sizes
        H, P = self.inner.maps, self.inner.width
        index = torch.arange(start, stop, device=self.device).expand(B, -1)
        ones = torch.ones(1, 1, 1, dtype=self.dtype, device=self.device)
        left = (ones if self.left is None else self.left[:, start:stop]).expand(B, stop - start, D)
        right = (ones if self.right is None else self.right).expand(B, L, D)
        taps = torch.ones(D, 1, dtype=self.dtype, device=self.device)
        taps = taps if self.conv is None else self.conv.flip(-1)  # by lag
        total = torch.zeros(B, stop - start, L, dtype=self.dtype, device=self.device)
        for h in range(H):
            at = slice(h * P, (h + 1) * P)
            rows = self.inner.map_rows(index, h, h + 1)[:, 0]  # (B, R, L)
            for lag in range(min(taps.shape[1], L)):
                weight = (left[..., at] * taps[at, lag]) @ right[..., at].mT
                total[..., : L - lag] += (rows * weight)[..., lag:]
        return total / D

    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        if self.conv is not None and right is not None:
            scaled = ComposedOperator(self.inner, product(self.left, left), self.right, self.conv)
            return behind_conv(scaled, left, skip, right, conv)
        composed = ComposedOperator(
            self.inner,
            product(self.left, left),
            product(self.right, right),
            join_taps(self.conv, conv),
        )
        return with_skip(composed, left, skip, right, conv)
