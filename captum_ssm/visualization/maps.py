"""Maps: tokens by tokens, layers by tokens, and the maps of several layers in a strip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from captum_ssm.visualization.figure import (
    SMALL,
    color_bar,
    draw_map,
    framed,
    new_figure,
    plain,
    printable,
    sparse_labels,
)
from captum_ssm.visualization.palette import Colors, colors_of, finite
from captum_ssm.visualization.text import readable_tokens


def interaction_map(
    matrix: Tensor | np.ndarray,
    tokens: Sequence[str],
    *,
    row_tokens: Sequence[str] | None = None,
    title: str | None = None,
    scale: str | float = "each",
    max_labels: int = 64,
) -> Figure:
    """A token-to-token map with token labels.

    Args:
        matrix (Tensor): ``(R, L)``: row i holds the relevance of each token for query i.
        tokens (sequence of str): the L tokens of the columns.
        row_tokens (sequence of str, optional): the R queries. Default: ``tokens``
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`; the map
            is one panel. Default: ``"each"``
        max_labels (int, optional): with more tokens than this, every n-th is labeled, and in bold
            the decisive ones: those whose strongest entry is at least half the map's, as many as
            have room. Of maps with more than 512 tokens, each cell shows the strongest entry in
            it. Default: 64

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("map.png")`` writes it.

    Raises:
        ValueError: if the number of labels does not match the matrix, or it cannot be drawn.

    Examples::

        >>> matrix = LaTIM(model).interactions(input_ids, layer=0)[0]
        >>> figure = interaction_map(matrix, tokens, title="layer 0")
        >>> figure.savefig(folder / "map.png")
    """
    rows = tokens if row_tokens is None else row_tokens
    values = _labeled_map("matrix", matrix, (len(rows), len(tokens)))
    side = min(14.0, 2.0 + 0.22 * max(values.shape))
    height = side * max(0.35, values.shape[0] / values.shape[1])
    figure = new_figure(side + 0.8, height, title)
    axes = _draw_tokens(figure, colors_of([values], scale), tokens, max_labels)
    axes.set_xlabel("token j")
    axes.set_ylabel("query i")
    # A label is as high as ten points.
    fitting = min(max_labels, int(7.2 * max(1.0, height - 1)))
    sparse_labels(axes.yaxis, readable_tokens(rows), np.abs(values).max(1), fitting)
    return figure


def layer_overview(
    rows: Mapping[str, Tensor] | Tensor,
    tokens: Sequence[str],
    *,
    title: str | None = None,
    scale: str | float = "each",
    max_labels: int = 64,
) -> Figure:
    """Layers by tokens: one row of relevance per layer or method.

    Args:
        rows (mapping of str to Tensor, or Tensor): ``(L,)`` each by name, or ``(R, L)``.
        tokens (sequence of str): the L tokens.
        scale (str or float, optional): as for :func:`interaction_map`, where each row is a panel:
            rows of different methods have different units. Default: ``"each"``
        title, max_labels (optional): as for :func:`interaction_map`.

    The result and the errors are those of :func:`interaction_map`.

    Examples::

        >>> maps = hidden_attention(model, input_ids, reduction="mean", rows=-1)
        >>> figure = layer_overview({path: m[0, 0] for path, m in maps.items()}, tokens)
    """
    if isinstance(rows, Mapping):
        names = list(rows)
        values = [_labeled_map(f"rows[{n!r}]", row, (len(tokens),)) for n, row in rows.items()]
    else:
        names = [f"layer {i}" for i in range(len(rows) if rows.ndim else 0)]
        values = list(_labeled_map("rows", rows, (len(names), len(tokens))))
    if not values:
        raise ValueError("rows is empty, so there is nothing to show; expected a row per layer.")
    size = min(16.0, 3.8 + 0.24 * len(tokens)), 1.4 + 0.35 * len(names)
    figure = new_figure(*size, title)
    axes = _draw_tokens(figure, colors_of(values, scale), tokens, max_labels)
    axes.set_yticks(range(len(names)), [printable(name) for name in names])
    return figure


def map_strip(
    maps: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    columns: int = 6,
    title: str | None = None,
    scale: str | float = "each",
) -> Figure:
    """The maps of several layers or stages side by side, each on its own grid.

    Args:
        maps (mapping of str to Tensor, or sequence of pairs of them): by name ``(h, w)``, or
            ``(L,)`` for a row of tokens. Grids may differ.
        columns (int, optional): the most maps next to each other. Default: 6
        title (str, optional): of the figure. Default: None
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`, where each
            map is a panel. Default: ``"each"``

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`.

    Raises:
        ValueError: if a map has another number of axes or cannot be drawn.

    Examples::

        >>> stages = [("stage 0", torch.rand(14, 14)), ("stage 1", torch.rand(7, 7))]
        >>> figure = map_strip(stages, title="a model of two stages")
    """
    pairs = list(maps.items() if isinstance(maps, Mapping) else maps)
    if not pairs or columns < 1:
        raise ValueError(
            f"maps holds {len(pairs)} maps for {columns} columns; expected at least one of each."
        )
    values = []
    for name, relevance in pairs:
        if relevance.ndim not in (1, 2):
            raise ValueError(
                f"the map {name!r} has shape {tuple(relevance.shape)}; expected (h, w), or (L,) "
                "for tokens in a row. Choose one example and one channel, or sum over them."
            )
        values.append(np.atleast_2d(finite(relevance, f"the map {name!r}")))
    colors = colors_of(values, scale)
    wide = min(columns, len(pairs))
    # As tall as the tallest map, from a strip of tokens to a column.
    ratio = float(np.clip(max(h / w for h, w in (v.shape for v in values)), 0.2, 2.0))
    rows = math.ceil(len(pairs) / wide)
    size = 1.9 * wide + 1.2, max(1.4, rows * (1.75 * ratio + 0.6)) + 0.35 * bool(title)
    figure = new_figure(*size, title)
    cells = figure.subplots(rows, wide, squeeze=False)
    for k, cell in enumerate(cells.flat):
        if k >= len(pairs):
            cell.set_axis_off()
            continue
        grid = " \N{MULTIPLICATION SIGN} ".join(map(str, pairs[k][1].shape))
        plain(cell, 1.8, pairs[k][0], "  ·  ".join(filter(None, (grid, colors.caption(k)))))
        draw_map(cell, colors.panels[k], colors, most=128)
        if len(values[k]) == 1:
            cell.set_aspect("auto")
    color_bar(figure, cells, colors, colors.unit("map"))
    return figure


def _draw_tokens(figure: Figure, colors: Colors, tokens: Sequence[str], max_labels: int) -> Any:
    # One column per token.
    axes = figure.subplots()
    framed(axes)
    values = np.vstack(colors.panels)
    draw_map(axes, values, colors)
    axes.set_aspect("auto")
    strength = np.abs(values).max(0)
    labels = sparse_labels(axes.xaxis, readable_tokens(tokens), strength, max_labels)
    # In points; a letter is about two thirds as wide as it is high.
    room = 72 * (figure.get_size_inches()[0] - 2.4) / len(labels)
    if max(map(len, labels)) * 0.67 * SMALL > room:
        for label in axes.get_xticklabels():
            label.set_rotation(0 if len(label.get_text()) <= 2 else 90)
    color_bar(figure, axes, colors, colors.unit("row"))
    return axes


def _labeled_map(name: str, values: Tensor | np.ndarray, expected: tuple[int, ...]) -> np.ndarray:
    if tuple(values.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but the labels are for {expected}; expected "
            "one token per column and one query per row, without a batch axis."
        )
    return finite(values, name)
