"""Faithfulness of circuits, where the deciding token is known and against the model's own runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from families import padded
from models import Classifier, ids, last_logits
from torch import Tensor, nn

from captum_ssm import examples
from captum_ssm.attr import Edge, RelevanceFlow
from captum_ssm.examples import copying
from captum_ssm.interventions import Reference, circuit
from captum_ssm.metrics import (
    CircuitFaithfulness,
    circuit_faithfulness,
    find_circuit,
    find_circuits,
)

L = 7
EVERY = 2 * L * (L + 1) // 2  # edges of two causal layers


@pytest.fixture(scope="module")
def copier() -> nn.Module:
    model, _ = examples.load("copying-mamba")
    return model


def read_from(source: int) -> list[Edge]:
    """What the query of a copied string reads from a token and its neighbors, nearest first."""
    near = sorted(range(source - 1, source + 2), key=lambda j: abs(j - source))
    return [Edge(f"backbone.layers.{layer}.mixer", 30, j) for j in near for layer in (1, 2)]


def test_two_edges_from_the_token_that_is_copied_keep_the_answer_and_others_do_not(copier):
    place, n = 10, 20
    tokens = copying.held_out_batch(8, torch.Generator().manual_seed(0), n).tokens
    prompt, answers = tokens[:, : n + 1 + place], tokens[:, n + 1 + place]
    found, elsewhere = (
        circuit_faithfulness(copier, prompt, read_from(source), answers, ks=(2, 6))
        for source in (place, 5)
    )
    assert float(found.kept_whole.min()) == 1
    assert float(found.kept_none.max()) == 0
    assert found.kept.mean(0).min() == 1  # 2 of 1,488 edges
    assert found.removed.mean(0).max() < 0.2
    assert found.recovered.mean(0).min() > 0.7
    assert found.at(2)["gap"].value < 0.3
    assert elsewhere.kept.mean(0).max() == 0
    assert elsewhere.removed.mean(0).min() == 1
    assert elsewhere.recovered.mean(0).max() < 0.1


def test_all_edges_recover_everything_and_none_nothing_to_the_last_bit(mamba):
    tokens = ids(3, L)
    edges = RelevanceFlow(mamba).edges(tokens, target=5)
    found = circuit_faithfulness(mamba, tokens, edges, 5, ks=(1, EVERY))
    assert torch.equal(found.scores[:, 1], found.whole)
    assert torch.equal(found.recovered[:, 1], torch.ones(3).double())
    assert torch.equal(found.gap[:, 1], torch.zeros(3).double())
    nothing = circuit_faithfulness(mamba, tokens, [], 5, ks=(1,))
    assert torch.equal(nothing.scores[:, 0], nothing.none)
    assert torch.equal(nothing.recovered, torch.zeros(3, 1).double())
    assert nothing.control is None


def test_scores_are_those_of_the_models_own_runs_by_hand(mamba):
    tokens, target, foil = ids(2, L), torch.tensor([5, 8]), torch.tensor([4, 3])
    edges = RelevanceFlow(mamba).edges(tokens, target)
    reference = Reference.of(mamba, ids(4, L, seed=1))
    found = circuit_faithfulness(mamba, tokens, edges, target, foil, ks=(3,), ablation=reference)
    rows = torch.arange(2)

    def score(logits: Tensor) -> Tensor:
        return (logits[rows, target] - logits[rows, foil]).double()

    with circuit(mamba, edges.top(3), ablation=reference):
        kept = last_logits(mamba, tokens)
    with circuit(mamba, edges.top(3), ablation=reference, remove=True):
        removed = last_logits(mamba, tokens)
    torch.testing.assert_close(found.scores[:, 0], score(kept), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.whole, score(last_logits(mamba, tokens)), atol=1e-6, rtol=0)
    assert torch.equal(found.kept[:, 0], (kept.argmax(1) == target).double())
    assert torch.equal(found.removed[:, 0], (removed.argmax(1) == target).double())


def test_answers_are_read_at_the_token_that_each_example_names(mamba):
    tokens, pairs = ids(2, L), [(3, 5), (-2, 8)]
    edges = [Edge("backbone.layers.0.mixer", 3, 1)]
    apart = [
        circuit_faithfulness(mamba, tokens[b : b + 1], edges, pairs[b], ks=(1,)) for b in (0, 1)
    ]
    truth = torch.cat([found.scores for found in apart])
    for given in ({"target": pairs}, {"target": [5, 8], "position": torch.tensor([3, -2])}):
        for count in (1, 3):
            found = circuit_faithfulness(
                mamba, tokens, edges, ks=(1,), perturbations_per_eval=count, **given
            )
            torch.testing.assert_close(found.scores, truth, atol=1e-5, rtol=1e-5)
    circuits = find_circuits(mamba, tokens, pairs, max_edges=4, prune=False)
    alone = find_circuit(mamba, tokens[1:], (-2, 8), max_edges=4, prune=False)
    assert circuits[1].score == pytest.approx(alone.score, abs=1e-5)


def test_the_entry_of_another_output_is_not_one_answer_for_each_example():
    model = Classifier("last")
    with pytest.raises(TypeError, match="target is tuple; expected one class per example"):
        circuit_faithfulness(model, ids(2, L), [], (3, 1), ks=(1,))


def test_without_a_foil_others_count_by_the_probabilities_of_the_whole_run(mamba):
    tokens = ids(1, L)
    found = circuit_faithfulness(mamba, tokens, [], 5, ks=(1,))
    whole = last_logits(mamba, tokens)[0].double()
    others = torch.cat([whole[:5], whole[6:]])
    expected = whole[5] - (others.softmax(0) * others).sum()
    torch.testing.assert_close(found.whole[0], expected, atol=1e-5, rtol=0)
    assert float(found.control_whole) == float(others.max() > whole[5])  # the best other answer


def test_the_control_is_what_the_foils_own_ranking_keeps_of_the_foil(mamba):
    tokens, flow = ids(4, L), RelevanceFlow(mamba)
    edges = flow.edges(tokens, target=5, rule="gradient")
    wrong = flow.edges(tokens, target=9, rule="gradient")
    found = circuit_faithfulness(mamba, tokens, edges, 5, 9, ks=(2, 9, EVERY), by="signed")
    of_foil = circuit_faithfulness(mamba, tokens, wrong, 9, 5, ks=(2, 9, EVERY), by="signed")
    assert torch.equal(found.control, of_foil.kept)
    assert torch.equal(found.kept, of_foil.control)


def same(found: CircuitFaithfulness, expected: CircuitFaithfulness, row: Any = slice(None)) -> None:
    for field in fields(found):
        value, other = getattr(found, field.name), getattr(expected, field.name)
        if torch.is_tensor(value):
            torch.testing.assert_close(value, other[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_examples_one_by_one_and_runs_may_be_joined(mamba, side):
    tokens, mask, target = ids(2, 9), padded(side), torch.tensor([5, 8])
    options = {"additional_forward_args": {"attention_mask": mask}, "ks": (1, 4, 12)}
    flow = RelevanceFlow(mamba)
    edges = flow.edges(tokens, target, options["additional_forward_args"])
    found = circuit_faithfulness(mamba, tokens, edges, target, **options)
    same(
        circuit_faithfulness(mamba, tokens, edges, target, perturbations_per_eval=2, **options),
        found,
    )
    for b in range(2):
        own = {"attention_mask": mask[b : b + 1]}
        one = flow.edges(tokens[b : b + 1], target[b], own)
        options["additional_forward_args"] = own
        same(
            circuit_faithfulness(mamba, tokens[b : b + 1], one, target[b], **options),
            found,
            slice(b, b + 1),
        )


def test_maps_and_lists_rank_as_they_say(mamba):
    tokens = ids(2, L)
    names = [f"backbone.layers.{k}.mixer" for k in range(2)]
    maps = {name: torch.zeros(2, L, L) for name in names}
    maps[names[0]][0, 6, 2], maps[names[1]][0, 6, 6] = -3, 2
    maps[names[1]][1, 6, 5], maps[names[0]][1, 5, 5] = 1, 4
    listed = [
        Edge(names[0], 6, 2, example=0),
        Edge(names[0], 5, 5, example=1),
        Edge(names[1], 6, 6, example=0),
        Edge(names[1], 6, 5, example=-1),
    ]
    by_size = circuit_faithfulness(mamba, tokens, maps, 5, ks=(1, 2), control=maps)
    same(by_size, circuit_faithfulness(mamba, tokens, listed, 5, ks=(1, 2), control=listed))
    signed = circuit_faithfulness(mamba, tokens, maps, 5, ks=(1, 2), by="signed", control=maps)
    del listed[0]
    same(signed, circuit_faithfulness(mamba, tokens, listed, 5, ks=(1, 2), control=listed))


def test_areas_are_over_log_k_and_recovered_is_the_ratio_of_means():
    one, zero = torch.ones(2).double(), torch.zeros(2).double()
    scores = torch.tensor([[0.0, 1.0, 1.0], [0.0, 9.0, 9.0]]).double()
    whole = torch.tensor([1.0, 9.0]).double()
    found = CircuitFaithfulness(
        (1, 10, 100), scores.clamp(max=1), 1 - scores.clamp(max=1), scores, None, whole, zero,
        one, zero, zero, zero,
    )  # fmt: skip
    areas = {name: value.value for name, value in found.estimate().items()}
    expected = {"kept": 0.75, "removed": 0.25, "recovered": 0.75, "gap": 0.25}
    assert areas == pytest.approx(expected)
    assert found.at(10)["recovered"].samples == 2
    assert "| 10 | 1.000 [1.000, 1.000] | 0.000 [0.000, 0.000] |" in str(found)
    with pytest.raises(ValueError, match="expected one of \\(1, 10, 100\\)"):
        found.at(2)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "positive integers in ascending", {"ks": (5, 1)}),
        (ValueError, "positive integers in ascending", {"ks": ()}),
        (ValueError, "foil is the target", {"foil": 5}),
        (ValueError, "target holds classes", {"target": 99}),
        (
            ValueError,
            "which names the position, and position is 2",
            {"target": (3, 5), "position": 2},
        ),
        (ValueError, "target has 1 entries for a batch of 2", {"target": [(3, 5)]}),
        (TypeError, "target is tuple", {"target": (3, 5, 1)}),
        (ValueError, "by is 'sign'", {"by": "sign"}),
        (TypeError, "edges holds tuple", {"edges": [(0, 6, 6)]}),
        (TypeError, "edges holds int", {"edges": 3}),
        (ValueError, "for a batch of 2 examples", {"edges": [Edge("x", 6, 6, example=2)]}),
        (ValueError, "target and source", {"edges": {"x": torch.zeros(L, L)}}),
        (ValueError, "map of x holds NaN", {"edges": {"x": torch.full((2, L, L), torch.nan)}}),
        (ValueError, "perturbations_per_eval", {"perturbations_per_eval": 0}),
        (ValueError, "coefficients is", {"coefficients": "none"}),
    ],
)
def test_what_does_not_fit_is_refused(mamba, error, message, options):
    arguments = {"edges": [], "target": 5, **options}
    with pytest.raises(error, match=message):
        circuit_faithfulness(mamba, ids(2, L), **arguments)


@pytest.mark.parametrize("how", ["by place", "in a function", "made by the function"])
def test_padding_on_the_right_is_known_however_the_mask_is_passed(mamba, how):
    tokens, mask, target = ids(2, 9), padded("right"), torch.tensor([5, 8])
    extra = {"by place": mask, "in a function": (mask,), "made by the function": None}[how]
    model: Any = mamba
    if how == "in a function":

        def model(x: Tensor, given: Tensor) -> Tensor:
            return mamba(x, attention_mask=given).logits
    elif how == "made by the function":

        def model(x: Tensor) -> Tensor:
            return mamba(x, attention_mask=mask[: len(x)]).logits

    edges = RelevanceFlow(mamba).edges(tokens, target, {"attention_mask": mask})
    options = {"model": mamba, "ks": (1, 1000)}
    found = circuit_faithfulness(
        model, tokens, edges, target, additional_forward_args=extra, **options
    )
    named = {"attention_mask": mask}
    same(
        found,
        circuit_faithfulness(
            mamba, tokens, edges, target, additional_forward_args=named, **options
        ),
    )
    torch.testing.assert_close(found.recovered[:, 1], torch.ones(2).double())


def test_a_ranking_of_other_edges_than_those_that_are_removed_is_refused(mamba):
    tokens = ids(1, L)
    edges, unified = (
        RelevanceFlow(mamba).edges(tokens, 5, formulation=one) for one in ("hidden", "unified")
    )
    for ranking in ({"edges": unified}, {"edges": edges, "control": unified}):
        with pytest.raises(ValueError, match="ranking has 'unified' edges and formulation is 'hid"):
            circuit_faithfulness(mamba, tokens, target=5, **ranking)
    found = circuit_faithfulness(
        mamba, tokens, unified, 5, ks=(EVERY,), formulation="unified", coefficients="whole"
    )
    torch.testing.assert_close(found.recovered, torch.ones(1, 1).double())


@pytest.mark.parametrize("axes", [1, 2])
def test_an_output_of_one_score_recovers_and_has_no_answers(mamba, axes):
    def score(tokens: Tensor) -> Tensor:
        found = mamba(tokens).logits[:, -1, 5] ** 2
        return found if axes == 1 else found[:, None]

    tokens = ids(3, L)
    edges = RelevanceFlow(score, mamba).edges(tokens)
    found = circuit_faithfulness(score, tokens, edges, ks=(1, EVERY), model=mamba)
    torch.testing.assert_close(found.whole, score(tokens).double().flatten())
    assert torch.equal(found.recovered[:, 1], torch.ones(3).double())
    assert bool(found.kept.isnan().all())
    assert found.control is None
    assert set(found.estimate()) == {"gap", "recovered"}
    assert "nan" not in str(found)
    with pytest.raises(ValueError, match="returns one score per example; expected target=None"):
        circuit_faithfulness(score, tokens, edges, 3, model=mamba)
