"""One series ``(T, F)``, or one row of a table: what the model sees in it, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.inputs.arrays import Given, arranged
from captum_ssm.explanation.make.questions.base import (
    Questions,
    Setup,
    Steps,
    per_example,
    to_numpy,
)
from captum_ssm.explanation.make.questions.forecasts import add_forecast
from captum_ssm.explanation.make.questions.labels import classes_of, configured, names_of
from captum_ssm.explanation.make.questions.observed import Look
from captum_ssm.explanation.make.relevance.run import Run

PLACEHOLDER = re.compile(r"LABEL_\d+")


@dataclass(frozen=True)
class SeriesQuestion:
    """What is asked about one series or row ``values (1, ...)``: as ``explain`` takes it.

    With ``labels``, or those of the model's configuration, the output is one score per class;
    without, each of its numbers is a forecast.
    """

    values: Tensor
    axes: str
    name: str
    features: tuple[str, ...]
    target: Any
    against: Any
    labels: Sequence[str] | Mapping[int, str] | None

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.values.numel()

    def answer(self, setup: Setup) -> Steps[Example]:
        """The series, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        values = self.values.to(next(setup.model.parameters()).device)
        seen = yield Look(Run(setup.model), values)
        output = seen.scores.float()
        if output.shape[0] != 1 or output.dim() not in (2, 3):
            raise InputError(
                f"the model returns an output of shape {tuple(output.shape)} for one series; "
                "expected (1, classes), (1, numbers) or (1, steps, features). Other outputs are "
                "explained by the methods' own attribute, with a target that selects one number."
            )
        questions = self._asked(setup, output[0])
        questions.require_memory(values.numel())
        relevance, deltas = yield from questions.explained(values, self._kept)
        return Example(
            self.name,
            tuple(questions.outputs),
            relevance,
            deltas,
            series=to_numpy(self._kept(self.values)[0]),
            features=self.features,
            validation=questions.validation,
        )

    def _asked(self, setup: Setup, output: Tensor) -> Questions:
        if not self._has_classes(setup.model, output):
            questions = Questions(setup, str)
            add_forecast(questions, output, self.features, self.target, self.against)
            return questions
        names = names_of(self.labels, setup.model, len(output))
        chosen, against = classes_of(self.target, self.against, names, output)
        questions = Questions(setup, lambda index: names[index])
        questions.add(output, None, chosen, against)
        return questions

    def _has_classes(self, model: Any, output: Tensor) -> bool:
        # Classes have names; a configuration that nobody filled in has placeholders.
        if output.dim() != 1:
            return False
        names = configured(model)
        is_named = not all(PLACEHOLDER.fullmatch(str(name)) for name in names.values())
        return self.labels is not None or (len(names) == len(output) and is_named)

    def _kept(self, rows: Tensor) -> Tensor:
        # Rows (R, ...) in the model's axes, as (R, T, F) or (R, F).
        if self.axes == "1f":
            return rows
        if "f" not in self.axes:
            return rows.flatten(1)[..., None]
        return arranged(rows, f"{self.axes.replace('1', 'r')}->rtf")


def series_questions(found: Given, target: Any, against: Any, labels: Any) -> list[SeriesQuestion]:
    """What is asked about each series.

    Raises:
        ValueError: for targets that are not one per example.
    """
    B = len(found.examples)
    targets, others = per_example("target", target, B), per_example("against", against, B)
    return [
        SeriesQuestion(values, found.axes, name, found.features, a, b, labels)
        for values, name, a, b in zip(found.examples, found.names, targets, others, strict=True)
    ]
