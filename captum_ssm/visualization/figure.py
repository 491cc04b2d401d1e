"""What all figures share: their look, their color bar, and labels that never overlap."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import font_manager
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from captum_ssm.utils.colors import FAINT, INK, LINE, SOFT
from captum_ssm.visualization.palette import Colors, relevance_colors, signed

SMALL, NORMAL, LARGE = 8.0, 9.0, 11.0


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """A figure of this size in inches, with room made for labels."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    if title:
        figure.suptitle(title, x=0.015, ha="left", fontsize=LARGE, color=INK, weight="bold")
    return figure


def plain(axes: Any, width: float, name: str | None = None, caption: str = "") -> None:
    """Axes without ticks, as for pictures, with a name above and a caption below.

    A name longer than the panel, of this width in inches, goes on in the next line.
    """
    axes.set_xticks([])
    axes.set_yticks([])
    framed(axes)
    if name is not None:
        axes.set_title(
            printable(textwrap.fill(name, int(13 * width))), fontsize=NORMAL, color=INK, pad=4
        )
    if caption:
        axes.set_xlabel(caption, fontsize=SMALL, color=SOFT, labelpad=3)


def framed(axes: Any) -> None:
    """A thin frame, and ticks that do not compete with the picture."""
    for spine in axes.spines.values():
        spine.set(color=LINE, linewidth=0.8)
    axes.tick_params(length=2, width=0.6, color=FAINT, labelcolor=INK, labelsize=SMALL, pad=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=SOFT, fontsize=NORMAL)


def color_bar(figure: Figure, axes: Any, colors: Colors, unit: str = "relevance") -> Any:
    """The scale in numbers, to the right of the axes; arrows where stronger values were clipped."""
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(
        colors.clipped, "neither"
    )
    mappable = ScalarMappable(colors.norm, relevance_colors(colors.sign))
    height = figure.get_size_inches()[1]
    bar = figure.colorbar(
        mappable,
        ax=axes,
        extend=extend,
        extendfrac=0.04,
        aspect=max(8.0, 6 * min(height, 3.6)),
        shrink=min(1.0, 3.6 / height),
        fraction=0.06,
        pad=0.02,
    )
    parts = 4 if colors.sign == "both" else 2
    ticks = np.linspace(colors.low, colors.high, parts + 1)
    labels = [signed(tick) for tick in ticks]
    if colors.sign == "both":
        labels[0], labels[-1] = f"{labels[0]} against", f"{labels[-1]} for"
    bar.set_ticks(ticks.tolist(), labels=labels)
    bar.outline.set(color=LINE, linewidth=0.8)
    bar.ax.tick_params(length=2, width=0.6, color=FAINT, labelcolor=INK, labelsize=SMALL)
    letters = int(12 * min(height, 3.6))
    bar.set_label(textwrap.fill(unit, letters), color=SOFT, fontsize=SMALL)
    return bar


def strongest_per_cell(values: np.ndarray, most: int) -> tuple[np.ndarray, tuple[float, ...]]:
    """A map of at most ``most`` cells per axis, and where ``imshow`` has to put it.

    A cell shows its strongest entry: a mean, or leaving entries out, would hide a decisive one.
    """
    sizes = [math.ceil(n / most) for n in values.shape]
    padding = [(0, -n % size) for n, size in zip(values.shape, sizes, strict=True)]
    padded = np.pad(values, padding)
    rows, columns = (n // size for n, size in zip(padded.shape, sizes, strict=True))
    blocks = padded.reshape(rows, sizes[0], columns, sizes[1])
    cells = blocks.swapaxes(1, 2).reshape(rows, columns, -1)
    strongest = np.abs(cells).argmax(-1)[..., None]
    entries = np.take_along_axis(cells, strongest, -1)[..., 0]
    return entries, (-0.5, padded.shape[1] - 0.5, padded.shape[0] - 0.5, -0.5)


def draw_map(
    axes: Any, values: np.ndarray, colors: Colors, most: int = 512, overlay: bool = False
) -> Any:
    """A map of which no decisive entry is lost, however small it is drawn."""
    height, width = values.shape
    shown, extent = strongest_per_cell(values, most)
    image = axes.imshow(shown, extent=extent, **colors.drawing(overlay))
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    return image


def sparse_labels(
    axis: Any, names: Sequence[str], strength: np.ndarray, max_labels: int, **options: Any
) -> list[str]:
    """Labels of an axis: every n-th, and the decisive ones in bold where not all have room."""
    step = max(1, math.ceil(len(names) / max_labels))
    chosen, bold = _labeled(strength, step, most=max(1, max_labels // 8))
    labels = [printable(names[i]) for i in chosen]
    axis.set_ticks(chosen, labels, fontsize=SMALL, **options)
    for label, i in zip(axis.get_ticklabels(), chosen, strict=True):
        if i in bold:
            label.set_fontweight("bold")
    return labels


def _labeled(strength: np.ndarray, step: int, most: int) -> tuple[list[int], set[int]]:
    # Decisive: at least half as strong as the strongest. Others give way to them.
    n = len(strength)
    if step == 1:
        return list(range(n)), set()
    order = np.argsort(-strength, kind="stable")
    decisive: list[int] = []
    for i in order.tolist():
        weak = strength[i] <= 0 or strength[i] < 0.5 * strength[order[0]]
        if weak or len(decisive) == most:
            break
        if all(abs(i - j) >= step for j in decisive):
            decisive.append(i)
    regular = [i for i in range(0, n, step) if all(abs(i - j) >= step for j in decisive)]
    return sorted([*decisive, *regular]), set(decisive)


def printable(text: str) -> str:
    """Text as matplotlib draws it letter by letter.

    Text between dollars would be taken for a formula, and characters that the font lacks would all
    be drawn as the same empty box, so they are spelled out.
    """
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    letters = (
        c if c == "\n" or font.get_char_index(ord(c)) else c.encode("unicode_escape").decode()
        for c in text
    )
    return "".join(letters).replace("$", r"\$")
