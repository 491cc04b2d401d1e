"""Videos and volumes: frames with their relevance, and slices through the most relevant voxel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from captum_ssm.utils.colors import AGAINST, FAINT, FOR, INK, PAPER, SOFT
from captum_ssm.visualization.figure import NORMAL, SMALL, color_bar, framed, new_figure, plain
from captum_ssm.visualization.images import as_pictures, draw_on_picture
from captum_ssm.visualization.palette import array, color_limit, colors_of, finite, signed


def video_strip(
    relevance: Tensor,
    video: Tensor,
    *,
    frames: int = 8,
    fps: float | None = None,
    title: str | None = None,
    scale: str | float = "shared",
) -> Figure:
    """Frames of a video with their relevance, and the relevance of every frame as bars.

    Args:
        relevance (Tensor): ``(C, T, H, W)`` or ``(1, C, T, H, W)`` as a method returns it, summed
            over C; or ``(T, H, W)``.
        video (Tensor): ``(C, T, H, W)`` or ``(1, C, T, H, W)`` with one or three color channels
            and values as for :func:`image_overlay`.
        frames (int, optional): the most frames shown; of a longer video evenly spaced ones, with
            the most relevant one always among them. Default: 8
        fps (float, optional): frames per second, for times in seconds. Default: None
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`, where each
            frame is a panel. Default: ``"shared"``

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`. The frame with the largest
        magnitude of relevance is marked.

    Raises:
        ValueError: if the shapes do not match, or relevance cannot be drawn.

    Examples::

        >>> video, relevance = torch.rand(3, 24, 16, 16), torch.randn(3, 24, 16, 16)
        >>> figure = video_strip(relevance, video, fps=8)
    """
    pictures, values = _one_example(relevance, video, "video", "(C, T, H, W)")
    if frames < 1 or (fps is not None and fps <= 0):
        raise ValueError(f"frames is {frames} and fps is {fps}; expected positive numbers.")
    T = len(values)
    magnitude = np.abs(values).sum((1, 2))
    best = int(magnitude.argmax())
    shown = _spread(T, frames, best)
    colors = colors_of([values[t] for t in shown], scale)
    ratio = min(2.0, values.shape[1] / values.shape[2])
    size = max(6.0, 1.5 * len(shown) + 0.9), 1.5 * ratio + 1.75 + 0.35 * bool(title)
    figure = new_figure(*size, title)
    grid = figure.add_gridspec(2, len(shown), height_ratios=[1.5 * ratio, 0.8])
    cells = [figure.add_subplot(grid[0, k]) for k in range(len(shown))]
    for k, (cell, t) in enumerate(zip(cells, shown, strict=True)):
        name = f"frame {t}" if fps is None else f"frame {t}, {t / fps:.2f} s"
        plain(cell, 1.6, name, colors.caption(k))
        draw_on_picture(cell, pictures[t], colors.panels[k], colors, most=128)
        if t == best:
            cell.title.set_fontweight("bold")
            for spine in cell.spines.values():
                spine.set(color=INK, linewidth=2.0)
    bars = figure.add_subplot(grid[1, :])
    _frame_bars(bars, values, magnitude, shown, best)
    bars.set_xlabel("frame" if fps is None else f"frame, {fps:g} per second")
    color_bar(figure, [*cells, bars], colors, colors.unit("frame"))
    return figure


def volume_slices(
    relevance: Tensor,
    volume: Tensor,
    *,
    at: Sequence[int] | None = None,
    axes: Sequence[str] = ("z", "y", "x"),
    title: str | None = None,
    scale: str | float = "shared",
) -> Figure:
    """Three orthogonal slices of a volume through its most relevant voxel.

    Args:
        relevance (Tensor): ``(C, D, H, W)`` or ``(1, C, D, H, W)`` as a method returns it, summed
            over C; or ``(D, H, W)``.
        volume (Tensor): ``(C, D, H, W)`` or ``(1, C, D, H, W)`` with one or three channels and
            values as for :func:`image_overlay`.
        at (sequence of three ints, optional): the voxel through which to cut.
            Default: the one with the largest magnitude of relevance
        axes (sequence of str, optional): names of D, H and W. Default: ``("z", "y", "x")``
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`, where each
            slice is a panel, and ``"shared"`` is one scale of the whole volume.
            Default: ``"shared"``

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`. Lines in each slice lead to the
        voxel.

    Raises:
        ValueError: if the shapes do not match, ``at`` is outside, or relevance cannot be drawn.

    Examples::

        >>> volume, relevance = torch.rand(1, 16, 16, 16), torch.randn(1, 16, 16, 16)
        >>> figure = volume_slices(relevance, volume, axes=("axial", "coronal", "sagittal"))
    """
    pictures, values = _one_example(relevance, volume, "volume", "(C, D, H, W)")
    shape = values.shape
    if at is None:
        at = [int(i) for i in np.unravel_index(np.abs(values).argmax(), shape)]
    if len(at) != 3 or not all(0 <= i < n for i, n in zip(at, shape, strict=True)):
        raise ValueError(f"at is {tuple(at)}; expected a voxel of the volume of shape {shape}.")
    if len(axes) != 3:
        raise ValueError(f"axes is {axes!r}; expected three names.")
    panels = [values.take(i, axis) for axis, i in enumerate(at)]
    colors = colors_of(panels, color_limit(values) if scale == "shared" else scale)
    wide, high = (shape[2], shape[2], shape[1]), max(shape[0], shape[1])
    inch = 2.9 / max(*wide, high)
    size = max(4.0, inch * sum(wide) + 2.8), max(1.2, inch * high) + 1.1 + 0.35 * bool(title)
    figure = new_figure(*size, title)
    cells = figure.subplots(1, 3, width_ratios=wide)
    for axis, (cell, i) in enumerate(zip(cells, at, strict=True)):
        down, across = (k for k in range(3) if k != axis)
        framed(cell)
        draw_on_picture(cell, pictures.take(i, axis), colors.panels[axis], colors)
        name = f"{axes[axis]} = {i} of {shape[axis]}", colors.caption(axis)
        cell.set_title("\n".join(filter(None, name)), fontsize=NORMAL, color=INK, pad=4)
        cell.set(xlabel=axes[across], ylabel=axes[down])
        for ticks in (cell.xaxis, cell.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True, nbins=4))
        _crosshair(cell, at[across], at[down])
    where = ", ".join(f"{name} {i}" for name, i in zip(axes, at, strict=True))
    figure.supxlabel(
        f"lines cross at {where}: relevance {signed(float(values[tuple(at)]))}",
        fontsize=SMALL,
        color=SOFT,
    )
    color_bar(figure, cells, colors, colors.unit("slice"))
    return figure


def _crosshair(axes: Any, x: int, y: int) -> None:
    # With a gap, so that the voxel itself stays visible.
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    gap = 0.03 * (right - left) + 1
    for xs, ys in (
        ((left, x - gap), (y, y)),
        ((x + gap, right), (y, y)),
        ((x, x), (top, y - gap)),
        ((x, x), (y + gap, bottom)),
    ):
        # Light around dark: seen on any picture.
        axes.plot(xs, ys, color=PAPER, linewidth=2.0, alpha=0.7)
        axes.plot(xs, ys, color=INK, linewidth=0.8)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _frame_bars(
    axes: Any, values: np.ndarray, magnitude: np.ndarray, shown: Sequence[int], best: int
) -> None:
    framed(axes)
    steps = np.arange(len(values))
    for sign, color in ((1, FOR[3]), (-1, AGAINST[3])):
        axes.bar(steps, sign * (sign * values).clip(min=0).sum((1, 2)), color=color, width=0.8)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.plot(shown, [0] * len(shown), "|", color=INK, markersize=5)
    low, high = axes.get_ylim()
    axes.set(xlim=(-0.6, len(values) - 0.4), ylim=(low, high + 0.25 * (high - low)))
    top = values[best].clip(min=0).sum()
    share = magnitude[best] / (magnitude.sum() or 1)
    axes.annotate(
        f"most relevant: {share:.0%} of all",
        (best, top),
        (0, 2),
        textcoords="offset points",
        ha=_side(best, len(values)),
        va="bottom",
        fontsize=SMALL,
        color=INK,
        weight="bold",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.set_ylabel("relevance\nper frame", fontsize=SMALL)


def _side(step: int, n: int) -> str:
    return "left" if step < n / 8 else "right" if step > 7 * n / 8 else "center"


def _spread(n: int, most: int, best: int) -> list[int]:
    # Evenly spaced, with the nearest one moved to the best.
    chosen = np.linspace(0, n - 1, min(n, most)).round().astype(int)
    chosen[np.abs(chosen - best).argmin()] = best
    return [int(t) for t in chosen]


def _one_example(
    relevance: Tensor, volume: Tensor, name: str, expected: str
) -> tuple[np.ndarray, np.ndarray]:
    # The pictures (T, H, W, 3) and the relevance (T, H, W).
    example = volume[0] if volume.ndim == 5 and len(volume) == 1 else volume
    if example.ndim != 4 or example.shape[0] not in (1, 3) or example.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(volume.shape)}; expected {expected} with one or three "
            f"channels, of one example: {name}[0] of a batch."
        )
    values = array(relevance)
    values = values[0] if values.ndim == 5 and len(values) == 1 else values
    values = values.sum(0) if values.ndim == 4 else values
    if values.shape != example.shape[1:]:
        raise ValueError(
            f"relevance has shape {tuple(relevance.shape)} for a {name} of shape "
            f"{tuple(volume.shape)}; expected the same, as a method returns it, or without "
            "channels."
        )
    return as_pictures(example[None], name)[0], finite(values, "relevance")
