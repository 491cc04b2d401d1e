"""What a page holds: data small enough to mail, the same bytes each time, nothing that can run."""

import base64
import builtins
import html
import json
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import pytest

import captum_ssm.explanation.page as page_package
from captum_ssm.explanation import Span
from captum_ssm.explanation.page import notebook_bundle, page_html, widget
from captum_ssm.explanation.page.data import MOST_CELLS, packed, page_data, pooled
from captum_ssm.explanation.page.html import MODULES, OF_REPORTS, OF_STATES, script, stylesheet
from captum_ssm.explanation.page.whole import opening_of
from captum_ssm.utils.colors import AGAINST, FAINT, FOR, INK, LINE, PAPER, SOFT, SUNKEN


def unpacked(rows: dict) -> np.ndarray:
    steps = np.frombuffer(zlib.decompress(base64.b64decode(rows["data"])), "<i2").astype(float)
    steps = steps.reshape(rows["shape"])
    return steps * np.abs(steps) * np.array(rows["scale"])[:, None]


def test_rows_keep_their_digits_next_to_a_strong_one():
    rows = np.array([[1000.0, 1.0, -0.01, 0.0], [0.0, 0.0, 0.0, 0.0], [-1e-9, 1e-12, 0, 0]])
    found = unpacked(packed(rows))
    np.testing.assert_allclose(found, rows, rtol=0.01, atol=0)
    np.testing.assert_allclose(found[:, :2], rows[:, :2], rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(3, 512, 512), (2, 700, 1030), (1, 2000, 2000)])
