"""Links inside of a site: which of them lead nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    # The places of a page, and what it links to or loads.
    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.places.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


# A template that the theme leaves among its files.
NOT_A_PAGE = "webpack-macros.html"


def broken(site: Path) -> Iterator[tuple[str, str]]:
    """Pages of a folder, each with a link in it to a file or place that is not there."""
    site = site.resolve()
    files = (path for path in site.rglob("*.html") if path.name != NOT_A_PAGE)
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in files}
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            found = Path(os.path.normpath(path.parent / unquote(parts.path)))
            found = path if not parts.path else found / "index.html" if found.is_dir() else found
            place = unquote(parts.fragment)
            is_place = not place or found not in pages or place in pages[found].places
            if not (found.exists() and is_place):
                yield str(path.relative_to(site)), link
