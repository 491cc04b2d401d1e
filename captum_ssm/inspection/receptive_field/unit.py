"""The unit whose receptive field is asked for: where it lies, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from captum_ssm.capture import FrozenModel
from captum_ssm.errors import brief
from captum_ssm.inspection.receptive_field.result import index_of, times
from captum_ssm.utils.integers import as_index


@dataclass(frozen=True)
class Unit:
    """What is asked: a place of the output, a token of it or of the last mixers, or a target."""

    text: str
    center: tuple[int, ...] | None = None
    place: tuple[int, ...] | None = None
    axis: int | None = None  # of the output's channels
    from_mixer: bool = False


def unit_of_tokens(frozen: FrozenModel, position: Any, size: tuple[int, ...]) -> Unit:
    """The token of the last mixers at a place of their grid, the central one by default."""
    tokens = frozen.shape[1]
    grid = None if tokens_are_places(frozen, size) else frozen.grids[-1]
    is_token = as_index(position) is not None
    if grid is None or (is_token and len(grid.shape) > 1):
        (token,) = index_of("position", position, (tokens,))
        text = named("token", (token,), (tokens,))
        if grid is None:
            lies = (token,) if size == (tokens,) else None
            return Unit(f"{text} of the last mixers", lies, (token,))
        here = (grid.index == token).nonzero().tolist()
        center = proportional(here[0], grid.shape, size) if here else None
        return Unit(f"{text} of the last mixers", center, (token,))
    place = index_of("position", position, grid.shape)
    text = f"{named('place', place, grid.shape)} of the last mixers' grid"
    return Unit(text, proportional(place, grid.shape, size), (int(grid.index[place]),))


def tokens_are_places(frozen: FrozenModel, size: tuple[int, ...]) -> bool:
    """Whether the tokens are the input's: no grid is needed, and a long run has measured none."""
    return frozen.wiring.is_simple and size == (frozen.shape[1],)


def features_axis(tensor: Tensor, channels: int | None) -> int | None:
    """The axis of an input's features; None for ids, and for floats ``(B, L)``."""
    if not tensor.is_floating_point() or (tensor.dim() < 3 and channels is None):
        return None
    usual = 2 if tensor.dim() == 3 else 1
    axis = usual if channels is None else channels
    if not -tensor.dim() <= axis < tensor.dim() or axis % tensor.dim() == 0:
        raise ValueError(
            f"channels is {brief(channels)} for inputs of shape {tuple(tensor.shape)}; expected "
            f"the axis of their features, 1 .. {tensor.dim() - 1} (or negative, from the end)."
        )
    return axis % tensor.dim()


def places_of(tensor: Tensor, channels: int | None) -> tuple[int, ...]:
    """The sizes of a tensor's axes except those of examples and of features."""
    return tuple(n for axis, n in enumerate(tensor.shape) if axis not in (0, channels))


def proportional(
    place: Sequence[int], shape: Sequence[int], size: Sequence[int]
) -> tuple[int, ...] | None:
    """The place of the input where one of a grid lies; None where their axes differ."""
    if len(shape) != len(size):
        return None
    ends = zip(place, shape, size, strict=True)
    return tuple((2 * at + 1) * n // (2 * count) for at, count, n in ends)


def named(what: str, place: Sequence[int], shape: Sequence[int]) -> str:
    """A place in words, such as ``"token 3 of 7"``."""
    at = str(place[0]) if len(place) == 1 else str(tuple(place))
    return f"{what} {at} of {times(shape)}"


def over_channels(target: Any, channels: int) -> str:
    """The channels that a unit sums over, in words."""
    if target is not None:
        return f", channel {target}"
    return "" if channels == 1 else f", over {channels} channels"
