"""Rows of every kind of mistake: each recorded by its number, and all others explained."""

import math

import numpy as np
import pytest
import torch

from captum_ssm import examples, explain_dataset

GOOD = {"text": "Anna has a red ball.", "target": "Tom"}
BAD = {
    "empty": ({"text": ""}, "text is '', which is empty"),
    "white space": ({"text": " \n"}, "which is empty"),
    "missing": ({"text": None}, "text is None (a NoneType)"),
    "not a number": ({"text": math.nan}, "text is nan (a float)"),
    "a number": ({"text": 3.5}, "text is 3.5 (a float)"),
    "a list": ({"text": ["Anna", "has"]}, "(a list); expected a text"),
    "bytes": ({"text": b"Anna has"}, "(a bytes); expected a text"),
    "half a character": ({"text": "Anna \ud800 has"}, "TypeError: "),
    "too long": ({"text": "Anna has a red ball. " * 600}, "MemoryLimitError: "),
    "no column": ({"other": 1}, "the row has no 'text'"),
    "no row": (None, "the row is a NoneType"),
    "another row": ("Anna has", "the row is a str"),
    "an unknown target": (GOOD | {"target": "zebra"}, "target is 'zebra', which the tokenizer"),
    "an id that is not there": (GOOD | {"target": 10**6}, "the model's ids are 0 .. 70"),
    "a target of a wrong type": (GOOD | {"target": 2.5}, "target is 2.5; expected a text"),
    "an empty target": (GOOD | {"target": ""}, "target is '', which holds no token"),
    "an unknown contrast": (GOOD | {"against": "zebra"}, "against is 'zebra'"),
    "the target itself": (GOOD | {"against": "Tom"}, "against is 'Tom', which is the target"),
    "a span that is not there": (GOOD | {"span": "green"}, "which the continuation does not hold"),
    "tokens that are not there": (GOOD | {"span": (5, 9)}, "span is (5, 9); expected the first"),
    "an unknown unit": (GOOD | {"units": "chapters"}, "units is 'chapters'; expected one of"),
    "a part outside": (GOOD | {"units": {"x": (0, 99)}}, "units['x'] is (0, 99)"),
}


def test_bad_texts_are_recorded_and_the_others_explained(stories, tmp_path):
    good = [GOOD, {"text": "Tom has a blue kite. Tom's kite is"}, GOOD | {"against": "Ben"}]
    rows, expected = [good[0]], {}
    for k, (bad, said) in enumerate(BAD.values()):
        expected[len(rows)] = said
        rows += [bad, good[k % 3]]
    how = {"memory_limit": 2**20, "rows_per_shard": 7}
    found = explain_dataset(*stories, rows, tmp_path / "all", **how)
    told = found.errors
    assert list(told) == list(expected)
    assert [told[i] for i, said in expected.items() if said not in told[i]] == []
    alone = explain_dataset(*stories, good, tmp_path / "good", **how)
    for i, row in enumerate(rows):
        if i not in expected:
            same = alone[good.index(row)].examples[0]
            one = found[i].examples[0]
            assert one.text == same.text
            np.testing.assert_allclose(
                one.relevance["mamba-lrp"], same.relevance["mamba-lrp"], rtol=1e-4, atol=1e-6
            )


def test_words_that_the_model_does_not_know_are_warned_of_and_explained(stories, tmp_path):
    with pytest.warns(UserWarning, match="does not know 'zebra'"):
        found = explain_dataset(*stories, [GOOD, {"text": "Anna has a zebra."}], tmp_path)
    assert not found.errors
    assert "zebra" in [token.text.strip() for token in found[1].examples[0].tokens]


def test_bad_series_and_pictures_are_recorded(tmp_path):
    model, _ = examples.load("series-forecaster")
    series = examples.sample("series-forecaster")[0].float().numpy()
    holed, endless = series.copy(), series.copy()
    holed[3, 1], endless[0, 0] = math.nan, math.inf
    bad = [holed, endless, series[:, :-1], np.zeros((0, series.shape[1])), "a text", None]
    found = explain_dataset(model, None, [series, *bad, series], tmp_path / "series")
    assert list(found.errors) == [*range(1, 1 + len(bad))]
    assert "holds nan at (3, 1)" in found.errors[1]
    assert "holds inf at (0, 0)" in found.errors[2]
    model, _ = examples.load("digits-vim")
    picture = torch.from_numpy(np.array(examples.sample("digits-vim"))).permute(2, 0, 1) / 255
    holed = picture.clone()
    holed[0, 2, 2] = math.nan
    bad = [holed, picture[0, 0], tmp_path / "nothing.png"]
    found = explain_dataset(model, None, [picture, *bad, picture], tmp_path / "pictures")
    assert list(found.errors) == [*range(1, 1 + len(bad))]
    assert "holds nan at (0, 2, 2)" in found.errors[1]
