"""One input that is not a text: an image, a video, a series or a row of a table, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from captum_ssm.errors import InputError, TargetError, brief
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.inputs.arrays import Given, arranged
from captum_ssm.explanation.make.inputs.pictures import shown
from captum_ssm.explanation.make.questions.base import (
    Choices,
    Questions,
    Setup,
    Steps,
    per_example,
    to_numpy,
)
from captum_ssm.explanation.make.questions.labels import classes_of, configured, itself, names_of
from captum_ssm.explanation.make.questions.observed import Look
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.inspection.implicit_attention import token_grids
from captum_ssm.utils.integers import as_index

PLACEHOLDER = re.compile(r"LABEL_\d+")
# Whether it is of pixels: the axes that an output may have, and what is said of another one.
OUTPUTS = {
    True: ((2,), "image", "one score per class, (1, classes)"),
    False: ((2, 3), "series", "(1, classes), (1, numbers) or (1, steps, features)"),
}


@dataclass(frozen=True)
class ArrayQuestion:
    """What is asked about one of the inputs that are given: as ``explain`` takes it.

    The output for pixels is one score per class. That for a series or a row is, too, with
    ``labels``, or those of the model's configuration; without, each of its numbers is a forecast.
    """

    setup: Setup
    given: Given
    index: int
    target: Any
    against: Any

    @property
    def values(self) -> Tensor:
        """The input, ``(1, ...)``."""
        return self.given.examples[self.index]

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.values.numel()

    def answer(self) -> Steps[Example]:
        """The input, explained."""
        model = self.setup.model
        values = self.values.to(next(model.parameters()).device)
        seen = yield Look(Run(model), values)
        output = seen.scores.float()
        self._check(output)
        questions = self._asked(output[0])
        questions.require_memory(self._kept(values).numel())
        relevance, deltas = yield from questions.explained(values, self._kept)
        return Example(
            self.given.names[self.index],
            tuple(questions.outputs),
            relevance,
            deltas,
            **self._shown(values),
            validation=questions.validation,
        )

    def _check(self, output: Tensor) -> None:
        axes, kind, expected = OUTPUTS[self.given.is_pixels]
        if output.shape[0] != 1 or output.dim() not in axes:
            raise InputError(
                f"the model returns an output of shape {tuple(output.shape)} for one {kind}; "
                f"expected {expected}. Other outputs are explained by the methods' own attribute, "
                "with a target that selects one number."
            )
        if not self.given.is_pixels or self.given.axes.index("c") == 1:
            return
        for name, method in self.setup.methods.items():  # parts are found behind the channels
            if getattr(method, "removes_parts", False):
                raise InputError(
                    f"{name} removes parts of a video (B, C, T, H, W), and this model takes (B, T, "
                    "C, H, W); expected other methods, or a model that moves the axes itself."
                )

    def _asked(self, output: Tensor) -> Questions:
        setup, shape, asked = self.setup, tuple(output.shape), (self.target, self.against)
        if self._has_classes(output):
            names = names_of(setup.labels, setup.model, len(output))
            chosen, other = classes_of(*asked, names, output)
            choices = Choices(names.__getitem__)
        else:
            names = _names(shape, self.given.features)
            chosen, other = _numbers(*asked, names, shape)
            ask = partial(NumberQuestion, shape=shape)
            choices = Choices(names.__getitem__, None, ask=ask, is_ranked=False)
        questions = Questions(setup, Run(setup.model), choices)
        questions.add(output.flatten(), None, chosen, other)
        return questions

    def _has_classes(self, output: Tensor) -> bool:
        # Classes have names; a configuration that nobody filled in has placeholders.
        if self.given.is_pixels or output.dim() != 1:
            return self.given.is_pixels
        names = configured(self.setup.model)
        is_named = not all(PLACEHOLDER.fullmatch(str(name)) for name in names.values())
        return self.setup.labels is not None or (len(names) == len(output) and is_named)

    def _kept(self, rows: Tensor) -> Tensor:
        # Rows (R, ...) in the model's axes, without channels, or as (R, T, F) or (R, F).
        axes = self.given.axes
        if self.given.is_pixels:
            return rows.sum(axes.index("c"))
        if axes == "1f":
            return rows
        if "f" not in axes:
            return rows.flatten(1)[..., None]
        return arranged(rows, f"{axes.replace('1', 'r')}->rtf")

    def _shown(self, values: Tensor) -> dict[str, Any]:
        inputs = self.given
        if not inputs.is_pixels:
            return {"series": to_numpy(self._kept(self.values)[0]), "features": inputs.features}
        channels = inputs.axes.index("c")
        pixels = values[0].movedim(channels - 1, 0).cpu()
        grids = token_grids(self.setup.model, values).values() if channels == 1 else ()
        shapes = [tuple(grid.shape) for grid in grids if grid is not None]
        grid = shapes[0] if shapes and len(shapes[0]) == values.dim() - 2 else None
        return {"image": shown(pixels, inputs.mean, inputs.std), "grid": grid}


def array_questions(setup: Setup, inputs: Given, target: Any, against: Any) -> list[ArrayQuestion]:
    """What is asked about each input; a ValueError for targets that are not one per example."""
    B = len(inputs.examples)
    targets, others = per_example("target", target, B), per_example("against", against, B)
    pairs = enumerate(zip(targets, others, strict=True))
    return [ArrayQuestion(setup, inputs, k, a, b) for k, (a, b) in pairs]


@dataclass(frozen=True)
class NumberQuestion(Question):
    """A question about numbers of an output of several axes; each has its number in it."""

    shape: tuple[int, ...] = ()

    def entry(self, answer: int) -> tuple[int, ...]:
        """The index of a number."""
        return tuple(int(k) for k in np.unravel_index(answer, self.shape))


def _names(shape: Sequence[int], features: Sequence[str]) -> tuple[str, ...]:
    # Forecasts of steps have the names of the features; other outputs have their index.
    indices = list(product(*map(range, shape)))
    if len(shape) == 2 and shape[1] == len(features):
        return tuple(f"{features[k]}, {step + 1} ahead" for step, k in indices)
    return tuple(f"output {', '.join(map(str, index))}" for index in indices)


def _numbers(
    target: Any, against: Any, names: Sequence[str], shape: Sequence[int]
) -> tuple[int, int | None]:
    # The number that is explained, the first unless another one is named, and its rival.
    first = 0 if target is None else _number("target", target, names, shape)
    other = None if against is None else _number("against", against, names, shape)
    if other == first:
        raise itself(against, "the number that is explained", "another one")
    return first, other


def _number(name: str, wanted: Any, names: Sequence[str], shape: Sequence[int]) -> int:
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    items = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    index, indices = tuple(map(as_index, items)), list(product(*map(range, shape)))
    if index in indices:
        return indices.index(index)  # type: ignore[arg-type]
    raise TargetError(
        f"{name} is {brief(wanted)}; expected a number of the forecast {indices[0]} .. "
        f"{indices[-1]}, or its name, such as {names[-1]!r}."
    )
