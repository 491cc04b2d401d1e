"""The interface of a frozen token mixer: a linear operator over tokens.

Axes: B batch, L tokens, D channels, M maps (one matrix each: a channel, or a head of D / M
channels), R rows asked for. The channels of a map are consecutive.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from captum_ssm.errors import brief, renamed
from captum_ssm.operators.top import TopEntries, top_entries
from captum_ssm.utils.memory import tile_entries
from captum_ssm.utils.nested import detached

FEW_ROWS = 4

# How each reduction takes a tile of maps (B, m, R, L), and joins the results of two tiles.
_OVER_MAPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": (lambda tile: tile.sum(1), torch.add),
    "max": (lambda tile: tile.amax(1), torch.maximum),
    "min": (lambda tile: tile.amin(1), torch.minimum),
    "prod": (lambda tile: tile.prod(1), torch.mul),
}
REDUCTIONS = tuple(_OVER_MAPS)


class TokenOperator(ABC):
    r"""A token mixer whose coefficients are frozen at their values for one input.

    It maps values ``(B, L, D)`` to outputs ``(B, L, D)``, channel by channel:
    :math:`y_{i,d} = \sum_j \alpha^{m(d)}_{ij} v_{j,d}`, with one matrix :math:`\alpha^m` of
    shape ``(L, L)`` for each map m. The matrix is never computed, except by the methods that return
    it: all others take time linear in L if the recurrence allows it.

    Attributes:
        batch (int): B.
        length (int): L.
        channels (int): D.
        maps (int): M; D is a multiple of it.
        dtype (torch.dtype): float32 or float64, the dtype of all results.
        device (torch.device): device of all results.

    Raises:
        ValueError: from a method, for an unknown ``reduction``.

    Examples::

        >>> operator = SkipOperator(torch.rand(1, 5, 4))
        >>> isinstance(operator, TokenOperator), operator.length, operator.maps
        (True, 5, 4)
        >>> v, w = torch.randn(2, 1, 5, 4)
        >>> there, back = (w * operator.matvec(v)).sum(), (operator.rmatvec(w) * v).sum()
        >>> torch.testing.assert_close(there, back)  # rmatvec is the adjoint of matvec
    """

    if not TYPE_CHECKING:
        __getattr__ = renamed(
            apply="matvec",
            naive_matrix="kernels.naive_diagonal_matrix or naive_linear_attention_matrix",
            place="position",
            vecmat="rmatvec",
        )

    # What differs between examples, channels or heads, for part.py: the axes of coefficients, or
    # operators inside.
    axes: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, L, D, M); of coefficients ``(B, L, D)`` with one map per channel."""
        B, L, D = self.reference.shape
        return B, L, D, D

    @property
    def reference(self) -> Tensor:
        """The first of the coefficients, which all have the same dtype and device."""
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]

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
    def matvec(self, v: Tensor) -> Tensor:
        """The mixer's output for the values ``v (B, L, D)``: ``(B, L, D)``."""

    @abstractmethod
    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        """A row vector times each matrix: the adjoint of :meth:`matvec`.

        Args:
            w (Tensor): ``(B, L, D)``, or ``(B, L)`` for the same row vector in every channel.
            reduction (str, optional): None keeps the channels; ``"mean"`` returns their mean
                without storing all of them. Default: None

        Returns:
            Tensor: ``(B, L, D)``, or ``(B, L)`` for ``"mean"``.
        """

    @abstractmethod
    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        """Rows ``index (B, R)`` of the maps ``start .. stop - 1``: ``(B, stop - start, R, L)``."""

    def scaled(self, left: Tensor | None, right: Tensor | None) -> TokenOperator:
        """``diag(left) alpha diag(right)`` for ``(B, L, D)`` each, with one map per channel."""
        return _composed.ScaledOperator(self, left, right)

    def convolved(self, taps: Tensor, grid: tuple[int, int] | None = None) -> TokenOperator:
        """``alpha conv``, of an operator with one map per channel.

        Args:
            taps (Tensor): ``(D, K)``, causal, or ``(D, Kh, Kw)`` over an image.
            grid (tuple of int, optional): (H, W) of the image's patches. Default: None
        """
        return _composed.ConvolvedOperator(self, taps, grid)

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
        composed = self.scaled(left, right)
        if conv is not None:
            composed = composed.convolved(conv)
        if skip is None:
            return composed
        diagonal = skip.to(self.dtype).expand(self.batch, self.length, self.channels)
        added = _composed.SkipOperator(diagonal).scaled(left, right)
        if conv is not None:
            added = added.convolved(conv)
        return _composed.SumOperator((composed, added))

    def with_taps(self, taps: Tensor, right: Tensor | None = None) -> TokenOperator | None:
        """``alpha conv diag(right)`` as one operator, if it computes causal taps ``(D, K)`` too."""
        return None

    def between_states(self) -> TokenOperator | None:
        """It with N tokens in front, which write its state, and N at the end, which read it.

        None where its state is not known. See :mod:`captum_ssm.operators.states`.
        """
        return None

    def detach(self) -> TokenOperator:
        """The operator with its coefficients detached from any autograd graph."""
        return detached(self)

    def row_tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start .. stop - 1`` of the mean over channels: ``(B, stop - start, L)``."""
        index = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        return self._reduced(index, "mean")

    def add_to_tile(self, tile: Tensor, start: int) -> None:
        """Add rows of the mean over channels, from ``start`` on, to a tile ``(B, R, L)``."""
        tile += self.row_tile(start, start + tile.shape[1])

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
            raise ValueError(
                f"reduction is {brief(reduction)}; expected one of {REDUCTIONS} or None."
            )
        if reduction == "mean" and index.shape[1] <= FEW_ROWS:
            # A few rows of the mean: one reversed scan each, without the rows of every map.
            one_hot = nn.functional.one_hot(index, self.length).to(self.dtype)  # (B, R, L)
            return torch.stack([self.rmatvec(w, "mean") for w in one_hot.unbind(1)], 1)
        return self._reduced(index, reduction)

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
        return self.matvec(ones).mean(-1)

    def entries(self, example: Tensor, target: Tensor, source: Tensor) -> Tensor | None:
        """Some entries of every map; None for an operator that knows rows only.

        A diagonal recurrence and linear attention know their entries, without a convolution, a
        delta rule or a bonus.

        Args:
            example, target, source (Tensor): ``(E,)`` int64, of each entry; no source is after its
                target.

        Returns:
            Tensor, optional: ``(E, M)``.

        Examples::

            >>> dt, (B, C) = torch.rand(2, 5, 4), torch.randn(2, 2, 5, 1, 3)
            >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
            >>> some = operator.entries(*torch.tensor([[0, 1], [4, 2], [1, 2]]))
            >>> torch.testing.assert_close(some[0], operator.matrix()[0, :, 4, 1])
        """
        return None

    def top(self, k: int, by: str = "size", *, between: bool = False) -> TopEntries:
        r"""The largest entries of the channel sum :math:`\sum_d \alpha^{m(d)}_{ij}`.

        They are D times the entries of ``matrix("mean")``, which is never held: memory is linear
        in L. Tiles of rows that cannot contain any of the largest, by :meth:`row_bounds`, are not
        computed. Entries above the diagonal of a causal operator are never returned.

        Args:
            k (int): how many per example, at least 1. There are at most as many as the matrix has.
            by (str, optional): ``"size"``, the largest absolute values, or ``"signed"``, the
                largest values. Default: ``"size"``
            between (bool, optional): leave out the diagonal, what tokens read from themselves.
                Default: False

        Returns:
            TopEntries: ``values``, ``targets`` (rows) and ``sources`` (columns), ``(B, k)`` each,
            the largest first; and ``rest (B,)``, the sum of all other entries.

        Raises:
            ValueError: for an unknown order, or k below 1.

        Examples::

            >>> operator = SkipOperator(torch.rand(1, 5, 4)).convolved(torch.rand(4, 2))
            >>> top = operator.scaled(torch.randn(1, 5, 4), None).top(3)
            >>> top.values.shape, bool((top.sources <= top.targets).all())
            (torch.Size([1, 3]), True)
        """
        return top_entries(self, k, by, between=between)

    def weighted_tile(
        self,
        start: int,
        left: Tensor,
        right: Tensor | None,
        taps: Tensor | None,
        columns: Tensor | None,
    ) -> Tensor | None:
        """Rows, from ``start`` on, of the mean of a product around alpha.

        It is ``diag(left) alpha diag(right) conv diag(columns)`` with ``left (B, R, D)`` of these
        rows, ``taps (D, K)``, and others ``(B, L, D)``. None where no kernel computes it without
        rows of all maps.
        """
        return None

    def row_bounds(self) -> Tensor:
        """A bound of the sizes of each row's entries in the channel sum: ``(B, L)``.

        It takes linear time, and is infinite where nothing is known of an operator's entries.
        """
        return _composed.ScaledOperator(self).row_bounds()

    def map_bounds(self) -> tuple[Tensor, Tensor] | None:
        r"""Row and column factors of a bound: :math:`|\alpha^m_{ij}| \le a_{im} b_{jm}`.

        Returns:
            tuple of Tensor, optional: a and b, ``(B, L, M)`` each; None where nothing is known.
        """
        return None

    def _reduced(self, index: Tensor, reduction: str) -> Tensor:
        of_tile, combine = _OVER_MAPS[reduction]
        tiles = self.map_tiles(index.shape[1])
        total = functools.reduce(combine, (of_tile(self.map_rows(index, *tile)) for tile in tiles))
        return total / self.maps if reduction == "mean" else total

    def map_tiles(self, rows: int, most: int = 1 << 24) -> Iterator[tuple[int, int]]:
        """Ranges of maps, of whose rows so many have at most ``most`` entries (64 MiB)."""
        entries = tile_entries(most)
        step = max(1, entries // max(1, self.batch * rows * self.length))
        for start in range(0, self.maps, step):
            yield start, min(self.maps, start + step)


class AroundOperator(TokenOperator):
    # Base of operators around another; they have as many channels and maps, unless they say more.
    inner: TokenOperator

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.inner.sizes

    @property
    def reference(self) -> Tensor:
        return self.inner.reference

    @property
    def is_causal(self) -> bool:
        return self.inner.is_causal


class PartsOperator(TokenOperator):
    # Base of operators put together from others.
    parts: tuple[TokenOperator, ...]

    @property
    def reference(self) -> Tensor:
        return self.parts[0].reference

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self.parts)


def check_rmatvec(reduction: str | None) -> bool:
    """Whether ``rmatvec`` should return the mean; a ValueError for an unknown reduction."""
    if reduction not in (None, "mean"):
        raise ValueError(f"reduction is {brief(reduction)}; expected 'mean' or None.")
    return reduction == "mean"


# Imported last: these are subclasses of TokenOperator.
from captum_ssm.operators import composed as _composed  # noqa: E402
