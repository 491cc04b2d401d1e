"""Figures and HTML for relevance of tokens and images, on matplotlib's and Captum's own functions.

Functions return a figure or HTML and show nothing by themselves. Figures are made without pyplot,
which would keep them open and may need a display.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from captum.attr import visualization as captum_visualization
from matplotlib import font_manager
from matplotlib.figure import Figure
from torch import Tensor

from captum_ssm._receptive_field_figure import receptive_field_map as receptive_field_map

__all__ = [
    "image_overlay",
    "interaction_map",
    "layer_overview",
    "readable_tokens",
    "receptive_field_map",
    "text_html",
    "text_record",
]

SIGNS = ("all", "positive", "negative", "absolute_value")
_DRAWINGS = ("original_image", "heat_map", "blended_heat_map", "masked_image", "alpha_scaling")
_VISIBLE = {" ": "␣", "▁": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


def _byte_alphabet() -> dict[str, int]:
    # Byte-level vocabularies write bytes that print as themselves and shift the others up.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(shifted)}


_BYTES = _byte_alphabet()


def readable_tokens(tokens: Sequence[str]) -> list[str]:
    """Tokens in readable form, with spaces, line breaks and tabs made visible.

    Args:
        tokens (sequence of str): as returned by a tokenizer's ``convert_ids_to_tokens``. Tokens
            of byte-level vocabularies (recognized by letters such as ``Ġ``, a space, in any of
            the tokens) are decoded; bytes that do not form a character are shown as ``\\xe2``.
            The markers (``▁``) and byte tokens (``<0x0A>``) of sentencepiece are decoded too.

    Returns:
        list of str: one per token, none of them empty.

    Examples::

        >>> readable_tokens(["The", "Ġcat", "Ċ"])
        ['The', '␣cat', '⏎']
        >>> readable_tokens(["ĠvoilÃł"])
        ['␣voilà']
    """
    tokens = [str(token) for token in tokens]
    byte_level = any(256 <= ord(c) < 324 and c in _BYTES for token in tokens for c in token)
    return [_readable(token, byte_level) for token in tokens]


def _readable(token: str, byte_level: bool) -> str:
    if byte_level and all(c in _BYTES for c in token):
        token = bytes(_BYTES[c] for c in token).decode("utf-8", "backslashreplace")
    elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        token = bytes([int(token[3:5], 16)]).decode("utf-8", "backslashreplace")
    return "".join(_VISIBLE.get(c, c) for c in token) or "∅"


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
        matrix (Tensor): ``(R, L)``: row i holds the relevance of each token for query i.
        tokens (sequence of str): the L tokens of the columns.
        row_tokens (sequence of str, optional): the R queries. Default: ``tokens``
        title (str, optional): of the figure. Default: None
        cmap (str, optional): a matplotlib color map; None picks one for signed or for
            nonnegative values. Default: None
        max_labels (int, optional): with more tokens than this, only every n-th is labeled.
            Default: 64

    Returns:
        matplotlib.figure.Figure: not shown; ``figure.savefig("map.png")`` writes it.

    Raises:
        ValueError: if the number of labels does not match the matrix.

    Examples::

        >>> matrix = LaTIM(model).interactions(input_ids, layer=0)[0]
        >>> figure = interaction_map(matrix, tokens, title="layer 0")
        >>> figure.savefig(folder / "map.png")
    """
    rows = tokens if row_tokens is None else row_tokens
    values = _array(matrix)
    _check_shape("matrix", values, (len(rows), len(tokens)))
    side = min(14.0, 2.0 + 0.22 * max(values.shape))
    size = side, side * max(0.35, values.shape[0] / values.shape[1])
    figure, axes = _map_of_tokens(values, tokens, size, title, cmap, max_labels)
    axes.set_xlabel("token j")
    axes.set_ylabel("query i")
    axes.set_yticks(*_labels(rows, max_labels), fontsize=8)
    figure.colorbar(axes.images[0], ax=axes, fraction=0.046, pad=0.04)
    return figure


