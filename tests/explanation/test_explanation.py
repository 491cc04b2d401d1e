"""Explanations as data: saved, opened without PyTorch, joined, subtracted, and as tables."""

import base64
import json
import os
import subprocess
import sys
import zlib
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pages
import pytest
import torch
from folders import ROOT
from models import tiny
from vision_models import vim

from captum_ssm import Explanation, LaTIM, explain

METHODS = {"latim": {"activation": "gate"}, "rollout": {}}


@pytest.fixture(scope="module")
def found(model, words) -> Explanation:
    """Two texts by two methods, with maps, the lens, a contrast and named parts."""
    return explain(
        model,
        words,
        ["w3 w4 w5 w6", "w7 w8 w3"],
        target="w9 w10",
        against="w9 w11",
        methods=METHODS,
        units={"first": (0, 5)},
        maps=["hidden-attention", "latim"],
        lens=True,
    )


@pytest.fixture(scope="module")
def image() -> Explanation:
    return explain(vim(), torch.rand(3, 16, 16), against=2, target=1)


def same(one, other) -> bool:
    """Whether all that two explanations hold is equal, bit by bit."""
    assert type(one) is type(other), (one, other)
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.fixture(scope="module")
def answer() -> Explanation:
    return pages.explanation(pages.answer_at_once())


@pytest.mark.parametrize("name", ["found", "image", "answer"])
def test_what_is_saved_is_what_is_loaded(name, request, tmp_path):
    explanation = request.getfixturevalue(name)
    explanation.save(tmp_path / "a.json")
    again = Explanation.load(tmp_path / "a.json")
    assert same(again, explanation)
    again.save(str(tmp_path / "b.json"))
    for ending in (".json", ".safetensors"):
        files = [tmp_path / f"{name}{ending}" for name in "ab"]
        assert [file.exists() for file in files] == [name == "found" or ending == ".json"] * 2
        if files[0].exists():
            assert files[0].read_bytes() == files[1].read_bytes()


def test_numbers_are_kept_exactly(found, tmp_path):
    values = np.array([0.1, 1e-45, -0.0, 3.4e38, 1 / 3, 0.0], dtype=np.float32)
    example = found.examples[0]
    odd = replace(example, relevance=dict.fromkeys(METHODS, np.stack([values] * 9)), deltas={})
    replace(found, examples=(odd,)).save(tmp_path / "a.json")
    again = Explanation.load(tmp_path / "a.json").examples[0].relevance["latim"][0]
    assert again.tobytes() == values.tobytes()
    bad = replace(odd, relevance=dict.fromkeys(METHODS, np.full((9, 5), np.nan)))
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        replace(found, examples=(bad,)).save(tmp_path / "b.json")


WITHOUT_TORCH = """
import sys
for name in ("torch", "captum", "matplotlib", "transformers", "nnsight", "scipy"):
    sys.modules[name] = None
from captum_ssm import Explanation
a = Explanation.load("a.json")
a.save("c.json")
assert (a.difference(a).relevance() == 0).all()
(a + a[:1]).mean().top(), a.to_pandas("word")
a.relevance("rollout", 1, against="w11", units="span")
print(a.relevance().tolist())
"""


def test_it_opens_without_torch(found, tmp_path):
    found.save(tmp_path / "a.json")
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == found.relevance().tolist()
    for ending in (".json", ".safetensors"):
        read = [(tmp_path / f"{name}{ending}").read_bytes() for name in "ac"]
        assert read[0] == read[1]


