"""The circuit on the page, in a real browser: what is drawn, said, pointed at and walked along."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import flow_graphs
import numpy as np
import pages
import pytest
from tabs import Tabs, address

from captum_ssm.explanation.page import page_html

GRAPH = flow_graphs.flow_graph()


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Opens each page once; at the end, none has had an error or used a network."""
    graph = flow_graphs.flow_graph()
    made = {
        "story": lambda: [flow_graphs.explained(graph)],
        "shifted": lambda: [flow_graphs.explained(flow_graphs.shifted())],
        "deep": lambda: [flow_graphs.explained(flow_graphs.deep())],
        "hostile": lambda: [flow_graphs.hostile()],
        "several": lambda: [
            flow_graphs.explained(graph),
            pages.story(),
            flow_graphs.explained(flow_graphs.flow_graph(score=3.0, layers=4)),
        ],
        "weak": lambda: [
            flow_graphs.explained(flow_graphs.flow_graph(reads={2: [(15, 3, 0.1), (15, 9, 0.05)]}))
        ],
        "foil": lambda: [
            flow_graphs.explained(
                graph | {"score": {"of": "difference", "value": 10.0}, "against": "brown"}
            )
        ],
        "own": lambda: [flow_graphs.explained(flow_graphs.flow_graph(reads={}))],
    }

    explanations = {
        name: lambda make=make: pages.explanation(*make()) for name, make in made.items()
    }
    tabs = Tabs(browser, tmp_path_factory.mktemp("circuits"), explanations)
    yield tabs
    tabs.seen.check()


def sentence(tab: Any) -> str:
    return tab.locator(".decided").inner_text()


def edge(layer: int, source: int, target: int, graph: dict[str, Any] = GRAPH) -> int:
    """The rank of an edge."""
    places = [(e[0], e[1], e[2]) for e in graph["edges"]]
    return places.index((layer, source, target))


def drawn(tab: Any) -> set[str]:
    return {
        *tab.locator(".circuit-picture .link:not(.stay)").evaluate_all(
            "all => all.map(n => n.dataset.id)"
        )
    }


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace("+", "").replace(",", ""))


def active(tab: Any) -> str:
    return tab.evaluate("document.activeElement.dataset.id")


def test_the_first_sight_says_which_word_decides_and_by_which_layer(opened):
    tab = opened("story")
    share = GRAPH["paths"][0]["share"]
    assert sentence(tab) == (
        f"“yellow”3 decides: “is”15 reads it in attention layer 2. {share:.0%} of the score goes "
        "this way."
    )
    box = tab.locator(".circuit-picture").bounding_box()
    assert tab.locator(".decided").bounding_box()["y"] < box["y"]
    assert box["y"] + box["height"] <= 900  # without a scroll
    assert tab.locator(".name.strong").all_text_contents() == ["yellow3decides", "is15answers"]
    assert tab.locator(".name.answer").text_content() == "yellow"
    # The ink goes from the word, up two layers, and over to the output.
    ink = tab.locator(".ink path").get_attribute("d")
    assert ink.count("C") == 3
    assert tab.locator(".ink circle").count() == 2


def test_a_word_that_gives_little_does_not_decide(opened):
    tab = opened("weak")
    assert sentence(tab).startswith("“yellow”3 gives most: “is”15 reads it in attention layer 2.")
    assert "10% of the score goes this way" in sentence(tab)
    facts = tab.locator(".circuit .facts").inner_text()
    assert facts.startswith("More, 85%, is what “is” keeps of its own.")
    assert "gives most" in tab.locator(".name.strong").first.text_content()
    tab = opened("own")
    assert sentence(tab) == "“is”15 keeps its own through all layers: 100% of the score."
    assert tab.locator(".circuit-picture .link:not(.stay)").count() == 0
    assert tab.locator(".carry").is_hidden()


