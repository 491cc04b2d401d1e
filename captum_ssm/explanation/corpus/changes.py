"""What changed between two runs of the same examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from captum_ssm.explanation.corpus.readings import Reading
from captum_ssm.explanation.corpus.shares import Difference, ShareTable
from captum_ssm.utils.intervals import Interval, moderated_halves


@dataclass(frozen=True)
class Change:
    """What changed from this run to another one of the same data.

    Args:
        other (str): what the other run is: its model, or its method.
        moved (Interval): the mean over examples of the part of the relevance that lies on other
            units of the text, half of the sum of all differences of shares.
        examples (dict): that part, by the row of the data.
        shares (dict): by kind, the keys whose mean share moved, the surest first; the interval is
            that of the differences in pairs.
        flipped (tuple of int): rows whose prediction is another one.
        unpaired (int): examples of one of the runs alone, or of another text in it.

    Examples::

        >>> first = explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"])
        >>> summarize(first, against=first).change.moved.value
        0.0
    """

    other: str
    moved: Interval
    examples: Mapping[int, float]
    shares: Mapping[str, tuple[Difference, ...]]
    flipped: tuple[int, ...]
    unpaired: int


def change(first: list[Reading], second: list[Reading], other: str) -> Change:
    """The change from the readings of one run to those of another one.

    Raises:
        ValueError: where no example is the same in both.
    """
    theirs = {reading.index: reading for reading in second}
    pairs = [
        (reading, theirs[reading.index])
        for reading in first
        if reading.index in theirs and theirs[reading.index].units == reading.units
    ]
    if not pairs:
        raise ValueError(
            f"none of the {len(first)} examples is the same text in the run it is held against, "
            f"which has {len(second)}; expected two runs of the same data, in the same order."
        )
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    moved = np.array([np.abs(a.vector - b.vector).sum() / 2 for a, b in pairs], dtype=float)
    n, mean = len(moved), float(moved.mean())
    variance = float(moved.var(ddof=1)) if n > 1 else 0.0
    (half,) = moderated_halves(np.array([n]), np.array([variance]))
    known = [{kind: 0 for reading in run for kind in reading.kinds} for run in (before, after)]
    kinds = [kind for kind in known[0] if kind in known[1]]
    tables = [(ShareTable(before, kind), ShareTable(after, kind)) for kind in kinds]
    return Change(
        other,
        Interval(mean, max(0.0, mean - float(half)), min(1.0, mean + float(half)), n),
        {a.index: float(distance) for (a, _), distance in zip(pairs, moved, strict=True)},
        {kind: a.change(b) for kind, (a, b) in zip(kinds, tables, strict=True)},
        tuple(a.index for a, b in pairs if a.prediction != b.prediction),
        len(first) + len(second) - 2 * len(pairs),
    )