def test_a_file_that_cannot_be_opened_says_why(found, tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"expected a name that ends in \.json"):
        found.save(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        Explanation.load(path)
    found.save(path)
    held = json.loads(path.read_text())
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has maps, and there is no .*a\.safetensors"):
        Explanation.load(path)
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged"):
        Explanation.load(path)
    for change, message in (
        ({"format": "captum_ssm.explanation/9"}, "this version of captum_ssm does not read"),
        ({"format": "other/1"}, "has the format 'other/1'; expected a file that"),
        ({"methods": [{}], "examples": []}, "is damaged"),
    ):
        path.write_text(json.dumps(held | change))
        with pytest.raises(ValueError, match=message):
            Explanation.load(path)
    path.write_text("no json")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        Explanation.load(path)


def _change(held, path, value):
    *parents, last = path
    for key in parents:
        held = held[key]
    held[last] = value


BOMB = base64.b64encode(zlib.compress(bytes(10**7), 9)).decode()


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("found", ("title",), None, "title is None; expected a value of type str"),
        ("found", ("examples", 0, "prompt"), 99, r"prompt is 99; expected 0 \.\. "),
        ("found", ("examples", 0, "tokens", 0, "text"), 5, r"tokens\[0\]\.text is 5; expected"),
        ("found", ("examples", 0, "tokens"), [], "relevance is .* rows of 0"),
        ("found", ("examples", 0, "relevance", "latim", 0, 0), 1e39, "expected finite numbers"),
        ("found", ("examples", 0, "relevance", "latim"), [[1], [1, 2]], "rows of one length"),
        ("found", ("examples", 0, "outputs", 0, "chosen"), 99, "expected answers 0"),
        ("found", ("examples", 0, "outputs", 0, "position"), -5, "position is -5"),
        ("found", ("examples", 0, "units", "word"), [], "expected spans of all tokens"),
        ("found", ("examples", 0, "maps", 0, "layers"), ["none"], "expected layers of the file"),
        ("found", ("examples", 0, "grid"), [2, 2], "grid is .*an image's patches"),
        ("found", ("model",), ["\u202e\x1b[2J"], r"model is \['\\u202e\\x1b\[2J'\]"),
        ("answer", ("examples", 0, "reasoning"), [3, 9], "reasoning is .* <= first < end"),
        ("answer", ("examples", 0, "outputs", 0, "part"), [0, 5], r"part is \(0, 5\); expected"),
        ("answer", ("examples", 0, "outputs", 0, "part"), None, "part is None; expected"),
        ("answer", ("examples", 0, "outputs", 1, "part"), [9, 12], "expected None or a part"),
        ("answer", ("examples", 0, "outputs", 0, "position"), 4, "position is 4; expected None"),
        ("answer", ("examples", 0, "outputs", 0, "hops"), [999], r"expected rows 0 \.\. "),
        ("image", ("examples", 0, "image", "shape"), [1, 1, 3], "rows of 1 x 1"),
        ("image", ("examples", 0, "image", "zlib"), BOMB, "expected 768 bytes"),
    ],
)
def test_what_a_file_declares_is_checked(name, place, value, message, request, tmp_path):
    path = tmp_path / "a.json"
    request.getfixturevalue(name).save(path)
    held = json.loads(path.read_text())
    _change(held, place, value)
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=message):
        Explanation.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10**5, "nested too deep"),
        ('{"a": NaN}', "a number is NaN"),
        ('{"a": 1e999}', "1e999"),
    ],
)
def test_text_that_is_no_explanation(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Explanation.load(tmp_path / "a.json")


def test_what_is_shown_of_an_explanation_is_printable(found):
    assert repr(replace(found, model="a\x1b[2J\u202eb")).isprintable()


def test_one_row(found):
    example = found.examples[0]
    output = example.outputs[1]
    rows = example.relevance["latim"]
    answer = output.answers[output.chosen]
    assert (found.relevance(output=1) == rows[answer.row]).all()
    assert (found.relevance(output=-1, answer="w10") == rows[answer.row]).all()
    (contrast,) = output.contrasts
    assert (found.relevance(output=1, against="w11") == rows[contrast.row]).all()
    other = next(a for a in output.answers if a.row is not None and a.text not in ("w10", "w11"))
    difference = rows[answer.row] - rows[other.row]
    assert (found.relevance(output=1, against=other.id) == difference).all()
    with pytest.raises(ValueError, match="method is 'magic'; expected latim or rollout"):
        found.relevance("magic")
    with pytest.raises(ValueError, match=r"output is 2; expected 0 \.\. 1"):
        found.relevance(output=2)
    with pytest.raises(ValueError, match=r"example is 5; expected 0 \.\. 1"):
        found.relevance(example=5)
    with pytest.raises(ValueError, match="answer is 'w99'; expected "):
        found.relevance(answer="w99")
    with pytest.raises(ValueError, match="against is 'w9', the answer itself"):
        found.relevance(against="w9")
    unexplained = next(a for a in output.answers if a.row is None)
    with pytest.raises(ValueError, match=f"the answer '{unexplained.text}' was not explained"):
        found.relevance(output=1, answer=unexplained.text)
    with pytest.raises(ValueError, match="units is 'letter'; expected 'token' or 'word' or"):
        found.relevance(units="letter")


def test_examples_by_number(found):
    assert len(found) == 2
    assert found[1].examples == (found.examples[1],)
    assert found[-1:].examples == (found.examples[1],)
    assert [len(one) for one in found] == [1, 1]
    assert (found[1].relevance() == found.relevance(example=1)).all()
    with pytest.raises(IndexError, match=r"expected an example, 0 \.\. "):
        found[2]


def test_joined(found, model, words):
    more = explain(model, words, "w3 w4", target="w5", methods=METHODS)
    both = found + more
    assert both.examples == found.examples + more.examples
    assert sum([found, more]).examples == both.examples
    assert both.settings["device"] == "cpu"
    assert "target" not in both.settings
    other = explain(model, words, "w3 w4", methods={"latim": {}})
    with pytest.raises(ValueError, match="expected the same methods with the same options"):
        found + other
    with pytest.raises(TypeError):
        found + 3


def test_the_difference_of_two(found, model, words):
    options = {"target": "w9 w10", "against": "w9 w11", "alternatives": 0, "lens": True}
    options |= {"methods": METHODS, "maps": ["hidden-attention", "latim"]}
    other = explain(tiny(seed=1), words, ["w3 w4 w5 w6", "w7 w8 w3"], **options)
    less = found.difference(other)
    for method in METHODS:
        for which in ({"output": 0}, {"output": 1}, {"output": 1, "against": "w11"}):
            rows = [one.relevance(method, example=1, **which) for one in (less, found, other)]
            assert (rows[0] == rows[1] - rows[2]).all()
    maps = [
        one.examples[0].maps[0].layers["backbone.layers.0.mixer"] for one in (less, found, other)
    ]
    assert (maps[0] == maps[1] - maps[2]).all()
    assert (found.difference(found).to_pandas().value == 0).all()
    for wrong, message in (
        (found[:1], "are of 2 and 1 examples"),
        (explain(model, words, ["w3 w4", "w5"], methods=METHODS), "is not the same in both"),
        (explain(model, words, "w3 w4"), "were made by latim, rollout and by mamba-lrp"),
    ):
        with pytest.raises(ValueError, match=message):
            found.difference(wrong)
    places = [explain(model, words, "w3 w4 w5", position=i, target=6) for i in (1, 2)]
    with pytest.raises(ValueError, match="only one of the explanations explains 'w6' at token 1"):
        places[0].difference(places[1])


def test_the_mean_is_a_table_in_a_notebook(found):
    summary = found.mean()
    shown = summary._repr_html_()
    assert shown.count("<table>") == len(found.methods)
    for entry in summary.top(count=3):
        assert f"{entry.share:.1%}" in shown
    assert "<script" not in shown


def test_the_mean(found):
    summary = found.mean()
    rows = []
    for example in found.examples:
        for output in example.outputs:
            row = example.relevance["latim"][output.answers[output.chosen].row]
            row = row[: output.position + 1].astype(float)
            share = abs(row) / abs(row).sum()
            texts = [token.text.strip() for token in example.tokens]
            rows += [(texts[j], j, output.position - j, row[j], share[j]) for j in range(len(row))]
    assert len(rows) == 4 + 5 + 3 + 4
    for by, column in (("token", 0), ("position", 1), ("distance", 2)):
        entries = [e for e in getattr(summary, f"by_{by}") if e.method == "latim"]
        assert {entry.key for entry in entries} == {row[column] for row in rows}
        for entry in entries:
            mine = [row[3:] for row in rows if row[column] == entry.key]
            assert entry.count == len(mine)
            assert (entry.relevance, entry.share) == pytest.approx(np.mean(mine, 0), rel=1e-5)
    top = summary.top("rollout", len(summary.by_token))
    assert top[0].count > 1
    assert list(top) == sorted(top, key=lambda entry: (entry.count == 1, -entry.share))
    table = summary.to_pandas()
    assert list(table.columns) == ["by", "method", "key", "count", "relevance", "share"]
    assert len(table) == sum(map(len, vars(summary).values()))


def test_pandas(found):
    table = found.to_pandas()
    example = found.examples[0]
    one = table[(table.example == example.name) & (table.method == "latim")]
    one = one[(one.output == 4) & (one.answer == "w10") & (one.against == "w11")]
    assert one.value.tolist() == found.relevance("latim", 1, against="w11").tolist()
    assert "".join(one.text) == example.text
    assert one.position.tolist() == list(range(len(example.tokens)))
    assert one.share.sum() == pytest.approx(1)
    parts = found.to_pandas("span")
    assert parts.text.iloc[0] == "w3 w4"
    totals = [
        t.groupby(["example", "method", "output", "answer", "against"]).value.sum()
        for t in (table, parts)
    ]
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-4, atol=1e-6)