def test_pooled_cells_keep_their_strongest_entry(shape):
    values = np.random.default_rng(0).normal(size=shape)
    found = pooled(values)
    assert max(found.shape[-2:]) <= MOST_CELLS
    size = -(-max(shape[1:]) // MOST_CELLS)
    cell = values[-1, size : 2 * size, 2 * size : 3 * size].ravel()
    assert found[-1, 1, 2] == cell[np.abs(cell).argmax()]
    assert np.abs(found).max() == np.abs(values).max()


def test_values_that_are_not_finite_are_refused():
    example = pages.story()
    rows = example.relevance["mamba-lrp"].copy()
    rows[0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        page_html(pages.explanation(replace(example, relevance={"mamba-lrp": rows})))


def test_a_page_is_the_same_each_time():
    assert page_html(pages.explanation()) == page_html(pages.explanation())
    assert page_html(pages.explanation()).isascii() is False  # the script has signs such as “
    data = re.search(r'id="captum-data">(.*?)</script>', page_html(pages.hostile()))[1]
    assert data.isascii()
    assert not re.search("[<>&]", data)
    assert json.loads(data) == json.loads(json.dumps(page_data(pages.hostile())))


def test_a_page_loads_nothing_and_runs_one_script():
    page = page_html(pages.hostile())
    assert "default-src 'none'" in page
    assert "unsafe" not in re.search("Content-Security-Policy.*?>", page)[0]
    # The namespace of drawings is a name, which no browser loads.
    addresses = re.findall(r"https?://[^\"]+", script() + stylesheet())
    assert addresses == ["http://www.w3.org/2000/svg"]
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert len(script(pictures=False)) + len(stylesheet(pictures=False)) < 303_000
    assert len(script()) + len(stylesheet()) < 308_000
    assert len(script(True, False, False)) + len(stylesheet(True, False, False)) < 262_000
    assert len(script(False, False, False)) + len(stylesheet(False, False, False)) < 207_000


def test_every_module_is_in_the_page_once():
    static = Path(page_package.__file__).parent / "static"
    modules = (*MODULES, *OF_REPORTS)
    assert {path.stem for path in static.glob("*.js")} == {*modules, *OF_STATES}
    joined = script(report=True)
    assert not re.search(r"^(import|export) ", joined, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|let|class|function) (\w+)", joined, re.MULTILINE)
    assert len(names) == len(set(names))
    for name in modules:
        imports = re.findall(r'from "\./(\w+)\.js"', (static / f"{name}.js").read_text("utf-8"))
        assert all(modules.index(other) < modules.index(name) for other in imports)


def test_colors_are_those_of_the_figures():
    light = stylesheet().split('[data-theme="dark"]')[0]
    found = dict(re.findall(r"--([\w-]+): (#[^;]*);", light))
    assert found["for"] == " ".join(FOR)
    assert found["against"] == " ".join(AGAINST)
    plain = {"paper": PAPER, "ink": INK, "soft": SOFT, "faint": FAINT, "line": LINE}
    assert {name: found[name] for name in plain} == plain
    assert found["sunken"] == SUNKEN


def test_a_page_that_is_too_large_says_what_to_leave_out():
    with pytest.raises(ValueError, match=r"limit is 0\.1 MiB; maps of layers of 1 examples"):
        page_html(pages.explanation(), size_limit=100_000)
    with pytest.raises(ValueError, match="0 examples"):
        page_html(replace(pages.explanation(), examples=()))


def test_without_anywidget_a_notebook_shows_the_page_in_a_frame(monkeypatch):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "anywidget":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"captum-ssm\[notebook\]"):
        widget(pages.hostile())
    shown, _ = notebook_bundle(pages.hostile())
    assert sorted(shown) == ["text/html", "text/plain"]
    assert shown["text/html"].startswith("<iframe")
    assert shown["text/html"].count("<") == 4
    assert 'sandbox="allow-scripts"' in shown["text/html"]


def test_with_anywidget_a_notebook_shows_the_widget_and_a_saved_one_the_page():
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    explanation = pages.explanation()
    shown, _ = notebook_bundle(explanation)
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert page_html(explanation) in html.unescape(shown["text/html"])
    assert "\n" not in shown["text/html"]
    assert f'title="{html.escape(explanation.title)}"' in shown["text/html"]
    assert shown["text/plain"] == explanation.title


def test_the_page_package_needs_no_torch():
    folder = Path(page_package.__file__).parent
    code = (
        "import sys, types\n"
        "root = types.ModuleType('captum_ssm')\n"
        f"root.__path__ = [{str(folder.parents[1])!r}]\n"
        "sys.modules['captum_ssm'] = root\n"
        "import captum_ssm.explanation.page\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_an_answer_opens_on_the_token_that_rests_on_the_prompt():
    """Neither on the first token, nor on one that reads the tokens right before it, nor a sign."""
    one = pages.story(continuation=" the color is red.")
    assert [output.answers[output.chosen].text.strip() for output in one.outputs] == [
        *["the", "color", "is", "red", "."]
    ]
    rows = np.zeros((len(one.relevance["mamba-lrp"]), len(one.tokens)), dtype=np.float32)
    far, near = 3, one.prompt - 2
    sizes = {0: (near, 5.0), 1: (far, 1.0), 2: (near, 9.0), 3: (far, 2.0), 4: (far, 4.0)}
    for k, (source, size) in sizes.items():
        output = one.outputs[k]
        row = output.answers[output.chosen].row
        rows[row, [source, output.position]] = size, 1.0
    one = replace(one, relevance={"mamba-lrp": rows, "raw-attention": rows})
    assert opening_of(one, "mamba-lrp") == 3
    # What the template says between the turns answers nothing.
    turns = (Span("user 1", 0, far), Span("template", far, far + 1), Span("user 1", far + 1, near))
    assert opening_of(replace(one, units={"turn": turns}), "mamba-lrp") == 0
    assert opening_of(replace(one, outputs=one.outputs[:1]), "mamba-lrp") is None
    # Only of what the model wrote: where others chose the answer, they begin where it begins.
    found = pages.explanation(one)
    assert page_data(found)["examples"][0]["opening"] is None
    written = replace(found, settings={"max_new_tokens": 5})
    assert page_data(written)["examples"][0]["opening"] == 3
