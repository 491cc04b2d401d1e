"""A flow graph as a figure: layers by tokens, the largest edges, and the path that decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from captum_ssm.attr.flow.graph import FORMAT, FlowGraph
from captum_ssm.utils.colors import FAINT, INK, LINE, PAPER, SOFT, SUNKEN
from captum_ssm.visualization.figure import LARGE, NORMAL, SMALL, printable
from captum_ssm.visualization.flow_layout import FlowBand, FlowLayout, FlowLink, FlowNode
from captum_ssm.visualization.palette import relevance_colors, signed
from captum_ssm.visualization.text import readable_tokens

POINTS = 72
CORNER = 9.0  # the largest radius where an edge turns
NAME = 14  # letters of a token


def flow_graph(
    graph: FlowGraph | Mapping[str, Any],
    *,
    edges: int | None = None,
    path: int | None = None,
    title: str | None = None,
    width: float = 7.0,
) -> Figure:
    """The circuit of an answer: which token reads which other one, in which layer.

    The text is at the bottom and the answer at the top. A column is a token that carries relevance,
    a band a layer. Widths are relevance, all to one scale; orange supports the answer, blue
    opposes it. Edges of a recurrence run along their layer, those of attention jump. The black line
    is the path. Tokens and layers that move nothing that is shown are folded.

    Args:
        graph (FlowGraph or dict): by ``RelevanceFlow(model).graph(...)``, or its ``to_dict()``,
            such as an example's ``circuits`` of an explanation.
        edges (int, optional): how many of the largest edges are shown, in addition to those of the
            path. None for the fewest with a large share, 24 at most. Default: None
        path (int, optional): which of the graph's paths is drawn; None for the likeliest from
            another token than the one at which the answer is read. Default: None
        title (str, optional): of the figure. Default: None
        width (float, optional): in inches, more where the tokens need it. Default: 7

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("circuit.pdf")`` writes it.

    Raises:
        TypeError: for something that is not a graph.
        ValueError: for numbers of edges and paths that the graph does not have, and values that
            are not finite.

    Examples::

        >>> graph = RelevanceFlow(model).graph(input_ids, target=5)
        >>> figure = flow_graph(graph.with_tokens(tokens), edges=5)
        >>> figure.savefig(folder / "circuit.svg")
    """
    data = graph.to_dict() if isinstance(graph, FlowGraph) else graph
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise TypeError(
            f"graph is {type(graph).__name__}; expected a FlowGraph, or a dict of the format "
            f"{FORMAT}, as its to_dict() makes it."
        )
    values = [row[2] for row in (*data["nodes"], *data["stays"])]
    values += [row[3] for row in data["edges"]]
    if not all(map(math.isfinite, values)):
        raise ValueError("graph holds NaN or Inf; expected finite values.")
    drawn = FlowLayout(data, edges, path, width * POINTS)
    head = 26.0 if title else 6.0
    size = drawn.width / POINTS, (drawn.height + head) / POINTS
    figure = Figure(figsize=size, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawn.width), ylim=(0, drawn.height + head))
    axes.set_axis_off()
    if title:
        corner = 8, drawn.height + head - 8
        options: dict[str, Any] = {"va": "top", "fontsize": LARGE, "weight": "bold", "color": INK}
        axes.text(*corner, printable(title), **options)
    _ground(axes, drawn)
    _links(axes, drawn)
    _path(axes, drawn)
    _names(axes, drawn)
    return figure


def _ground(axes: Any, drawn: FlowLayout) -> None:
    left, right = 58, drawn.width - 4
    for band in drawn.bands:
        if band.jumps:
            box = (left, band.low), right - left, band.high - band.low
            axes.add_patch(Rectangle(*box, facecolor=SUNKEN, linewidth=0))
        _layer_name(axes, drawn, band)
    key = "width: relevance,", "for the answer", "against it"
    x = float(left)
    for text, color in zip(key, (SOFT, _color(1, 0.84), _color(-1, 0.84)), strict=True):
        top = drawn.y[drawn.W] + 20
        axes.text(x, top, text, va="center", fontsize=6.5, color=color)
        x += 3.5 * len(text) + 4
    for y in drawn.y.values():
        axes.plot((left, right), (y, y), color=LINE, linewidth=0.6, zorder=1)
    for x, count in drawn.gaps:
        ends = drawn.y[0], drawn.y[drawn.W]
        axes.plot((x, x), ends, color=FAINT, linewidth=0.5, linestyle=(0, (1, 4)), zorder=1)
        said = "··" if drawn.is_turned else f"··\n{count}"
        axes.text(x, ends[0] - 6, said, ha="center", va="top", fontsize=6, color=SOFT)


def _layer_name(axes: Any, drawn: FlowLayout, band: FlowBand) -> None:
    name = str(band.first) if band.end == band.first + 1 else f"{band.first}-{band.end - 1}"
    middle = (band.low + band.high) / 2
    options: dict[str, Any] = {"ha": "right", "x": 52}
    if not band.links:
        axes.text(y=middle, s=f"{name} quiet", va="center", fontsize=6.5, color=SOFT, **options)
        return
    kind = printable(drawn.data["layers"][band.first]["kind"])
    axes.text(y=middle + 1, s=f"layer {name}", va="bottom", fontsize=SMALL, color=INK, **options)
    axes.text(y=middle - 1, s=kind, va="top", fontsize=6.5, color=SOFT, **options)


def _links(axes: Any, drawn: FlowLayout) -> None:
    for link in sorted(drawn.links, key=lambda one: (not one.is_kept, -abs(one.value))):
        color = _color(link.value, 0.42 + 0.36 * math.sqrt(min(1.0, link.width / 26)))
        if link.is_kept:
            shape = _upright(link, drawn.thick(link.low))
            axes.add_patch(PathPatch(shape, facecolor=color, linewidth=0, zorder=2))
            continue
        shape = _course(link)
        options: dict[str, Any] = {"facecolor": "none", "capstyle": "butt"}
        axes.add_patch(
            PathPatch(shape, edgecolor=PAPER, linewidth=link.width + 2, zorder=3, **options)
        )
        if link.is_shift:
            options["linestyle"] = (0, (0.4, 0.3))
        axes.add_patch(PathPatch(shape, edgecolor=color, linewidth=link.width, zorder=3, **options))
    for node in drawn.nodes:
        if node in drawn.busy:
            _node(axes, drawn, node)


def _node(axes: Any, drawn: FlowLayout, node: FlowNode) -> None:
    width, x, y = drawn.node_width(node), drawn.x[node[1]], drawn.y[node[0]]
    color = _color(drawn.values.get(node, 0.0), 0.84)
    box = (x - width / 2, y - 2.5), width, 5.0
    axes.add_patch(Rectangle(*box, facecolor=color, edgecolor=PAPER, linewidth=0.6, zorder=4))


def _path(axes: Any, drawn: FlowLayout) -> None:
    links = drawn.along()
    for link in links:
        line = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.2, "zorder": 5}
        axes.add_patch(PathPatch(_course(link), **line))
        if not link.is_kept:
            x = sum(link.x) / 2
            y = link.lane if link.lane is not None else sum(link.y) / 2
            axes.text(
                *(x, y + link.width / 2 + 2, signed(link.value, 3)),
                **{"ha": "center", "va": "bottom", "fontsize": SMALL, "weight": "bold"},
                **{"color": INK, "zorder": 6},
            )
    starts = [link for k, link in enumerate(links) if not k or not link.is_kept]
    for link in starts:
        axes.plot(link.x[0], link.y[0], "o", color=INK, markersize=3, zorder=6)


def _names(axes: Any, drawn: FlowLayout) -> None:
    data, told = drawn.data, drawn.told
    for t in drawn.tokens:
        is_strong = t == data["at"] or bool(told and t == told[0][1])
        options = {"fontsize": NORMAL, "color": INK, "weight": "bold" if is_strong else "normal"}
        name, x, y = _clipped(data["tokens"][t]), drawn.x[t], drawn.y[0] - 7
        if drawn.is_turned:
            turned: dict[str, Any] = {"rotation": 58, "rotation_mode": "anchor", "ha": "right"}
            axes.text(x + 3, y, f"{name} {t}", va="center", **options, **turned)
        else:
            axes.text(x, y, name, ha="center", va="top", **options)
            axes.text(x, y - 12, str(t), ha="center", va="top", fontsize=6.5, color=SOFT)
    links, top = drawn.along(), drawn.y[drawn.W]
    stem = links[-1].x[1] if links else drawn.x[data["at"]]
    axes.plot((stem, stem), (top, top + 14), color=INK, linewidth=1.2, zorder=5)
    answer = _clipped(data.get("answer") or "the answer")
    box = {"boxstyle": "round,pad=0.35", "facecolor": INK, "edgecolor": "none"}
    right = min(stem, drawn.width - 6 - 3.2 * len(answer))
    options = {"fontsize": NORMAL, "color": PAPER, "weight": "bold", "zorder": 7}
    axes.text(right, top + 20, answer, ha="center", va="center", bbox=box, **options)


def _clipped(text: str) -> str:
    (name,) = readable_tokens([text.strip() or text])
    return printable(name if len(name) <= NAME else name[: NAME - 1] + "…")


def _color(value: float, strength: float) -> Any:
    return relevance_colors()(0.5 + 0.5 * math.copysign(strength, value))


def _course(link: FlowLink) -> Path:
    """The middle line of a link."""
    (a, b), (low, high) = link.x, link.y
    if link.lane is None:
        bend = (high - low) * (0.5 if link.is_kept else 0.62)
        points = [(a, low), (a, low + bend), (b, high - bend), (b, high)]
        return Path(points, [Path.MOVETO, *[Path.CURVE4] * 3])
    way, y = math.copysign(1, b - a), link.lane
    corner = min(max(CORNER, 0.8 * link.width), abs(b - a) / 2)
    first, second = min(corner, y - low), min(corner, abs(high - y))
    points = [(a, low), (a, y - first), (a, y), (a + way * first, y)]
    points += [(b - way * second, y), (b, y), (b, y + math.copysign(second, high - y)), (b, high)]
    turn = [Path.CURVE3, Path.CURVE3]
    return Path(points, [Path.MOVETO, Path.LINETO, *turn, Path.LINETO, *turn, Path.LINETO])


def _upright(link: FlowLink, low_width: float) -> Path:
    """Both sides of what a token keeps, which may be wider at one end."""
    (a, b), (low, high) = link.x, link.y
    p, q, bend = low_width / 2, link.width / 2, (high - low) / 2
    up = [(a - p, low), (a - p, low + bend), (b - q, high - bend), (b - q, high)]
    down = [(b + q, high), (b + q, high - bend), (a + p, low + bend), (a + p, low)]
    curve = [Path.CURVE4] * 3
    codes = [Path.MOVETO, *curve, Path.LINETO, *curve, Path.CLOSEPOLY]
    return Path([*up, *down, up[0]], codes)