@pytest.mark.parametrize("k", range(1, 7))
def test_widths_are_to_scale(opened, k):
    tab = opened("story", f"edges={k}")
    shown = tab.locator(".link.mix").evaluate_all(
        """all => all.map(
            n => [n.dataset.id, +n.querySelector(".strand").getAttribute("stroke-width")]
        )"""
    )
    widths = dict(shown)
    assert {f"e{n}" for n in range(k)} <= {*widths}
    scale = widths["e0"] / abs(GRAPH["edges"][0][3])
    for name, width in widths.items():
        wanted = abs(GRAPH["edges"][int(name[1:])][3]) * scale
        assert width == pytest.approx(max(1.2, wanted), rel=1e-3)


def test_every_ledger_adds_up(opened):
    # Rows of what arrives, and of what leaves, are the node, at any number of edges.
    for k in (1, 3, 6):
        tab = opened("story", f"edges={k}")
        ids = tab.locator(".circuit-picture .node").evaluate_all("a => a.map(n => n.dataset.id)")
        assert len(ids) >= 5
        for name in ids:
            tab.locator(f".node[data-id='{name}']").focus()
            for table in tab.locator(".ledger table").all():
                *parts, total = (
                    number(text) for text in table.locator("td:last-child").all_inner_texts()
                )
                assert sum(parts) == pytest.approx(total, abs=0.03)
            stage, token = map(int, name.split(":"))
            value = next(n[2] for n in GRAPH["nodes"] if n[:2] == [stage, token])
            assert number(tab.locator(".ledger p b").first.inner_text()) == pytest.approx(
                value, abs=0.02
            )


def test_attention_jumps_and_a_recurrence_runs_along_its_layer(opened):
    tab = opened("story", "edges=6")
    jump = tab.locator(f".link[data-id='e{edge(2, 3, 15)}'] .strand").get_attribute("d")
    run = tab.locator(f".link[data-id='e{edge(0, 2, 3)}'] .strand").get_attribute("d")
    assert "C" in jump
    assert "H" not in jump
    assert "H" in run
    assert tab.locator(".jumping").count() == 1
    assert "shaded layer" in tab.locator(".circuit figure > p").inner_text()
    assert "attention" in tab.locator(".gutter").text_content()


def test_the_slider_and_its_curve_choose_how_many_edges(opened):
    tab = opened("story")
    slider = tab.get_by_label("Edges shown", exact=True)
    start = next(k for k, share in GRAPH["curve"] if share >= 0.9)
    assert len(drawn(tab)) == start
    share = dict(map(tuple, GRAPH["curve"]))
    said = tab.locator(".carried")
    assert (
        said.inner_text() == f"{start} of {GRAPH['of']} alone keep {share[start]:.0%} of the score"
    )
    slider.focus()
    tab.keyboard.press("Home")
    assert address(tab) == "#edges=1"
    assert drawn(tab) == {"e0"}
    tab.keyboard.press("ArrowRight")
    assert address(tab) == "#edges=2"
    assert slider.get_attribute("aria-valuetext") == f"2 edges, {share[2]:.0%}"
    tab.keyboard.press("]")
    tab.keyboard.press("]")
    assert address(tab) == "#edges=4"
    tab.keyboard.press("[")
    assert address(tab) == "#edges=3"
    tab.get_by_role("button", name="50%", exact=True).click()
    least = next(k for k, x in GRAPH["curve"] if x >= 0.5)
    assert address(tab) == f"#edges={least}"
    assert tab.locator(".carry [aria-pressed=true]").inner_text() == "50%"
    assert tab.evaluate("document.activeElement.textContent") == "50%"  # made anew, still focused
    box = tab.locator(".chart").bounding_box()
    tab.mouse.move(box["x"] + 10, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 40, box["y"] + 40, steps=4)
    tab.mouse.up()
    assert address(tab) == "#edges=6"
    assert "the largest 2 edges alone, the model still gives this answer" in (
        tab.locator(".carry .quiet").inner_text()
    )


