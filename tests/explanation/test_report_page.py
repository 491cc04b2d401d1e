"""The page of a report in a real browser: what people see, click and press."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pages
import pytest
from tabs import Tabs

from captum_ssm.explanation import Report, Token, summarize

COUNT = 48


def corpus() -> Any:
    """Stories, of which every eighth is predicted wrong."""
    found = pages.many(COUNT)
    examples = []
    for k, one in enumerate(found.examples):
        (output,) = one.outputs
        first, second, *others = output.answers
        if k % 8 == 0:
            first, second = replace(first, rank=2), replace(second, rank=1)
        output = replace(output, answers=(first, second, *others))
        examples.append(replace(one, outputs=(output,)))
    return replace(found, examples=tuple(examples), title="Stories")


@cache
def stories() -> Report:
    return summarize(corpus(), by=["even", "odd"] * (COUNT // 2))


def spaced() -> Report:
    """Texts of characters, of which each is a token."""
    (one,) = pages.many(1).examples
    letters = "a word and another one " * 3
    tokens = tuple(Token(letter, 3, k, k + 1) for k, letter in enumerate(letters))
    rows = np.random.default_rng(0).normal(size=(COUNT, len(tokens))).astype(np.float32)
    output = replace(one.outputs[0], position=len(tokens) - 2)
    example = replace(one, tokens=tokens, prompt=len(tokens) - 1, units={}, outputs=(output,))
    found = pages.many(1)
    count = len(next(iter(one.relevance.values())))
    examples = [
        replace(
            example,
            relevance={name: np.tile(row, (count, 1)) for name in one.relevance},
        )
        for row in rows
    ]
    return summarize(replace(found, examples=tuple(examples)))


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = {
        "stories": stories,
        "methods": lambda: summarize(corpus(), against="raw-attention"),
        "spaced": spaced,
        "hostile": lambda: summarize(pages.hostile()[:1]),
    }

    tabs = Tabs(browser, tmp_path_factory.mktemp("reports"), made)
    yield tabs
    tabs.seen.check()


def row_count(tab: Any) -> str:
    return tab.locator(".list-all .search .quiet").inner_text()


def test_the_first_sight_says_what_the_corpus_tells(opened):
    tab, report = opened("stories"), stories()
    first = report.shares["word"][0]
    assert f"\u201c{first.key}\u201d" in tab.locator(".question").inner_text()
    assert f"{COUNT} examples" in tab.locator(".ask p").inner_text()
    assert f"{report.right:.0%} predicted right" in tab.locator(".ask p").inner_text()
    bars = tab.locator(".shares").first.locator("li")
    assert bars.first.locator(".link").inner_text() == first.key
    assert bars.first.locator("small").inner_text() == str(first.examples)
    assert tab.locator(".columns li").count() == 10


def test_intervals_end_where_they_end(opened):
    tab, places = opened("stories"), stories().shares["tenth"]
    highs = {int(one.key): one.high for one in places}
    bars = tab.locator(".columns .column").evaluate_all(
        """columns => columns.map(column => {
            const parts = [column, column.querySelector("b")];
            const [box, line] = parts.map(part => part.getBoundingClientRect());
            return (box.bottom - line.top) / box.height;
        })"""
    )
    top = max(highs.values())
    assert bars == pytest.approx([highs[k] / top for k in sorted(highs)], abs=0.02)


def test_spaces_that_are_tokens_end_lines(opened):
    tab = opened("spaced")
    text = tab.locator(".cards .mini").first
    text.locator(".part").first.wait_for()
    # No line is broken within a word, and so none is left almost empty.
    starts = text.locator(".part").evaluate_all(
        """parts => parts.filter((part, k) => k && part.offsetTop > parts[k - 1].offsetTop)
            .map(part => part.previousElementSibling.tagName)"""
    )
    assert starts
    assert {*starts} == {"WBR"}


def test_a_slice_is_chosen_by_the_mouse_and_kept_in_the_address(opened):
    tab = opened("stories")
    tab.get_by_role("radio", name="Column").click()
    tab.locator(".slices").get_by_role("button", name="odd").click()
    assert row_count(tab) == f"{COUNT // 2} examples"
    assert tab.locator(".question").inner_text().startswith("odd:")
    state = tab.evaluate("location.hash")
    assert row_count(opened("stories", state)) == f"{COUNT // 2} examples"
    tab.keyboard.press("Escape")
    assert row_count(tab) == f"{COUNT} examples"


def test_the_list_is_searched_and_sorted(opened):
    tab = opened("stories")
    tab.keyboard.press("/")
    tab.keyboard.type("tree 7 bark")
    assert row_count(tab) == "1 example"
    tab = opened("stories", "sort=wrong")
    cells = tab.locator(".lines tbody tr").first.locator("td").all_inner_texts()
    assert int(cells[0]) % 8 == 0
    assert "right" not in cells
    assert tab.locator(".lines tbody tr").count() == 25
    tab.get_by_role("button", name="More").click()
    assert tab.locator(".lines tbody tr").count() == COUNT


def test_an_example_opens_as_its_own_page_and_closes(opened):
    tab = opened("stories")
    card = tab.locator(".card").first
    card.locator(".part").first.wait_for()
    button = card.get_by_role("button")
    row = int(button.inner_text().split()[-1])
    button.click()
    tab.locator(".holder .text .part").first.wait_for()
    shown = tab.locator(".holder h1, .holder .text").all_inner_texts()
    assert f"tree {row} bark" in " ".join(shown)
    assert not tab.locator(".report > main").is_visible()
    tab.go_back()
    tab.locator(".report > main").wait_for()
    tab = opened("stories", f"x={row}")
    tab.locator(".holder .text .part").first.wait_for()
    tab.get_by_role("button", name="All examples").click()
    assert tab.locator(".report > main").is_visible()


def test_kinds_places_and_theme_are_chosen_by_keys(opened):
    tab = opened("stories")
    tab.get_by_role("radio", name="In tenths").focus()
    tab.keyboard.press("ArrowRight")
    assert "after the first" in tab.locator(".columns li").first.get_attribute("aria-label")
    before = tab.locator(".report").get_attribute("data-theme")
    tab.keyboard.press("d")
    assert tab.locator(".report").get_attribute("data-theme") != before
    tab.keyboard.press("d")


def test_two_runs_side_by_side(opened):
    tab = opened("methods")
    text = tab.locator(".change").inner_text()
    assert "Against RawAttention" in text
    assert "0 predictions differ" in text
    assert tab.locator(".change .mini").count() == 6


@pytest.mark.parametrize("width", [390, 768, 1600])
def test_nothing_is_cut_off(opened, width):
    tab = opened("stories", "slice=0", width)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, theme):
    assert pages.serious_violations(opened("stories", f"theme={theme}&slice=0")) == []


def test_hostile_texts_are_shown_and_never_run(opened):
    tab = opened("hostile")
    assert "owned" not in tab.title() or tab.title().startswith("</title>")
    assert tab.locator(".report img, .report svg[onload]").count() == 0
    tab.get_by_role("button", name="Open example 0").first.click()
    tab.locator(".holder .captum-page").wait_for()
    assert tab.locator(".report img").count() == 0
    tab = opened("hostile", "slice=constructor&kind=constructor&place=toString")
    assert tab.locator("h1").is_visible()