def layer_overview(
    rows: Mapping[str, Tensor] | Tensor,
    tokens: Sequence[str],
    *,
    title: str | None = None,
    cmap: str | None = None,
    max_labels: int = 64,
) -> Figure:
    """Layers by tokens: one row of relevance per layer or method.

    Args:
        rows (mapping of str to Tensor, or Tensor): ``(L,)`` each by name, or ``(R, L)``. Each
            row is scaled by its own largest magnitude.
        tokens (sequence of str): the L tokens.
        title, cmap, max_labels (optional): as for :func:`interaction_map`.

    The result and the errors are those of :func:`interaction_map`.

    Examples::

        >>> maps = hidden_attention(model, input_ids, reduction="mean", rows=-1)
        >>> figure = layer_overview({path: m[0, 0] for path, m in maps.items()}, tokens)
    """
    if isinstance(rows, Mapping):
        names = list(rows)
        arrays = [_array(row) for row in rows.values()]
        for name, row in zip(names, arrays, strict=True):
            _check_shape(f"rows[{name!r}]", row, (len(tokens),))
        values = np.reshape(arrays, (-1, len(tokens)))
    else:
        values = _array(rows)
        names = [f"layer {i}" for i in range(values.shape[0] if values.ndim else 0)]
    _check_shape("rows", values, (len(names), len(tokens)))
    values = values / np.maximum(np.abs(values).max(1, keepdims=True), 1e-30)
    size = (min(16.0, 3.0 + 0.24 * len(tokens)), 1.2 + 0.35 * len(names))
    figure, axes = _map_of_tokens(values, tokens, size, title, cmap, max_labels)
    axes.set_yticks(range(len(names)), names)
    return figure


def image_overlay(
    relevance: Tensor,
    images: Tensor,
    *,
    methods: Sequence[str] = ("original_image", "blended_heat_map"),
    signs: str | Sequence[str] | None = None,
    titles: Sequence[str] | None = None,
    **options: Any,
) -> Figure:
    """Images and their relevance: one row per image, one column per way to draw it.

    Each cell is drawn by Captum's ``visualize_image_attr``, which scales each image's relevance
    separately and clips its largest values.

    Args:
        relevance (Tensor): ``(B, C, H, W)`` as a method returns it, summed over C; or
            ``(B, H, W)``.
        images (Tensor): ``(B, C, H, W)`` with one or three color channels. Integers are in
            0 .. 255. Floating values outside [0, 1], as in normalized images, are rescaled to
            it, per image from the smallest value to the largest.
        methods (sequence of str, optional): Captum's ways to draw, one per column:
            ``"original_image"``, ``"heat_map"``, ``"blended_heat_map"``, ``"masked_image"`` or
            ``"alpha_scaling"``. Default: the image and the blended heat map
        signs (str or sequence of str, optional): for all columns or one per column, ``"all"``
            (not for the last two methods), ``"positive"``, ``"negative"`` or
            ``"absolute_value"``. None is ``"positive"`` if no relevance is negative, else
            ``"all"``, or ``"absolute_value"`` for the last two methods. Default: None
        titles (sequence of str, optional): one per image. Default: None
        **options: of Captum's function: ``outlier_perc``, ``cmap``, ``alpha_overlay``,
            ``show_colorbar``.

    Returns:
        matplotlib.figure.Figure: as for :func:`interaction_map`.

    Raises:
        ValueError: if relevance, titles or signs do not match the images or methods, or cannot
            be drawn.

    Examples::

        >>> vim = VisionMamba(image_size=32, patch_size=8, classes=5, width=16, depth=2).eval()
        >>> images = torch.rand(2, 3, 32, 32)
        >>> relevance = MambaAttribution(vim).attribute(images, target=4)
        >>> figure = image_overlay(relevance, images, titles=["a cat", "a dog"])
    """
    pictures, values = _pictures(images), _array(relevance)
    values = values.sum(1) if values.ndim == 4 else values
    if values.shape != pictures.shape[:3]:
        raise ValueError(
            f"relevance has shape {tuple(relevance.shape)} for images of shape "
            f"{tuple(images.shape)}; expected their shape, as a method returns it, or (B, H, W)."
        )
    if not np.isfinite(values).all():
        raise ValueError("relevance holds NaN or Inf.")
    if titles is not None and (isinstance(titles, str) or len(titles) != len(pictures)):
        raise ValueError(f"titles is {titles!r}; expected one per image, {len(pictures)} in all.")
    chosen = _signs(methods, signs, bool((values < 0).any()))
    rows, columns = len(pictures), len(chosen)
    height = 2.4 * values.shape[1] / values.shape[2] + 0.4
    # The "constrained" layout does not make room for Captum's color bars.
    figure = Figure(figsize=(2.4 * columns, height * rows), layout="tight")
    cells = figure.subplots(rows, columns, squeeze=False)
    for k, column in np.ndindex(rows, columns):
        title = titles[k] if titles is not None and column == 0 else None
        cell = figure, cells[k, column]
        _draw(cell, pictures[k], values[k], *chosen[column], title=title, **options)
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
    """One line of the table of :func:`text_html` and of Captum's own ``visualize_text``.

    Relevance is scaled to its largest magnitude.

    Args:
        relevance (Tensor): ``(L,)``.
        tokens (sequence of str): the L tokens.
        predicted, probability, true, target, delta (optional): the table's other columns.

    Returns:
        captum.attr.visualization.VisualizationDataRecord.

    Raises:
        ValueError: if tokens and relevance differ in number.

    Examples::

        >>> relevance = MambaLRP(model).attribute(input_ids, target=token)[0]
        >>> record = text_record(relevance, tokens, target="w5")
    """
    values = _array(relevance)
    _check_shape("relevance", values, (len(tokens),))
    scaled = values / max(float(np.abs(values).max()), 1e-30)
    # Escaped, since Captum's functions do not escape them.
    shown = [html.escape(token) for token in readable_tokens(tokens)]
    predicted, true, target = (html.escape(str(label)) for label in (predicted, true, target))
    total = float(values.sum())
    return captum_visualization.VisualizationDataRecord(
        torch.as_tensor(scaled), probability, predicted, true, target, total, shown, delta
    )


