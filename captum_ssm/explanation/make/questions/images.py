"""One image or video: which class the model sees in it, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.inputs.arrays import Given
from captum_ssm.explanation.make.inputs.pictures import shown
from captum_ssm.explanation.make.questions.base import Questions, Setup, Steps, per_example
from captum_ssm.explanation.make.questions.labels import classes_of, names_of
from captum_ssm.explanation.make.questions.observed import Look
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.inspection.implicit_attention import token_grids


@dataclass(frozen=True)
class ImageQuestion:
    """What is asked about one image or video ``pixels (1, ...)``: as ``explain`` takes it.

    ``axes`` has a letter for each axis, such as ``"1chw"``.
    """

    pixels: Tensor
    axes: str
    name: str
    target: int | str | None
    against: int | str | None
    labels: Sequence[str] | Mapping[int, str] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.pixels.numel()

    def answer(self, setup: Setup) -> Steps[Example]:
        """The image, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        channels = self.axes.index("c")
        pixels = self.pixels.to(next(setup.model.parameters()).device)
        run = Run(setup.model)
        seen = yield Look(run, pixels)
        logits = seen.scores.float()
        if logits.dim() != 2 or logits.shape[0] != 1:
            raise ValueError(
                f"the model returns an output of shape {tuple(logits.shape)} for one image; "
                "expected one score per class, (1, classes). Other outputs are explained by the "
                "methods' own attribute, with a target that selects one number."
            )
        if channels > 1:
            _require_no_removal(setup)
        names = names_of(self.labels, setup.model, logits.shape[1])
        chosen, against = classes_of(self.target, self.against, names, logits[0])
        questions = Questions(setup, lambda index: names[index], run)
        questions.add(logits[0], None, chosen, against)
        questions.require_memory(pixels.numel() // pixels.shape[channels])
        relevance, deltas = yield from questions.explained(pixels, lambda rows: rows.sum(channels))
        return Example(
            self.name,
            tuple(questions.outputs),
            relevance,
            deltas,
            image=shown(pixels[0].movedim(channels - 1, 0).cpu(), self.mean, self.std),
            grid=_grid(setup.model, pixels) if channels == 1 else None,
            validation=questions.validation,
        )


def _require_no_removal(setup: Setup) -> None:
    # Parts of the input are found behind its channels.
    for name, method in setup.methods.items():
        if getattr(method, "removes_parts", False):
            raise InputError(
                f"{name} removes parts of a video (B, C, T, H, W), and this model takes (B, T, C, "
                "H, W); expected other methods, or a model that moves the axes itself."
            )


def image_questions(found: Given, target: Any, against: Any, labels: Any) -> list[ImageQuestion]:
    """What is asked about each image.

    Raises:
        ValueError: for targets that are not one per example.
    """
    B = len(found.examples)
    targets, others = per_example("target", target, B), per_example("against", against, B)
    return [
        ImageQuestion(pixels, found.axes, name, a, b, labels, found.mean, found.std)
        for pixels, name, a, b in zip(found.examples, found.names, targets, others, strict=True)
    ]


def _grid(model: Any, pixels: Tensor) -> tuple[int, ...] | None:
    shapes = [tuple(grid.shape) for grid in token_grids(model, pixels).values() if grid is not None]
    return shapes[0] if shapes and len(shapes[0]) == pixels.dim() - 2 else None
