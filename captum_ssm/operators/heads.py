"""Operators with one map per head: the P channels of a head share one matrix."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from captum_ssm.operators.base import TokenOperator, check_rmatvec


class HeadOperator(TokenOperator):
    """One map per head. A subclass says how heads act on ``(B, H, L, P)`` tensors.

    Attributes:
        width (int): P, the channels of a head.

    Raises:
        ValueError: from a method, for an unknown ``reduction``.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> operator = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> isinstance(operator, HeadOperator), operator.maps, operator.channels
        (True, 2, 8)
    """

    width: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """(B, L, H); of coefficients ``(B, H, L, N)``."""
        B, H, L, _ = self.reference.shape
        return B, L, H

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, H = self.heads
        return B, L, H * self.width, H

    @abstractmethod
    def matvec_heads(self, v: Tensor) -> Tensor:
        """Each head's map times ``v (B, H, L, P)``: ``(B, H, L, P)``."""

    @abstractmethod
    def rmatvec_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        """Transposed maps of the heads ``start .. stop - 1`` times ``w (B, 1 or h, L, P)``."""

    def matvec(self, v: Tensor) -> Tensor:
        return self._join(self.matvec_heads(self._split(v)))

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        if w.dim() == 2:
            rows = self.rmatvec_heads(w[:, None, :, None], 0, self.maps)[..., 0]  # (B, H, L)
            if mean:
                return rows.mean(1)
            return rows.transpose(1, 2).repeat_interleave(self.width, -1)
        u = self._join(self.rmatvec_heads(self._split(w), 0, self.maps))
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        one_hot = nn.functional.one_hot(index, self.length).to(self.dtype)  # (B, R, L)
        return self.rmatvec_heads(one_hot.mT[:, None], start, stop).mT

    def _split(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.maps, self.width)).transpose(1, 2)

    def _join(self, v: Tensor) -> Tensor:
        return v.transpose(1, 2).flatten(2)
