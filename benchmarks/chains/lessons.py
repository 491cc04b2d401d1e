"""What the models of chains and of documents are trained and judged on.

A task draws lines, each of which is inputs, targets and which of the targets count. Several
questions about the same records follow one another in a line of training; the line of an example
that is judged has one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from captum_ssm.examples import chains, documents

QUESTIONS = 4
CURRICULUM = 0.4  # of the training, in which chains grow
ORDERED = 0.6  # of the training, in which a part of the records has the numbers first


@dataclass
class Line:
    """Words that are read, the word that is right after each, and whether it counts."""

    inputs: list[str]
    targets: list[str]
    counts: list[bool]


def numbers_first(puzzle: chains.Puzzle) -> chains.Puzzle:
    """The records in the order in which a reader can fill in each number at once."""
    steps = [len(puzzle.asking(name).links) for name, _ in puzzle.records]
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return replace(puzzle, records=tuple(puzzle.records[k] for k in order))


class Task(ABC):
    """A vocabulary, lines to train on and held-out examples."""

    words: Sequence[str]
    unknown: str
    padding: str
    end: str

    @abstractmethod
    def line(self, rng: random.Random, progress: float) -> Line:
        """One line of training; ``progress`` goes from 0 to 1."""

    @abstractmethod
    def held_out(self, rng: random.Random) -> tuple[str, list[str], list[str]]:
        """A kind of example, its prompt and the right continuation."""

    @property
    def ids(self) -> dict[str, int]:
        """The id of each word."""
        return {word: index for index, word in enumerate(self.words)}

    def batch(self, lines: Sequence[Line]) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``(n, length)``; a target that does not count is -100."""
        ids = self.ids
        length = max(len(line.inputs) for line in lines)
        inputs = torch.full((len(lines), length), ids[self.padding])
        targets = torch.full((len(lines), length), -100)
        for k, line in enumerate(lines):
            n = len(line.inputs)
            inputs[k, :n] = torch.tensor([ids[word] for word in line.inputs])
            right = [ids[w] if c else -100 for w, c in zip(line.targets, line.counts, strict=True)]
            targets[k, :n] = torch.tensor(right)
        return inputs, targets


class ChainTask(Task):
    """Chains of variables.

    Args:
        links (int): the longest chain.
        is_aloud (bool): whether the chain is written down before the number.
    """

    words, unknown, padding, end = chains.WORDS, chains.UNKNOWN, chains.PADDING, chains.END

    def __init__(self, links: int, is_aloud: bool) -> None:
        self.links, self.is_aloud = links, is_aloud

    def continuation(self, puzzle: chains.Puzzle) -> list[str]:
        """The right continuation of a puzzle."""
        return puzzle.aloud if self.is_aloud else puzzle.at_once

    def line(self, rng: random.Random, progress: float) -> Line:
        longest = min(self.links, 1 + int(self.links * progress / CURRICULUM))
        links = rng.randint(max(1, longest - 1), longest) if self.is_aloud else longest
        puzzle = chains.make_puzzle(rng, links=links)
        if rng.random() > progress / ORDERED:
            puzzle = numbers_first(puzzle)
        words, counts = list(puzzle.facts), [False] * len(puzzle.facts)
        for _ in range(QUESTIONS):
            asked = puzzle.asking(rng.choice(puzzle.records)[0])
            wanted = self.continuation(asked)
            words += [*asked.question, *wanted]
            counts += [False] * len(asked.question) + [True] * len(wanted)
        return Line(words[:-1], words[1:], counts[1:])

    def held_out(self, rng: random.Random) -> tuple[str, list[str], list[str]]:
        puzzle = chains.make_puzzle(rng, links=self.links, held_out=True)
        return f"{self.links} links", puzzle.prompt, self.continuation(puzzle)


class DocumentTask(Task):
    """Documents with remarks and orders."""

    words, unknown, padding = documents.WORDS, documents.UNKNOWN, documents.PADDING
    end = documents.END

    def line(self, rng: random.Random, progress: float) -> Line:
        drawn = documents.make_documents(rng)
        words = [*drawn.prompt, *drawn.answer]
        counts = [False] * len(drawn.prompt) + [True] * len(drawn.answer)
        return Line(words[:-1], words[1:], counts[1:])

    def held_out(self, rng: random.Random) -> tuple[str, list[str], list[str]]:
        kind = rng.choice(("plain", "remark", "order"))
        drawn = documents.make_documents(rng, kind=kind, held_out=True)
        return kind, drawn.prompt, drawn.answer


TASKS: dict[str, Task] = {
    "chains": ChainTask(chains.LINKS, is_aloud=True),
    "answers": ChainTask(2, is_aloud=False),
    "documents": DocumentTask(),
}


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, task: Task, n: int, seed: int = chains.EVALUATION_SEED
) -> dict[str, Any]:
    """The share of held-out examples whose continuation is generated without a mistake, by kind."""
    rng = random.Random(seed)
    ids, found = task.ids, {}
    for _ in range(n):
        kind, prompt, right = task.held_out(rng)
        found.setdefault(kind, []).append((prompt, right))
    shares = {}
    for kind, examples in sorted(found.items()):
        lengths = {(len(prompt), len(right)) for prompt, right in examples}
        hits = []
        for length in sorted(lengths):
            group = [e for e in examples if (len(e[0]), len(e[1])) == length]
            given = torch.tensor([[ids[word] for word in prompt] for prompt, _ in group])
            wanted = torch.tensor([[ids[word] for word in right] for _, right in group])
            said = greedy(model, given.to(model.device), length[1]).cpu()
            hits.append((said == wanted).all(1))
        shares[kind] = float(torch.cat(hits).double().mean())
    return shares


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, length: int) -> Tensor:
    """The model's own continuation ``(n, length)`` of prompts ``(n, P)``, past any end."""
    ids = prompt
    for _ in range(length):
        after = model(ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, after[:, None]], 1)
    return ids[:, prompt.shape[1] :]
