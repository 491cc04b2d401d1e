"""Parts of a corpus: by target, by right and wrong, by a column, by where examples look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from captum_ssm.explanation.corpus.readings import Reading
from captum_ssm.explanation.corpus.shares import Difference, Share, ShareTable

MOST_VALUES = 12  # of a column; rarer ones are one more slice
OTHERS = "all others"
FEW = 5  # examples that a slice needs
THIRDS = {"at the beginning": range(3), "in the middle": range(3, 7), "at the end": range(7, 10)}


@dataclass(frozen=True)
class Slice:
    """Examples that have something in common.

    Args:
        by (str): what that is: ``"target"``, ``"prediction"`` (right or wrong), ``"group"`` (where
            they look), or the name of a column.
        name (str): its value, or what sets a group apart.
        examples (tuple of int): their rows of the data.
        right (float or None): the part of them that is predicted right.
        probability (float or None): the mean probability of the target.
        shares (dict): mean shares by kind, as :attr:`Report.shares`.
        apart (tuple of Difference): what they give more or less of their relevance to than all
            others do, the surest first.
        typical, untypical (tuple of int): rows of the data, by the distance to the slice's mean.

    Examples::

        >>> explanation = explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"])
        >>> report = summarize(explanation, by=["a", "a", "b"])
        >>> [(one.name, one.examples) for one in report.slices if one.by == "column"]
        [('a', (0, 1)), ('b', (2,))]
    """

    by: str
    name: str
    examples: tuple[int, ...]
    right: float | None
    probability: float | None
    shares: Mapping[str, tuple[Share, ...]]
    apart: tuple[Difference, ...]
    typical: tuple[int, ...]
    untypical: tuple[int, ...]


class Slicer:
    """Makes slices of one corpus.

    Args:
        readings (list of Reading): of N examples.
        tables (dict): the shares of all, by kind.
        rows (numpy.ndarray): their profiles, ``(N, ...)``.
        units (str): the units that are compared, ``"word"`` or ``"token"``.
        shown (int): how many typical examples are named.
    """

    def __init__(
        self,
        readings: list[Reading],
        tables: Mapping[str, ShareTable],
        rows: np.ndarray,
        units: str,
        shown: int,
    ) -> None:
        self.readings, self.tables, self.rows = readings, tables, rows
        self.units, self.shown = units, shown

    def by_value(self, by: str, values: Sequence[Any], least: int = 1) -> list[Slice]:
        """A slice per value; none where all have the same, or no value has ``least`` examples."""
        names = named(values)
        counts = Counter(name for name in names if name is not None)
        if len(counts) < 2 or max(counts.values()) < least:
            return []
        order = sorted(counts, key=lambda name: (name == OTHERS, -counts[name]))
        if all(_is_number(value) for value in values):  # ranges stay in their order
            order = sorted(counts, key=lambda name: values[names.index(name)])
        return [self.make(by, name, np.array([each == name for each in names])) for name in order]

    def groups(self, labels: np.ndarray) -> list[Slice]:
        """A slice per group, named by what sets it apart."""
        if labels.max(initial=0) == 0:
            return []
        groups = [self.make("group", "", labels == k) for k in range(labels.max() + 1)]
        names = [group_name(group, self.units) for group in groups]
        again = Counter(names)
        told = [name if again[name] == 1 else f"{name} ({k + 1})" for k, name in enumerate(names)]
        return [
            Slice(**{**vars(group), "name": name}) for group, name in zip(groups, told, strict=True)
        ]

    def make(self, by: str, name: str, members: np.ndarray) -> Slice:
        """The slice of some examples, ``(N,)`` bool."""
        inside = np.flatnonzero(members)
        rows = self.rows[inside]
        far = np.linalg.norm(rows - rows.mean(0), axis=1)
        order = inside[np.argsort(far, kind="stable")]
        some = [self.readings[i] for i in inside]
        right = [reading.right for reading in some if reading.right is not None]
        known = [reading.probability for reading in some if reading.probability is not None]
        compared = (self.units, "tenth", "part", "layer")
        apart = [
            difference
            for kind in compared
            if kind in self.tables and not members.all()
            for difference in self.tables[kind].apart(members)
        ]
        apart.sort(key=lambda one: -min(abs(one.low), abs(one.high)))
        count = min(self.shown, (len(order) + 1) // 2)
        return Slice(
            by, name, tuple(reading.index for reading in some),
            float(np.mean(right)) if right else None,
            float(np.mean(known)) if known else None,
            {kind: table.shares(members) for kind, table in self.tables.items()},
            tuple(apart),
            tuple(self.readings[i].index for i in order[:count]),
            tuple(self.readings[i].index for i in order[::-1][: min(count, len(order) - count)]),
        )  # fmt: skip


def group_name(group: Slice, units: str) -> str:
    """What sets a group apart: up to two units that it looks at more, or else a third of the text.

    A unit counts where the group gives it twice as much as the others do.
    """
    more = [difference for difference in group.apart if difference.low > 0]
    words = [
        difference
        for difference in more
        if difference.kind == units and difference.here > 2 * difference.elsewhere
    ]
    if words:
        return " and ".join(f"\u201c{difference.key}\u201d" for difference in words[:2])
    tenths: dict[Any, float] = dict.fromkeys(range(10), 0.0)
    tenths |= {
        difference.key: difference.here - difference.elsewhere
        for difference in group.apart
        if difference.kind == "tenth"
    }
    return max(THIRDS, key=lambda name: sum(tenths[k] for k in THIRDS[name]))


def named(values: Sequence[Any]) -> list[str | None]:
    """The name of each value: itself, a quarter of many numbers, or :data:`OTHERS`."""
    known = [value for value in values if value is not None and value == value]
    counts = Counter(known)
    if len(counts) > MOST_VALUES and all(_is_number(value) for value in known):
        ends = np.unique(np.quantile(np.array(known, dtype=float), [0, 0.25, 0.5, 0.75, 1]))
        return [_quarter(value, ends) for value in values]
    common = {value for value, count in counts.most_common(MOST_VALUES) if count >= FEW}
    if len(counts) <= MOST_VALUES:
        common = set(counts)
    return [
        None if value is None or value != value else str(value) if value in common else OTHERS
        for value in values
    ]


def _quarter(value: Any, ends: np.ndarray) -> str | None:
    if value is None or value != value:
        return None
    k = min(int(np.searchsorted(ends, value, side="right")), len(ends) - 1) - 1
    return f"{ends[k]:.4g} to {ends[k + 1]:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
