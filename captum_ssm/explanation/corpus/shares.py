"""Mean shares of what tokens have in common, with intervals; and what differs between examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from captum_ssm.explanation.corpus.readings import Reading, rows_of_kind
from captum_ssm.utils.intervals import moderated_halves


@dataclass(frozen=True)
class Share:
    """The mean share of relevance of tokens that have something in common.

    Args:
        kind (str): what that is: ``"word"``, ``"token"``, ``"part"`` (a named part, or a turn of a
            conversation), ``"tenth"`` (of the text), ``"start"``, ``"end"`` or ``"distance"`` (how
            many tokens after the first, before the last, and before the one at which the answer
            is read; from 16 on, bins that double), or ``"layer"``.
        key (str or int): their text, name or position.
        examples (int): in how many examples there are any.
        count (float): how many there are; of several outputs, per output.
        share (float): the mean over examples of the share that one of them has: its part of the
            total magnitude of a row. A part, a tenth and a layer are counted as a whole.
        low, high (float): the interval of that mean, 95%, over examples.
        total (float): their part of all relevance.
        leaning (float): 1 where all of it supports what is explained, -1 where all opposes it.

    Examples::

        >>> report = summarize(explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"]))
        >>> sorted(one.key for one in report.shares["token"])
        ['w3', 'w4']
    """

    kind: str
    key: str | int
    examples: int
    count: float
    share: float
    low: float
    high: float
    total: float
    leaning: float


class ShareTable:
    """All shares of one kind: per example and key."""

    def __init__(self, readings: list[Reading], kind: str) -> None:
        self.kind, self.size = kind, len(readings)
        ids: dict[Any, int] = {}
        examples, keys, numbers = [], [], []
        for k, names, rows in rows_of_kind(readings, kind):
            examples += [k] * len(names)
            keys += [ids.setdefault(name, len(ids)) for name in names]
            numbers.append(rows)
        self.keys = list(ids)
        self.example, self.key = np.array(examples, dtype=int), np.array(keys, dtype=int)
        self.numbers = np.concatenate(numbers) if numbers else np.zeros((0, 4))

    def says(self, other: ShareTable) -> bool:
        """Whether another table has the same keys and numbers."""
        return self.keys == other.keys and np.array_equal(self.numbers, other.numbers)

    def shares(self, members: np.ndarray | None = None) -> tuple[Share, ...]:
        """The mean shares, highest lower end first; those of one example come last.

        Args:
            members (numpy.ndarray, optional): which examples count, ``(N,)`` bool. Default: None
        """
        among = np.ones(self.size, dtype=bool) if members is None else members
        inside = among[self.example]
        key, numbers, K = self.key[inside], self.numbers[inside], len(self.keys)
        examples = np.bincount(key, minlength=K)
        present = np.flatnonzero(examples)
        mean, variance = _moments(key, numbers[:, 0], examples, present)
        half = moderated_halves(examples[present], variance, mean * (1 - mean))
        total, signed, count = (
            np.bincount(key, weights=numbers[:, c], minlength=K)[present] for c in (1, 2, 3)
        )
        order = np.lexsort((-mean, half - mean, examples[present] == 1))
        low, high = np.maximum(mean - half, 0), np.minimum(mean + half, 1)
        return tuple(
            Share(
                self.kind, self.keys[present[i]], int(examples[present[i]]), float(count[i]),
                float(mean[i]), float(low[i]), float(high[i]), float(total[i] / among.sum()),
                float(signed[i] / total[i]) if total[i] else 0.0,
            )
            for i in order
        )  # fmt: skip

    def apart(self, members: np.ndarray) -> tuple[Difference, ...]:
        """What these examples give more or less of their relevance to than all others.

        ``members`` are bools, ``(N,)``. A difference whose interval holds 0 is left out; the surest
        comes first.
        """
        totals = []
        for among in (members, ~members):
            inside, K = among[self.example], len(self.keys)
            mean, variance = _moments(
                self.key[inside], self.numbers[inside, 1], np.full(K, among.sum()), np.arange(K)
            )
            totals.append((mean, moderated_halves(np.full(K, among.sum()), variance)))
        (here, a), (elsewhere, b) = totals
        return _surest(self.kind, self.keys, here, elsewhere, np.hypot(a, b))

    def change(self, other: ShareTable) -> tuple[Difference, ...]:
        """How much the share of each key moved to ``other``, of the same examples in pairs."""
        theirs = {
            (k, other.keys[key]): numbers[0]
            for k, key, numbers in zip(other.example, other.key, other.numbers, strict=True)
        }
        mine = [(k, self.keys[key]) for k, key in zip(self.example, self.key, strict=True)]
        both = np.array([pair in theirs for pair in mine], dtype=bool)
        before = self.numbers[both, 0]
        after = np.array([theirs[pair] for pair in mine if pair in theirs])
        key, K = self.key[both], len(self.keys)
        examples = np.bincount(key, minlength=K)
        present = np.flatnonzero(examples)
        if not len(present):
            return ()
        moved, variance = _moments(key, after - before, examples, present)
        start, _ = _moments(key, before, examples, present)
        half = moderated_halves(examples[present], variance)
        keys = [self.keys[i] for i in present]
        return _surest(self.kind, keys, start + moved, start, half)


@dataclass(frozen=True)
class Difference:
    """A share here, and elsewhere.

    Args:
        kind (str): of the key, as of :class:`Share`.
        key (str or int): the text, name or position.
        here, elsewhere (float): of a slice: the part of all relevance, in the slice and in the
            other examples. Of two runs: the mean share, in the other run and in this one.
        low, high (float): the interval of ``here`` minus ``elsewhere``, 95%.

    Examples::

        >>> first = explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"])
        >>> summarize(first, against=first).change.shares["token"]
        ()
    """

    kind: str
    key: str | int
    here: float
    elsewhere: float
    low: float
    high: float


def _moments(
    key: np.ndarray, values: np.ndarray, examples: np.ndarray, present: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # Means and variances per key over so many examples; one that has no entry counts as 0.
    n = examples[present]
    mean = np.bincount(key, weights=values, minlength=len(examples))[present] / np.maximum(n, 1)
    squares = np.bincount(key, weights=values**2, minlength=len(examples))[present]
    variance = np.maximum(squares - n * mean**2, 0) / np.maximum(n - 1, 1)
    return mean, variance


def _surest(
    kind: str, keys: Sequence[Any], here: np.ndarray, elsewhere: np.ndarray, half: np.ndarray
) -> tuple[Difference, ...]:
    moved = here - elsewhere
    least = np.abs(moved) - half
    order = [i for i in np.argsort(-least, kind="stable") if least[i] > 0]
    return tuple(
        Difference(kind, keys[i], float(here[i]), float(elsewhere[i]),
                   float(moved[i] - half[i]), float(moved[i] + half[i]))
        for i in order
    )  # fmt: skip