def test_hops_are_rows_of_their_own(answer):
    example = answer.examples[0]
    rows, output = example.relevance["mamba-lrp"], example.outputs[0]
    assert example.text[-len(output.answers[0].text) :] == output.answers[0].text
    for hop, row in enumerate((output.answers[0].row, *output.hops)):
        assert (answer.relevance(hop=hop) == rows[row]).all()
    table = answer.to_pandas()
    assert table.hop.unique().tolist() == [0, 1, 2]
    one = table[(table.method == "mamba-lrp") & (table.hop == 2)]
    assert one.value.tolist() == rows[output.hops[1]].tolist()
    targets = [record.attr_class for record in answer.to_captum()]
    assert sum(text.endswith(" blue., hop 2") for text in targets) == len(answer.methods)
    assert answer.mean().by_position[-1].key == len(example.tokens) - 2
    zero = answer.difference(answer)
    assert [len(one.hops) for one in zero.examples[0].outputs][:2] == [2, 0]
    assert (zero.to_pandas().value == 0).all()


def test_hops_that_are_not_there(answer):
    for hop in (3, -1):
        with pytest.raises(ValueError, match=rf"hop is {hop}; expected 0 \.\. 2"):
            answer.relevance(hop=hop)
    with pytest.raises(ValueError, match=r"hop is 1; expected 0 \.\. 0"):
        answer.relevance(output=1, hop=1)
    with pytest.raises(ValueError, match="expected hop=0 for them"):
        answer.relevance(hop=1, against=answer.examples[0].outputs[0].answers[0].id)


