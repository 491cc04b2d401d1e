"""A whole answer on the page, in a real browser: its parts, spans, hops and ways."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import flow_graphs
import numpy as np
import pages
import pytest
import whole_answers
from tabs import Tabs, part, question

from captum_ssm.explanation import Example
from captum_ssm.explanation.page import page_html
from captum_ssm.explanation.page.data import page_data
from captum_ssm.explanation.page.whole import whole_of

THOUGHTS = whole_answers.thoughts()
PROMPT, L = THOUGHTS.prompt, len(THOUGHTS.tokens)
ANSWER = (THOUGHTS.reasoning[1], L)
ROWS = THOUGHTS.relevance["mamba-lrp"]
HOPS = whole_answers.followed(ROWS, PROMPT, ANSWER)


def in_one_row() -> Example:
    return whole_answers.in_one_row(THOUGHTS, ANSWER, HOPS)


def by_swaps() -> Example:
    """Hops that were measured by swaps, in addition to the single tokens' rows."""
    example = whole_answers.with_hops(THOUGHTS, ANSWER, HOPS)
    first, *others = example.outputs
    return replace(example, outputs=(replace(first, through="swaps"), *others))


def ended() -> Example:
    """The last token, which ends the answer, says nothing; the prompt is a conversation."""
    from captum_ssm.explanation import Span

    last = replace(THOUGHTS.tokens[-1], text="<end>", start=400, end=400)
    turns = (
        *(Span("user 1", 0, 20), Span("template", 20, PROMPT)),
        Span("assistant 1", PROMPT, L),
    )
    return replace(
        THOUGHTS, tokens=(*THOUGHTS.tokens[:-1], last), units={**THOUGHTS.units, "turn": turns}
    )


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Opens each page once; at the end, none has had an error or used a network."""
    made = {
        "thoughts": lambda: [THOUGHTS],
        "plain": lambda: [whole_answers.without_reasoning()],
        "code": lambda: [whole_answers.code()],
        "one row": lambda: [in_one_row()],
        "both": lambda: [whole_answers.with_hops(THOUGHTS, ANSWER, HOPS[:2])],
        "swaps": lambda: [by_swaps()],
        "ended": lambda: [ended()],
        "long": lambda: [whole_answers.long()],
        "several": lambda: [pages.picture(), THOUGHTS, pages.story("red red", " red")],
    }

    explanations = {
        name: lambda make=make: whole_answers.explained(*make()) for name, make in made.items()
    }
    tabs = Tabs(browser, tmp_path_factory.mktemp("answers"), explanations)
    yield tabs
    tabs.seen.check()


def sentence(tab: Any) -> str:
    return tab.locator(".rests").inner_text()


def picked(tab: Any) -> list[int]:
    return tab.locator(".part.picked").evaluate_all("all => all.map(node => node.index)")


def steps(tab: Any) -> list[str]:
    return tab.get_by_role("radiogroup", name="Steps").get_by_role("radio").all_inner_texts()


def shares(tab: Any, column: str) -> dict[str, float]:
    """The shares of the boxes of a column, in percent, by their text."""
    boxes = tab.locator(f".column.{column} .box").all()
    texts = [
        (box.locator(".token").inner_text(), box.locator("small").inner_text()) for box in boxes
    ]
    return {text: float(share.strip("<%") or 0) for text, share in texts}


def ribbons(tab: Any) -> dict[tuple[int, int], float]:
    """The widths of the ribbons of this step, by the sentences that they connect."""
    drawn = tab.locator(".ribbon.active").evaluate_all(
        "all => all.map(g => [g.from, g.to, +g.firstChild.getAttribute('stroke-width')])"
    )
    return {(source, target): width for source, target, width in drawn}


def by_sentence(row: np.ndarray) -> np.ndarray:
    """Sums over sentences, which the prompt, the reasoning and the answer divide."""
    (example,) = page_data(whole_answers.explained(THOUGHTS))["examples"]
    return np.add.reduceat(row, [0, *example["units"]["sentence"]["ends"][:-1]])


def percent(share: float) -> float:
    """A share as the page writes it."""
    return round(100 * share, 1) if 0.001 <= share < 0.0995 or share > 0.99 else round(100 * share)


def without_own(rows: np.ndarray) -> np.ndarray:
    """Rows without what each has from the token that it is read from."""
    rows = rows.astype(float)
    rows[np.arange(len(rows)), np.arange(PROMPT - 1, L - 1)] = 0
    return rows


def test_the_first_sight_tells_three_parts_and_what_the_answer_rests_on(opened):
    tab = opened("thoughts")
    assert question(tab) == "Why “Anna has 5 apples now. Tom still has his dog.”?"
    sizes = abs(without_own(ROWS)[ANSWER[0] - PROMPT :].sum(0))
    own, prompt = sizes[PROMPT:].sum() / sizes.sum(), sizes[:PROMPT].sum() / sizes.sum()
    said = sentence(tab)
    assert said.startswith(f"{prompt:.0%} of this answer rests on the prompt, most on “Tom has 9")
    assert f"{own:.0%} rests on the model" in said
    assert "own words, most on “So 3 + 2 = 5.” (" in said
    assert tab.locator(".column h3").all_inner_texts() == [
        f"{name} {percent(value):g}%".upper()
        for name, value in zip(
            ("prompt", "reasoning", "answer"),
            np.add.reduceat(sizes, [0, PROMPT, ANSWER[0]]) / sizes.sum(),
            strict=True,
        )
    ]
    # The three parts are told apart in the text as well, and the whole answer is picked.
    assert [text.split()[0] for text in tab.locator(".text .turn").all_inner_texts()] == [
        *("PROMPT", "REASONING", "ANSWER")
    ]
    assert picked(tab) == list(range(*ANSWER))
    assert steps(tab)[0] == "Directly"
    assert tab.evaluate("location.hash") == ""
    picture = tab.locator(".ways-picture").bounding_box()
    assert picture["y"] + picture["height"] < 700  # the text begins on the first screen
    # Boxes of a part stand in one column, and are the text of its sentences.
    assert list(shares(tab, "reasoning")) == [
        *("Anna starts with 3 apples.", "Then Lena adds 2 of them.", "So 3 + 2 = 5.")
    ]
    assert list(shares(tab, "answer")) == ["Anna has 5 apples now.", "Tom still has his dog."]


@pytest.mark.parametrize("own", [0, 1])
def test_every_hop_is_that_of_the_definition(opened, own):
    rows = ROWS if own else without_own(ROWS)
    hops = whole_answers.followed(rows, PROMPT, ANSWER)
    handed_on = abs(hops[:, PROMPT:]).sum(1) / abs(hops).sum(1)
    reached = np.cumprod([1, *handed_on])
    tab = opened("thoughts", f"own={own}")
    told = steps(tab)
    assert len(told) == len(hops) + 1
    assert told[-1] == "All steps"
    for k, text in enumerate(told[1:-1], 1):
        number = float(text.split()[-1].strip("%"))
        assert number == pytest.approx(100 * reached[k], abs=0.6)
    for k, hop in enumerate(hops):
        tab = opened("thoughts", f"own={own}&hop={k}")
        expected = 100 * by_sentence(abs(hop)) / abs(hop).sum()
        found = [
            value
            for name in ("prompt", "reasoning", "answer")
            for value in shares(tab, name).values()
        ]
        assert len(found) == len(expected)
        np.testing.assert_allclose(found, expected, atol=0.6)
        if k:
            assert sentence(tab).startswith(f"{percent(reached[k]):g}")


def test_all_steps_together_keep_the_sum_of_the_first(opened):
    positive = np.maximum(without_own(ROWS), 0)
    own = positive / positive.sum(1, keepdims=True)
    first = without_own(ROWS)[ANSWER[0] - PROMPT :].sum(0)
    # What is handed on for ever, in closed form, and what the page stops at.
    weights = np.maximum(first[PROMPT:], 0)
    endless = weights @ np.linalg.inv(np.eye(len(own)) - own[:, PROMPT:]) @ own[:, :PROMPT]
    expected = by_sentence(abs(np.concatenate([first[:PROMPT] + endless, np.zeros(L - PROMPT)])))
    tab = opened("thoughts", "hop=all")
    found = list(shares(tab, "prompt").values())
    np.testing.assert_allclose(found, 100 * expected[: len(found)] / abs(first).sum(), atol=3)
    assert sentence(tab).startswith("Followed back through its own words, 97% of this answer rests")
    assert sum(found) + sum(shares(tab, "reasoning").values()) == pytest.approx(100, abs=1.5)


def test_rows_that_were_computed_are_shown_as_they_are(opened):
    # Hops of the definition, in rows of their own, give the same shares as rows of every token.
    assert steps(opened("one row")) == steps(opened("thoughts", "own=1"))
    for hop in range(len(HOPS)):
        each = [opened("one row", f"hop={hop}"), opened("thoughts", f"own=1&hop={hop}")]
        assert sentence(each[0]) == sentence(each[1])
        for name in ("prompt", "reasoning", "answer"):
            assert shares(each[0], name) == shares(each[1], name)
    # What one row explains cannot be taken apart.
    tab = opened("one row")
    assert not tab.locator(".whole-answer .picking").is_visible()
    assert not tab.get_by_label("Reading token (reads itself)").is_visible()
    part(tab, ANSWER[0]).click()
    assert picked(tab) == list(range(*ANSWER))


def test_computed_hops_come_first_and_single_rows_without_reading_tokens(opened):
    tab = opened("both")
    hide = tab.get_by_label("Reading token (reads itself)")
    assert not hide.is_checked()
    assert steps(tab) == [*steps(opened("thoughts", "own=1"))[:2], "All steps"]
    assert tab.evaluate("document.querySelectorAll('.ribbon').length") > 0
    tab = opened("both")
    hide.check()
    assert steps(tab) == steps(opened("thoughts"))
    assert sentence(tab) == sentence(opened("thoughts"))
    # Other words have no hops that were computed, and are followed on the page.
    tab = opened("both", f"span={ANSWER[0]}-{ANSWER[0] + 3}")
    assert hide.is_checked()


def test_hops_by_swaps_are_shown_as_computed_and_others_are_told_apart(opened):
    tab = opened("swaps")
    assert sentence(tab).endswith("was measured by swapping them.")
    shown = steps(tab)
    assert len(shown) == len(HOPS) + 1
    tab.get_by_label("Reading token (reads itself)").check()
    assert steps(tab) == shown
    tab = opened("swaps", f"span={ANSWER[0]}-{ANSWER[0] + 3}")
    assert "swapped for another part of the answer alone" in sentence(tab)
    assert "swap" not in sentence(opened("both"))


def test_ribbons_are_to_scale_and_end_where_the_words_were_written(opened):
    tab = opened("thoughts")
    (example,) = page_data(whole_answers.explained(THOUGHTS))["examples"]
    of = np.repeat(
        np.arange(len(example["units"]["sentence"]["ends"])),
        np.diff([0, *example["units"]["sentence"]["ends"]]),
    )
    rows, links = without_own(ROWS), {}
    for sentence_ in {*of[ANSWER[0] :].tolist()}:
        written = np.flatnonzero(of == sentence_) - PROMPT
        for source, size in enumerate(by_sentence(abs(rows[written].sum(0)))):
            links[source, sentence_] = size
    found = ribbons(tab)
    total = abs(without_own(ROWS)[ANSWER[0] - PROMPT :].sum(0)).sum()
    assert {key for key in links if links[key] >= 0.015 * total} == {*found}
    largest = max(links, key=lambda key: links[key])
    scale = found[largest] / links[largest]
    for key, width in found.items():
        assert width == pytest.approx(max(1.5, scale * links[key]), rel=0.01)
    # They begin and end at their boxes.
    gaps = tab.locator(".ribbon.active").evaluate_all(
        """all => all.map(group => {
            const path = group.firstChild, end = path.getPointAtLength(path.getTotalLength());
            const frame = document.querySelector('.ways-picture').getBoundingClientRect();
            const boxes = [...document.querySelectorAll('.box')];
            const box = boxes.find(node => node.unitPart === group.to).getBoundingClientRect();
            const [x, y] = [end.x + frame.left, end.y + frame.top];
            const side = Math.min(Math.abs(box.left - x), Math.abs(box.right - x));
            return [side, y - box.top, box.bottom - y];
        })"""
    )
    assert all(side < 16 and above > -30 and below > -30 for side, above, below in gaps)


def test_a_span_is_picked_with_the_mouse(opened):
    tab = opened("thoughts")
    first, last = ANSWER[0] + 1, ANSWER[0] + 3
    part(tab, first).hover()
    tab.mouse.down()
    part(tab, last).hover()
    assert tab.locator(".part.picking").count() == 3
    tab.mouse.up()
    assert tab.locator(".part.picking").count() == 0
    assert picked(tab) == [first, first + 1, last]
    assert question(tab) == "Why “has 5 apples”?"
    assert "of this part rests" in sentence(tab)
    assert tab.evaluate("location.hash") == f"#span={first}-{last + 1}"
    # Shift + click makes it longer; one word alone has its alternatives; and back to all of it.
    part(tab, last + 1).click(modifiers=["Shift"])
    assert picked(tab) == list(range(first, last + 2))
    part(tab, first + 1).click()
    assert question(tab) == "Why “5”?"
    assert picked(tab) == [first + 1]
    assert "of this token rests on" in sentence(tab)
    assert "rank 1" in tab.locator(".ask").inner_text()
    assert tab.locator(".picks .answers").is_visible()
    tab.get_by_role("radio", name="The whole answer").click()
    assert picked(tab) == list(range(*ANSWER))
    tab.get_by_role("radio", name="The whole reasoning").click()
    assert picked(tab) == list(range(*THOUGHTS.reasoning))
    assert "of this reasoning rests on the prompt" in sentence(tab)
    # The prompt is not picked.
    part(tab, 3).click()
    assert picked(tab) == list(range(*THOUGHTS.reasoning))


def test_a_span_is_picked_with_the_keyboard(opened):
    tab = opened("thoughts")
    tab.locator(".text").focus()
    tab.keyboard.press("Shift+ArrowLeft")  # the answer, without its last token
    assert picked(tab) == list(range(ANSWER[0], L - 1))
    assert "Picked: Anna has 5" in tab.locator(".aloud").inner_text()
    for _ in range(2):
        tab.keyboard.press("Shift+ArrowLeft")
    tab.keyboard.press("Shift+ArrowRight")
    assert picked(tab) == list(range(ANSWER[0], L - 2))
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Shift+ArrowRight")  # a new one begins at the part that is pointed at
    assert picked(tab) == [L - 5, L - 4]
    tab.keyboard.press("Shift+Home")
    assert picked(tab) == list(range(PROMPT, L - 4))
    tab.keyboard.press("Enter")
    assert question(tab) == "Why “Anna”?"
    assert tab.evaluate("document.activeElement.className") == "text"


def test_hops_are_stepped_through_by_keys_and_by_the_button(opened):
    tab = opened("thoughts")
    count = len(steps(tab))
    seen = [sentence(tab)]
    for _ in range(count - 1):
        tab.keyboard.press("h")
        seen.append(sentence(tab))
    assert len({*seen}) == count
    assert tab.evaluate("location.hash") == "#hop=all"
    tab.keyboard.press("h")
    assert sentence(tab) == seen[0]
    tab.keyboard.press("H")
    assert sentence(tab) == seen[-1]
    button = tab.locator(".whole-answer .action")
    assert button.inner_text().startswith("Start again")
    button.click()
    assert button.inner_text().startswith("Follow its own words")
    button.click()
    assert sentence(tab) == seen[1]
    assert tab.evaluate("location.hash") == "#hop=1"
    # Colors and the list follow: "5" of the reasoning rests on "3" and "2" before it.
    largest = tab.locator(".sources button .what .token").all_inner_texts()[:2]
    assert sorted(largest) == ["2", "3"]


def test_a_box_says_its_numbers_and_is_a_way_into_the_text(opened):
    tab = opened("thoughts")
    box = tab.locator(".column.reasoning .box").last
    box.focus()
    tip = tab.locator(".tip")
    share = shares(tab, "reasoning")["So 3 + 2 = 5."]
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Tab")
    tip.filter(has_text="Goes into").wait_for()
    assert tip.inner_text().startswith(f"{share:g}% of what is explained.")
    assert "“Anna has 5 apples now.”" in tip.inner_text()
    assert tab.locator(".ways-picture.lit .ribbon.on").count() > 0
    tab.keyboard.press("Enter")  # explains the sentence
    assert question(tab) == "Why “So 3 + 2 = 5.”?"
    assert tab.evaluate("document.activeElement.className").startswith("box")
    tab = opened("thoughts")
    tab.locator(".column.prompt .box").nth(1).click()
    assert tab.locator(".part.pointed").inner_text() == "Tom"


def test_methods_units_and_views_of_a_span(opened):
    tab = opened("thoughts", "view=all")
    assert tab.locator(".text").count() == 2
    assert tab.locator(".part.picked").count() == 2 * (L - ANSWER[0])
    tab = opened("thoughts", "m=raw-attention")
    assert "of this answer rests" in sentence(tab)
    tab = opened("thoughts", "u=sentence")
    part(tab, len(by_sentence(np.zeros(L))) - 1).click()
    assert question(tab) == "Why “Tom still has his dog.”?"
    # Two outputs are compared one by one.
    tab.keyboard.press("v")
    tab.keyboard.press("v")
    assert question(tab).count("why") == 1
    assert not tab.locator(".rests").is_visible()
    tab = opened("code")
    assert "most on “print(double(4))”" in sentence(tab)
    tab.get_by_role("radio", name="Line").click()
    assert tab.locator(".part.picked").count() == 3


def test_an_answer_without_reasoning_has_two_columns(opened):
    tab = opened("plain")
    assert [text.split()[0] for text in tab.locator(".column h3").all_inner_texts()] == [
        *("PROMPT", "ANSWER")
    ]
    assert picked(tab) == list(range(PROMPT, L))
    # What the answer's own sentences were written from goes round on its side.
    assert any(source >= 5 for source, _ in ribbons(tab))


def test_what_ends_an_answer_is_not_explained_with_it(opened):
    tab = opened("ended")
    assert picked(tab) == list(range(ANSWER[0], L - 1))
    labels = [text.split()[0].lower() for text in tab.locator(".text .turn").all_inner_texts()]
    assert labels == ["user", "reasoning", "answer"]
    # What the template writes counts in no share, once it is hidden.
    tab = opened("ended", "template=0")
    assert tab.locator(".column.prompt h3").inner_text() in tab.locator(".columns").inner_text()
    kept = without_own(ROWS)[ANSWER[0] - PROMPT : -1].sum(0)
    kept[20:PROMPT] = 0
    share = abs(kept[:PROMPT]).sum() / abs(kept).sum()
    assert sentence(tab).startswith(f"{share:.0%} of this answer")
    assert ", and from the template (" in tab.locator(".sum").inner_text()


def test_the_address_keeps_what_is_picked(opened):
    tab = opened("thoughts", f"span={ANSWER[0]}-{ANSWER[0] + 3}&hop=1")
    assert len(picked(tab)) == 3
    assert sentence(tab).count("came through") == 1
    for wrong in ("span=0-3", "span=99-2", "span=x", f"span={L - 1}-{L + 5}"):
        assert question(opened("thoughts", wrong)).startswith("Why “Anna has 5 apples now.")
    assert sentence(opened("thoughts", "hop=77")) == sentence(opened("thoughts"))
    assert question(opened("thoughts", "t=2")) == "Why “with”?"
    assert tab.locator(".picks .chips").is_visible()
    assert not tab.locator(".rests").is_visible()
    # Each of several examples opens as it would by itself.
    tab = opened("several")
    assert not tab.locator(".whole-answer").is_visible()
    tab.keyboard.press("e")
    assert picked(tab) == list(range(*ANSWER))
    tab.keyboard.press("e")
    assert not tab.locator(".whole-answer").is_visible()


@pytest.mark.parametrize("width", [390, 768, 1024, 1600])
@pytest.mark.parametrize("name", ["thoughts", "plain"])
def test_nothing_is_cut_off_at_any_width(opened, name, width):
    tab = opened(name, "hop=1", width)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= width
    picture = tab.locator(".ways-picture")
    assert ("stacked" in picture.get_attribute("class")) == (width < 700)
    frame = tab.evaluate("document.documentElement.clientWidth")
    for box in tab.locator(".ribbon path").all():
        place = box.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= frame


@pytest.mark.parametrize("state", ["hop=1&theme=light", "hop=all&theme=dark"])
@pytest.mark.parametrize("width", [390, 1240])
def test_axe_finds_nothing_serious_in_a_whole_answer(opened, state, width):
    assert pages.serious_violations(opened("thoughts", state, width)) == []


def test_a_whole_answer_is_printed(opened):
    tab = opened("thoughts")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    picture = tab.locator(".ways-picture")
    assert "stacked" in picture.get_attribute("class")
    assert picture.bounding_box()["width"] == 640
    assert tab.locator(".ribbon.active").count() > 0
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert "stacked" not in picture.get_attribute("class")


def test_five_thousand_tokens_have_few_elements(opened):
    tab = opened("long")
    assert "5,000 tokens" in tab.locator(".top").inner_text()
    assert tab.locator(".part").count() < 2500
    assert tab.locator(".box").count() <= 15
    for hop in ("1", "all", "0"):
        tab.evaluate("hop => { location.hash = `hop=${hop}` }", hop)
    assert len(steps(tab)) == 5


def test_only_a_written_answer_of_several_tokens_is_explained_as_a_whole():
    assert whole_of(THOUGHTS, is_written=True) == {
        "regions": [["prompt", 0, PROMPT], ["reasoning", PROMPT, ANSWER[0]], ["answer", *ANSWER]],
        "spans": [["reasoning", PROMPT, ANSWER[0]], ["answer", *ANSWER]],
        "opening": list(ANSWER),
    }
    assert whole_of(THOUGHTS, is_written=False) is None
    assert whole_of(replace(THOUGHTS, outputs=THOUGHTS.outputs[:1]), is_written=True) is None
    assert whole_of(pages.picture(), is_written=True) is None
    # A part was asked for, whoever wrote it; a circuit is of one token.
    asked = whole_of(in_one_row(), is_written=False)
    assert asked is not None
    assert asked["opening"] == list(ANSWER)
    drawn = replace(THOUGHTS, circuits=(flow_graphs.flow_graph(),))
    assert whole_of(drawn, is_written=True)["opening"] is None
    assert whole_of(ended(), is_written=True)["spans"][-1] == ["answer", ANSWER[0], L - 1]


def test_other_pages_come_without_its_scripts():
    for explanation, is_there in (
        (pages.explanation(), False),
        (whole_answers.explained(THOUGHTS), True),
        (whole_answers.explained(pages.picture()), False),
    ):
        page = page_html(explanation)
        assert ("class AnswerPicture" in page) == is_there
        assert (".ways-picture" in page) == is_there
