"""Chains of variables: puzzles whose answer is reached link by link, aloud or without words.

    a = c ; f = 31 ; k = 17 ; c = k ; e = f ; b = e ; ? a = c = k = 17 .
    \\_____________________ prompt ___________________/ \\_ continuation _/

The records of several chains stand in random order. The question asks for one variable, and the
continuation follows its chain to the number at its end. Every link has one record in the prompt,
and where the chain is written down, every link is a thought as well (``c``, ``k``) that the next
one can be read from. So it is known which record each word rests on; whether an answer follows
the thoughts or the prompt is known only after they were made to differ (:func:`other_thought`).

A puzzle may also be answered at once (``? a = 17 .``), which takes all links in one step.

Training and held-out puzzles are told apart by their records, in order: one list in eight, chosen
by a hash, is reserved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from captum_ssm.examples.split import is_reserved

VARIABLES = tuple("abcdefghijklmnop")
NUMBERS = tuple(str(n) for n in range(10, 40))
EQUALS, BREAK, ASK, END = "=", ";", "?", "."
UNKNOWN, PADDING = "<unk>", "<pad>"
WORDS = (UNKNOWN, PADDING, EQUALS, BREAK, ASK, END, *VARIABLES, *NUMBERS)
IDS = {word: index for index, word in enumerate(WORDS)}

RECORD_LENGTH = 4
LINKS, CHAINS = 4, 2
"""The puzzles that the models are made for: links of a chain, and chains."""

EVALUATION_SEED = 20_005


@dataclass(frozen=True)
class Puzzle:
    """Records of several chains, and a question about a variable of one.

    Args:
        records (tuple of pairs): each variable with what it equals, in the order of the prompt.
        asked (str): the variable of the question.

    Examples::

        >>> from captum_ssm.examples.chains import Puzzle
        >>> puzzle = Puzzle((("a", "c"), ("k", "17"), ("c", "k")), asked="a")
        >>> " ".join(puzzle.prompt), " ".join(puzzle.aloud), " ".join(puzzle.at_once)
        ('a = c ; k = 17 ; c = k ; ? a =', 'c = k = 17 .', '17 .')
    """

    records: tuple[tuple[str, str], ...]
    asked: str

    @property
    def facts(self) -> list[str]:
        """The words of the records."""
        return [word for name, value in self.records for word in (name, EQUALS, value, BREAK)]

    @property
    def question(self) -> list[str]:
        """The words after the records."""
        return [ASK, self.asked, EQUALS]

    @property
    def prompt(self) -> list[str]:
        """Records and question; the last token reads the first word of the continuation."""
        return self.facts + self.question

    @property
    def links(self) -> list[int]:
        """The records on the way from the asked variable to its number, by index."""
        index = {name: k for k, (name, _) in enumerate(self.records)}
        links, name = [], self.asked
        while name in index and index[name] not in links:
            links.append(index[name])
            name = self.records[links[-1]][1]
        return links

    @property
    def thoughts(self) -> list[str]:
        """The variables between the asked one and its number."""
        return [self.records[k][1] for k in self.links[:-1]]

    @property
    def answer(self) -> str:
        """What the last link says: a number, unless a record was changed or taken away."""
        return self.records[self.links[-1]][1]

    @property
    def aloud(self) -> list[str]:
        """The continuation with its thoughts: ``c = k = 17 .``"""
        return [word for thought in self.thoughts for word in (thought, EQUALS)] + self.at_once

    @property
    def at_once(self) -> list[str]:
        """The continuation without thoughts: ``17 .``"""
        return [self.answer, END]

    @property
    def is_held_out(self) -> bool:
        """Whether it is reserved for evaluation, by a hash of its records."""
        return is_reserved(" ".join(self.facts))

    def positions(self, record: int) -> range:
        """Where the words of a record stand in the prompt, without the break after them."""
        return range(RECORD_LENGTH * record, RECORD_LENGTH * (record + 1) - 1)

    def asking(self, variable: str) -> Puzzle:
        """These records with another question."""
        return replace(self, asked=variable)

    def without(self, record: int) -> Puzzle:
        """One record fewer."""
        return replace(self, records=self.records[:record] + self.records[record + 1 :])

    def changed(self, record: int, value: str) -> Puzzle:
        """One record that says something else."""
        name, _ = self.records[record]
        records = (*self.records[:record], (name, value), *self.records[record + 1 :])
        return replace(self, records=records)

    @property
    def others(self) -> list[int]:
        """The records of the chain that is not asked for, link by link, if there are two chains.

        Raises:
            ValueError: for puzzles of another number of chains.
        """
        mine = self.links
        rest = [k for k in range(len(self.records)) if k not in mine]
        values = {self.records[k][1] for k in rest}
        first = [k for k in rest if self.records[k][0] not in values]
        if len(first) != 1:
            raise ValueError(f"the puzzle has {1 + len(first)} chains; expected 2.")
        return self.asking(self.records[first[0]][0]).links


def make_puzzle(
    rng: random.Random, *, links: int = LINKS, chains: int = CHAINS, held_out: bool = False
) -> Puzzle:
    """A puzzle about the first variable of one of its chains.

    Args:
        rng (random.Random): draws it.
        links (int, optional): the records of each chain. Default: 4
        chains (int, optional): their number. Default: 2
        held_out (bool, optional): whether it is one of those reserved. Default: False

    Examples::

        >>> import random
        >>> from captum_ssm.examples.chains import make_puzzle
        >>> puzzle = make_puzzle(random.Random(0), links=2)
        >>> len(puzzle.records), len(puzzle.links), len(puzzle.thoughts)
        (4, 2, 1)
    """
    while True:
        names = rng.sample(VARIABLES, links * chains)
        numbers = rng.sample(NUMBERS, chains)
        rows = [[*names[k * links : (k + 1) * links], numbers[k]] for k in range(chains)]
        records = [pair for row in rows for pair in pairwise(row)]
        rng.shuffle(records)
        puzzle = Puzzle(tuple(records), names[0])
        if puzzle.is_held_out == held_out:
            return puzzle


def other_thought(puzzle: Puzzle, thought: int) -> Puzzle:
    """The puzzle whose chain goes on in the other one after ``thought`` thoughts.

    Its ``aloud`` has the other chain's variable in the place of the swapped thought, and its
    ``answer`` is what a model says that follows the thought.

    Args:
        puzzle (Puzzle): one of two chains.
        thought (int): which thought is swapped, from 0.

    Examples::

        >>> from captum_ssm.examples.chains import Puzzle, other_thought
        >>> records = (("a", "c"), ("k", "17"), ("c", "k"), ("e", "f"), ("f", "b"), ("b", "31"))
        >>> puzzle = Puzzle(records, asked="a")
        >>> " ".join(puzzle.aloud), " ".join(other_thought(puzzle, 0).aloud)
        ('c = k = 17 .', 'f = b = 31 .')
    """
    others, link = puzzle.others, puzzle.links[thought]
    return puzzle.changed(link, puzzle.records[others[thought]][1])


def encode(words: Sequence[str]) -> list[int]:
    """The ids of words, which the models' tokenizers give as well.

    Args:
        words (sequence of str): of :data:`WORDS`.

    Examples::

        >>> from captum_ssm.examples.chains import encode
        >>> encode(["a", "=", "10"])
        [6, 2, 22]
    """
    return [IDS[word] for word in words]