def text_html(records: Iterable[Any], title: str | None = None) -> str:
    """The HTML of a page with the table of Captum's ``visualize_text``, made without IPython.

    Args:
        records (iterable): from :func:`text_record`.
        title (str, optional): a heading. Default: None

    Raises:
        TypeError: for anything else than several records.

    Examples::

        >>> record = text_record(torch.tensor([0.5, -1.0]), ["The", "Ġcat"])
        >>> page = text_html([record], title="Why?")
        >>> _ = (folder / "why.html").write_text(page, encoding="utf-8")
    """
    expected = "expected a list of text_record's results: text_html([record])."
    if not isinstance(records, Iterable):
        raise TypeError(f"records is a {type(records).__name__}; {expected}")
    rows = ""
    for record in records:
        if not isinstance(record, captum_visualization.VisualizationDataRecord):
            raise TypeError(f"records holds a {type(record).__name__}; {expected}")
        rows += _table_row(record)
    legend = captum_visualization.format_word_importances(
        ["Negative", "Neutral", "Positive"], np.array([-1.0, 0.0, 1.0])
    )
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    head = (
        "<th>True Label</th><th>Predicted Label</th><th>Attribution Label</th>"
        "<th>Attribution Score</th><th>Word Importance</th>"
    )
    return (
        '<!doctype html><html><head><meta charset="utf-8">'
        "<style>body{font-family:sans-serif} td,th{padding:4px 8px;text-align:left}</style>"
        f"</head><body>{heading}<table><tr>{legend}</tr></table>"
        f"<table><tr>{head}</tr>{rows}</table></body></html>"
    )


def _table_row(record: Any) -> str:
    predicted = record.pred_class
    if not math.isnan(record.pred_prob):
        predicted = f"{predicted} ({record.pred_prob:.2f})"
    labels = (record.true_class, predicted, record.attr_class, f"{record.attr_score:.2f}")
    cells = [captum_visualization.format_classname(label) for label in labels]
    words = captum_visualization.format_word_importances(
        record.raw_input_ids, record.word_attributions
    )
    return f"<tr>{''.join(cells)}{words}</tr>"


