"""An operator for each example, over those tokens of it that are not padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm.operators.base import PartsOperator, TokenOperator, check_rmatvec


@dataclass(frozen=True)
class PackedOperator(PartsOperator):
    """Operators over sequences of their own lengths, each at its tokens of one batch.

    All other entries are zero: tokens of no sequence, and between sequences.

    Args:
        parts (tuple of TokenOperator): of one example each, with as many channels and maps.
        examples (tuple of int): the example of the batch that each sequence is in.
        positions (tuple of Tensor): for each sequence ``(l,)`` int64, where its tokens are.
        shape (tuple of int): (B, L).

    Examples::

        >>> short, long = SkipOperator(torch.rand(1, 3, 4)), SkipOperator(torch.rand(1, 5, 4))
        >>> at = (torch.arange(2, 5), torch.arange(5))  # the first example is padded on the left
        >>> operator = PackedOperator((short, long), (0, 1), at, (2, 5))
        >>> operator.matvec(torch.ones(2, 5, 4))[0, :2].abs().max()
        tensor(0.)
    """

    parts: tuple[TokenOperator, ...]
    examples: tuple[int, ...]
    positions: tuple[Tensor, ...]
    shape: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return *self.shape, self.parts[0].channels, self.parts[0].maps

    def placed(self, values: Iterable[Tensor]) -> Tensor:
        """Values of each sequence, ``(1, l, ...)``, at its tokens of ``(B, L, ...)``."""
        first, *_ = values = list(values)
        total = first.new_zeros(*self.shape, *first.shape[2:])
        for y, row, at in zip(values, self.examples, self.positions, strict=True):
            total = total.index_put((torch.tensor(row, device=at.device), at), y[0].to(total))
        return total

    def matvec(self, v: Tensor) -> Tensor:
        return self.placed(part.matvec(v[row : row + 1, at]) for part, row, at in self._sequences())

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        check_rmatvec(reduction)
        return self.placed(
            part.rmatvec(w[row : row + 1, at], reduction) for part, row, at in self._sequences()
        )

    def row_tile(self, start: int, stop: int) -> Tensor:
        B, L = self.shape
        tile = torch.zeros(B, stop - start, L, dtype=self.dtype, device=self.device)
        for part, row, at in self._sequences():
            asked = ((at >= start) & (at < stop)).nonzero()[:, 0]  # in order
            if len(asked):
                first, last = int(asked[0]), int(asked[-1]) + 1
                rows = part.row_tile(first, last)[0, asked - first]
                tile[row, (at[asked] - start)[:, None], at] = rows.to(tile)
        return tile

    def row_bounds(self) -> Tensor:
        return self.placed(part.row_bounds() for part in self.parts)

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        parts = (
            part.scaled(*(None if x is None else self._of(x, row, at) for x in (left, right)))
            for part, row, at in self._sequences()
        )
        return replace(self, parts=tuple(parts))

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        B, L = self.shape
        rows = torch.zeros(B, stop - start, index.shape[1], L, dtype=self.dtype, device=self.device)
        for part, row, at in self._sequences():
            asked, token = (index[row][:, None] == at).nonzero().unbind(1)
            if len(asked):
                of_part = part.map_rows(token[None], start, stop)[0]  # (m, R, l)
                rows[row, :, asked[:, None], at] = of_part.movedim(0, 1).to(rows).movedim(1, 0)
        return rows

    def _sequences(self) -> Iterator[tuple[TokenOperator, int, Tensor]]:
        return zip(self.parts, self.examples, self.positions, strict=True)

    def _of(self, x: Tensor, row: int, at: Tensor) -> Tensor:
        return x.expand(*self.shape, self.channels)[row : row + 1, at]
