"""Whole answers through the front door: spans, hops, and thoughts told apart from answers."""

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from models import WORDS, tiny

from captum_ssm import (
    Explanation,
    InputError,
    MambaAttribution,
    MambaLRP,
    RawAttention,
    explain,
    trace,
    trace_rows,
)
from captum_ssm.explanation import Token
from captum_ssm.explanation.make.answers.whole import THOUGHTS, AskedAnswer

TEXT, TARGET = "w3 w4 w5 w6", "w7 w8 w9 w10 w11"


def explained(**options):
    given = {"target": TARGET, "alternatives": 0} | options
    return explain(tiny(), WORDS, TEXT, show_progress=False, **given)


def tokens(*texts: str) -> tuple[Token, ...]:
    return tuple(Token(text, k, k, k + 1) for k, text in enumerate(texts))


def test_a_span_is_explained_in_one_row_in_place_of_its_tokens():
    found = explained(span="w8 w9")
    (output,) = found.examples[0].outputs
    assert output.role == "part"
    assert output.part == (5, 7)
    each = explained()
    rows = [each.relevance(output=k) for k in (1, 2)]
    np.testing.assert_allclose(found.relevance(), sum(rows), rtol=1e-4, atol=1e-5)
    (answer,) = output.answers
    outputs = each.examples[0].outputs[1:3]
    chosen = [one.answers[one.chosen] for one in outputs]
    assert answer.text == "w8 w9"
    assert answer.logit == pytest.approx(sum(one.logit for one in chosen), rel=1e-5)
    likely = chosen[0].probability * chosen[1].probability
    assert answer.probability == pytest.approx(likely, rel=1e-5)


def test_hops_come_after_the_single_tokens(tmp_path):
    found = explained(hops=2, methods=("mamba-lrp", "raw-attention", "saliency"))
    *each, output = found.examples[0].outputs
    assert [one.position for one in each] == [3, 4, 5, 6, 7]
    assert output.part == (4, 9)
    ids = torch.tensor([WORDS.encode(f"{TEXT} {TARGET}")])
    traced = trace(MambaLRP(tiny()), ids[:, :4], ids[0, 4:], hops=2)
    for hop in range(3):
        row = found.relevance(output=-1, hop=hop)
        np.testing.assert_allclose(row[:8], traced.relevance[hop], rtol=1e-4, atol=1e-5)
    found.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    assert again.examples[0].outputs == found.examples[0].outputs
    assert again.relevance(output=-1, hop=2).tolist() == found.relevance(output=-1, hop=2).tolist()


def test_hops_by_swaps_are_those_of_a_trace_and_are_kept(tmp_path):
    methods = ("mamba-lrp", "raw-attention")
    found = explained(span="w9", hops=2, through="swaps", methods=methods)
    (output,) = found.examples[0].outputs
    assert output.through == found.settings["through"] == "swaps"
    ids = torch.tensor([WORDS.encode(f"{TEXT} {TARGET}")])
    for method, kind in zip(methods, (MambaLRP, RawAttention), strict=True):
        traced = trace(kind(tiny()), ids[:, :4], ids[0, 4:], span=(2, 2), hops=2, through="swaps")
        for hop in range(3):
            row = found.relevance(method, output=0, hop=hop)
            np.testing.assert_allclose(row[:8], traced.relevance[hop], rtol=1e-4, atol=1e-5)
    found.save(tmp_path / "why.json")
    assert Explanation.load(tmp_path / "why.json").examples[0].outputs == (output,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(through="swaps"), "hops=1 or more"),
        (dict(through="swaps", span="w9"), "hops=1 or more"),
        (dict(through="gates", hops=1), "through is 'gates'"),
    ],
)
def test_through_says_how_hops_are_found(options, message):
    with pytest.raises(InputError, match=message):
        explained(**options)


@pytest.mark.parametrize("method", ["mamba-attribution", "saliency"])
def test_rows_of_single_tokens_are_computed_once(method, monkeypatch):
    # They are also what the hops of a method are made of whose rows do not add up.
    kind = MambaAttribution if method == "mamba-attribution" else Saliency
    attribute, calls = kind.attribute, []

    def counted(self, *args, **kwargs):
        calls.append(1)
        return attribute(self, *args, **kwargs)

    monkeypatch.setattr(kind, "attribute", counted)
    each = explained(methods=method)
    alone = len(calls)
    found = explained(methods=method, hops=2)
    assert len(calls) == 2 * alone
    rows = torch.from_numpy(np.stack([each.relevance(output=k)[:8] for k in range(5)]))
    traced = trace_rows(rows, 4, hops=2)
    for hop in range(3):
        row = found.relevance(output=-1, hop=hop)
        np.testing.assert_allclose(row[:8], traced.relevance[hop], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("marks", "thoughts", "part"),
    [
        (None, (2, 5), (5, 7)),
        (("a", "b"), (3, 5), (5, 7)),
        (("", "a"), (2, 4), (4, 7)),
        (("x", "y"), None, (2, 7)),
    ],
)
def test_thoughts_are_told_from_the_answer(marks, thoughts, part):
    text = tokens("user", " hi", "<think>", " a", " b</think>", " yes", " sir")
    asked = AskedAnswer.of(None, 1, marks)
    assert asked.thoughts(text, 2) == thoughts
    assert asked.part(text, 2, thoughts) == part


def test_thoughts_that_the_template_opened_begin_with_the_continuation():
    text = tokens("user", "<think>", " hmm", "</think>", " yes", "<end>")
    ended = (*text[:-1], Token("<end>", 5, 5, 5))
    asked = AskedAnswer.of(None, 1, THOUGHTS)
    assert asked.thoughts(ended, 2) == (2, 4)
    assert asked.part(ended, 2, (2, 4)) == (4, 5)  # the end-of-sequence token says nothing
    closed = tokens("<think>", "</think>", " a", "</think>")
    assert asked.thoughts(closed, 2) is None


def test_the_reasoning_of_an_example_is_kept():
    found = explained(hops=1, reasoning=("", "w8"))
    assert found.examples[0].reasoning == (4, 6)
    assert found.examples[0].outputs[-1].part == (6, 9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(span="w3"), InputError, "the continuation does not hold"),
        (dict(span=(0, 5)), InputError, "which has 5"),
        (dict(span=3), InputError, "span is 3"),
        (dict(hops=-1), InputError, "hops is -1"),
        (dict(hops=1, reasoning="w8"), TypeError, "expected two texts"),
        (dict(hops=1, target="w7", position=0), InputError, "position is 0"),
        (dict(hops=1, validate=True), InputError, "validate removes"),
    ],
)
def test_what_does_not_fit_is_named(options, error, message):
    with pytest.raises(error, match=message):
        explained(**options)
