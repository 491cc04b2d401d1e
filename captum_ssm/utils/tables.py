"""Tables as HTML, for the values of a notebook's cells."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table in the notebook's own style; texts are shown and never run.

    Args:
        head (sequence of str): one heading per column.
        rows (iterable of sequence of str): one text per column.
        caption (str, optional): stands above the table. Default: ``""``

    Examples::

        >>> html_table(["token"], [["<b>"]])
        '<table><thead><tr><th>token</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"
