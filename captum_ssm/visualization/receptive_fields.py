"""The picture of receptive fields: maps next to each other, or curves along time, on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from captum_ssm.inspection.receptive_field.result import ReceptiveField
from captum_ssm.utils.colors import AGAINST, FOR, INK

# Half of the field, and nearly all of it.
_SHARES = (0.5, 0.9)
_LINES = ("-", "--")
# From paper to orange, as for positive relevance; entries of exactly zero are gray blue.
_COLORS = LinearSegmentedColormap.from_list("receptive_field", FOR)
_ZERO, _UNIT = "#dfe5ea", AGAINST[4]
_CURVES = (FOR[4], AGAINST[4], INK, "#f0a35c", AGAINST[2], "#9a9a9a")


def receptive_field_map(
    fields: ReceptiveField | Mapping[str, ReceptiveField],
    *,
    decades: float = 4.0,
    title: str | None = None,
) -> Figure:
    """Effective receptive fields, as papers print them: log-scaled, several on one scale.

    Of images one map per field, each divided by its largest entry, with the smallest areas that
    hold 50% (solid line) and 90% (dashed) of it, slightly smoothed, and a cross at the unit. Of
    volumes and videos a map per axis, the field summed over that axis. Of series and text one curve
    per field, with the shortest window that holds 50% (thick) and 90% (thin) below, and a dotted
    line at the unit.

    Args:
        fields (ReceptiveField or mapping of str to ReceptiveField): one, or several by name.
        decades (float, optional): of the log scale, below the largest entry; smaller ones are drawn
            as the smallest, and zeros of images in gray blue. Default: 4.0
        title (str, optional): of the figure. Default: None

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("field.png")`` writes it.

    Raises:
        ValueError: for no fields, or fields of series together with those of images.

    Examples::

        >>> fields = {
        ...     by: effective_receptive_field(model, input_ids, position=-1, by=by)
        ...     for by in ("gradient", "implicit")
        ... }
        >>> figure = receptive_field_map(fields)
    """
    named = dict(fields) if isinstance(fields, Mapping) else {"": fields}
    axes = {field.map.dim() for field in named.values()}
    if len(axes) != 1:
        raise ValueError(
            f"fields holds {len(named)} fields, over inputs of {sorted(axes)} axes; expected at "
            "least one, and all over as many axes: draw series and images separately."
        )
    if not decades > 0:
        raise ValueError(f"decades is {decades!r}; expected a number above 0.")
    figure = _curves(named, decades) if axes == {1} else _maps(named, decades)
    if title is not None:
        figure.suptitle(title)
    return figure


def _maps(named: Mapping[str, ReceptiveField], decades: float) -> Figure:
    panels = []
    for name, field in named.items():
        values, count = field.map.numpy(), field.map.dim()
        center: Sequence[int] = field.center or ()
        if count == 2:
            sides = [f"{share:.0%}: {field.area(share).share:.1%}" for share in _SHARES]
            panels.append((name, values, center, "   ".join(sides) + " of the input"))
            continue
        for axis in range(count):
            rest = [at for k, at in enumerate(center) if k != axis]
            panels.append((name, values.sum(axis), rest, f"summed over axis {axis}"))
    columns = min(len(panels), 6)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.9, 3.1 * rows), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell in cells[len(panels) :]:
        cell.axis("off")
    norm = LogNorm(10.0**-decades, 1.0, clip=True)
    for cell, (name, values, center, below) in zip(cells, panels, strict=False):
        scaled = values / values.max()
        shown = cell.imshow(np.ma.masked_equal(scaled, 0), cmap=_COLORS, norm=norm)
        cell.set_facecolor(_ZERO)
        for share, line in zip(_SHARES, _LINES, strict=True):
            _outline(cell, scaled, share, line)
        if len(center) == 2:
            cell.plot(center[1], center[0], "+", color=_UNIT, markersize=8, markeredgewidth=1.8)
        cell.set(title=name, xlabel=below, xticks=[], yticks=[])
    bar = figure.colorbar(shown, ax=list(cells), fraction=0.04, pad=0.02)
    bar.set_label("share of the largest entry")
    return figure


def _outline(cell: Any, values: np.ndarray, share: float, line: str) -> None:
    # A line around the area that holds the share. The map is smoothed first: gradients are noisy.
    width = 2 * (min(values.shape) // 32) + 1
    for axis in (0, 1):
        padded = np.pad(values, [(width // 2, width // 2) if k == axis else (0, 0) for k in (0, 1)])
        values = np.lib.stride_tricks.sliding_window_view(padded, width, axis).mean(-1)
    ordered = np.sort(values, axis=None)[::-1]
    inside = np.searchsorted(ordered.cumsum(), share * ordered.sum())
    level = ordered[min(inside, len(ordered) - 1)]
    if values.min() < level < values.max():
        cell.contour(values, [level], colors=INK, linewidths=1.0, linestyles=line)


def _curves(named: Mapping[str, ReceptiveField], decades: float) -> Figure:
    length = max(len(field.map) for field in named.values())
    figure = Figure(figsize=(7.5, 3.2 + 0.18 * len(named)), layout="constrained")
    curves, windows = figure.subplots(2, 1, sharex=True, height_ratios=[5, 0.35 * len(named) + 0.4])
    for k, (name, field) in enumerate(named.items()):
        values, color = field.map.numpy(), _CURVES[k % len(_CURVES)]
        curves.plot(np.maximum(values, 10.0**-decades), color=color, label=name or None)
        if field.center is not None:
            curves.axvline(field.center[0], color=color, linestyle=":", linewidth=1)
        for share, height in zip(_SHARES, (0.5, 0.18), strict=True):
            side = field.area(share).side
            sums = np.convolve(values, np.ones(side), "valid")
            corner = (float(sums.argmax()) - 0.5, k - height / 2)
            windows.add_patch(Rectangle(corner, side, height, color=color, linewidth=0))
    curves.set(yscale="log", ylim=(10.0**-decades, 1.3), xlim=(-0.5, length - 0.5))
    curves.set_ylabel("share of the largest")
    if any(named):
        curves.legend(frameon=False)
    windows.set(ylim=(len(named) - 0.5, -0.5), yticks=[], xlabel="step or token of the input")
    windows.set_ylabel("50%, 90%", rotation=0, ha="right", va="center")
    return figure
