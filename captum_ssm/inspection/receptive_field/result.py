"""The effective receptive field of a unit, as what is returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import brief
from captum_ssm.utils.integers import as_index


@dataclass(frozen=True)
class Area:
    """How much of the input holds a share of a receptive field.

    Args:
        places (int): the fewest places (pixels, steps, tokens) that hold it.
        share (float): the same as a part of the input, in (0, 1].
        side (int): of the smallest square that holds it, wherever it lies; of series and text the
            length of the shortest window, of volumes and videos the edge of the smallest cube.
            Along an axis of the input that is shorter it is cut.

    Examples::

        >>> field = effective_receptive_field(nn.Conv1d(2, 3, 5), torch.randn(4, 2, 9), channels=1)
        >>> field.area(1.0).side
        5
    """

    places: int
    share: float
    side: int


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """The effective receptive field of one unit.

    Args:
        map (Tensor): over the places of the input, ``(L,)``, ``(H, W)`` or ``(D, H, W)``, float64
            on the CPU, in [0, 1]: the largest entry is one.
        unit (str): the unit that was asked, in words.
        inputs (int): the number of inputs averaged.
        by (str): ``"gradient"`` or ``"implicit"``.
        center (tuple of int, optional): the place of the input where the unit lies, in proportion
            to the axes of its own grid; None for a unit without a place. Default: None

    Examples::

        >>> field = effective_receptive_field(model, input_ids, position=-1)
        >>> print(field)  # doctest: +SKIP
        effective receptive field by gradient, of place 6 of 7, over 50 channels; 1 input
        50% in 2 of 7 places (28.6%), in a window of 3
        90% in 5 of 7 places (71.4%), in a window of 6
    """

    map: Tensor
    unit: str
    inputs: int
    by: str
    center: tuple[int, ...] | None = None

    def area(self, share: float = 0.5) -> Area:
        """How much of the input holds this share of the field.

        Args:
            share (float, optional): of the sum over the map, above 0 and at most 1. Default: 0.5

        Raises:
            ValueError: for another share.

        Examples::

            >>> effective_receptive_field(model, input_ids).area(0.9).places <= 7
            True
        """
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"share is {brief(share)}; expected a number above 0 and at most 1.")
        # The sums of whole maps are equal up to rounding only.
        needed = share * float(self.map.sum()) * (1 - 1e-12)
        sums = self.map.flatten().sort(descending=True).values.cumsum(0)
        places = min(int((sums < needed).sum()) + 1, len(sums))
        smallest, largest = 1, max(self.map.shape)
        while smallest < largest:
            side = (smallest + largest) // 2
            if _largest_sum(self.map, side) >= needed:
                largest = side
            else:
                smallest = side + 1
        return Area(places, places / len(sums), smallest)

    def profile(self, center: int | Sequence[int] | None = None) -> Tensor:
        """The share of the field at each distance from the unit, ``(R,)``, starting at zero.

        Of a causal model this is the distance back from the query. On several axes the distance is
        the largest of those along each, so that entry r is a square ring of side 2 r + 1.

        Args:
            center (int or sequence of int, optional): the place to start from; None for the
                unit's own. Default: None

        Raises:
            ValueError: for a unit without a place, or a place outside the input.

        Examples::

            >>> field = effective_receptive_field(model, input_ids, position=-1)
            >>> field.profile().shape
            torch.Size([7])
        """
        if center is None and self.center is None:
            raise ValueError(
                f"the unit is {self.unit}, which lies at no place of the input; pass center=."
            )
        start = self.center if center is None else index_of("center", center, self.map.shape)
        assert start is not None
        axes = [torch.arange(n) - at for n, at in zip(self.map.shape, start, strict=True)]
        distance = torch.stack(torch.meshgrid(*axes, indexing="ij")).abs().amax(0).flatten()
        sums = self.map.new_zeros(int(distance.max()) + 1)
        return sums.index_add_(0, distance, self.map.flatten()) / self.map.sum()

    def __repr__(self) -> str:
        kind = {1: "a window", 2: "a square"}.get(self.map.dim(), "a cube")
        places = times(self.map.shape)
        count = f"{self.inputs} input{'' if self.inputs == 1 else 's'}"
        lines = [f"effective receptive field by {self.by}, of {self.unit}; {count}"]
        for share in (0.5, 0.9):
            area = self.area(share)
            lines.append(
                f"{share:.0%} in {area.places} of {places} places ({area.share:.1%}), in {kind} of "
                f"{area.side}"
            )
        return "\n".join(lines)


def index_of(name: str, value: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """A place on axes of ``shape``, from zero on; the central one for None."""
    if value is None:
        return tuple(n // 2 for n in shape)
    several = (value,) if as_index(value) is not None else value
    try:
        place = [as_index(index) for index in several]
    except TypeError:
        place = [None]
    pairs = list(zip(place, shape, strict=False))
    inside = all(i is not None and -n <= i < n for i, n in pairs)
    if len(place) != len(shape) or not inside:
        ints = "an int" if len(shape) == 1 else f"{len(shape)} ints"
        raise ValueError(
            f"{name} is {brief(value)}; expected {ints}, a place on the {times(shape)} there are "
            "(negative from the end)."
        )
    return tuple(i % n for i, n in pairs if i is not None)


def times(shape: Sequence[int]) -> str:
    """Sizes of axes, such as ``"8 x 8"``."""
    return " x ".join(map(str, shape))


def _largest_sum(values: Tensor, side: int) -> float:
    """The largest sum over a cube of this side."""
    for axis, n in enumerate(values.shape):
        width = min(side, n)
        first = torch.zeros_like(values.narrow(axis, 0, 1))
        sums = torch.cat([first, values.cumsum(axis)], axis)
        left = sums.shape[axis] - width
        values = sums.narrow(axis, width, left) - sums.narrow(axis, 0, left)
    return float(values.max())
