"""A recurrence that takes several steps per token, each of which writes values of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators.base import AroundOperator, TokenOperator, check_rmatvec
from captum_ssm.operators.permuted import MovedOperator
from captum_ssm.utils.lazy import cached_property


@dataclass(frozen=True)
class SubstepOperator(AroundOperator):
    r"""Several steps per token, read after the last: one map for each step and map of ``inner``.

    What the mixer returns is the sum over the steps of its channels: token i reads
    :math:`\sum_s \sum_j \alpha^s_{ij} v^s_j`, with values of its own for each step s.

    Args:
        inner (TokenOperator): over ``S L`` steps, with one map per head.
        steps (int): S.

    Examples::

        >>> inner = SkipOperator(torch.rand(1, 10, 4))  # five tokens of two steps
        >>> operator = SubstepOperator(inner, steps=2)
        >>> operator.length, operator.channels, operator.maps
        (5, 8, 8)
        >>> bool(operator.matrix()[:, :4].any())  # the first step is not read by the last one
        False
    """

    inner: TokenOperator
    steps: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D, M = self.inner.sizes
        return B, L // self.steps, D * self.steps, M * self.steps

    @cached_property
    def _by_step(self) -> list[MovedOperator]:
        # The operator of each step: it enters there, and lands at the last step of a token.
        token = torch.arange(self.length, device=self.device)
        at = torch.full((self.steps, self.length, self.steps), -1, device=self.device)
        at.diagonal(dim1=0, dim2=2)[:] = token[:, None]
        enters = at.flatten(1)
        return [MovedOperator(self.inner, e, enters[-1], self.length) for e in enters]

    def matvec(self, v: Tensor) -> Tensor:
        pairs = zip(self._by_step, v.chunk(self.steps, -1), strict=True)
        return torch.cat([operator.matvec(part) for operator, part in pairs], -1)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        parts = [w] * self.steps if w.dim() == 2 else w.chunk(self.steps, -1)
        pairs = zip(self._by_step, parts, strict=True)
        products = [operator.rmatvec(part, reduction) for operator, part in pairs]
        return torch.stack(products).mean(0) if mean else torch.cat(products, -1)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        maps, rows = self.inner.maps, []
        for step in range(start // maps, (stop - 1) // maps + 1):
            first, last = max(start - step * maps, 0), min(stop - step * maps, maps)
            rows.append(self._by_step[step].map_rows(index, first, last))
        return torch.cat(rows, 1)
