"""Text: readable tokens, and a page of texts with relevance as background."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from captum.attr import visualization as captum_visualization
from matplotlib.colors import to_hex, to_rgb
from torch import Tensor

from captum_ssm.utils.colors import INK, LINE, PAPER, SOFT
from captum_ssm.utils.vocabulary import BYTES
from captum_ssm.visualization.palette import array, colors_of, finite, relevance_colors, signed

_VISIBLE = {" ": "␣", "▁": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


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
    byte_level = any(256 <= ord(c) < 324 and c in BYTES for token in tokens for c in token)
    return [_readable(token, byte_level) for token in tokens]


def _readable(token: str, byte_level: bool) -> str:
    if byte_level and all(c in BYTES for c in token):
        token = bytes(BYTES[c] for c in token).decode("utf-8", "backslashreplace")
    elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        token = bytes([int(token[3:5], 16)]).decode("utf-8", "backslashreplace")
    return "".join(_VISIBLE.get(c, c) for c in token) or "∅"


def text_record(
    relevance: Tensor,
    tokens: Sequence[str],
    *,
    predicted: str = "",
    probability: float = math.nan,
    true: str = "",
    target: str = "",
    delta: float = math.nan,
    scale: str | float = "each",
) -> Any:
    """One line of the table of :func:`text_html` and of Captum's own ``visualize_text``.

    Args:
        relevance (Tensor): ``(L,)``.
        tokens (sequence of str): the L tokens.
        predicted, probability, true, target, delta (optional): the table's other columns; those
            that no record uses are not shown.
        scale (str or float, optional): as described in :mod:`captum_ssm.visualization`; a record
            is one panel. Stronger relevance has the same color. Default: ``"each"``

    Returns:
        captum.attr.visualization.VisualizationDataRecord: its ``word_attributions`` are divided
        by the magnitude at which the color is strongest, which ``scale`` keeps.

    Raises:
        ValueError: if tokens and relevance differ in number, or relevance cannot be drawn.

    Examples::

        >>> relevance = MambaLRP(model).attribute(input_ids, target=token)[0]
        >>> record = text_record(relevance, tokens, target="w5")
    """
    values = array(relevance)
    if values.shape != (len(tokens),):
        raise ValueError(
            f"relevance has shape {values.shape} for {len(tokens)} tokens; expected "
            f"({len(tokens)},), one number per token, without a batch axis."
        )
    (limit,) = colors_of([finite(values, "relevance")], scale).limits
    # Escaped, since Captum's functions do not escape them.
    shown = [html.escape(token) for token in readable_tokens(tokens)]
    predicted, true, target = (html.escape(str(label)) for label in (predicted, true, target))
    return _Record(values, limit, (probability, predicted, true, target), shown, delta)


class _Record(captum_visualization.VisualizationDataRecord):
    """Captum's record, which also knows its scale, for numbers in relevance's own units."""

    def __init__(
        self,
        values: np.ndarray,
        limit: float,
        labels: tuple[float, str, str, str],
        tokens: list[str],
        delta: float,
    ) -> None:
        scaled, total = torch.as_tensor(values / limit), float(values.sum())
        super().__init__(scaled, *labels, total, tokens, delta)
        self.scale = limit


def text_html(records: Iterable[Any], title: str | None = None) -> str:
    """A page with one row per record: the text with relevance as background, and a legend.

    Pointing at a token shows its number and its share of the total magnitude. The page is whole in
    itself, and is made without IPython; ``IPython.display.HTML`` shows it in a notebook.

    Args:
        records (iterable): from :func:`text_record`.
        title (str, optional): a heading. Default: None

    Returns:
        str: a whole HTML page.

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
    rows: list[dict[str, str]] = []
    for record in records:
        if not isinstance(record, captum_visualization.VisualizationDataRecord):
            raise TypeError(f"records holds a {type(record).__name__}; {expected}")
        rows.append(_cells(record))
    used = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    head = "".join(f"<th>{name}</th>" for name in used)
    lines = "".join(
        "<tr>" + "".join(f"<td>{row[name]}</td>" for name in used) + "</tr>" for row in rows
    )
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title or 'Relevance')}</title><style>{_STYLE}</style></head>"
        f'<body><div class="relevance">{heading}{_LEGEND}'
        f"<table><tr>{head}</tr>{lines}</table></div></body></html>"
    )


_STYLE = (
    f".relevance{{color-scheme:light;background:{PAPER};color:{INK};padding:16px 20px;"
    "font:14px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    ".relevance h2{font-size:18px;font-weight:600;margin:0 0 10px}"
    ".relevance table{border-collapse:collapse;margin:0}"
    f".relevance th,.relevance td{{padding:7px 18px 7px 0;border-bottom:1px solid {LINE};"
    f"text-align:left;vertical-align:baseline;background:{PAPER};color:inherit}}"
    f".relevance th{{color:{SOFT};font-weight:400;font-size:12px}}"
    ".relevance td:last-child{line-height:1.9}"
    ".relevance mark{border-radius:3px;padding:2px 3px;margin:0 1px;white-space:pre}"
    f".relevance p{{margin:0 0 12px;color:{SOFT};font-size:12px}}"
    ".relevance i{display:inline-block;width:120px;height:9px;border-radius:2px;margin:0 6px}"
)
_LEGEND = (
    '<p>against <i style="background:linear-gradient(90deg,'
    + ",".join(to_hex(relevance_colors()(step / 8)) for step in range(9))
    + ')"></i> for; a color is strongest at the number under Scale</p>'
)


def _cells(record: Any) -> dict[str, str]:
    predicted = record.pred_class
    if not math.isnan(record.pred_prob):
        predicted = f"{predicted} ({record.pred_prob:.2f})"
    limit = getattr(record, "scale", 1.0)
    delta = record.convergence_score
    return {
        "Explained": record.attr_class,
        "Predicted": predicted,
        "True": record.true_class,
        "Sum": signed(record.attr_score, 3),
        "Delta": "" if delta is None or math.isnan(delta) else signed(delta),
        "Scale": f"±{limit:.3g}",
        "Relevance of each token": _marked(record.raw_input_ids, record.word_attributions, limit),
    }


def _marked(tokens: Sequence[str], scaled: Tensor, limit: float) -> str:
    values = array(scaled)
    total = float(np.abs(values).sum()) or 1.0
    colors = relevance_colors()(values.clip(-1, 1) / 2 + 0.5)
    words = []
    for i, (token, value, color) in enumerate(
        zip(tokens, values, map(to_hex, colors), strict=True)
    ):
        style = f"background:{color};color:{_ink_on(color)}"
        told = f"token {i}: {signed(value * limit, 3)}, {abs(value) / total:.0%} of all"
        words.append(f'<mark style="{style}" title="{told}">{token}</mark>')
    return " ".join(words)


def _ink_on(color: str) -> str:
    # Black or white, whichever stands out more (WCAG's contrast).
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"
