"""One series ``(T, F)``, or one row of a table: what the model sees in it, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.numbers import chosen_of, class_names
from captum_ssm.explanation.make.arrays import Given, arranged
from captum_ssm.explanation.make.questions import Questions, Setup, per_example, to_numpy


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

    def answer(self, setup: Setup) -> Example:
        """The series, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        values = self.values.to(next(setup.model.parameters()).device)
        with torch.no_grad():
            output = extract_logits(setup.model(values)).float()
        if output.shape[0] != 1 or output.dim() not in (2, 3):
            raise InputError(
                f"the model returns an output of shape {tuple(output.shape)} for one series; "
                "expected (1, classes), (1, numbers) or (1, steps, features). Other outputs are "
                "explained by the methods' own attribute, with a target that selects one number."
            )
        questions = self._asked(setup, output[0])
        questions.require_memory(values.numel())
        relevance, deltas = questions.explained(values, self._kept)
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
        labels = class_names(self.labels, setup.model, len(output)) if output.dim() == 1 else None
        names: dict[Any, str] = dict(enumerate(labels or ())) or self._numbers(output)
        first = next(iter(names)) if labels is None else int(output.argmax())
        what = "a number of the forecast" if labels is None else "a class"
        chosen, against = chosen_of(self.target, self.against, names, first, what)
        questions = Questions(setup, lambda index: names[index])
        if labels is None:
            questions.add_forecast(output, names, chosen, against)
        else:
            questions.add(output, None, chosen, against)
        return questions

    def _kept(self, rows: Tensor) -> Tensor:
        # Rows (R, ...) in the model's axes, as (R, T, F) or (R, F).
        if self.axes == "1f":
            return rows
        if "f" not in self.axes:
            return rows.flatten(1)[..., None]
        return arranged(rows, f"{self.axes.replace('1', 'r')}->rtf")

    def _numbers(self, forecast: Tensor) -> dict[Any, str]:
        places = product(*map(range, forecast.shape))
        return {place: _number_name(place, forecast.shape, self.features) for place in places}


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


def _number_name(place: tuple[int, ...], shape: Sequence[int], features: Sequence[str]) -> str:
    # Forecasts of steps have the names of the features; other outputs have their index.
    if len(shape) == 2 and shape[1] == len(features):
        return f"{features[place[1]]}, {place[0] + 1} ahead"
    return f"output {', '.join(map(str, place))}"