def test_pointing_shows_the_numbers(opened):
    tab = opened("story")
    name = f"e{edge(2, 3, 15)}"
    tab.locator(f".link[data-id='{name}'] .strand").first.hover(force=True)
    tip = tab.locator(".tip")
    assert tip.inner_text().splitlines()[:2] == [
        "“is”15 reads “yellow”3 in attention layer 2",
        "+6.50 · 65% of the score",
    ]
    assert "head 1: +4.33 of +6.50" in tip.inner_text()
    ledger = tab.locator(".ledger").inner_text()
    assert "number 1 by size" in ledger
    assert "layers.2.mixer" in ledger
    heads = tab.locator(".ledger table").first.locator("td:last-child").all_inner_texts()
    assert heads == ["+2.17", "+4.33", "+6.50"]
    tab.mouse.move(0, 0)
    assert tip.is_hidden()
    assert "where the answer is read" in tab.locator(".ledger").inner_text()


def test_the_keyboard_walks_along_the_flow(opened):
    tab = opened("story")
    tab.locator(".circuit-picture [tabindex='0']").focus()
    assert active(tab) == "3:15"
    tab.keyboard.press("ArrowDown")  # the largest that arrives
    largest = max(
        (abs(v), name)
        for v, name in (
            (GRAPH["edges"][edge(2, 3, 15)][3], f"e{edge(2, 3, 15)}"),
            (next(s[2] for s in GRAPH["stays"] if s[:2] == [2, 15]), "s2:15"),
        )
    )[1]
    assert active(tab) == largest
    tab.keyboard.press("Home")
    tab.keyboard.press("n")
    assert active(tab) == "e0"
    assert "“yellow”3" in tab.locator(".tip").inner_text()
    aloud = tab.locator(".aloud").text_content()
    assert aloud.startswith("is, token 15, reads yellow, token 3, in layer 2: +6.50, 65%")
    tab.keyboard.press("ArrowDown")
    assert active(tab) == "2:3"
    tab.keyboard.press("ArrowUp")
    assert active(tab) == "e0"
    tab.keyboard.press("ArrowUp")
    assert active(tab) == "3:15"
    tab.keyboard.press("End")
    assert active(tab) == "0:3"
    tab.keyboard.press("ArrowLeft")
    assert active(tab) == "0:2"
    tab.keyboard.press("n")
    tab.keyboard.press("n")
    assert active(tab) == "e1"
    tab.keyboard.press("N")
    assert active(tab) == "e0"
    assert tab.locator(".circuit-picture [tabindex='0']").count() == 1
    tab.keyboard.press("Enter")
    assert address(tab) == "#at=e0"
    assert active(tab) == "e0"  # drawn anew, still focused
    tab.keyboard.press("Escape")
    assert address(tab) == ""


def test_a_click_leaves_what_flows_through(opened):
    tab = opened("story", "edges=6")
    tab.locator(".node[data-id='2:3'] .hit").click()
    assert address(tab) == "#edges=6&at=2%3A3"
    on = {*tab.locator(".circuit-picture .on").evaluate_all("all => all.map(n => n.dataset.id)")}
    assert {"0:3", "0:2", "2:3", "3:15", f"e{edge(2, 3, 15)}", f"e{edge(0, 2, 3)}"} <= on
    assert f"e{edge(2, 9, 15)}" not in on
    assert "0:9" not in on
    assert tab.locator("[aria-pressed=true][data-id]").get_attribute("data-id") == "2:3"
    tab.locator(".node[data-id='2:3'] .hit").click()
    assert address(tab) == "#edges=6"
    assert tab.locator(".isolated").count() == 0


def test_signs_heads_and_what_stays_are_switched(opened):
    tab = opened("story", "edges=6")
    against = f"e{edge(2, 9, 15)}"
    assert against in drawn(tab)
    tab.get_by_label("Against", exact=True).uncheck()
    assert against not in drawn(tab)
    assert address(tab) == "#edges=6&neg=0"
    tab.get_by_label("Against", exact=True).check()
    tab.get_by_label("For", exact=True).uncheck()
    assert drawn(tab) == {against} | {f"e{n}" for n, e in enumerate(GRAPH["edges"]) if e[3] < 0}
    tab.get_by_label("For", exact=True).check()
    tab.get_by_label("What stays", exact=True).uncheck()
    assert tab.locator(".link.stay").count() == 0
    assert tab.locator(".thread").count() > 0
    tab.get_by_label("Heads", exact=True).check()
    strands = tab.locator(".link[data-id='e0'] .strand")
    assert strands.count() == 2
    first, second = (float(s.get_attribute("stroke-width")) for s in strands.all())
    assert second / first == pytest.approx(2, rel=0.1)


