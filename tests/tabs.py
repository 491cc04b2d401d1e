"""Pages in tabs of a browser, each opened once, and what they say and ask a network for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captum_ssm.explanation import Explanation, Report


@dataclass
class Seen:
    """What a page said on its console, and what it asked a network for."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def check(self) -> None:
        """No page has had an error or used a network."""
        assert not self.errors
        assert all(url.startswith("file://") for url in self.requests)

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


@dataclass
class Tabs:
    """Pages, by name: a call opens one, at the beginning and as ``state`` says.

    Args:
        browser (Any): of Playwright.
        folder (Path): where the pages are written.
        made (dict): by name, what makes an explanation or a report.
        height (int, optional): of a window. Default: 900
    """

    browser: Any
    folder: Path
    made: Mapping[str, Callable[[], Explanation | Report]]
    height: int = 900
    seen: Seen = field(default_factory=Seen)
    tabs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, state: str = "", width: int = 1240) -> Any:
        size = {"width": width, "height": self.height}
        if name not in self.tabs:
            file = self.folder / f"{name}.html"
            self.made[name]().to_html(file)
            self.tabs[name] = self.browser.new_page(viewport=size)
            self.seen.watch(self.tabs[name])
            self.tabs[name].goto(file.as_uri())
        tab = self.tabs[name]
        tab.set_viewport_size(size)
        tab.evaluate("state => { document.activeElement?.blur(); location.hash = state }", state)
        tab.evaluate("scrollTo(0, 0)")
        tab.mouse.move(0, 0)
        tab.locator(".captum-page").first.wait_for()
        tab.evaluate("() => new Promise(requestAnimationFrame)")
        return tab


def address(tab: Any) -> str:
    return tab.evaluate("location.hash")


def question(tab: Any) -> str:
    return tab.locator(".question").inner_text()


def part(tab: Any, index: int, panel: int = 0) -> Any:
    """A part of a text."""
    return tab.locator(".text").nth(panel).locator(f"[id$='-{index}']")
