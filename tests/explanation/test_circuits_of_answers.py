"""``explain(..., circuit=True)``: the graph of each explained answer, as the method gives it."""

import numpy as np
import pytest
import torch

import captum_ssm
from captum_ssm import explain, interventions
from captum_ssm.attr import RelevanceFlow
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.explanation import Explanation
from captum_ssm.explanation.circuits import check_circuit

TEXT = "Anna has a yellow book . Tom has a brown doll . Anna 's book is"


@pytest.fixture(scope="module")
def stories():
    return captum_ssm.examples.load("stories-qwen3next")


def test_it_is_the_graph_of_the_method(stories, tmp_path):
    model, tokenizer = stories
    explanation = explain(model, tokenizer, TEXT, circuit=True)
    (example,) = explanation.examples
    (circuit,) = example.circuits
    check_circuit(circuit)
    assert (circuit["answer"], circuit["at"]) == ("yellow", 15)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    answer = example.outputs[0].answers[0].id
    graph = RelevanceFlow(model).graph(ids, target=(15, answer)).to_dict()
    for name in ("nodes", "stays", "edges", "relevance", "score"):
        assert circuit[name] == graph[name]
    # The word that decides, and where it is read.
    told = circuit["paths"][0]
    assert told["nodes"] == [[0, 3], [1, 3], [2, 3], [3, 15]]
    nodes = {(s, t): value for s, t, value, *_ in circuit["nodes"]}
    np.testing.assert_allclose(nodes[3, 15], circuit["score"]["value"], rtol=1e-4)
    assert explanation.settings["circuit"] is True
    explanation.save(tmp_path / "why.json")
    assert Explanation.load(tmp_path / "why.json").examples[0].circuits == example.circuits
    assert '"circuits":[{"tokens"' in explanation.to_html()


@pytest.mark.parametrize("against", [None, "brown"])
def test_the_curve_is_of_runs_with_these_edges_alone(against, stories):
    model, tokenizer = stories
    (example,) = explain(model, tokenizer, TEXT, against=against, circuit=True).examples
    (found,) = example.circuits
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    answer, L, W = example.outputs[0].answers[0].id, ids.shape[1], len(found["layers"])

    @torch.no_grad()
    def logits(mask):
        options = {"formulation": found["formulation"], "coefficients": "whole"}
        with interventions.circuit(model, mask, **options):
            return model(ids).logits[0, -1]

    def mask(k):
        kept = torch.eye(L, dtype=torch.bool).repeat(W, 1, 1)
        for layer, source, target, *_ in found["edges"][:k]:
            kept[layer, target, source] = True
        return kept

    whole = model(ids).logits[0, -1].detach()
    others = whole.clone()
    others[answer] = -torch.inf
    weights = others.softmax(-1)
    if against is not None:
        weights = torch.zeros_like(whole)
        weights[tokenizer.convert_tokens_to_ids(against)] = 1.0

    def score(row):
        return float(row[answer] - weights @ row)

    assert found["score"]["value"] == pytest.approx(score(whole), rel=1e-3)
    none, full = score(logits(mask(0))), score(whole)
    for k, share in found["curve"]:
        assert share == pytest.approx((score(logits(mask(k))) - none) / (full - none), abs=2e-3)
    k = found["alone"]["edges"]
    assert found["alone"]["right"] == (int(logits(mask(k)).argmax()) == answer)


def test_it_explains_the_answer_against_the_one_that_is_asked_for(stories):
    model, tokenizer = stories
    explanation = explain(model, tokenizer, TEXT, against="brown", circuit=True)
    (example,) = explanation.examples
    (circuit,) = example.circuits
    answer, foil = (tokenizer.convert_tokens_to_ids(word) for word in ("yellow", "brown"))
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    graph = RelevanceFlow(model).graph(ids, target=(15, answer), against=(15, foil)).to_dict()
    assert graph["score"]["of"] == "difference"
    for name in ("nodes", "edges", "relevance", "score"):
        assert circuit[name] == graph[name]
    assert (circuit["answer"], circuit["against"]) == ("yellow", "brown")
    check_circuit(circuit)
    # The circuit's relevance is that of the contrast which the page shows.
    row = example.relevance["mamba-lrp"][example.outputs[0].contrasts[0].row]
    np.testing.assert_allclose(circuit["relevance"], row[: ids.shape[1]], rtol=1e-3, atol=1e-4)


def test_a_graph_says_what_its_score_is(stories):
    model, tokenizer = stories
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    for against, of in (("others", "contrast"), (3, "difference"), (None, "score")):
        graph = RelevanceFlow(model).graph(ids, target=5, against=against)
        assert graph.of == graph.to_dict()["score"]["of"] == of


def test_each_output_has_its_own(stories):
    model, tokenizer = stories
    explanation = explain(model, tokenizer, TEXT, target="yellow .", circuit=True)
    (example,) = explanation.examples
    ends = [output.position for output in example.outputs]
    assert [circuit["at"] for circuit in example.circuits] == ends == [15, 16]
    assert [len(circuit["tokens"]) for circuit in example.circuits] == [16, 17]
    assert example.circuits[1]["tokens"] == [token.text for token in example.tokens[:17]]


def test_a_path_from_another_token_is_among_those_that_are_told():
    model, tokenizer = captum_ssm.examples.load("reviews-jamba")
    text = captum_ssm.examples.sample("reviews-jamba")
    (circuit,) = explain(model, tokenizer, text, circuit=True).examples[0].circuits
    assert any(path["nodes"][0][1] != circuit["at"] for path in circuit["paths"])
    assert circuit["answer"] in ("negative", "mixed", "positive")


def test_without_the_option_there_is_none(stories):
    model, tokenizer = stories
    assert explain(model, tokenizer, TEXT).examples[0].circuits == ()


def test_a_model_without_a_graph_is_noted(stories, monkeypatch):
    def refuse(*args, **named):
        raise UnsupportedModelError("the residual stream was not found.\nMore.")

    monkeypatch.setattr(RelevanceFlow, "graph", refuse)
    model, tokenizer = stories
    explanation = explain(model, tokenizer, TEXT, circuit=True)
    assert explanation.examples[0].circuits == ()
    assert explanation.settings["notes"] == ["no circuit: the residual stream was not found."]


def test_the_model_is_left_as_it_was(stories):
    model, tokenizer = stories
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    before = model(ids).logits
    explain(model, tokenizer, TEXT, circuit=True)
    assert torch.equal(before, model(ids).logits)