def test_a_path_is_told_and_drawn_when_it_is_chosen(opened):
    tab = opened("story")
    before = tab.locator(".ink path").get_attribute("d")
    shares = [row.inner_text().split()[-1] for row in tab.locator(".ways button").all()]
    assert shares[0] == f"{GRAPH['paths'][0]['share']:.0%}"
    other = next(n for n, p in enumerate(GRAPH["paths"]) if p["nodes"][0][1] == 2)
    tab.locator(".ways button").nth(other).click()
    assert address(tab) == f"#path={other}"
    assert sentence(tab).startswith(
        "“a”2 gives a part: “yellow”3 reads it in layer 0, and “is”15 reads that in attention layer"
    )
    assert tab.locator(".ink path").get_attribute("d") != before
    tab.keyboard.press("p")
    assert address(tab) != f"#path={other}"


def test_tokens_and_layers_that_move_nothing_are_folded(opened):
    tab = opened("deep")
    columns = tab.locator(".name:not(.answer)").count()
    assert columns < 30
    gaps = tab.locator(".gap")
    counted = gaps.evaluate_all("all => all.map(g => +g.dataset.tip.split(' ')[0])")
    assert sum(counted) + columns == 200
    assert "w1 " in gaps.first.get_attribute("data-tip")
    quiet = tab.locator(".gutter").text_content()
    assert "quiet" in quiet
    assert tab.locator(".stage-line").count() < 20
    height = tab.locator(".circuit-picture").bounding_box()["height"]
    tab.get_by_label("Fold quiet layers", exact=True).uncheck()
    assert tab.locator(".stage-line").count() == 25
    assert tab.locator(".circuit-picture").bounding_box()["height"] > height
    assert tab.locator(".strip rect").count() > 200
    assert address(tab) == "#fold=0"
    assert "“w40”" in sentence(tab)
    assert "“w120”120 reads it in attention layer 11" in sentence(tab)


def test_the_strip_leads_to_a_column(opened):
    tab = opened("deep")
    gutter = tab.locator(".gutter").bounding_box()["width"]
    room = tab.locator(".strip").bounding_box()["width"] - gutter
    tab.locator(".strip").click(position={"x": gutter + room * 120.5 / 200, "y": 28})
    assert active(tab) == "0:120"


def test_a_token_shift_is_drawn_apart(opened):
    tab = opened("shifted")
    shift = tab.locator(".link.shift")
    assert shift.count() == 1
    assert shift.locator(".strand").evaluate("n => getComputedStyle(n).strokeDasharray") != "none"
    assert "token shift" in tab.locator(".circuit figure > p").inner_text()
    tab.locator(".node[data-id='0:3']").focus()
    given = tab.locator(".ledger tr", has_text="given by “a” 2, token shift")
    assert given.locator("td").last.inner_text() == "\N{MINUS SIGN}5.00"
    tab.locator(".node[data-id='0:2']").focus()
    gives = tab.locator(".ledger tr", has_text="to “yellow” 3 by the token shift")
    assert gives.locator("td").last.inner_text() == "+5.00"
    assert "+5.00" not in tab.locator(".picture .number").all_inner_texts()
    tab.locator(".way").last.click()
    way = "“yellow”3 is given it by the token shift of layer 0, and “is”15 reads that in layer 2."
    assert sentence(tab).startswith(f"“a”2 gives a part: {way}")
    line = tab.locator(".ink path").get_attribute("d")
    assert line.count("M") == 1  # it goes through from the text to the answer
    # Without runs, the share is of magnitudes, and no run is told of.
    assert "of all that tokens read" in tab.locator(".carried").inner_text()
    assert tab.locator(".carry .quiet").inner_text() == ""
    graph = flow_graphs.shifted()
    sizes = np.abs([e[3] for e in graph["edges"][: graph["ranked"]]])
    k, share = len(drawn(tab)) - 1, sizes.cumsum() / sizes.sum() * graph["held"]
    assert f"{k} of" in tab.locator(".carried").inner_text()
    assert f"{share[k - 1]:.0%}" in tab.locator(".carried").inner_text()


