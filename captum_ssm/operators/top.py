"""The largest entries of the channel sum of an operator, without ever holding all of them.

Rows are computed in tiles, in the order of a bound of their entries that takes linear time. A tile
whose bound is below the entries that are already known to be the largest is never computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import brief
from captum_ssm.utils.memory import tile_entries

ORDERS = ("size", "signed")
MOST_ROWS = 512


@dataclass(frozen=True)
class TopEntries:
    """Entries of the channel sum of an operator, the largest first, and the sum of the others.

    Args:
        values (Tensor): ``(B, k)``.
        targets (Tensor): ``(B, k)`` int64, the row of each: the token that reads.
        sources (Tensor): ``(B, k)`` int64, its column: the token that is read.
        rest (Tensor): ``(B,)``, the sum of all other entries, from a product in linear time.

    Examples::

        >>> top = SkipOperator(torch.tensor([[[1.0], [-3.0], [2.0]]])).top(2)
        >>> top.values.tolist(), top.targets.tolist(), top.rest.tolist()
        ([[-3.0, 2.0]], [[1, 2]], [1.0])
    """

    values: Tensor
    targets: Tensor
    sources: Tensor
    rest: Tensor


@torch.no_grad()
def top_entries(operator: Any, k: int, by: str = "size", *, between: bool = False) -> TopEntries:
    """See :meth:`TokenOperator.top`."""
    if by not in ORDERS:
        raise ValueError(f"by is {brief(by)}; expected one of {ORDERS}.")
    if k < 1:
        raise ValueError(f"k is {k}; expected at least 1 entry.")
    B, L, D, _ = operator.sizes
    others = L * (L - 1) // 2 if operator.is_causal else L * (L - 1)
    largest = _Largest(operator, min(k, others if between else others + L), by, between)
    rows = max(1, min(MOST_ROWS, tile_entries(1 << 24) // max(1, B * L)))
    bounds = [tile.amax(1) for tile in operator.row_bounds().split(rows, 1)]  # (B,) each
    for at in sorted(range(len(bounds)), key=lambda t: float(bounds[t].max()), reverse=True):
        if largest.may_gain(bounds[at]):
            start, stop = at * rows, min(L, (at + 1) * rows)
            largest.take(start, operator.row_tile(start, stop) * D)
    ones = torch.ones(B, L, D, dtype=operator.dtype, device=operator.device)
    total = operator.matvec(ones).double().sum((1, 2)) - largest.values.double().sum(1)
    return TopEntries(largest.values, *largest.indices, total.to(operator.dtype))


class _Largest:
    # The largest entries so far.
    def __init__(self, operator: Any, k: int, by: str, between: bool) -> None:
        self.k, self.by_size, self.is_causal = k, by == "size", operator.is_causal
        self.between = between
        self.length = operator.length
        self.values = torch.zeros(operator.batch, 0, dtype=operator.dtype, device=operator.device)
        self.at = torch.zeros(operator.batch, 0, dtype=torch.int64, device=operator.device)

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        return self.at // self.length, self.at % self.length

    def may_gain(self, bounds: Tensor) -> bool:
        """Whether entries of at most this size, (B,), may be among the largest."""
        if self.values.shape[1] < self.k:
            return True
        return self.k > 0 and bool((bounds > self._order(self.values[:, -1])).any())

    def take(self, start: int, tile: Tensor) -> None:
        """The rows (B, R, L) from ``start`` on."""
        if self.values.shape[1] == self.k:
            # Rows whose largest entry is too small are many, and found without sorting.
            largest = self._order(torch.stack(tile.aminmax(dim=-1))).amax(0)  # (B, R)
            rows = (largest > self._order(self.values[:, -1:])).any(0).nonzero()[:, 0]
            if len(rows) == 0:
                return
            tile = tile[:, rows]
        else:
            rows = torch.arange(tile.shape[1], device=tile.device)
        columns = torch.arange(self.length, device=tile.device)
        at = (start + rows)[:, None] * self.length + columns  # (R, L)
        if self.is_causal:
            tile, at = (x[..., : start + int(rows[-1]) + 1] for x in (tile, at))
        if self.is_causal or self.between:
            lag = at // self.length - at % self.length
            is_ranked = lag >= 0 if self.is_causal else torch.ones_like(lag, dtype=torch.bool)
            is_ranked = is_ranked & (lag != 0) if self.between else is_ranked
            tile, at = tile[:, is_ranked], at[is_ranked]
        values, at = tile.flatten(1), at.flatten().expand(len(tile), -1)
        top = self._largest(values)
        values = torch.cat([self.values, values.gather(1, top)], 1)
        at = torch.cat([self.at, at.gather(1, top)], 1)
        top = self._largest(values)
        self.values, self.at = values.gather(1, top), at.gather(1, top)

    def _largest(self, values: Tensor) -> Tensor:
        return self._order(values).topk(min(self.k, values.shape[1]), 1).indices

    def _order(self, values: Tensor) -> Tensor:
        return values.abs() if self.by_size else values
