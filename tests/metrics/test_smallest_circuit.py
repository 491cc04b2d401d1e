"""Circuits that are found are as faithful as they say, and hold no edge that is not needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import build
from models import VOCABULARY, ids, last_logits, tiny
from torch import Tensor, nn
from wild import Mixer

from captum_ssm import examples
from captum_ssm.attr import Edge, RelevanceFlow
from captum_ssm.capture import Request
from captum_ssm.interventions import Reference, circuit
from captum_ssm.interventions.circuit_flow import CircuitFlow
from captum_ssm.metrics import circuit_faithfulness, find_circuit, find_circuits

L = 7


def removal(model: nn.Module, given: Tensor | None) -> dict[str, Any]:
    if given is None:
        return {"coefficients": "whole"}
    return {"ablation": Reference.of(model, given)}


@pytest.mark.parametrize("others", [None, 6])
def test_a_found_circuit_is_as_faithful_as_it_says_and_needs_each_edge(mamba, others):
    tokens = ids(1, L)
    answer = int(last_logits(mamba, tokens).argmax())
    given = None if others is None else ids(others, L, seed=1)
    found = find_circuit(mamba, tokens, answer, reference_inputs=given, perturbations_per_eval=3)
    assert found.reached
    assert found.kept
    assert found.faithfulness >= 0.9
    options: dict[str, Any] = {"coefficients": "whole"}
    if given is not None:
        options = {"ablation": Reference.of(mamba, given)}

    def measured(edges: list[Edge]) -> tuple[float, float]:
        one = circuit_faithfulness(mamba, tokens, edges, answer, ks=(len(edges),), **options)
        return 1 - abs(1 - float(one.recovered)), float(one.kept)

    edges = list(found.edges)
    assert measured(edges) == (pytest.approx(found.faithfulness, abs=1e-5), 1)
    assert 1 < len(edges) <= found.unpruned
    for n in range(len(edges)):
        share, kept = measured(edges[:n] + edges[n + 1 :])
        assert share < 0.9 or not kept
    assert all(value >= 0.9 for k, value in found.curve.items() if k >= found.unpruned)
    assert found.curve[max(found.curve)] == pytest.approx(1, abs=1e-5)
    assert f"{len(edges)} edges, faithfulness" in str(found)


def test_a_circuit_that_is_not_found_is_not_claimed(mamba):
    tokens = ids(1, L)
    found = find_circuit(mamba, tokens, 5, faithfulness=0.99, max_edges=2)
    assert not found.reached
    assert found.faithfulness < 0.99
    assert found.faithfulness == pytest.approx(max(found.curve.values()), abs=1e-4)
    assert "was not reached" in str(found)


@pytest.mark.parametrize("position", [3, -2])
def test_an_answer_at_another_token_has_edges_up_to_it(mamba, position):
    tokens = ids(1, L)
    found = find_circuit(mamba, tokens, (position, 5), max_edges=8)
    same = find_circuit(mamba, tokens, 5, position=position, max_edges=8)
    assert (found.edges, found.score, found.curve) == (same.edges, same.score, same.curve)
    assert max(edge.target for edge in found.edges) <= position % L
    # What comes after that token has no part in it.
    begun = find_circuit(mamba, tokens[:, : position % L + 1], (-1, 5), max_edges=8)
    assert begun.whole == pytest.approx(found.whole, abs=1e-5)
    assert begun.score == pytest.approx(found.score, abs=1e-5)
    with pytest.raises(ValueError, match="names the position, and position is 1"):
        find_circuit(mamba, tokens, (position, 5), position=1)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("prune is 'all'; expected", {"prune": "all"}),
        ("expected a number above 0", {"faithfulness": 1.5}),
        ("max_edges is 0; expected", {"max_edges": 0}),
        ("depends on what tokens read", {"inputs": ids(1, L), "faithfulness": 0.9, "zero": True}),
    ],
)
def test_searches_that_cannot_be_made_are_refused(message, options):
    model = tiny("mamba")
    if options.pop("zero", False):
        for layer in model.backbone.layers:
            nn.init.zeros_(layer.mixer.out_proj.weight)
    arguments = {"inputs": ids(1, L), "target": 5, **options}
    with pytest.raises(ValueError, match=message):
        find_circuit(model, **arguments)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "rwkv"])
@pytest.mark.parametrize("others", [None, 6])
def test_relevance_inside_a_circuit_is_of_the_circuits_own_run(family, others):
    model, tokens = build(family), ids(2, L)
    given = None if others is None else ids(others, L, seed=1)
    options = removal(model, given)
    flow = CircuitFlow.of(Request.of(model, None, tokens), options.get("ablation"))
    edges = RelevanceFlow(model).edges(tokens, 5, against=None)
    few = edges.top(4)
    inside = flow.edges(few, 5, against=None)
    with circuit(model, few, **options):
        expected = last_logits(model, tokens)[:, 5]
    torch.testing.assert_close(inside.score, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):  # which is not that of the whole model
        torch.testing.assert_close(inside.score, edges.score, atol=1e-3, rtol=1e-3)
    if others is None:  # the run's gates and norms are constants, which take no relevance
        return
    whole = flow.edges(edges.top(10_000), 5, against=None)
    torch.testing.assert_close(whole.matrix(), edges.matrix(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prune", ["relevance", "runs", True, False])
def test_each_way_to_prune_leaves_a_part_that_suffices(mamba, prune):
    tokens = ids(1, L)
    found = find_circuit(mamba, tokens, 5, prune=prune, reference_inputs=ids(6, L, seed=1))
    assert found.reached
    assert len(found) <= found.unpruned
    assert prune or len(found) == found.unpruned


def test_a_circuit_of_several_examples_suffices_in_each(mamba):
    tokens, answers = ids(3, L), torch.tensor([5, 8, 4])
    given = ids(6, L, seed=1)
    found = find_circuit(mamba, tokens, answers, reference_inputs=given, faithfulness=0.8)
    options = removal(mamba, given)
    each = circuit_faithfulness(mamba, tokens, found.edges, answers, ks=(len(found),), **options)
    shares = 1 - (1 - each.recovered[:, 0]).abs()
    assert float(shares.min()) == pytest.approx(found.faithfulness, abs=1e-5)
    assert found.reached
    assert {edge.example for edge in found.edges} == {None}
    ranked = RelevanceFlow(mamba).edges(tokens, answers).matrix().abs().mean(0)
    first = find_circuit(mamba, tokens, answers, max_edges=1, prune=False).edges[0]
    layer, i, j = (int(x) for x in torch.unravel_index(ranked.argmax(), ranked.shape))
    assert (first.layer, first.target, first.source) == (f"backbone.layers.{layer}.mixer", i, j)


def test_circuits_of_a_batch_are_those_of_its_examples(mamba):
    tokens, answers = ids(2, L), torch.tensor([5, 8])
    given = ids(6, L, seed=1)
    found = find_circuits(mamba, tokens, answers, reference_inputs=given)
    for b, one in enumerate(found):
        alone = find_circuit(mamba, tokens[b : b + 1], answers[b], reference_inputs=given)
        places = [(e.layer, e.target, e.source) for e in alone.edges]
        assert [(e.layer, e.target, e.source) for e in one.edges] == places
        assert {edge.example for edge in one.edges} == {b}
        assert one.faithfulness == pytest.approx(alone.faithfulness, abs=1e-5)


def test_a_regressor_and_a_classifier_have_circuits(mamba):
    def score(tokens: Tensor) -> Tensor:
        return mamba(tokens).logits[:, -1, 5] ** 2

    tokens = ids(2, L)
    for found in find_circuits(score, tokens, model=mamba):
        assert found.reached
        assert found.kept
        assert len(found) < L * (L + 1)
    model, tokenizer = examples.load("reviews-jamba")
    text = tokenizer("The plot was not good.", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model(text).logits.argmax(-1)
    found = find_circuit(model, text, answer, max_edges=64)
    assert found.reached
    with torch.no_grad(), circuit(model, found.edges, coefficients="whole"):
        assert int(model(text).logits.argmax(-1)) == int(answer)


class OfUnknown(nn.Module):
    """A language model of mixers that no adapter is registered for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for mixer in self.mixers:
            x = x + mixer(nn.functional.layer_norm(x, (6,)))
        return self.head(x)


def test_the_first_question_about_a_model_of_unknown_mixers_may_be_its_circuit():
    torch.manual_seed(0)
    model, tokens = OfUnknown().eval(), ids(1, L)
    found = find_circuit(model, tokens, (L - 1, 5), max_edges=4)
    assert len(found) <= 4
    each = circuit_faithfulness(
        copy.deepcopy(model),
        tokens,
        found.edges,
        (L - 1, 5),
        ks=(len(found),),
        coefficients="whole",
    )
    assert 1 - abs(1 - float(each.recovered[0, 0])) == pytest.approx(found.faithfulness, abs=1e-5)