def test_the_answer_that_a_circuit_is_held_against_is_named(opened):
    facts = opened("foil").locator(".circuit .facts").inner_text()
    assert re.search("The score is [+]10.0, the answer.s logit minus that of “brown”[.] ", facts)
    facts = opened("story").locator(".circuit .facts").inner_text()
    assert re.search(
        "The score is [+]10.0, the answer.s logit against those of the others[.] ", facts
    )


def test_an_answer_without_a_circuit_leads_to_one_that_has_it(opened):
    tab = opened("story", "t=0.1")
    assert "No circuit was computed for this answer" in tab.locator(".circuit").inner_text()
    assert tab.locator(".circuit-picture").is_hidden()
    tab.locator(".circuit .link").first.click()
    assert address(tab) == ""
    assert tab.locator(".circuit-picture").is_visible()
    tab = opened("several", "e=1")
    assert tab.locator(".circuit").is_hidden()
    tab.keyboard.press("e")
    assert tab.locator(".circuit").is_visible()


def test_the_address_restores_it_and_ignores_what_is_invalid(opened):
    state = "edges=4&path=1&at=e1&pos=1&neg=0&kept=0&heads=1&fold=0&theme=dark"
    tab = opened("story", state)
    assert len(drawn(tab) - {f"e{k}" for k in range(4)}) == 0
    assert tab.locator(".ways [aria-pressed=true]").count() == 1
    assert tab.locator(".isolated").count() == 1
    tab.get_by_label("Heads", exact=True).uncheck()
    kept = address(tab)[1:].split("&")
    assert {*kept} == {"edges=4", "path=1", "at=e1", "neg=0", "kept=0", "fold=0", "theme=dark"}
    opened("story", "edges=99&path=77&at=%22%5D&pos=2&neg=x&kept=-1&heads=&fold=9")
    tab.get_by_label("Heads", exact=True).check()
    assert address(tab) == "#heads=1"
    # Another example begins anew.
    tab = opened("several", "edges=2&at=e0")
    tab.keyboard.press("e")
    tab.keyboard.press("e")
    assert "edges" not in address(tab)


def test_its_terms_are_explained_and_its_keys_listed(opened):
    tab = opened("story")
    for word in ("circuit", "edges", "paths", "node", "supporting", "kept"):
        assert tab.locator(f".circuit [data-word={word}]").count() == 1
    tab.locator(".circuit > h2").hover()
    tab.locator(".tip", has_text="Each column is a token that matters").wait_for()
    tab.keyboard.press("?")
    dialog = tab.get_by_role("dialog").inner_text()
    for text in ("along the largest flow", "Paths to the answer", "What stays"):
        assert text in dialog
    tab.get_by_label("Single-letter keys").uncheck()
    tab.keyboard.press("Escape")
    tab.get_by_label("Edges shown", exact=True).focus()
    tab.keyboard.press("[")
    assert address(tab) == ""
    tab.locator(".tools button").nth(1).click()
    tab.get_by_label("Single-letter keys").check()
    tab.keyboard.press("Escape")


