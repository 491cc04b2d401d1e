"""Figures and HTML for token relevance, on matplotlib's and Captum's own functions.

Every function returns what it made and shows nothing by itself, so that notebooks, scripts and
machines without a screen are served alike. Images need nothing of ours: an attribution has the
image's shape, and ``captum.attr.visualization.visualize_image_attr`` takes it as it is.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from captum.attr import visualization as captum_visualization
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

# What byte-level tokenizers print for bytes that have no letter.
_BYTE_LEVEL = {"Ġ": "␣", "Ċ": "⏎", "ĉ": "⇥", "▁": "␣", "\n": "⏎", "\t": "⇥"}


def readable_tokens(tokens: Sequence[str]) -> list[str]:
    """Tokens as a reader wants them: spaces, line breaks and tabs made visible.

    Args:
        tokens (sequence of str): as a tokenizer's ``convert_ids_to_tokens`` gives them; the
            markers of byte-level (``Ġ``, ``Ċ``) and sentencepiece (``▁``) vocabularies are known.

    Examples::

        >>> readable_tokens(["The", "Ġcat", "Ċ"])
        ['The', '␣cat', '⏎']
    """
    return ["".join(_BYTE_LEVEL.get(c, c) for c in token) or "∅" for token in tokens]


def interaction_map(
    matrix: Tensor | np.ndarray,
    tokens: Sequence[str],
    *,
    row_tokens: Sequence[str] | None = None,
    title: str | None = None,
    cmap: str | None = None,
    max_labels: int = 64,
) -> Figure:
    """A token-to-token map with token labels.

    Args:
        matrix (Tensor): ``(R, L)``: row i holds what each token means to query i.
        tokens (sequence of str): the L tokens of the columns.
        row_tokens (sequence of str, optional): the R queries. Default: ``tokens``
        title (str, optional): above the figure. Default: None
        cmap (str, optional): a matplotlib colour map; None picks one for signed or for
            nonnegative values. Default: None
        max_labels (int, optional): beyond it every n-th token is labelled. Default: 64

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("map.png")`` writes it.

    Raises:
        ValueError: where the labels do not fit the matrix.

    Examples::

        >>> matrix = LaTIM(model).interactions(input_ids, layer=0)[0]
        >>> figure = interaction_map(matrix, tokens, title="layer 0")
        >>> figure.savefig(folder / "map.png")
    """
    rows = tokens if row_tokens is None else row_tokens
    values = _array(matrix)
    _check_shape("matrix", values, (len(rows), len(tokens)))
    side = min(14.0, 2.0 + 0.22 * max(values.shape))
    figure, (axes,) = _figure(1, (side, side * max(0.35, values.shape[0] / values.shape[1])))
    image = _image(axes, values, cmap)
    axes.set_xlabel("token j")
    axes.set_ylabel("query i")
    _labels(axes, "x", tokens, max_labels)
    _labels(axes, "y", rows, max_labels)
    if title:
        axes.set_title(title)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04)
    return figure


def layer_overview(
    rows: Mapping[str, Tensor] | Tensor,
    tokens: Sequence[str],
    *,
    title: str | None = None,
    cmap: str | None = None,
    max_labels: int = 64,
) -> Figure:
    """Layers by tokens: one row of relevance for each layer or method.

    Args:
        rows (mapping of str to Tensor, or Tensor): ``(L,)`` each by name, or ``(R, L)``. Each
            row is scaled by its own largest magnitude.
        tokens (sequence of str): the L tokens.
        title (str, optional): above the figure. Default: None
        cmap (str, optional): as for :func:`interaction_map`. Default: None
        max_labels (int, optional): as for :func:`interaction_map`. Default: 64

    Returns:
        matplotlib.figure.Figure: not shown.

    Raises:
        ValueError: where the labels do not fit the rows.

    Examples::

        >>> maps = hidden_attention(model, input_ids, reduction="mean", rows=-1)
        >>> figure = layer_overview({path: m[0, 0] for path, m in maps.items()}, tokens)
    """
    if isinstance(rows, Mapping):
        names = list(rows)
        values = np.stack([_array(row) for row in rows.values()])
    else:
        values = _array(rows)
        names = [f"layer {i}" for i in range(values.shape[0])]
    _check_shape("rows", values, (len(names), len(tokens)))
    values = values / np.maximum(np.abs(values).max(1, keepdims=True), 1e-30)
    size = (min(16.0, 3.0 + 0.24 * len(tokens)), 1.2 + 0.35 * len(names))
    figure, (axes,) = _figure(1, size)
    _image(axes, values, cmap)
    _labels(axes, "x", tokens, max_labels)
    axes.set_yticks(range(len(names)), names)
    if title:
        axes.set_title(title)
    return figure


def text_record(
    relevance: Tensor,
    tokens: Sequence[str],
    *,
    predicted: str = "",
    probability: float = math.nan,
    true: str = "",
    target: str = "",
    delta: float = math.nan,
) -> Any:
    """One line of Captum's ``visualize_text``: relevance scaled to its largest magnitude.

    Args:
        relevance (Tensor): ``(L,)``.
        tokens (sequence of str): the L tokens.
        predicted, probability, true, target, delta (optional): what Captum's table shows.

    Returns:
        captum.attr.visualization.VisualizationDataRecord.

    Raises:
        ValueError: where tokens and relevance differ in number.

    Examples::

        >>> relevance = MambaLRP(model).attribute(input_ids, target=token)[0]
        >>> record = text_record(relevance, tokens, target="w5")
    """
    values = _array(relevance)
    _check_shape("relevance", values, (len(tokens),))
    scaled = values / max(float(np.abs(values).max()), 1e-30)
    return captum_visualization.VisualizationDataRecord(
        torch.as_tensor(scaled),
        probability,
        predicted,
        true,
        target,
        float(values.sum()),
        [html.escape(t) if not _is_special(t) else t for t in readable_tokens(tokens)],
        delta,
    )


def text_html(records: Sequence[Any], title: str | None = None) -> str:
    """A page with Captum's ``visualize_text`` table of some records.

    Args:
        records (sequence): from :func:`text_record`.
        title (str, optional): a heading. Default: None

    Returns:
        str: HTML, to be written to a file.

    Examples::

        >>> record = text_record(torch.tensor([0.5, -1.0]), ["The", "Ġcat"])
        >>> page = text_html([record], title="Why?")
        >>> _ = (folder / "why.html").write_text(page, encoding="utf-8")
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it displays what it returns
        table = captum_visualization.visualize_text(records).data
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    return (
        '<!doctype html><html><head><meta charset="utf-8">'
        "<style>body{font-family:sans-serif} td,th{padding:4px 8px;text-align:left}</style>"
        f"</head><body>{heading}{table}</body></html>"
    )