def test_captum(found, model):
    from captum.attr import visualization

    records = found.to_captum()
    assert len(records) == sum(len(rows) for e in found.examples for rows in e.relevance.values())
    first = records[0]
    assert isinstance(first, visualization.VisualizationDataRecord)
    row = next(a for a in found.examples[0].outputs[0].answers if a.row is not None)
    values = torch.from_numpy(found.relevance("latim", 0, answer=row.id))
    torch.testing.assert_close(first.word_attributions.float() * first.scale, values)
    assert first.true_class == "LaTIM"


def test_images_have_no_table(image):
    for call in (image.to_pandas, image.to_captum, image.mean):
        with pytest.raises(ValueError, match="the example 'image' is an image; its relevance"):
            call()
    assert image.relevance(against=2).shape == (16, 16)
    assert (image.difference(image).relevance() == 0).all()


def test_latims_options_are_those_of_the_rows(found, model):
    read = torch.tensor([[3, 4, 5, 6]])
    own = LaTIM(model).attribute(read, target=9, activation="gate")[0]
    np.testing.assert_allclose(found.relevance()[:4], own.numpy(), rtol=1e-4, atol=1e-6)


def test_where_nothing_can_be_written(tmp_path):
    found = pages.explanation()
    for write, name in ((found.to_html, "why.html"), (found.save, "why.json")):
        there = tmp_path / "not" / "there"
        with pytest.raises(FileNotFoundError, match=r"there is no folder '.*not/there'; create it"):
            write(there / name)
        assert not there.exists()
        (tmp_path / name).mkdir()
        with pytest.raises(IsADirectoryError, match="is a folder; expected the name of a file"):
            write(tmp_path / name)
