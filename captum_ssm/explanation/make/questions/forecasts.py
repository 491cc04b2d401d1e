"""The numbers of a forecast: their names, and which of them is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from captum_ssm.errors import TargetError
from captum_ssm.explanation import Answer, Contrast, Output
from captum_ssm.explanation.make.questions.base import TOP, Questions
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.utils.integers import as_index

Place = tuple[int, ...]


@dataclass(frozen=True)
class NumberQuestion(Question):
    """A question about numbers of an output of several axes; each has its number in it."""

    shape: Place = ()

    def place(self, answer: int) -> Place:
        """The index of a number."""
        return tuple(int(k) for k in np.unravel_index(answer, self.shape))


def add_forecast(
    questions: Questions, numbers: Tensor, features: Sequence[str], target: Any, against: Any
) -> None:
    """One output of several numbers, of which one is explained.

    Args:
        questions (Questions): of one example.
        numbers (Tensor): ``(N,)``, or ``(steps, F)`` of the features of the series.
        features (sequence of str): of the series.
        target, against (Any): the index or the name of a number; None for the first, and for no
            contrast.

    Raises:
        TargetError: for a number that there is not.
    """
    shape = tuple(numbers.shape)
    names = _names(shape, features)
    first = 0 if target is None else _number("target", target, names, shape)
    other = None if against is None else _number("against", against, names, shape)
    if other == first:
        raise TargetError(
            f"against is {against!r}, the number that is explained; expected another one."
        )
    later = [k for k in (*range(first + 1, len(names)), *range(first)) if k != other]
    asked = [first, *([] if other is None else [other]), *later[: questions.setup.alternatives]]
    rows = {k: len(questions.questions) + i for i, k in enumerate(asked)}
    ask = partial(NumberQuestion, None, shape=shape)
    questions.questions += [ask(k) for k in asked]
    flat = numbers.flatten().tolist()
    shown = sorted({*asked, *range(min(TOP, len(names)))})
    answers = tuple(Answer(names[k], k, None, flat[k], k + 1, rows.get(k)) for k in shown)
    contrasts: list[Contrast] = []
    if other is not None:
        row = len(questions.questions)
        contrasts = [Contrast(shown.index(first), shown.index(other), row)]
        questions.questions.append(ask(first, other))
    chosen = shown.index(first)
    output = Output(None, answers, chosen, tuple(contrasts), among=len(names))
    questions.outputs.append(output)


def _names(shape: Sequence[int], features: Sequence[str]) -> list[str]:
    # Forecasts of steps have the names of the features; other outputs have their index.
    places = list(product(*map(range, shape)))
    if len(shape) == 2 and shape[1] == len(features):
        return [f"{features[k]}, {step + 1} ahead" for step, k in places]
    return [f"output {', '.join(map(str, place))}" for place in places]


def _number(name: str, wanted: Any, names: Sequence[str], shape: Sequence[int]) -> int:
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    items = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    place, places = tuple(map(as_index, items)), list(product(*map(range, shape)))
    if place in places:
        return places.index(place)  # type: ignore[arg-type]
    raise TargetError(
        f"{name} is {wanted!r}; expected a number of the forecast {places[0]} .. {places[-1]}, or "
        f"its name, such as {names[-1]!r}."
    )
