"""The page of a text with images and sound: pictures with relevance over them, among the words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pages
import pytest

from captum_ssm.explanation import Explanation, Picture
from captum_ssm.explanation.units import with_pictures

CELLS = (3, 4, 5, 6, 7, 8)
VALUES = (2.0, -1.5, 0.5, 0.25, -0.25, 1.0)
SOUND = (10, 11, 12)


def example() -> Any:
    """A story with an image of 2 by 3 places, a sound, and an image whose tokens are in a row."""
    one = pages.story()
    image = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    pictures = (
        Picture("image 1", CELLS, (2, 3), image),
        Picture("sound 1", SOUND),
        Picture("image 2", (14, 15), image=image, note="Where its tokens lie is not known."),
    )
    units = with_pictures(one.units, pictures, len(one.tokens))
    for rows in one.relevance.values():
        rows[:, CELLS] = VALUES
    return replace(one, pictures=pictures, units=units)


@pytest.fixture(scope="module")
def shown() -> Explanation:
    return pages.explanation(example())


@pytest.fixture
def page(browser: Any, shown: Explanation, tmp_path: Any) -> Iterator[Any]:
    shown.to_html(tmp_path / "page.html")
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"file://{tmp_path / 'page.html'}")
    tab.wait_for_selector(".inset canvas")
    yield tab
    tab.close()
    assert not errors


def point_at(page: Any, cell: int) -> str:
    """What the page tells of a cell of the first image, of 2 by 3."""
    page.locator(".inset canvas").first.scroll_into_view_if_needed()
    box = page.locator(".inset canvas").first.bounding_box()
    x = box["x"] + box["width"] * (cell % 3 + 0.5) / 3
    page.mouse.move(x, box["y"] + box["height"] * (cell // 3 + 0.5) / 2)
    return str(page.locator(".tip").inner_text())


def test_pictures_stand_in_the_text(page: Any) -> None:
    assert page.locator(".inset").count() == 3
    captions = page.locator(".inset figcaption strong").all_inner_texts()
    assert captions == ["image 1", "sound 1", "image 2"]
    box = page.locator(".inset canvas").first.bounding_box()
    assert box["width"] / box["height"] == pytest.approx(60 / 40, rel=0.02)
    assert "not known" in page.locator(".inset").nth(2).inner_text()
    words = page.locator(".text").inner_text()
    assert "Anna has a" in words
    assert "row 1, column 1" not in words


@pytest.mark.parametrize(("cell", "value"), [(0, "+2.00"), (1, "\N{MINUS SIGN}1.50"), (5, "+1.00")])
def test_a_cell_tells_the_relevance_of_its_token(page: Any, cell: int, value: str) -> None:
    told = point_at(page, cell)
    assert f"image 1, row {cell // 3 + 1}, column {cell % 3 + 1}" in told
    assert value in told


def test_the_caption_has_the_share_of_the_image(page: Any, shown: Explanation) -> None:
    values = shown.relevance()
    own = shown.examples[0].outputs[0].position
    sizes = np.abs(np.delete(values, own))
    share = np.abs(values[list(CELLS)]).sum() / sizes.sum()
    told = page.locator(".inset figcaption").first.inner_text()
    number = float(told.split("%")[0].split()[-1])
    assert number == pytest.approx(100 * share, abs=0.51)
    sums = page.locator(".sum").inner_text()
    assert "image 1 has" in sums
    assert "sound 1 has" in sums
    assert "the text has the rest" in sums


def test_an_image_is_one_part_of_its_sentence(page: Any) -> None:
    page.evaluate("location.hash = 'u=modality'")
    page.wait_for_timeout(100)
    for cell in (0, 5):
        told = point_at(page, cell)
        assert "image 1" in told
        assert "row" not in told
        assert "+2.00" in told


@pytest.mark.parametrize(("cell", "is_for"), [(0, True), (1, False)])
def test_colors_are_those_of_the_words(page: Any, cell: int, is_for: bool) -> None:
    color = page.evaluate(
        """(cell) => {
          const canvas = document.querySelector(".inset canvas");
          const [x, y] = [(cell % 3 + 0.3) / 3, (Math.floor(cell / 3) + 0.3) / 2];
          const context = canvas.getContext("2d");
          return [...context.getImageData(x * canvas.width, y * canvas.height, 1, 1).data];
        }""",
        cell,
    )
    red, _, blue, _ = color
    assert abs(red - blue) > 40
    assert (red > blue) == is_for


@pytest.mark.parametrize("width", [390, 800])
def test_a_picture_fits_a_narrow_window(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    box = page.locator(".inset canvas").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_keys_go_through_the_cells(page: Any) -> None:
    page.locator(".text").focus()
    point_at(page, 0)
    page.keyboard.press("ArrowRight")
    assert "image 1, row 1, column 2" in page.locator(".aloud").inner_text()