def test_all_that_can_be_pressed_has_a_name(opened):
    tab = opened("story", "edges=6")
    names = tab.locator(".circuit [role=button]").evaluate_all("a => a.map(n => n.ariaLabel)")
    assert len(names) > 15
    assert all(re.search("token [0-9]+.*: [+\N{MINUS SIGN}0]", name) for name in names)
    unnamed = tab.locator(".circuit button").evaluate_all(
        "all => all.filter(n => !n.textContent.trim()).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("width", [390, 1024, 1600])
@pytest.mark.parametrize("name", ["story", "deep", "hostile", "shifted"])
def test_no_circuit_is_wider_than_the_window(opened, name, width):
    tab = opened(name, "fold=0&edges=6&heads=1", width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    picture = tab.locator(".circuit-picture")
    assert "NaN" not in picture.evaluate("n => n.outerHTML")
    assert "undefined" not in tab.locator(".circuit").inner_text()
    # The answer is in view.
    answer, scroller = (
        tab.locator(s).bounding_box() for s in (".name.answer rect", ".plot-scroller")
    )
    assert answer["x"] + answer["width"] <= scroller["x"] + scroller["width"] + 1


def test_a_finger_reads_and_chooses(browser, opened):
    phone = browser.new_context(has_touch=True, viewport={"width": 390, "height": 800})
    tab = phone.new_page()
    tab.goto(opened("story").url.split("#")[0])
    tab.locator(".node[data-id='2:3'] .hit").tap()
    assert tab.locator(".isolated").count() == 1
    assert "after layer 1" in tab.locator(".ledger").inner_text()
    phone.close()


def test_the_paper_has_all_of_it_in_light(opened):
    tab = opened("deep", "theme=dark&fold=0")
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 688, "height": 1000})
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator(".captum-page").get_attribute("data-theme") == "light"
    box = tab.locator(".circuit-plot").bounding_box()
    assert box["height"] <= 1000
    assert box["x"] + box["width"] <= 690
    assert tab.locator(".circuit .controls").is_hidden()
    assert tab.locator(".decided").is_visible()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.emulate_media(media="screen")
    assert tab.locator(".captum-page").get_attribute("data-theme") == "dark"


def test_hostile_texts_stay_texts(opened):
    tab = opened("hostile", "edges=6&heads=1")
    for node in tab.locator(".node").all()[:8]:
        node.focus()
    assert tab.title() == "Anna's ball"
    assert tab.locator("img, iframe, [onload], [onerror]").count() == 0
    assert tab.locator("script").count() == 2
    assert pages.HOSTILE[0][:13] in tab.locator(".decided, .name.answer").all_text_contents()[1]
    assert "⟨202E⟩" in tab.locator(".circuit .facts").inner_text()


def test_every_number_of_edges_draws_without_a_bad_path(opened):
    tab = opened("deep")
    edges = flow_graphs.deep()["edges"]
    for k in range(1, len(edges) + 1):
        for fold in (0, 1):
            tab.evaluate(f"location.hash = 'edges={k}&fold={fold}'")
            tab.evaluate("() => new Promise(requestAnimationFrame)")
            paths = tab.locator(".circuit-picture path").evaluate_all(
                "all => all.map(n => n.getAttribute('d'))"
            )
            assert not any(re.search("NaN|undefined|Infinity", d) for d in paths)


def test_a_circuit_of_an_output_in_the_middle_is_of_that_output(opened, browser, tmp_path):
    example = pages.story()
    graph = flow_graphs.flow_graph()
    at = example.outputs[1].position
    texts = [token.text for token in example.tokens[: at + 1]]
    scale = {t: at - (15 - t) for t in range(16)}
    moved = graph | {
        "tokens": texts,
        "at": at,
        "answer": example.outputs[1].answers[0].text,
        "relevance": [0.0] * len(texts),
        "nodes": [[s, scale[t], *rest] for s, t, *rest in graph["nodes"]],
        "stays": [[s, scale[t], *rest] for s, t, *rest in graph["stays"]],
        "edges": [[s, scale[j], scale[i], *rest] for s, j, i, *rest in graph["edges"]],
        "paths": [
            path | {"nodes": [[s, scale[t]] for s, t in path["nodes"]]} for path in graph["paths"]
        ],
    }
    path = tmp_path / "middle.html"
    path.write_text(page_html(pages.explanation(replace(example, circuits=(moved,)))), "utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert tab.locator(".circuit-picture").is_hidden()
    tab.locator(".circuit .link").first.click()
    assert address(tab) == "#t=1"
    assert "decides" in sentence(tab)
    tab.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["story", "shifted", "deep"])
def test_axe_finds_nothing_serious_in_a_circuit(opened, name, theme):
    assert pages.serious_violations(opened(name, f"heads=1&theme={theme}")) == []
