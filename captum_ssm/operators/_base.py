"""The interface of a frozen token mixer: a linear operator over tokens.

Axes: B batch, L tokens, D channels, M maps (one matrix each: a channel, or a head of D / M
channels), R rows asked for. The channels of a map are consecutive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._memory import tile_entries

REDUCTIONS = ("mean", "max", "min", "prod")
FEW_ROWS = 4


class TokenOperator(ABC):
    r"""A token mixer whose coefficients are frozen at their values for one input.

    It maps values ``(B, L, D)`` to outputs ``(B, L, D)``, channel by channel:
    :math:`y_{i,d} = \sum_j \alpha^{m(d)}_{ij} v_{j,d}`, with one matrix :math:`\alpha^m` of
    shape ``(L, L)`` for each map m. The matrix never has to exist: every method that does not
    return it works in time linear in L wherever the recurrence allows.

    Attributes:
        batch (int): B.
        length (int): L.
        channels (int): D.
        maps (int): M; D is a multiple of it.
        dtype (torch.dtype): float32 or float64, the dtype of all results.
        device (torch.device): device of all results.

    Raises:
        ValueError: from a method, for a ``reduction`` that is not accepted.

    Examples::

        >>> operator = BandOperator(torch.rand(1, 5, 4))
        >>> isinstance(operator, TokenOperator), operator.length, operator.maps
        (True, 5, 4)
        >>> v, w = torch.randn(2, 1, 5, 4)
        >>> there, back = (w * operator.apply(v)).sum(), (operator.vecmat(w) * v).sum()
        >>> torch.testing.assert_close(there, back)  # vecmat is the adjoint of apply
    """

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, L, D, M)."""

    @property
    @abstractmethod
    def reference(self) -> Tensor:
        """A coefficient, of the dtype and on the device of all of them."""

    @property
    def is_causal(self) -> bool:
        """Whether a token's output depends on no later token."""
        return True

    @property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def length(self) -> int:
        return self.sizes[1]

    @property
    def channels(self) -> int:
        return self.sizes[2]

    @property
    def maps(self) -> int:
        return self.sizes[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    @property
    def device(self) -> torch.device:
        return self.reference.device

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """The mixer's output for the values ``v (B, L, D)``: ``(B, L, D)``."""

    @abstractmethod
    def vecmat(self, w: Tensor, reduction: str | None = None) -> Tensor:
        """A row vector times each matrix: the adjoint of :meth:`apply`.

        Args:
            w (Tensor): ``(B, L, D)``, or ``(B, L)`` for the same row vector in every channel.
            reduction (str, optional): None keeps the channels; ``"mean"`` returns their mean
                without ever holding them all. Default: None

        Returns:
            Tensor: ``(B, L, D)``, or ``(B, L)`` for ``"mean"``.
        """

    @abstractmethod
    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        """Rows ``index (B, R)`` of the maps ``start .. stop - 1``: ``(B, stop - start, R, L)``."""

    @abstractmethod
    def compose(
        self,
        *,
        left: Tensor | None = None,
        skip: Tensor | None = None,
        right: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> TokenOperator:
        r"""The operator :math:`\mathrm{diag}(l)\,(\alpha + \mathrm{diag}(s))\,\mathrm{diag}(r)\,C`.

        Args:
            left (Tensor, optional): ``(B, L, D)``, multiplies rows. Default: None
            skip (Tensor, optional): broadcasts to ``(B, L, D)``, added on the diagonal.
                Default: None
            right (Tensor, optional): ``(B, L, D)``, multiplies columns. Default: None
            conv (Tensor, optional): ``(D, K)``, the taps of a causal depthwise convolution in
                the order of :class:`torch.nn.Conv1d` (the last tap is the current token).
                Default: None

        Returns:
            TokenOperator: with one map per channel.
        """

    def detach(self) -> TokenOperator:
        """The operator with coefficients outside any autograd graph."""
        return _detached(self)

    def row_tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start .. stop - 1`` of the mean over channels: ``(B, stop - start, L)``."""
        index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        total = torch.zeros(index.shape + (self.length,), dtype=self.dtype, device=self.device)
        for first, last in self._map_tiles(stop - start):
            total += self.map_rows(index, first, last).sum(1)
        return total / self.maps

    def rows(self, index: Tensor, reduction: str | None = None) -> Tensor:
        """Some rows of every map, or of a reduction over the maps.

        Args:
            index (Tensor): ``(B, R)`` int64, positions in ``0 .. L - 1``.
            reduction (str, optional): ``"mean"``, ``"max"``, ``"min"`` or ``"prod"`` over the
                maps. Default: None

        Returns:
            Tensor: ``(B, M, R, L)``, or ``(B, R, L)`` with a reduction.

        Raises:
            ValueError: for an unknown reduction.
        """
        if reduction is None:
            return self.map_rows(index, 0, self.maps)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {reduction!r}; accepted are {REDUCTIONS} and None.")
        if reduction == "mean" and index.shape[1] <= FEW_ROWS:
            # A few rows of the mean: one reversed scan each, without the rows of every map.
            one_hot = nn.functional.one_hot(index, self.length).to(self.dtype)  # (B, R, L)
            return torch.stack([self.vecmat(w, "mean") for w in one_hot.unbind(1)], 1)
        total: Tensor | None = None
        for start, stop in self._map_tiles(index.shape[1]):
            tile = self.map_rows(index, start, stop)
            if reduction == "mean":
                part = tile.sum(1)
                total = part if total is None else total + part
            elif reduction == "prod":
                part = tile.prod(1)
                total = part if total is None else total * part
            else:
                part = tile.amax(1) if reduction == "max" else tile.amin(1)
                combine = torch.maximum if reduction == "max" else torch.minimum
                total = part if total is None else combine(total, part)
        assert total is not None
        return total / self.maps if reduction == "mean" else total

    def matrix(self, reduction: str | None = None) -> Tensor:
        """Every row: ``(B, M, L, L)``, or ``(B, L, L)`` with a reduction (see :meth:`rows`)."""
        if reduction == "mean":
            return self.row_tile(0, self.length)
        index = torch.arange(self.length, device=self.device).expand(self.batch, -1)
        return self.rows(index, reduction)

    def row_sums(self, columns: Tensor | None = None) -> Tensor:
        """Sums over columns of the mean over channels: ``(B, L)``, in time linear in L.

        Args:
            columns (Tensor, optional): ``(B, L)``, a weight for each column. Default: None
        """
        shape = (self.batch, self.length, self.channels)
        if columns is None:
            ones = torch.ones(shape, dtype=self.dtype, device=self.device)
        else:
            ones = columns.to(self.dtype)[..., None].expand(shape)
        return self.apply(ones).mean(-1)

    def _map_tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        # Tiles of maps whose rows take a bounded amount of memory (64 MiB in float32).
        entries = tile_entries(1 << 24)
        step = max(1, entries // max(1, self.batch * rows * self.length))
        for start in range(0, self.maps, step):
            yield start, min(self.maps, start + step)


def check_vecmat(reduction: str | None) -> bool:
    """Whether ``vecmat`` was asked for the mean; a ValueError for what it does not do."""
    if reduction not in (None, "mean"):
        raise ValueError(f"reduction is {reduction!r}; vecmat accepts 'mean' and None.")
    return reduction == "mean"


def _detached(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(_detached(v) for v in value)
    if isinstance(value, TokenOperator) and is_dataclass(value):
        parts = {f.name: _detached(getattr(value, f.name)) for f in fields(value)}
        return replace(value, **parts)
    return value
