"""Operators of channels that lie next to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators.base import PartsOperator, TokenOperator, check_rmatvec
from captum_ssm.operators.factors import sum_of


@dataclass(frozen=True)
class JoinedOperator(PartsOperator):
    """Operators side by side, each of channels of its own, as heads that are modules.

    Where their maps are not of as many channels each, it has one map per channel.

    Args:
        parts (tuple of TokenOperator): at least one, in the order of their channels.

    Examples::

        >>> first, second = SkipOperator(torch.rand(1, 5, 4)), SkipOperator(torch.rand(1, 5, 2))
        >>> JoinedOperator((first, second)).matrix().shape
        torch.Size([1, 6, 5, 5])
    """

    parts: tuple[TokenOperator, ...]

    def __post_init__(self) -> None:
        if len({part.channels // part.maps for part in self.parts}) > 1:
            parts = tuple(part.scaled(None, None) for part in self.parts)
            object.__setattr__(self, "parts", parts)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, _, _ = self.parts[0].sizes
        return B, L, sum(p.channels for p in self.parts), sum(p.maps for p in self.parts)

    def matvec(self, v: Tensor) -> Tensor:
        pairs = zip(self.parts, self._split(v), strict=True)
        return torch.cat([part.matvec(x) for part, x in pairs], -1)

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        pairs = zip(self.parts, self._split(w), strict=True)
        of_parts = [part.rmatvec(x, reduction) for part, x in pairs]
        if not check_rmatvec(reduction):
            return torch.cat(of_parts, -1)
        return sum_of([x * self._share(p) for x, p in zip(of_parts, self.parts, strict=True)])

    def row_tile(self, start: int, stop: int) -> Tensor:
        return sum_of([part.row_tile(start, stop) * self._share(part) for part in self.parts])

    def row_bounds(self) -> Tensor:
        return sum_of([part.row_bounds() for part in self.parts])

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        rows, first = [], 0
        for part in self.parts:
            begin, end = max(0, start - first), min(part.maps, stop - first)
            if begin < end:
                rows.append(part.map_rows(index, begin, end))
            first += part.maps
        return torch.cat(rows, 1)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        factors = [[None] * len(self.parts) if x is None else self._split(x) for x in (left, right)]
        pairs = zip(self.parts, *factors, strict=True)
        return JoinedOperator(tuple(part.scaled(*of_part) for part, *of_part in pairs))

    def _share(self, part: TokenOperator) -> float:
        return part.channels / self.channels

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        # Each part's channels of x (B, L, D); of what has no channels, (B, L), all of it.
        if x.dim() == 2:
            return [x] * len(self.parts)
        return x.split([part.channels for part in self.parts], -1)
