"""The one palette and the one scale: which color a relevance has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from torch import Tensor

from captum_ssm.utils.colors import AGAINST, FOR

_RAMPS = {"both": (*AGAINST[:0:-1], *FOR), "for": FOR, "against": AGAINST[::-1]}


def relevance_colors(sign: str = "both") -> LinearSegmentedColormap:
    """The color map of every picture: blue against, paper at zero, orange for.

    Args:
        sign (str, optional): ``"both"``, or one half, ``"for"`` or ``"against"``.
            Default: ``"both"``

    Returns:
        matplotlib.colors.LinearSegmentedColormap: for figures of your own; its middle is zero, so
        draw with ``vmin=-limit, vmax=limit``.

    Raises:
        ValueError: if there is no such half.

    Examples::

        >>> from matplotlib.figure import Figure
        >>> relevance = torch.randn(8, 8)
        >>> limit = color_limit(relevance)
        >>> axes = Figure().subplots()
        >>> image = axes.imshow(relevance.numpy(), cmap=relevance_colors(), vmin=-limit, vmax=limit)
    """
    if sign not in _RAMPS:
        raise ValueError(f"sign is {sign!r}; expected one of {tuple(_RAMPS)}.")
    return LinearSegmentedColormap.from_list(f"relevance_{sign}", _RAMPS[sign], N=513)


def overlay_colors(sign: str) -> LinearSegmentedColormap:
    """The color map on top of a picture: zero is transparent instead of paper."""
    # Opacity rises early, so that weak relevance shows on any picture.
    orange, blue = (
        [(*to_rgb(ramp[i]), opacity) for i, opacity in ((3, 0.0), (3, 0.5), (3, 0.8), (4, 0.95))]
        for ramp in (FOR, AGAINST)
    )
    ramp = {"both": [*blue[::-1], *orange[1:]], "for": orange, "against": blue[::-1]}[sign]
    return LinearSegmentedColormap.from_list(f"overlay_{sign}", ramp, N=513)


def color_limit(relevance: Tensor | np.ndarray, outliers: float = 2.0) -> float:
    """The magnitude at which the color is strongest.

    The strongest values are clipped as far as together they hold at most ``outliers`` percent of
    the total magnitude, as in Captum's image functions, but not below a third of the largest. A
    few stray pixels then do not make the others pale, and a decisive one never looks like them.

    Args:
        relevance (Tensor): of any shape.
        outliers (float, optional): percent of the total magnitude, from 0 (clips nothing) to below
            100. Default: 2

    Returns:
        float: greater than zero; 1 where all relevance is zero.

    Raises:
        ValueError: if relevance is empty or not finite, or outliers is out of range.

    Examples::

        >>> color_limit(torch.tensor([0.5, -2.0, 0.1]))
        2.0
        >>> first, second = torch.randn(9), torch.randn(9)
        >>> both = color_limit(torch.stack([first, second]))  # one scale for two figures
        >>> figure = layer_overview(first[None], list("abcdefghi"), scale=both)
    """
    if not 0 <= outliers < 100:
        raise ValueError(f"outliers is {outliers}; expected a percentage, from 0 to below 100.")
    values = np.sort(np.abs(finite(relevance, "relevance")), axis=None)[::-1]
    if not values[0]:
        return 1.0
    above = np.cumsum(values / values[0])
    clipped = int(np.searchsorted(above, above[-1] * outliers / 100, side="right"))
    return float(max(values[clipped], values[0] / 3))


@dataclass(frozen=True)
class Colors:
    """The panels of one figure as they are drawn, on one common scale from low to high."""

    panels: list[np.ndarray]
    limits: list[float]  # the relevance at which each panel's color is strongest
    low: float
    high: float
    is_divided: bool  # each panel by its limit

    def caption(self, panel: int) -> str:
        """The relevance that a panel shows as 1, where panels are divided by their limits."""
        return f"1 = {self.limits[panel]:.2g}" if self.is_divided else ""

    def unit(self, panel: str) -> str:
        """What the numbers of the color bar mean; ``panel`` says what one panel is."""
        return f"share of the {panel}'s strongest" if self.is_divided else "relevance"

    @property
    def sign(self) -> str:
        return "both" if self.low and self.high else "against" if self.low else "for"

    @property
    def norm(self) -> Normalize:
        return Normalize(self.low, self.high)

    @property
    def clipped(self) -> tuple[bool, bool]:
        """Whether values lie below low, and above high."""
        slack = 1 + 1e-6
        below = any(panel.min() < self.low * slack for panel in self.panels)
        return below, any(panel.max() > self.high * slack for panel in self.panels)

    def drawing(self, overlay: bool = False) -> dict[str, Any]:
        """What ``imshow`` needs for these colors."""
        colors = overlay_colors(self.sign) if overlay else relevance_colors(self.sign)
        return {"cmap": colors, "norm": self.norm, "interpolation": "nearest"}


def colors_of(panels: Sequence[np.ndarray], scale: str | float) -> Colors:
    """Colors of panels by ``scale``; with ``"each"``, panels are divided by their limits."""
    # The numbers of a single panel stay its relevance.
    is_divided = scale == "each" and len(panels) > 1
    if is_divided:
        limits, limit = [color_limit(panel) for panel in panels], 1.0
        panels = [panel / top for panel, top in zip(panels, limits, strict=True)]
    elif scale == "each":
        limits = [limit := color_limit(panels[0])]
    else:
        limit = _common_limit(panels, scale)
        limits = [limit] * len(panels)
    negative = any(bool((panel < 0).any()) for panel in panels)
    positive = any(bool((panel > 0).any()) for panel in panels) or not negative
    low, high = -limit if negative else 0.0, limit if positive else 0.0
    return Colors(list(panels), limits, low, high, is_divided)


def _common_limit(panels: Sequence[np.ndarray], scale: str | float) -> float:
    if scale == "shared":
        return color_limit(np.concatenate([panel.ravel() for panel in panels]))
    if isinstance(scale, str) or not 0 < scale < float("inf"):
        raise ValueError(
            f"scale is {scale!r}; expected 'each', 'shared', or the relevance, greater than zero, "
            "at which the color is strongest."
        )
    return float(scale)


def signed(value: float, digits: int = 2) -> str:
    """A relevance with its sign, such as +0.031; a minus is as wide as a plus."""
    return f"{value:+.{digits}g}".replace("-", "\N{MINUS SIGN}") if value else "0"


def array(values: Tensor | np.ndarray) -> np.ndarray:
    """Tensors of any device and dtype as an array of floats."""
    if isinstance(values, Tensor):
        return values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=float)


def finite(values: Tensor | np.ndarray, name: str) -> np.ndarray:
    """Tensors as an array of floats, at least one and all finite; ``name`` is for errors."""
    numbers = array(values)
    if numbers.size == 0:
        raise ValueError(
            f"{name} is empty, of shape {numbers.shape}, so there is nothing to show; expected at "
            "least one value."
        )
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} holds NaN or Inf; expected finite values.")
    return numbers
