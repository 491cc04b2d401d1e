"""Series: each feature as a line with its relevance in color, and all features as a heat map."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from captum_ssm.utils.colors import FAINT, INK, PAPER, SOFT, SUNKEN
from captum_ssm.visualization.figure import (
    NORMAL,
    SMALL,
    color_bar,
    draw_map,
    framed,
    new_figure,
    printable,
    sparse_labels,
)
from captum_ssm.visualization.palette import Colors, colors_of, finite, overlay_colors, signed

DRAWINGS = ("background", "points")
# The most steps that the map shows: each cell is then at least a pixel wide.
MOST_STEPS = 480


def series_plot(
    relevance: Tensor,
    series: Tensor,
    *,
    channels_first: bool = False,
    features: Sequence[str] | None = None,
    times: Sequence[object] | None = None,
    forecast: Tensor | None = None,
    mark: int | None = None,
    drawing: str = "background",
    max_lines: int = 6,
    xlabel: str = "step",
    title: str | None = None,
    scale: str | float = "each",
) -> Figure:
    """One series: a line per feature with its relevance in color, and a map of all features.

    Args:
        relevance (Tensor): of one example, in the series' shape.
        series (Tensor): ``(L, F)``, or ``(L,)`` of one feature. One example of a batch:
            ``series[0]``.
        channels_first (bool, optional): whether both are ``(F, L)``. Default: False
        features (sequence of str, optional): the F names, with their units.
            Default: feature 0, 1, ...
        times (sequence, optional): what is written at the steps, such as dates: one per step, and
            those of the forecast where it is to have some. Default: 0, 1, ...
        forecast (Tensor, optional): ``(T,)`` or ``(T, F)`` (``(F, T)`` with channels first): what
            the model predicts after the last step, drawn as a broken line. Default: None
        mark (int, optional): a step to mark as the explained one. Steps from L on are those of the
            forecast: ``L + 3`` is its fourth. Default: None
        drawing (str, optional): ``"background"``: relevance as color behind the line;
            ``"points"``: as points on the line, larger where relevance is stronger.
            Default: ``"background"``
        max_lines (int, optional): with more features than this, those with the most relevance are
            drawn as lines; the map has all. Default: 6
        xlabel (str, optional): the time axis' label, with its unit. Default: ``"step"``
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`; all
            features are one panel. Default: ``"each"``

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`. The entry with the most relevance
        is marked with its number.

    Raises:
        ValueError: if the shapes or numbers of names do not match, or relevance cannot be drawn.

    Examples::

        >>> series, relevance = torch.randn(48, 3), torch.randn(48, 3)
        >>> figure = series_plot(relevance, series, features=["load (MW)", "wind (m/s)", "hour"])
        >>> figure = series_plot(
        ...     relevance.T, series.T, channels_first=True, forecast=torch.randn(3, 12), mark=51
        ... )
    """
    if relevance.shape != series.shape:
        raise ValueError(
            f"relevance has shape {tuple(relevance.shape)} for a series of shape "
            f"{tuple(series.shape)}; expected the same, as a method returns it."
        )
    lines = _by_feature(series, "series", channels_first)
    values = _by_feature(relevance, "relevance", channels_first)
    F, L = lines.shape
    later = (
        np.zeros((F, 0)) if forecast is None else _by_feature(forecast, "forecast", channels_first)
    )
    names = [f"feature {i}" for i in range(F)] if features is None else list(features)
    _check(F, L, later, names, times, mark, drawing, max_lines)
    colors = colors_of([values], scale)
    strength = np.abs(values).max(1)
    drawn = sorted(np.argsort(-strength, kind="stable")[:max_lines].tolist())
    # One feature needs no map in addition to its background.
    mapped = F > 1 or drawing == "points"
    heights = [0.9] * len(drawn) + [float(np.clip(0.24 * F, 0.5, 4.0))] * mapped
    figure = new_figure(9.0, sum(heights) + 0.12 * len(heights) + 0.8 + 0.35 * bool(title), title)
    grid = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    rows = list(grid[:, 0])
    for axes, i in zip(rows, drawn, strict=False):
        _draw_line(axes, lines[i], values[i], later[i], colors, drawing)
        axes.set_ylabel(
            printable(textwrap.fill(names[i], 18)), rotation=0,
            ha="right", va="center", fontsize=NORMAL, color=INK,
        )  # fmt: skip
    if mapped:
        draw_map(rows[-1], values, colors, most=MOST_STEPS)
        rows[-1].set_aspect("auto")
        framed(rows[-1])
        sparse_labels(rows[-1].yaxis, names, strength, 24)
    end = max(L + later.shape[1], 0 if mark is None else mark + 1)
    _draw_time(rows, L, end, mark, times)
    rows[-1].set_xlabel(xlabel)
    _mark_strongest(rows, drawn, lines, values)
    color_bar(figure, rows, colors)
    return figure


def _by_feature(values: Tensor, name: str, channels_first: bool) -> np.ndarray:
    # One row per feature, (F, L).
    if values.ndim not in (1, 2):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; expected (L, F), (F, L) with channels_first, "
            f"or (L,): one example, such as {name}[0] of a batch."
        )
    numbers = finite(values, name)
    return np.atleast_2d(numbers if channels_first else numbers.T)


def _check(
    F: int,
    L: int,
    later: np.ndarray,
    names: Sequence[str],
    times: Sequence[object] | None,
    mark: int | None,
    drawing: str,
    max_lines: int,
) -> None:
    if len(names) != F:
        raise ValueError(f"features is {names!r}; expected one name per feature, {F} in all.")
    if len(later) != F:
        raise ValueError(f"forecast is of {len(later)} features; expected the series' {F}.")
    if times is not None and len(times) < L:
        raise ValueError(f"times has {len(times)} entries; expected one per step, {L} in all.")
    if mark is not None and mark < 0:
        raise ValueError(f"mark is {mark}; expected a step from 0 on; the forecast starts at {L}.")
    if drawing not in DRAWINGS:
        raise ValueError(f"drawing is {drawing!r}; expected one of {DRAWINGS}.")
    if max_lines < 1:
        raise ValueError(f"max_lines is {max_lines}; expected at least one.")


def _draw_line(
    axes: Any,
    line: np.ndarray,
    values: np.ndarray,
    later: np.ndarray,
    colors: Colors,
    drawing: str,
) -> None:
    framed(axes)
    steps = np.arange(len(line))
    everything = np.concatenate([line, later])
    low, high = float(everything.min()), float(everything.max())
    room = 0.12 * (high - low) or 1.0
    axes.plot(steps, line, color=INK if drawing == "background" else FAINT, linewidth=1.1, zorder=2)
    if later.size:
        # From the last step on, so that the line does not break.
        ahead = np.concatenate([line[-1:], later])
        axes.plot(len(line) - 1 + np.arange(len(ahead)), ahead, "--", color=SOFT, linewidth=1.1)
    if drawing == "background":
        shown = draw_map(axes, values[None], colors, most=MOST_STEPS)
        left, right, _, _ = shown.get_extent()
        shown.set_extent((left, right, low - room, high + room))
        shown.set_zorder(0)
        axes.set_aspect("auto")
    else:
        share = np.abs(values) / max(-colors.low, colors.high)
        axes.scatter(
            steps,
            line,
            s=6 + 100 * share.clip(0, 1),
            c=values,
            linewidths=0,
            zorder=3,
            cmap=overlay_colors(colors.sign),
            norm=colors.norm,
        )
    axes.set_ylim(low - room, high + room)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))


def _draw_time(
    rows: Sequence[Any], L: int, end: int, mark: int | None, times: Sequence[object] | None
) -> None:
    rows[-1].set_xlim(-0.5, end - 0.5)
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if times is not None:
        written = [printable(str(time)) for time in times]
        rows[-1].xaxis.set_major_formatter(
            lambda x, _: written[round(x)] if 0 <= round(x) < len(written) else ""
        )
    for axes in rows:
        if end > L:
            axes.axvspan(L - 0.5, end - 0.5, color=SUNKEN, zorder=0, linewidth=0)
        if mark is not None:
            axes.axvline(mark, color=INK, linewidth=1.0, linestyle=(0, (1, 1.5)), zorder=4)
    if mark is not None:
        rows[0].annotate(
            "explained",
            (mark, 1),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=SMALL,
            color=INK,
        )


def _mark_strongest(
    rows: Sequence[Any], drawn: Sequence[int], lines: np.ndarray, values: np.ndarray
) -> None:
    i, step = np.unravel_index(np.abs(values).argmax(), values.shape)
    if not values[i, step]:
        return
    axes, L = rows[drawn.index(int(i))], lines.shape[1]
    axes.plot([step], [lines[i, step]], "o", mfc="none", mec=INK, ms=8, mew=1.2, zorder=5)
    side = -1 if step > L / 2 else 1
    axes.annotate(
        signed(float(values[i, step])),
        (step, lines[i, step]),
        (8 * side, 0),
        va="center",
        ha="left" if side > 0 else "right",
        textcoords="offset points",
        fontsize=NORMAL,
        color=INK,
        weight="bold",
        zorder=5,
        bbox={"fc": PAPER, "ec": "none", "alpha": 0.75, "pad": 1},
    )
