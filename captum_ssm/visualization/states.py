"""The picture of a state report: half-lives by layer, and three measures along positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from captum_ssm.interventions import StateReport
from captum_ssm.utils.colors import AGAINST, FAINT, FOR, SOFT
from captum_ssm.visualization.figure import NORMAL, SMALL, framed, new_figure, printable

_PANELS = {
    "used": "part of the rank in use",
    "change": "change of the state by a token",
    "share": "share of later states",
}


def state_plot(report: StateReport, *, title: str | None = None) -> Figure:
    """Half-lives of a model's layers, and how states fill along the text.

    The first panel has a dot for each channel or head, at its median half-life in tokens; the part
    of them that keep more than half to the end of most texts is written at the right edge. The
    others have a line per layer, the mean over its heads, from the first layer in blue to the last
    in orange.

    Args:
        report (StateReport): of :func:`captum_ssm.interventions.state_report`.
        title (str, optional): of the figure. Default: None

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("states.png")`` writes it.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, [input_ids])
        >>> figure = state_plot(report)
    """
    layers = list(dict.fromkeys(row["layer"] for row in report.half_lives))
    figure = new_figure(11.0, 2.6 + 0.25 * len(layers), title)
    panels = figure.subplots(1, 1 + len(_PANELS))
    _draw_half_lives(panels[0], report, layers)
    colors = _colors(len(layers))
    for axes, (measure, name) in zip(panels[1:], _PANELS.items(), strict=True):
        for layer, color in zip(layers, colors, strict=True):
            _draw_line(axes, report, layer, measure, color)
        axes.set_xscale("log", base=2)
        axes.set_title(name, fontsize=NORMAL)
        axes.set_xlabel("position, from 1")
        framed(axes)
    panels[-1].axhline(1, color=FAINT, linewidth=0.8, zorder=0)
    panels[-1].set_ylabel("even share = 1")
    panels[2].set_yscale("log")
    return figure


def _draw_half_lives(axes: Any, report: StateReport, layers: Sequence[str]) -> None:
    for y, (layer, color) in enumerate(zip(layers, _colors(len(layers)), strict=True)):
        lives = np.array([row["half_life"] for row in report.half_lives if row["layer"] == layer])
        known = np.isfinite(lives)
        axes.plot(lives[known], np.full(known.sum(), y), "o", color=color, alpha=0.5, markersize=4)
        longer = f"{1 - known.mean():.0%} longer"
        axes.text(1.02, y, longer, fontsize=SMALL, color=SOFT, transform=axes.get_yaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(layers)), [printable(layer) for layer in layers])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_title("half-lives", fontsize=NORMAL)
    axes.set_xlabel("tokens")
    framed(axes)


def _draw_line(axes: Any, report: StateReport, layer: str, measure: str, color: Any) -> None:
    means: dict[int, list[float]] = {}
    for row in report.positions:
        if (row["layer"], row["measure"]) == (layer, measure):
            means.setdefault(row["start"] + 1, []).append(row["mean"])
    at = sorted(means)
    axes.plot(at, [np.nanmean(means[x]) for x in at], "o-", color=color, markersize=3, linewidth=1)


def _colors(n: int) -> list[Any]:
    ramp = (AGAINST[4], AGAINST[3], FOR[3], FOR[4])
    return [ramp[round(k * (len(ramp) - 1) / max(n - 1, 1))] for k in range(n)]
