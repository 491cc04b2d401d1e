"""The figure of a corpus's memory: half-lives per head, sinks and saturation by position."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from captum_ssm.interventions import StateReport
from captum_ssm.utils.colors import AGAINST, INK, LINE, SOFT
from captum_ssm.visualization.figure import NORMAL, SMALL, framed, new_figure, printable

# Layers from light to dark blue; orange would mean relevance.
_LAYERS = LinearSegmentedColormap.from_list("layers", (AGAINST[2], AGAINST[4], INK))


def state_memory(report: StateReport, *, title: str | None = None) -> Figure:
    """Half-lives per layer and head, the sink profile by position, and saturation by position.

    Each head's half-life is a dot at the median and a line from the quantile 0.1 to 0.9; an arrow
    to the right where a quantile was not reached. The other curves are means over the heads of a
    layer: of the share of the last state, and of the effective rank (solid, matrix states) and the
    relative change per token (dotted).

    Args:
        report (StateReport): of :func:`captum_ssm.interventions.state_report`.
        title (str, optional): of the figure. Default: None

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("memory.png")`` writes it.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, input_ids)
        >>> figure = state_memory(report, title="What the states keep")
    """
    count = sum(len(layer.unreached) for layer in report.layers.values())
    figure = new_figure(11.0, min(14.0, max(3.4, 1.4 + 0.16 * count)), title)
    lives, sinks, full = figure.subplots(1, 3)
    colors = [_LAYERS(x) for x in np.linspace(0, 1, len(report.layers))]
    _half_lives(lives, report, colors)
    for (name, layer), color in zip(report.layers.items(), colors, strict=True):
        sinks.plot(layer.sinks.mean(1), color=color, linewidth=1.2, label=printable(name))
        full.plot(report.after, layer.rank.mean(1), "o-", color=color, markersize=3)
        full.plot(report.after, layer.change.mean(1), "o:", color=color, markersize=3)
    sinks.set(xlabel="source position", ylabel="mean share of the last state")
    sinks.set_ylim(bottom=0)
    full.set(xlabel="tokens read", ylabel="rank (solid), change (dotted)")
    full.set_xscale("log", base=2)
    full.set_ylim(bottom=0)
    names = ("Half-life", "Sinks", "Saturation")
    for axes, name in zip((lives, sinks, full), names, strict=True):
        framed(axes)
        axes.set_title(name, fontsize=NORMAL, color=INK)
        axes.set_facecolor("white")
    if len(report.layers) <= 8:
        sinks.legend(frameon=False, fontsize=SMALL, labelcolor=SOFT)
    return figure


def _half_lives(axes: Any, report: StateReport, colors: list[Any]) -> None:
    finite = [v[np.isfinite(v)] for v in (one.half_lives for one in report.layers.values())]
    values = np.concatenate([*finite, np.ones(1)])
    end = 2.0 * values.max()
    row, ticks = 0, []
    for layer, color in zip(report.layers.values(), colors, strict=True):
        ticks.append(row)
        for low, middle, high in layer.half_lives.T:
            axes.plot([min(low, end), min(high, end)], [row, row], color=color, linewidth=1.4)
            if np.isfinite(middle):
                axes.plot(middle, row, "o", color=color, markersize=4)
            if not np.isfinite(high):
                axes.plot(end, row, ">", color=color, markersize=4)
            row += 1
        axes.axhline(row - 0.5, color=LINE, linewidth=0.8)
    axes.set_xscale("log")
    axes.set(ylim=(row - 0.5, -0.5), xlabel="tokens")
    step = -(-len(ticks) // 24)
    axes.set_yticks(ticks[::step], [f"layer {k}" for k in range(0, len(ticks), step)])
