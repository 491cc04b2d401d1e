"""Interventions on chains: thoughts are swapped, records are changed or taken away.

A swap takes what stands at the same place of the other chain, so that every changed text is one
that could have been drawn, and what a model says that follows the change is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lessons import ChainTask, greedy
from torch import Tensor
from transformers import PreTrainedModel

from captum_ssm.examples.chains import IDS, NUMBERS, RECORD_LENGTH, Puzzle, encode, other_thought

NUMBER_IDS = torch.tensor([IDS[word] for word in NUMBERS])


@dataclass(frozen=True)
class Subject:
    """A model with the task that it was trained on."""

    model: PreTrainedModel
    task: ChainTask

    def answers(self, prompts: list[list[str]], length: int) -> Tensor:
        """The first number that the model writes after each prompt, or -1, ``(n,)``."""
        written = greedy(self.model, torch.tensor([encode(prompt) for prompt in prompts]), length)
        is_number = torch.isin(written, NUMBER_IDS)
        first = is_number.int().argmax(1, keepdim=True)
        return torch.where(is_number.any(1), written.gather(1, first)[:, 0], -1)

    def is_right(self, puzzles: list[Puzzle]) -> Tensor:
        """Whether each continuation is written without a mistake, ``(n,)``."""
        wanted = torch.tensor([encode(self.task.continuation(puzzle)) for puzzle in puzzles])
        given = torch.tensor([encode(puzzle.prompt) for puzzle in puzzles])
        return (greedy(self.model, given, wanted.shape[1]) == wanted).all(1)

    def after_swaps(self, puzzles: list[Puzzle], thought: int) -> dict[str, Tensor]:
        """What is written after thought number ``thought`` was swapped, by boolean tensors.

        ``next`` is the word after it and ``number`` the answer at the end; each may follow the
        thought, or the prompt. The thoughts before the swapped one are kept, later ones are the
        model's own.
        """
        swapped = [other_thought(puzzle, thought) for puzzle in puzzles]
        cut = 2 * thought + 1
        begun = [p.prompt + s.aloud[:cut] for p, s in zip(puzzles, swapped, strict=True)]
        by_thought = torch.tensor([encode(puzzle.aloud) for puzzle in swapped])[:, cut:]
        by_prompt = torch.tensor([encode(puzzle.aloud) for puzzle in puzzles])[:, cut:]
        given = torch.tensor([encode(words) for words in begun])
        written = greedy(self.model, given, by_thought.shape[1])
        return {
            f"{place} follows the {name}": written[:, k] == wanted[:, k]
            for place, k in (("next", 1), ("number", -2))
            for name, wanted in (("thought", by_thought), ("prompt", by_prompt))
        }

    def after_changes(self, puzzles: list[Puzzle], link: int, mine: bool) -> dict[str, Tensor]:
        """What becomes of the answer after one record is changed or removed, by boolean tensors.

        ``link`` is the record's place in its chain, from 0; ``mine`` tells whether it is a record
        of the chain that is asked for.
        """
        length = max(len(self.task.continuation(puzzle)) for puzzle in puzzles)
        before = torch.tensor([IDS[puzzle.answer] for puzzle in puzzles])
        changed = [_interchanged(puzzle, link, mine) for puzzle in puzzles]
        record = [(p.links if mine else p.others)[link] for p in puzzles]
        removed = [puzzle.without(k) for puzzle, k in zip(puzzles, record, strict=True)]
        said = self.answers([puzzle.prompt for puzzle in changed], length)
        right = torch.tensor([IDS[puzzle.answer] for puzzle in changed])
        gone = self.answers([puzzle.prompt for puzzle in removed], length)
        return {
            "changed: another answer": said != before,
            "changed: the right answer": said == right,
            "removed: another answer": gone != before,
        }

    @torch.no_grad()
    def effects(self, puzzle: Puzzle, word: int) -> tuple[Tensor, Tensor]:
        """How far the logit of a word of the continuation falls, by exact interventions.

        Everything else is kept as it was: these are direct effects.

        Args:
            puzzle (Puzzle): what the model answered right.
            word (int): the word's place in the continuation, from 0.

        Returns:
            tuple of Tensor: the effects of swapping each thought before the word, and of changing
            each record, in the order of the prompt.
        """
        continuation = self.task.continuation(puzzle)
        thoughts = [k for k in range(len(puzzle.thoughts)) if self.task.is_aloud and 2 * k < word]
        text = [*puzzle.prompt, *continuation[:word]]
        texts = [text]
        for k in thoughts:
            place = len(puzzle.prompt) + 2 * k
            texts.append([*text[:place], other_thought(puzzle, k).thoughts[k], *text[place + 1 :]])
        for record in range(len(puzzle.records)):
            mine = record in puzzle.links
            link = (puzzle.links if mine else puzzle.others).index(record)
            changed = _interchanged(puzzle, link, mine)
            texts.append([*changed.prompt, *continuation[:word]])
        ids = torch.tensor([encode(words) for words in texts])
        logits = self.model(ids, use_cache=False).logits[:, -1, IDS[continuation[word]]]
        fall = logits[0] - logits[1:]
        return fall[: len(thoughts)], fall[len(thoughts) :]


def record_shares(relevance: Tensor, puzzle: Puzzle) -> Tensor:
    """Relevance summed over the words of each record, ``(..., records)``."""
    length = RECORD_LENGTH * len(puzzle.records)
    return relevance[..., :length].unflatten(-1, (-1, RECORD_LENGTH))[..., :-1].sum(-1)


def _interchanged(puzzle: Puzzle, link: int, mine: bool) -> Puzzle:
    """A record of one chain says what the other chain's record says at the same place."""
    own, other = puzzle.links, puzzle.others
    if not mine:
        own, other = other, own
    return puzzle.changed(own[link], puzzle.records[other[link]][1])