def _figure(columns: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    # Not through pyplot: nothing is kept open, and no window system is asked for.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _image(axes: Any, values: np.ndarray, cmap: str | None) -> Any:
    largest = float(np.nanmax(np.abs(values))) or 1.0
    signed = bool((values < 0).any())
    return axes.imshow(
        values,
        cmap=cmap or ("RdBu_r" if signed else "viridis"),
        vmin=-largest if signed else 0.0,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )


def _labels(axes: Any, axis: str, tokens: Sequence[str], max_labels: int) -> None:
    step = max(1, math.ceil(len(tokens) / max_labels))
    places = range(0, len(tokens), step)
    # A dollar would start a formula.
    shown = [readable_tokens([tokens[i]])[0].replace("$", r"\$") for i in places]
    if axis == "x":
        upright = all(len(t) <= 2 for t in shown)
        axes.set_xticks(places, shown, rotation=0 if upright else 90, fontsize=8)
    else:
        axes.set_yticks(places, shown, fontsize=8)


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=float)


def _check_shape(name: str, values: np.ndarray, expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        raise ValueError(
            f"{name} has shape {values.shape}, but the labels are for {expected}; give one token "
            "a column and one query a row, without a batch axis."
        )


def _is_special(token: str) -> bool:
    return token.startswith("<") and token.endswith(">")
