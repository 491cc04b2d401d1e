"""Tables: as lines of text, and as HTML for the values of a notebook's cells."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The rows as lines, columns below each other, two spaces apart.

    The heading is the first row. The columns ``right`` end at their right.

    Examples::

        >>> text_table([("part", "share"), ("bias", "7%")], right=[1])
        ['part  share', 'bias     7%']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.rjust if k in right else str.ljust for k in range(len(widths))]
    return [
        "  ".join(
            put(cell, width) for put, cell, width in zip(justify, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table in the notebook's own style; texts are shown and never run.

    Examples::

        >>> html_table(["token"], [["<b>"]])
        '<table><thead><tr><th>token</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"
