"""The page of a state report, its data and how it looks in a real browser."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from captum_ssm.explanation.page import states_page
from captum_ssm.explanation.page.states import MOST_TOKENS, states_data

LAYERS = ("backbone.layers.0.mixer", "backbone.layers.1.mixer")


@pytest.fixture(scope="module")
def report():
    lives, positions, sinks = [], [], []
    for k, layer in enumerate(LAYERS):
        for head in range(4):
            life = math.inf if k and head > 1 else 3.0 * (k + 1) * (head + 1)
            ends = {"low": 1.0, "high": 9.0, "q10": 1.0, "q90": 9.0, "outlives": 0.25 * k}
            lives.append({"layer": layer, "head": head, "half_life": life, **ends})
            for start, mean in ((0, 0.1), (1, 0.2), (3, 0.1 * head)):
                place = {"layer": layer, "measure": "used", "start": start, "stop": 2 * start + 1}
                positions.append({**place, "head": head, "inputs": 5, "mean": mean})
        for token in range(30):
            low = math.nan if token == 7 else 0.5 + token
            row = {"layer": layer, "head": token % 3, "token": token, "inputs": 3, "low": low}
            sinks.append({**row, "text": f" <b>{token}", "share": 1.0 + token, "high": 2.0 + token})
    return SimpleNamespace(half_lives=lives, positions=positions, sinks=sinks, inputs=5)


def test_data_is_what_the_tables_say(report):
    data = states_data(report, "States")
    first, second = data["layers"]
    assert [one["life"] for one in first["lives"]] == [3, 6, 9, 12]
    assert [one["life"] for one in second["lives"]] == [6, 12, None, None]
    assert second["outlives"] == 0.25
    assert first["lines"]["used"] == [[0, 0.1], [1, 0.2], [3, 0.15]]
    assert len(first["sinks"]) == MOST_TOKENS
    assert [one["share"] for one in first["sinks"][:2]] == [30, 29]
    json.dumps(data, allow_nan=False)


def test_a_token_without_an_interval_comes_last(report):
    few = SimpleNamespace(**{**vars(report), "sinks": report.sinks[:9]})
    (tokens,) = [one["sinks"] for one in states_data(few, "States")["layers"] if one["sinks"]]
    assert tokens[-1]["text"] == " <b>7"
    assert tokens[-1]["low"] is None


def test_the_page_in_a_browser(report, browser, tmp_path):
    errors = []
    path = tmp_path / "states.html"
    assert states_page(report, path, title="<i>mine") is None
    assert states_page(report, title="<i>mine") == path.read_text("utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(path.as_uri())
    said = tab.locator(".question").inner_text()
    assert re.search(r"layer 0 half of it is gone after 6\.00 tokens; in layer 1 .* 12\.0", said)
    assert tab.locator("h1").inner_text() == "<i>mine"
    assert tab.locator(".strip-of-lives").first.locator("circle").count() == 4
    assert tab.locator(".shares li").first.inner_text().startswith("<b>29")
    tab.get_by_role("radio", name="layer 1").click()
    assert tab.locator("tr.chosen").inner_text().startswith(LAYERS[1])
    tab.keyboard.press("d")
    assert tab.locator(".captum-page").get_attribute("data-theme") == "dark"
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    tab.close()
    assert errors == []
