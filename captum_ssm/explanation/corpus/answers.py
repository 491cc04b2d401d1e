"""What outputs answer, in one text: as shards and reports tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from captum_ssm.explanation.parts import Output


class ToldAnswer(NamedTuple):
    """The answers of several outputs, joined.

    Args:
        target (str): what is explained first at each.
        prediction (str): the likeliest one at each.
        probability (float or None): of all that is explained; None where one has none.
    """

    target: str
    prediction: str
    probability: float | None


def told_answer(outputs: Sequence[Output], between: str = "") -> ToldAnswer:
    """What outputs answer, with what stands between two answers."""
    chosen = [one.answers[one.chosen] for one in outputs]
    likely = [min(one.answers, key=lambda answer: answer.rank) for one in outputs]
    known = [answer.probability for answer in chosen if answer.probability is not None]
    return ToldAnswer(
        between.join(answer.text for answer in chosen),
        between.join(answer.text for answer in likely),
        math.prod(known) if len(known) == len(chosen) else None,
    )
