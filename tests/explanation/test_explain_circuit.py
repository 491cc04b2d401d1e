"""``explain(..., circuit=True)``: the graph of each explained answer, as the method gives it."""

import numpy as np
import pytest
import torch

import captum_ssm
from captum_ssm import explain
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
