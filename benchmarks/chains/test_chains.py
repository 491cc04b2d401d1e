"""Tests of chains and documents, of the models trained on them, and of what is measured."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from evaluate_chains import summaries
from handing import WAYS, handed_by, hops_of, on_prompt
from lessons import TASKS, ChainTask, accuracy
from swaps import Subject, record_shares
from transformers import AutoModelForCausalLM, AutoTokenizer

from captum_ssm.examples import chains, documents
from captum_ssm.examples.chains import Puzzle, encode, make_puzzle, other_thought

MODELS = Path(__file__).resolve().parents[2] / "tutorials" / "models"


def puzzles(n: int, **options: int) -> list[Puzzle]:
    rng = random.Random(0)
    return [make_puzzle(rng, **options) for _ in range(n)]


def followed(puzzle: Puzzle) -> list[str]:
    """The chain by a look-up table."""
    table, found = dict(puzzle.records), [puzzle.asked]
    while found[-1] in table:
        found.append(table[found[-1]])
    return found[1:]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_chain_is_what_a_table_gives(held_out: bool) -> None:
    for puzzle in puzzles(50, held_out=held_out):
        chain = followed(puzzle)
        assert [*puzzle.thoughts, puzzle.answer] == chain == puzzle.aloud[::2]
        assert len(chain) == chains.LINKS
        assert puzzle.is_held_out == held_out
        assert sorted(puzzle.links + puzzle.others) == list(range(len(puzzle.records)))
        for k, (name, value) in enumerate(puzzle.records):
            words = [puzzle.prompt[i] for i in puzzle.positions(k)]
            assert words == [name, chains.EQUALS, value]


def test_a_swapped_thought_leads_to_the_other_number() -> None:
    for puzzle in puzzles(20):
        for k in range(len(puzzle.thoughts)):
            swapped = other_thought(puzzle, k)
            assert swapped.thoughts[k] != puzzle.thoughts[k]
            assert swapped.thoughts[:k] == puzzle.thoughts[:k]
            assert swapped.answer == followed(swapped)[-1] != puzzle.answer
            assert len(swapped.aloud) == len(puzzle.aloud)


def test_a_chain_that_is_broken_ends_there() -> None:
    puzzle = puzzles(1)[0]
    broken = puzzle.without(puzzle.links[2])
    assert broken.answer == puzzle.thoughts[1] == followed(broken)[-1]


def test_others_need_two_chains() -> None:
    with pytest.raises(ValueError, match="3 chains; expected 2"):
        assert puzzles(1, links=2, chains=3)[0].others


def test_lines_hold_questions_and_their_right_words() -> None:
    task = TASKS["chains"]
    assert isinstance(task, ChainTask)
    for seed in range(20):
        line = task.line(random.Random(seed), progress=1.0)
        facts = range(0, line.inputs.index(chains.ASK), chains.RECORD_LENGTH)
        table = {line.inputs[i]: line.inputs[i + 2] for i in facts}
        for i, word in enumerate(line.inputs):
            if word != chains.ASK:
                continue
            chain, k = followed(Puzzle(tuple(table.items()), line.inputs[i + 1])), i + 2
            for wanted in chain:
                assert line.counts[k]
                assert line.targets[k] == wanted
                k += 2
        assert len(line.inputs) == len(line.targets) == len(line.counts)


@pytest.mark.parametrize("kind", ["plain", "remark", "order"])
def test_an_answer_is_from_its_source(kind: str) -> None:
    rng = random.Random(0)
    for _ in range(50):
        drawn = documents.make_documents(rng, kind=kind)
        assert sorted(i for part in drawn.parts.values() for i in part) == list(
            range(len(drawn.prompt))
        )
        assert {*drawn.prompt} <= {*documents.WORDS}
        source = [drawn.prompt[i] for i in drawn.parts[drawn.source]]
        start = source.index("a")
        assert source[start : start + len(drawn.answer) - 1] == drawn.answer[:-1]
        assert (drawn.source == "order") == (kind == "order") == ("say" in drawn.prompt)


def test_ways_to_hand_on_keep_the_prompt_and_choose_words() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(5, 8, generator=generator).tril(3)  # two thoughts, two signs and an answer
    swapped = [
        (torch.zeros(0), torch.tensor([1.0, 0.0])),
        (torch.tensor([3.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])),
    ]
    found = {way: handed_by(way, rows, 4, swapped) for way in WAYS}
    assert torch.equal(found["all words"], rows)
    for way in WAYS[2:]:
        assert torch.equal(found[way][:, :4], rows[:, :4])
        assert not found[way][:, 5::2].any()
    reading = found["not the reading word"]
    assert torch.equal(reading == 0, (rows == 0) | torch.eye(8)[3:].bool())
    assert torch.equal(found["thoughts only"][:, 4::2], rows[:, 4::2])
    strongest = found["the strongest thought"][:, 4:]
    assert (strongest > 0).sum(1).tolist() == [0, 1, 1, 1, 1]
    assert torch.equal(strongest.amax(1), rows[:, 4::2].amax(1))
    exact = found["thoughts, by swaps"] / found["thoughts, by swaps"].sum(1, keepdim=True)
    torch.testing.assert_close(exact[2, 4:], torch.tensor([0.75, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(exact[4, 4:], torch.tensor([0.0, 0.0, 0.5, 0.0]))


def test_hops_of_positive_rows_are_products_of_shares() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(3, 6, generator=generator).tril(3)  # four words of a prompt, three after it
    shares = rows / rows.sum(1, keepdim=True)
    wanted = [shares[2], shares[2, 4:] @ shares[:2], shares[2, 5] * shares[1, 4] * shares[0]]
    for signs in ("positive", "positive of each word", "net"):
        found = hops_of(rows, 4, signs, hops=2).relevance
        torch.testing.assert_close(found / rows[2].sum(), torch.stack(wanted))
    assert on_prompt(rows, 4)[0].sum() == pytest.approx(1)


def test_an_answer_at_once_has_no_hops_to_sum_up() -> None:
    (puzzle,) = puzzles(1, links=2)
    P = len(puzzle.prompt)
    rows = torch.rand(2, P + 1, generator=torch.Generator().manual_seed(0)).tril(P - 1)
    alone = summaries(hops_of(rows, P, "positive", hops=0), puzzle)
    assert list(alone) == ["hop 0"]
    torch.testing.assert_close(alone["hop 0"], record_shares(on_prompt(rows, P)[-1:], puzzle)[0])
    assert len(summaries(hops_of(rows, P, "positive", hops=1), puzzle)) > 1


def test_record_shares_are_those_of_its_words() -> None:
    puzzle = puzzles(1)[0]
    relevance = torch.arange(len(puzzle.prompt), dtype=torch.float)
    shares = record_shares(relevance, puzzle)
    for k, share in enumerate(shares.tolist()):
        assert share == sum(puzzle.positions(k))


@pytest.mark.parametrize("name", ["chains-mamba2", "documents-mamba2"])
def test_saved_model_answers(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
    shares = accuracy(model, TASKS[name.split("-")[0]], 60)
    assert min(shares.values()) > 0.95, shares


def test_the_tokenizer_gives_the_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "chains-mamba2")
    for puzzle in puzzles(5):
        assert tokenizer(" ".join(puzzle.prompt)).input_ids == encode(puzzle.prompt)


def test_the_answer_follows_the_thought() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "chains-mamba2").eval()
    task = TASKS["chains"]
    assert isinstance(task, ChainTask)
    subject = Subject(model, task)
    drawn = [make_puzzle(random.Random(k), held_out=True) for k in range(20)]
    found = subject.after_swaps(drawn, 1)
    assert found["number follows the thought"].double().mean() > 0.9
    thoughts, records = subject.effects(drawn[0], 2 * len(drawn[0].thoughts))
    assert thoughts.argmax() == len(thoughts) - 1
    assert records.argmax() == drawn[0].links[-1]
