"""The passkey task: records of a key and a value among filler, and a question about one of them.

``x q <KEY> B 4 m s <KEY> P 9 t ... <QUERY> B`` is to be continued by ``4``. A model can only know
the answer from the value of the record with the asked key, so the token that decides every answer
is known, and with it what an explanation should point at and what it should not: the values of the
other records, which look just like the right one.

Layout, for a context of ``n`` tokens::

    position   0 .. n-1            n        n+1    n+2
    token      records, filler     <QUERY>  key    value

Position ``i`` predicts token ``i + 1``: the answer is predicted at ``n + 1``. A batch can ask
several questions in turn (training does); each follows the answer before it in the same layout.

The vocabulary needs no tokenizer: ids 0 to 25 are the letters ``a`` to ``z``, of which filler is
made, 26 to 35 the digits, the values, 36 to 51 the capitals ``A`` to ``P``, the keys, and the last
two ``<KEY>`` and ``<QUERY>``. The keys of one example differ from one another; everything else is
drawn independently and uniformly, so that two records may hold the same value.

Training and held-out examples are told apart by their records (all keys and values, in order), as
the copying task does it with its strings: one list of records in sixteen, chosen by its fixed hash,
is reserved. :func:`make_batch` never returns a reserved one and :func:`held_out_batch` nothing
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from captum_ssm.examples.copying import SYMBOLS, is_held_out

DIGITS: tuple[str, ...] = tuple("0123456789")
KEYS: tuple[str, ...] = tuple("ABCDEFGHIJKLMNOP")
KEY, QUERY = "<KEY>", "<QUERY>"
VOCABULARY: tuple[str, ...] = (*SYMBOLS, *DIGITS, *KEYS, KEY, QUERY)
VOCABULARY_SIZE = len(VOCABULARY)
FIRST_DIGIT_ID = len(SYMBOLS)
FIRST_KEY_ID = FIRST_DIGIT_ID + len(DIGITS)
KEY_ID, QUERY_ID = (VOCABULARY.index(word) for word in (KEY, QUERY))

VALUE_LENGTH = 1
RECORD_LENGTH = 2 + VALUE_LENGTH
RECORDS = 4
CONTEXT = 64
"""Longest context in training; shorter ones go down to half of it."""


@dataclass(frozen=True)
class PasskeyBatch:
    """Examples with one length of context, one number of records and one number of questions.

    Attributes:
        tokens: Token ids, shape ``(examples, context + 3 * questions)``, dtype ``int64``.
        context: Number of tokens before the first ``<QUERY>``.
        starts: Position of each record's ``<KEY>``, in order, shape ``(examples, records)``.
        asked: Which of these records each question is about, shape ``(examples, questions)``.
    """

    tokens: Tensor
    context: int
    starts: Tensor
    asked: Tensor

    @property
    def inputs(self) -> Tensor:
        """What a model reads: all tokens but the last, after which nothing is predicted."""
        return self.tokens[:, :-1]

    @property
    def prompt(self) -> Tensor:
        """The tokens up to the first question's key: where generation of the answer starts."""
        return self.tokens[:, : self.context + 2]

    @property
    def targets(self) -> Tensor:
        """The tokens of the answers, shape ``(examples, questions)``."""
        return self.tokens[:, self.predicting_positions + 1]

    @property
    def predicting_positions(self) -> Tensor:
        """Input positions whose prediction is an answer, in order."""
        return predicting_positions(self.context, self.asked.shape[1])

    @property
    def answer_positions(self) -> Tensor:
        """Where in the context each target stands, shape ``(examples, questions)``."""
        starts = self.starts.gather(1, self.asked)
        return (starts[..., None] + 2 + torch.arange(VALUE_LENGTH)).flatten(1)

    def record_masks(self) -> tuple[Tensor, Tensor]:
        """Context positions of the record first asked about, and those of all others.

        Two boolean tensors of shape ``(examples, context)``; filler is in neither.
        """
        positions = torch.arange(self.context)
        offset = positions - self.starts[..., None]
        inside = (offset >= 0) & (offset < RECORD_LENGTH)
        right = torch.arange(self.starts.shape[1]) == self.asked[:, :1]
        return (inside & right[..., None]).any(1), (inside & ~right[..., None]).any(1)


def decode(tokens: Tensor | Sequence[int]) -> list[str]:
    """Vocabulary entries of a one-dimensional tensor, or sequence, of token ids."""
    return [VOCABULARY[int(token)] for token in tokens]


def predicting_positions(context: int, questions: int = 1) -> Tensor:
    """Input positions whose prediction is an answer, one for each question."""
    first = context + 1 + RECORD_LENGTH * torch.arange(questions)
    return (first[:, None] + torch.arange(VALUE_LENGTH)).flatten()


def _distinct(n: int, choices: int, count: int, generator: torch.Generator) -> Tensor:
    """``n`` rows of ``count`` different numbers below ``choices``, in random order."""
    return torch.rand(n, choices, generator=generator).argsort(1)[:, :count]


def _records(n: int, records: int, generator: torch.Generator, held_out: bool) -> Tensor:
    """Keys and values from one side of the split, ``(n, records, 1 + VALUE_LENGTH)``, as ids."""
    found = torch.zeros(n, records, 1 + VALUE_LENGTH, dtype=torch.int64)
    wrong = torch.ones(n, dtype=torch.bool)
    while wrong.any():
        keys = _distinct(n, len(KEYS), records, generator) + FIRST_KEY_ID
        shape = (n, records, VALUE_LENGTH)
        values = torch.randint(len(DIGITS), shape, generator=generator) + FIRST_DIGIT_ID
        found[wrong] = torch.cat([keys[..., None], values], -1)[wrong]
        wrong = is_held_out(found.flatten(1)) != held_out
    return found


def make_batch(
    n: int,
    generator: torch.Generator,
    context: int = CONTEXT,
    records: int = RECORDS,
    questions: int = 1,
    *,
    held_out: bool = False,
) -> PasskeyBatch:
    """A batch of ``n`` examples.

    The same state of the ``generator`` gives the same batch. ``context`` and ``records`` count the
    tokens before the question and the records among them; the rest is filler. A record can be asked
    for twice; reserved ones, which training examples never are, are ``held_out``.
    """
    filler = context - RECORD_LENGTH * records
    if filler < 0 or questions < 1 or not 1 <= records <= len(KEYS):
        raise ValueError(
            f"{records} records and {questions} questions do not go with {context} tokens"
        )
    tokens = torch.randint(len(SYMBOLS), (n, context), generator=generator)
    # Every filler token and every record is one slot; a record then takes two tokens more.
    slots = _distinct(n, filler + records, records, generator).sort(1).values
    starts = slots + (RECORD_LENGTH - 1) * torch.arange(records)
    asked = torch.randint(records, (n, questions), generator=generator)
    marks = torch.full((n, records, 1), KEY_ID)
    whole = torch.cat([marks, _records(n, records, generator, held_out)], -1)
    positions = starts[..., None] + torch.arange(RECORD_LENGTH)
    tokens.scatter_(1, positions.flatten(1), whole.flatten(1))
    chosen = whole.gather(1, asked[..., None].expand(-1, -1, RECORD_LENGTH)).clone()
    chosen[..., 0] = QUERY_ID
    return PasskeyBatch(torch.cat([tokens, chosen.flatten(1)], 1), context, starts, asked)


held_out_batch = partial(make_batch, held_out=True)
