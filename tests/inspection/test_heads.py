"""Heads are named by what they read: hand-made maps, and a model that copies."""

from __future__ import annotations

import pytest
import torch
from families import build
from models import ids
from torch import Tensor

import captum_ssm
from captum_ssm import InputError, RelevanceFlow
from captum_ssm.examples import copying
from captum_ssm.inspection.heads import head_roles, is_clearly_above_chance

# Words that repeat: 7 is a separator.
TOKENS = torch.tensor([[3, 1, 7, 4, 2, 7, 1, 5, 4, 6]])
L = TOKENS.shape[1]


def _map(reads: dict[int, int]) -> Tensor:
    # A head that reads one token at each of some tokens, (L, L).
    made = torch.zeros(L, L)
    for i, j in reads.items():
        made[i, j] = -2.0 if i % 2 else 2.0  # a sign is not asked for
    return made


HAND_MADE = {
    "itself": _map({i: i for i in range(L)}),
    "previous": _map({i: i - 1 for i in range(1, L)}),
    "duplicate": _map({5: 2, 6: 1, 8: 3}),
    "induction": _map({5: 3, 6: 2, 8: 4}),
    "first": _map({i: 0 for i in range(2, L)}),
    "separator": _map({4: 2, 7: 5, 9: 2}),
    None: torch.ones(L, L).tril() / torch.arange(1, L + 1)[:, None],
}


def test_hand_made_heads_get_their_names():
    scale = torch.arange(len(HAND_MADE), 0, -1.0)[:, None, None]
    stack = torch.stack(list(HAND_MADE.values()))
    stack = stack / stack.abs().sum((1, 2), keepdim=True) * scale
    found = head_roles({"mixer": stack[None]}, TOKENS, separators=[7])
    assert [head.role for head in found] == list(HAND_MADE)
    assert [head.head for head in found] == list(range(len(HAND_MADE)))
    for head in found[:-1]:
        assert head.shares[head.role] == pytest.approx(1)
        assert head.excess[head.role] == pytest.approx(1)
    # Even attention is at chance for all roles.
    assert found[-1].shares == pytest.approx(found[-1].chance)
    assert sum(head.part for head in found) == pytest.approx(1)
    assert found.by_role()["itself"] == pytest.approx(found[0].part)
    assert [head.head for head in found.named("induction")] == [3]
    assert "induction" in str(found)
    assert found.table(2).splitlines()[-1] == "and 5 more"


def test_chance_counts_the_tokens_by_hand():
    # Row 6 alone, read at 1 and 2: duplicates of token 1 are 1 of the 7 tokens up to it.
    made = torch.zeros(1, 1, L, L)
    made[0, 0, 6, 1], made[0, 0, 6, 2] = 1.0, 3.0
    (head,) = head_roles({"mixer": made}, TOKENS, separators=[7])
    assert head.chance["duplicate"] == pytest.approx(1 / 7)
    assert head.chance["separator"] == pytest.approx(2 / 7)
    assert head.shares["duplicate"] == pytest.approx(0.25)
    assert head.shares["induction"] == pytest.approx(0.75)
    assert head.role == "induction"


def test_padding_is_not_read_and_not_counted():
    made = torch.zeros(2, 1, L, L)
    made[:, 0, 8, 4] = 1.0
    mask = torch.ones(2, L)
    mask[1, :3] = 0
    (head,) = head_roles({"mixer": made}, TOKENS.expand(2, L), mask=mask)
    assert head.chance["first"] == pytest.approx((1 / 9 + 1 / 6) / 2)
    assert "separator" not in head.shares


def test_is_clearly_above_chance():
    assert is_clearly_above_chance(0.3, 0.1)
    assert not is_clearly_above_chance(0.25, 0.1)
    assert not is_clearly_above_chance(0.85, 0.9)


def _copied(seed: int, length: int) -> tuple[Tensor, list[tuple[int, int]]]:
    # One string once for each letter that is copied, with the place and the id of that letter.
    batch = copying.held_out_batch(1, torch.Generator().manual_seed(seed), length)
    at = range(length, 2 * length)
    targets = [(i, int(batch.tokens[0, i + 1])) for i in at]
    return batch.inputs.expand(length, -1).contiguous(), targets


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_the_mixer_that_copies_reads_what_followed_the_letter_before(seed):
    model, _ = captum_ssm.examples.load("copying-mamba")
    tokens, targets = _copied(seed, 16)
    flow = RelevanceFlow(model)
    edges = flow.edges(tokens, targets, formulation="unified")
    found = head_roles(edges, tokens, separators=[copying.SEPARATOR_ID])
    last = next(head for head in found if head.layer == "backbone.layers.2.mixer")
    assert max(last.excess, key=last.excess.get) == "induction"
    assert last.shares["induction"] > 2.5 * last.chance["induction"]
    # What the others do comes before: they read around themselves, and find the separator.
    others = [head for head in found if head is not last]
    assert all(head.excess["induction"] < 0.6 * last.excess["induction"] for head in others)
    # It is the last mixer that writes the copied letter.
    direct = flow.components(tokens, targets)
    written = head_roles(direct.edges, tokens)
    assert written[0].layer == "backbone.layers.2.mixer"
    assert written[0].part > 0.8


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_heads_of_edges_are_those_of_their_matrices(family):
    tokens = ids(2, 9)
    edges = RelevanceFlow(build(family)).edges(tokens, 5, formulation="unified")
    by_matrix = {
        name: (layer.heads() if layer.heads_count < layer.operator.channels else None)
        for name, layer in edges.items()
    }
    by_matrix = {
        name: edges[name].matrix()[:, None] if maps is None else maps
        for name, maps in by_matrix.items()
    }
    found, expected = head_roles(edges, tokens), head_roles(by_matrix, tokens)
    assert [(one.layer, one.head) for one in found] == [(x.layer, x.head) for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.size == pytest.approx(other.size, rel=1e-4)
        assert one.shares == pytest.approx(other.shares, rel=1e-4, abs=1e-5)
    every = head_roles(edges, tokens, groups=None)
    assert len(every) == sum(layer.heads_count for layer in edges.values())


def test_what_does_not_fit_is_refused():
    made = {"mixer": torch.zeros(1, 2, L, L)}
    with pytest.raises(InputError, match="works on 10 tokens of 1 texts"):
        head_roles(made, TOKENS[:, :-1])
    with pytest.raises(InputError, match="expected the ids"):
        head_roles(made, TOKENS.float())
    with pytest.raises(InputError, match="a row for every token"):
        head_roles({"mixer": torch.zeros(1, 2, 1, L)}, TOKENS)
    with pytest.raises(TypeError, match="maps is a MambaForCausalLM; expected a mapping"):
        head_roles(build("mamba"), ids(1, 9))
    edges = RelevanceFlow(build("mamba")).edges(ids(1, 9), 5)
    with pytest.raises(ValueError, match="expected a divisor"):
        head_roles(edges, ids(1, 9), groups=5)
