"""Which examples a report shows as texts: the others are a few numbers each."""

from __future__ import annotations

from collections.abc import Sequence

from captum_ssm.explanation.corpus.parts import ReportExample
from captum_ssm.explanation.corpus.slices import Slice

MOST = 200  # as many at most; the page takes fewer where they are long
EACH = 12  # of the wrong and of the changed ones


def shown_rows(
    examples: Sequence[ReportExample], everything: Slice, slices: Sequence[Slice]
) -> list[int]:
    """Rows of the data, the most wanted first.

    The most and the least typical of all, those that changed most or whose prediction flipped, the
    surest of the wrong predictions, then the most and the least typical of each slice in turn.
    """
    moved = [one for one in examples if one.moved is not None]
    moved.sort(key=lambda one: -(one.moved or 0))
    wrong = [one for one in examples if one.right is False]
    wrong.sort(key=lambda one: one.probability or 0)
    wanted = [*everything.typical, *everything.untypical]
    wanted += [one.index for one in moved[:EACH]]
    wanted += [one.index for one in moved if one.flipped][:EACH]
    wanted += [one.index for one in wrong[:EACH]]
    for rank in range(max((len(one.typical) for one in slices), default=0)):
        for part in slices:
            for rows in (part.typical, part.untypical):
                wanted += rows[rank : rank + 1]
    return list(dict.fromkeys(wanted))[:MOST]
