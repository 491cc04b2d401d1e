"""A recurrence that takes several steps per token, each of which writes values of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators.base import AroundOperator, TokenOperator, check_rmatvec


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

    def matvec(self, v: Tensor) -> Tensor:
        parts = v.chunk(self.steps, -1)
        outputs = [
            self.inner.matvec(self._at(part, step))[:, self.steps - 1 :: self.steps]
            for step, part in enumerate(parts)
        ]
        return torch.cat(outputs, -1)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        parts = [w] * self.steps if w.dim() == 2 else w.chunk(self.steps, -1)
        products = [
            self.inner.rmatvec(self._at(part, self.steps - 1), reduction)[:, step :: self.steps]
            for step, part in enumerate(parts)
        ]
        return torch.stack(products).mean(0) if mean else torch.cat(products, -1)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        maps, rows = self.inner.maps, []
        for step in range(start // maps, (stop - 1) // maps + 1):
            first, last = max(start - step * maps, 0), min(stop - step * maps, maps)
            at = index * self.steps + self.steps - 1
            rows.append(self.inner.map_rows(at, first, last)[..., step :: self.steps])
        return torch.cat(rows, 1)

    def _at(self, x: Tensor, step: int) -> Tensor:
        # x (B, L, ...) at one step of each token, zero at the others.
        spread = x.new_zeros(x.shape[0], x.shape[1], self.steps, *x.shape[2:])
        spread[:, :, step] = x
        return spread.flatten(1, 2)
