"""Images and their relevance: methods side by side, one row per image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from captum_ssm.utils.colors import AGAINST, FOR, INK
from captum_ssm.visualization.figure import (
    NORMAL,
    color_bar,
    draw_map,
    new_figure,
    plain,
    printable,
)
from captum_ssm.visualization.palette import Colors, array, colors_of, finite

DRAWINGS = ("overlay", "heat_map")


def image_overlay(
    relevance: Tensor | Mapping[str, Tensor],
    images: Tensor,
    *,
    drawing: str = "overlay",
    contours: Sequence[float] = (),
    columns: int = 4,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    scale: str | float = "each",
) -> Figure:
    """Images and their relevance, by one method or several.

    Several images make one row each: the image, then one column per method. A single image makes
    a grid of at most ``columns`` panels per row, the image first.

    Args:
        relevance (Tensor, or mapping of str to Tensor): ``(B, C, H, W)`` as a method returns it,
            summed over C; or ``(B, H, W)``. Several methods by name.
        images (Tensor): ``(B, C, H, W)`` with one or three color channels. Integers are in
            0 .. 255. Floating values outside [0, 1], as in normalized images, are rescaled to
            it, per image from the smallest value to the largest.
        drawing (str, optional): ``"overlay"``: relevance in color on the gray image, transparent
            where it is zero; ``"heat_map"``: relevance alone. Default: ``"overlay"``
        contours (sequence of float, optional): shares such as 0.5: lines around the smallest area
            that holds this share of the total magnitude, in the color of the sign inside. Reads
            best for relevance of patches; per pixel, areas are many and small. Default: none
        columns (int, optional): the most panels per row, for a single image. Default: 4
        titles (sequence of str, optional): one per image. Default: None
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`; a panel
            is the relevance of one image by one method. Default: ``"each"``

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`.

    Raises:
        ValueError: if relevance or titles do not match the images, or cannot be drawn.

    Examples::

        >>> vim = VisionMamba(image_size=32, patch_size=8, classes=5, width=16, depth=2).eval()
        >>> images = torch.rand(2, 3, 32, 32)
        >>> relevance = MambaAttribution(vim).attribute(images, target=4)
        >>> figure = image_overlay(relevance, images, titles=["a cat", "a dog"])
        >>> methods = {"LRP": MambaLRP(vim), "LaTIM": LaTIM(vim)}
        >>> result = {name: m.attribute(images[:1], target=4) for name, m in methods.items()}
        >>> figure = image_overlay(result, images[:1], contours=(0.5,))
    """
    if images.dim() != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise ValueError(
            f"images has shape {tuple(images.shape)}; expected (B, C, H, W) with one or three "
            "color channels; pass images[None] for a single image."
        )
    pictures = as_pictures(images, "images")
    methods = relevance if isinstance(relevance, Mapping) else {"": relevance}
    maps = {
        name: _map_of(f"relevance[{name!r}]" if name else "relevance", values, images, pictures)
        for name, values in methods.items()
    }
    if not maps or columns < 1:
        raise ValueError(
            f"relevance holds {len(maps)} methods for {columns} columns; expected at least one of "
            "each."
        )
    if titles is not None and (isinstance(titles, str) or len(titles) != len(pictures)):
        raise ValueError(f"titles is {titles!r}; expected one per image, {len(pictures)} in all.")
    if drawing not in DRAWINGS:
        raise ValueError(f"drawing is {drawing!r}; expected one of {DRAWINGS}.")
    if any(not 0 < share < 1 for share in contours):
        raise ValueError(f"contours is {contours!r}; expected shares between 0 and 1.")
    colors = colors_of([values[k] for k in range(len(pictures)) for values in maps.values()], scale)
    figure, cells, width = _grid(pictures, len(maps), columns, title)
    for k, picture in enumerate(pictures):
        cells[k, 0].imshow(picture)
        plain(cells[k, 0], width, "image" if k == 0 else None)
        if titles is not None:
            cells[k, 0].set_ylabel(printable(titles[k]), fontsize=NORMAL, color=INK)
        for j, name in enumerate(maps):
            cell, panel = cells[k, 1 + j], k * len(maps) + j
            plain(cell, width, name if k == 0 else None, colors.caption(panel))
            draw_on_picture(cell, picture, colors.panels[panel], colors, drawing)
            _outline(cell, colors.panels[panel], contours)
    color_bar(figure, cells, colors, colors.unit("panel"))
    return figure


def _grid(
    pictures: np.ndarray, methods: int, columns: int, title: str | None
) -> tuple[Figure, np.ndarray, float]:
    # Cells (B, 1 + methods) and their width: a single image's are wrapped, those of several are
    # one row each.
    count, panels = len(pictures), 1 + methods
    wide = panels if count > 1 else min(columns, panels)
    rows = math.ceil(panels / wide) * count
    ratio = pictures.shape[1] / pictures.shape[2]
    width = max(1.2, min(2.4, 4.0 / ratio))
    height = min(4.0, width * ratio) + 0.25
    size = (width + 0.05) * wide + 1.3, height * rows + 0.25 + 0.35 * bool(title)
    figure = new_figure(*size, title)
    cells = figure.subplots(rows, wide, squeeze=False).reshape(count, -1)
    for cell in cells[:, panels:].flat:
        cell.remove()
    return figure, cells[:, :panels], width


def draw_on_picture(
    axes: Any,
    picture: np.ndarray,
    values: np.ndarray,
    colors: Colors,
    drawing: str = "overlay",
    most: int = 224,
) -> None:
    """Relevance on a picture ``(H, W, 3)``, where color is kept for relevance."""
    if drawing == "overlay":
        # Neither black nor white, on which one of the two hues would be hard to see.
        axes.imshow(0.2 + 0.75 * picture.mean(2), cmap="gray", vmin=0, vmax=1)
    draw_map(axes, values, colors, most, overlay=drawing == "overlay")


def _outline(axes: Any, values: np.ndarray, shares: Sequence[float]) -> None:
    magnitude = np.abs(values)
    strongest = np.sort(magnitude, axis=None)[::-1]
    sums = np.cumsum(strongest)
    if min(values.shape) < 2 or not sums[-1]:
        return
    inside = [float(strongest[np.searchsorted(sums, share * sums[-1])]) for share in shares]
    # Halfway to the next weaker value: a line at a patch's own value would run through it.
    weaker = [float(magnitude[magnitude < level].max(initial=0)) for level in inside]
    levels = sorted({(a + b) / 2 for a, b in zip(inside, weaker, strict=True)})
    for sign, color in ((1, FOR[4]), (-1, AGAINST[4])):
        crossed = [level for level in levels if level < (sign * values).max()]
        if crossed:
            axes.contour(sign * values, levels=crossed, colors=color, linewidths=1.2)


def _map_of(label: str, relevance: Tensor, images: Tensor, pictures: np.ndarray) -> np.ndarray:
    values = array(relevance)
    values = values.sum(1) if values.ndim == 4 else values
    if values.shape != pictures.shape[:3]:
        raise ValueError(
            f"{label} has shape {tuple(relevance.shape)} for images of shape "
            f"{tuple(images.shape)}; expected their shape, as a method returns it, or (B, H, W)."
        )
    return finite(values, label)


def as_pictures(images: Tensor, name: str) -> np.ndarray:
    """``(B, C, ...)`` of one or three channels as ``(B, ..., 3)`` in [0, 1], per example."""
    values = finite(images if images.is_floating_point() else images / 255, name)
    values = np.moveaxis(values, 1, -1).repeat(3 // values.shape[1], -1)
    rest = tuple(range(1, values.ndim))
    low, high = values.min(rest, keepdims=True), values.max(rest, keepdims=True)
    outside = (low < 0) | (high > 1)
    return np.where(outside, (values - low) / np.maximum(high - low, 1e-30), values)
