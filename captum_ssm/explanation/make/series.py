"""One series, T time steps of F features: what the model forecasts or sees in it, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError, TargetError
from captum_ssm.explanation import Answer, Example, Output
from captum_ssm.explanation.make.questions import Questions, Setup, to_numpy
from captum_ssm.explanation.make.rows import Question
from captum_ssm.explanation.make.rows import has_delta
from captum_ssm.utils.integers import as_index


@dataclass(frozen=True)
class SeriesQuestion:
    """What is asked about one series, ``values (1, T, F)``: as ``explain`` takes it.

    With ``labels``, or those of the model's configuration, the output is one score per class;
    without, each of its numbers is a forecast.
    """

    values: Tensor
    features: tuple[str, ...]
    name: str
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
        names = self._class_names(setup.model, output)
        explained = self._class if names is not None else self._forecast
        outputs, relevance, deltas = explained(setup, values, output[0], names or ())
        series = to_numpy(self.values[0])
        return Example(self.name, outputs, relevance, deltas, series=series, features=self.features)

    def _class_names(self, model: Any, output: Tensor) -> list[str] | None:
        labels = self.labels
        if labels is None:
            labels = getattr(getattr(model, "config", None), "id2label", None)
        if labels is None or output.dim() != 2 or len(labels) != output.shape[1]:
            return None
        return [str(labels[k]) for k in range(len(labels))]

    def _class(
        self, setup: Setup, values: Tensor, scores: Tensor, names: Sequence[str]
    ) -> tuple[tuple[Output, ...], dict[str, np.ndarray], dict[str, np.ndarray]]:
        chosen = _choice("target", self.target, names)
        against = _choice("against", self.against, names)
        questions = Questions(setup, lambda index: names[index])
        questions.add(scores, None, chosen, against)
        questions.require_memory(values[0].numel())
        relevance, deltas = questions.explained(values, lambda rows: rows)
        return tuple(questions.outputs), relevance, deltas

    def _forecast(
        self, setup: Setup, values: Tensor, forecast: Tensor, _: Sequence[str]
    ) -> tuple[tuple[Output, ...], dict[str, np.ndarray], dict[str, np.ndarray]]:
        names = {place: _number_name(place, self.features) for place in _places(forecast)}
        place = _number("target", self.target, names) or next(iter(names))
        score = float(forecast[place])
        answers = (Answer(names[place], list(names).index(place), None, score, 1, 0),)
        relevance, deltas = {}, {}
        for name, method in setup.methods.items():
            rows, delta = method.rows(values, [Question(None, place)], name)
            relevance[name] = to_numpy(rows)
            if delta is not None:
                deltas[name] = to_numpy(delta)
        return (Output(None, answers, 0),), relevance, deltas


def as_series(inputs: Any) -> tuple[Tensor, tuple[str, ...]] | None:
    """A batch of series ``(B, T, F)`` and the names of their features; None for other inputs.

    A pandas table is a series whose columns are its features; so is a float tensor or array of two
    axes. One of three axes may be an image too: see :func:`is_series`.
    """
    columns = getattr(inputs, "columns", None)
    values = inputs.to_numpy(dtype=np.float32) if columns is not None else inputs
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if not torch.is_tensor(values) or not values.is_floating_point() or values.numel() == 0:
        return None
    if values.dim() not in (2, 3):
        return None
    batch = values[None] if values.dim() == 2 else values
    count = batch.shape[2]
    names = [f"feature {k}" for k in range(count)] if columns is None else map(str, columns)
    return batch, tuple(names)


def is_series(model: Any, inputs: Any) -> bool:
    """Whether inputs are series for this model.

    A tensor of three axes is an image ``(C, H, W)`` where the model takes it with a batch axis in
    front; else it is a batch of series.
    """
    found = as_series(inputs)
    if found is None:
        return False
    if not torch.is_tensor(inputs) or inputs.dim() == 2:
        return True
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model(inputs[None].to(device))
    except Exception:  # the model's own, of any kind: it does not take an image
        return True
    return False


def series_questions(inputs: Any, target: Any, against: Any, labels: Any) -> list[SeriesQuestion]:
    """What is asked about each series.

    Raises:
        TypeError: for inputs that are not series.
    """
    found = as_series(inputs)
    if found is None:
        raise TypeError(f"inputs is a {type(inputs).__name__}; expected a series (T, F) of floats.")
    batch, features = found
    one = SeriesQuestion(batch[:1], features, "series", target, against, labels)
    if len(batch) == 1:
        return [one]
    return [replace(one, values=v[None], name=f"series {k + 1}") for k, v in enumerate(batch)]


def _choice(name: str, wanted: Any, names: Sequence[str]) -> int | None:
    if wanted is None:
        return None
    index = list(names).index(wanted) if wanted in names else as_index(wanted)
    if index is None or not 0 <= index < len(names):
        raise TargetError(
            f"{name} is {wanted!r}; expected a class 0 .. {len(names) - 1}, or its name: "
            f"{', '.join(names[:20])}."
        )
    return index


def _places(forecast: Tensor) -> list[tuple[int, ...]]:
    return list(product(*map(range, forecast.shape)))


def _number_name(place: tuple[int, ...], features: Sequence[str]) -> str:
    # Forecasts of steps have the names of the features; of one number, its index.
    if len(place) == 2 and place[1] < len(features):
        return f"{features[place[1]]}, {place[0] + 1} ahead"
    return f"output {', '.join(map(str, place))}"


def _number(name: str, wanted: Any, names: Mapping[tuple[int, ...], str]) -> tuple[int, ...] | None:
    if wanted is None:
        return None
    by_name = {text: place for place, text in names.items()}
    if isinstance(wanted, str) and wanted in by_name:
        return by_name[wanted]
    items = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    place = tuple(as_index(item) for item in items)
    if place in names:
        return place  # type: ignore[return-value]
    last, text = list(names.items())[-1]
    raise TargetError(
        f"{name} is {wanted!r}; expected an index of the forecast, {next(iter(names))} .. {last}, "
        f"or its name, such as {text!r}."
    )
