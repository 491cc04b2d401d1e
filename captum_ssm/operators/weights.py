"""A mixer whose maps are known entry by entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from captum_ssm.operators.heads import HeadOperator
from captum_ssm.utils.lazy import cached_property


@dataclass(frozen=True)
class WeightsOperator(HeadOperator):
    """Maps that are stored as they are: L^2 numbers per head.

    For mixers that take time quadratic in L anyway, and whose weights no shorter equation gives.

    Args:
        weights (Tensor): ``(B, H, L, L)``.
        width (int): P, the channels of a head's values.

    Examples::

        >>> weights = torch.rand(1, 2, 5, 5).tril()
        >>> operator = WeightsOperator(weights, width=4)
        >>> v = torch.randn(1, 2, 5, 4)
        >>> torch.testing.assert_close(operator.matvec_heads(v), weights @ v)
        >>> operator.is_causal
        True
    """

    weights: Tensor
    width: int
    axes = (("weights", "BHLN"),)

    @cached_property
    def is_causal(self) -> bool:
        return not bool(self.weights.triu(1).any())

    def matvec_heads(self, v: Tensor) -> Tensor:
        return self.weights @ v

    def rmatvec_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        return self.weights[:, start:stop].mT @ w

    def map_bounds(self) -> tuple[Tensor, Tensor]:
        most = self.weights.abs().amax(-1).transpose(1, 2)  # (B, L, H)
        return most, most.new_ones(most.shape)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        at = index[:, None, :, None].expand(-1, stop - start, -1, self.length)
        return self.weights[:, start:stop].gather(2, at)