def _pictures(images: Tensor) -> np.ndarray:
    # Images (B, C, H, W) of any values as (B, H, W, 3) in [0, 1].
    if images.dim() != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise ValueError(
            f"images has shape {tuple(images.shape)}; expected (B, C, H, W) with one or three "
            "color channels; pass images[None] for a single image."
        )
    values = _array(images if images.is_floating_point() else images / 255)
    if not np.isfinite(values).all():
        raise ValueError("images holds NaN or Inf.")
    values = values.transpose(0, 2, 3, 1).repeat(3 // images.shape[1], 3)
    low, high = values.min((1, 2, 3), keepdims=True), values.max((1, 2, 3), keepdims=True)
    outside = (low < 0) | (high > 1)
    return np.where(outside, (values - low) / np.maximum(high - low, 1e-30), values)


def _signs(
    methods: Sequence[str], signs: str | Sequence[str] | None, has_negative: bool
) -> list[tuple[str, str]]:
    # Per column: how to draw, and which sign of relevance.
    methods = [methods] if isinstance(methods, str) else list(methods)
    unknown = [method for method in methods if method not in _DRAWINGS]
    if unknown or not methods:
        raise ValueError(f"methods is {methods!r}; expected some of {_DRAWINGS}.")
    without = ("masked_image", "alpha_scaling")
    if signs is None:
        both = "all" if has_negative else "positive"
        chosen = ["absolute_value" if method in without else both for method in methods]
    else:
        chosen = [signs] * len(methods) if isinstance(signs, str) else list(signs)
    if len(chosen) != len(methods) or any(sign not in SIGNS for sign in chosen):
        raise ValueError(
            f"signs is {signs!r}; expected one of {SIGNS}, or one for each of the {len(methods)} "
            "methods."
        )
    for method, sign in zip(methods, chosen, strict=True):
        if sign == "all" and method in without:
            raise ValueError(f"signs holds 'all', which {method} cannot draw; choose another.")
    return list(zip(methods, chosen, strict=True))


def _draw(
    cell: tuple[Figure, Any],
    picture: np.ndarray,
    values: np.ndarray,
    method: str,
    sign: str,
    **options: Any,
) -> None:
    # Captum warns of small values, such as a pixel's share of a token's relevance, and fails if
    # no value has the sign: then a map of ones is drawn, and set to zero afterwards.
    part = {"positive": values.clip(min=0), "negative": values.clip(max=0)}.get(sign, values)
    largest = float(np.abs(part).max())
    shown = part / largest if largest else np.full_like(part, -1 if sign == "negative" else 1)
    captum_visualization.visualize_image_attr(
        shown, picture, method, sign, plt_fig_axis=cell, use_pyplot=False, **options
    )
    if not largest and method != "original_image":
        drawn = cell[1].images[-1]
        drawn.set_data(0 * drawn.get_array())


def _map_of_tokens(
    values: np.ndarray,
    tokens: Sequence[str],
    size: tuple[float, float],
    title: str | None,
    cmap: str | None,
    max_labels: int,
) -> tuple[Figure, Any]:
    # Of values (R, L), with one column per token.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    largest = float(np.abs(values).max()) or 1.0
    signed = bool((values < 0).any())
    axes.imshow(
        values,
        cmap=cmap or ("RdBu_r" if signed else "viridis"),
        vmin=-largest if signed else 0.0,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    ticks, labels = _labels(tokens, max_labels)
    upright = all(len(label) <= 2 for label in labels)
    axes.set_xticks(ticks, labels, rotation=0 if upright else 90, fontsize=8)
    if title:
        axes.set_title(title)
    return figure, axes


def _labels(tokens: Sequence[str], max_labels: int) -> tuple[range, list[str]]:
    # The tokens that are labeled, and their labels.
    ticks = range(0, len(tokens), max(1, math.ceil(len(tokens) / max_labels)))
    readable = readable_tokens(tokens)
    # Matplotlib takes text between dollars for a formula.
    return ticks, [_drawable(readable[i]).replace("$", r"\$") for i in ticks]


def _drawable(text: str) -> str:
    # Characters that the font lacks are spelled out: all of them would be drawn as empty boxes.
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    return "".join(
        c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode() for c in text
    )


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=float)


def _check_shape(name: str, values: np.ndarray, expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        raise ValueError(
            f"{name} has shape {values.shape}, but the labels are for {expected}; expected one "
            "token per column and one query per row, without a batch axis."
        )
    if values.size == 0:
        raise ValueError(f"{name} is empty, of shape {values.shape}; there is nothing to show.")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds NaN or Inf.")
