"""The page in a notebook: a widget where it is live, and a frame where it is read."""

from __future__ import annotations

import html
import json
from typing import Any

from captum_ssm.explanation.page.data import page_data
from captum_ssm.explanation.page.html import extras_of, page_html, script, stylesheet
from captum_ssm.explanation.parts import ExplanationData

_RENDER = """
export default {
  render({ model, el }) {
    return openPage(el, JSON.parse(model.get("data")), { whole: false });
  },
};
"""


def widget(explanation: ExplanationData) -> Any:
    """The page of an explanation as a widget for notebooks, by anywidget.

    Args:
        explanation (Explanation): what to show.

    Returns:
        anywidget.AnyWidget: shown by a notebook where it is the value of a cell.

    Raises:
        ImportError: if anywidget is not installed.

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4 w5")
        >>> shown = widget(explanation)  # as the last line of a cell, the same as explanation
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(
            "The widget needs anywidget, which is not installed. Expected the extra "
            "captum-ssm[notebook]; install it by `pip install anywidget`, or write the page to "
            "a file instead."
        ) from error

    data = page_data(explanation)
    extras = extras_of(data)

    class ExplanationWidget(anywidget.AnyWidget):
        _esm = script(*extras) + _RENDER
        _css = stylesheet(*extras)
        data = traitlets.Unicode().tag(sync=True)

    return ExplanationWidget(data=json.dumps(data, separators=(",", ":")))


def notebook_bundle(explanation: ExplanationData, **formats: Any) -> Any:
    """What a notebook shows of an explanation: for ``Explanation._repr_mimebundle_``.

    A live notebook shows the widget, where anywidget is installed. A saved notebook is read without
    its kernel, so the whole page, in a frame of its own, is always there as well.

    Args:
        explanation (Explanation): what to show.
        **formats: ``include`` and ``exclude``, as IPython passes them.

    Returns:
        tuple of dict: data by media type (the page in a frame as ``text/html``, the title as
        ``text/plain``, and the widget if there is one), and metadata.

    Examples::

        >>> data, metadata = notebook_bundle(explain(model, tokenizer, "w3 w4 w5"))
        >>> data["text/html"].startswith("<iframe")
        True
    """
    data = {
        "text/html": framed(page_html(explanation), explanation.title),
        "text/plain": explanation.title,
    }
    try:
        shown = widget(explanation)._repr_mimebundle_(**formats)
    except ImportError:
        return data, {}
    live, metadata = shown if isinstance(shown, tuple) else (shown, {})
    return {**live, **data}, metadata


def framed(page: str, title: str) -> str:
    """A page in a frame of its own, as a notebook shows it without a kernel."""
    title = html.escape(title)
    # One line: a notebook's file has each line as a string of its own.
    page = html.escape(page).replace("\n", "&#10;")
    # What removes frames, as GitHub does, removes styles as well: then the text is seen.
    return (
        f'<iframe title="{title}" srcdoc="{page}" sandbox="allow-scripts" '
        'style="width: 100%; height: 720px; border: 0"></iframe>'
        f'<p style="display: none">{title} (An interactive page, which is not shown here.)</p>'
    )
