"""What an example is, and the proof that its cause decides the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

ANY_OTHER = -1
SEEDS = (0, 1, 2)  # of the trainings of one model
TOLERANCE = 0.5  # between a forecast and what it has to be, in standard deviations of the series


@dataclass(frozen=True)
class Examples:
    """Examples of one shape, each with its cause. U numbers the units that are scored.

    Args:
        inputs (Tensor): ``(B, ...)``.
        target (Tensor): ``(B,)``, the entry of the output that is explained: the answer of a
            classification or a language model, an entry of the future of a forecast.
        cause (Tensor): ``(B, U)``, boolean: the units that decide.
        swapped (Tensor): ``(B, ...)``, the inputs with another cause.
        redrawn (Tensor): ``(R, B, ...)``, the inputs with everything else drawn anew, R times.
            What no redraw changes (the question, a separator) counts neither as cause nor as
            irrelevant.
        answer (Tensor): ``(B,)``, what is right for ``inputs`` and ``redrawn``: a class, or for a
            forecast a value.
        other (Tensor): ``(B,)``, what is right for ``swapped``; :data:`ANY_OTHER` for every answer
            except ``answer``.
        skipped (Tensor, optional): ``(B, U)``, units that a redraw changes only because they repeat
            another one, and that count for nothing.
    """

    inputs: Tensor
    target: Tensor
    cause: Tensor
    swapped: Tensor
    redrawn: Tensor
    answer: Tensor
    other: Tensor
    skipped: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> Examples:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        redrawn = parts.pop("redrawn")[:, rows]
        return Examples(redrawn=redrawn, **{name: part[rows] for name, part in parts.items()})

    @classmethod
    def joined(cls, parts: list[Examples]) -> Examples:
        """Examples of the same shape as one."""
        return cls(
            **{
                f.name: torch.cat([getattr(p, f.name) for p in parts], int(f.name == "redrawn"))
                for f in fields(cls)
            }
        )


@dataclass(frozen=True)
class Task:
    """A model with examples whose cause is known.

    Args:
        name (str): unique.
        family (str): tasks of one family count as one in the means over all tasks.
        about (str): what decides, in one sentence.
        load (Callable): takes the seed of a training, 0 for the model that comes with the
            repository, and returns the model in eval mode: ``(B, C)`` logits of a classifier, or
            ``(B, L, V)`` of a language model, whose last token is asked.
        draw (Callable): takes a number and a ``torch.Generator``, and returns lists of examples of
            one shape each, which need not be answered right.
        units (Tensor): of the shape of one input, the number of each entry's unit, from 0: a token,
            a patch, a frame. Captum calls it ``feature_mask``. Lists of examples of other lengths
            use its first entries.
        blank (float): what a removed unit holds.
        trained_as (str): the name of the checkpoint, of a model that the repository trains.
        is_forecast (bool): whether answers are values instead of classes.
    """

    name: str
    family: str
    about: str
    load: Callable[[int], nn.Module]
    draw: Callable[[int, torch.Generator], list[Examples]]
    units: Tensor
    blank: float = 0.0
    trained_as: str = ""
    is_forecast: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """The model, which knows its units: ``model.units`` and ``model.blank``."""
        model = self.load(seed).eval().requires_grad_(False)
        model.units, model.blank = self.units, self.blank  # type: ignore[assignment]
        return model

    @property
    def seeds(self) -> tuple[int, ...]:
        """The trainings whose maps are compared."""
        return SEEDS if self.trained_as else SEEDS[:1]

    def is_text(self) -> bool:
        """Whether the inputs are token ids."""
        return self.units.dim() == 1

    def has_circuits(self) -> bool:
        """Whether each question has a known wrong answer, which edges could lead to instead."""
        return self.is_text() and self.family != "code"

    def units_of(self, inputs: Tensor) -> Tensor:
        """The unit of each entry of inputs ``(B, ...)``, ``(...)``."""
        return self.units[: inputs.shape[1]] if self.is_text() else self.units

    def per_unit(self, entries: Tensor) -> Tensor:
        """The sum over each unit's entries, ``(B, ...)`` to ``(B, U)``."""
        units = self.units_of(entries)
        flat = entries.double().flatten(1)
        found = flat.new_zeros(len(flat), int(units.max()) + 1)
        return found.index_add(1, units.flatten(), flat)

    def says(self, model: nn.Module, inputs: Tensor, target: Tensor, value: Tensor) -> Tensor:
        """Whether the model gives these answers, ``(B,)``."""
        found = outputs(model, inputs)
        if self.is_forecast:
            return (found.gather(1, target[:, None])[:, 0] - value).abs() < TOLERANCE
        return found.argmax(1) == value

    def changed(self, examples: Examples) -> Tensor:
        """The units that a redraw changes and that are not the cause, ``(B, U)``: irrelevant."""
        moved = (examples.redrawn != examples.inputs).any(0)
        return (self.per_unit(moved) > 0) & ~examples.cause & ~examples.skipped

    def is_proven(self, model: nn.Module, examples: Examples) -> Tensor:
        """Whether each example's cause decides the model's answer, ``(B,)``.

        Three interventions have to agree: the answer is right; with another cause it is the one
        that goes with that; and however everything else is redrawn, it stays.
        """
        e = examples
        right = self.says(model, e.inputs, e.target, e.answer)
        if self.is_forecast:
            follows = self.says(model, e.swapped, e.target, e.other)
        else:
            given = outputs(model, e.swapped).argmax(1)
            follows = torch.where(e.other == ANY_OTHER, given != e.answer, given == e.other)
        stays = [self.says(model, again, e.target, e.answer) for again in e.redrawn]
        return torch.stack([right, follows, *stays]).all(0)


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The logits ``(B, C)`` of a classifier, or of a language model at the last token."""
    return logits_of(model(inputs))


def logits_of(output: Any) -> Tensor:
    """The logits ``(B, C)`` in what a model returns."""
    logits: Tensor = getattr(output, "logits", output)
    return logits[:, -1] if logits.dim() == 3 else logits


def proven(
    task: Task, model: nn.Module, count: int, seed: int, most: int = 8
) -> tuple[list[Examples], dict[str, int]]:
    """Examples with a proof, as many as asked for, and how many were drawn for them.

    The same ``seed`` draws the same examples; after ``most`` draws of ``count``, it gives up.

    Raises:
        ValueError: if no example passes.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Examples] = []
    drawn = 0
    for _ in range(most):
        parts = task.draw(count, generator)
        drawn += sum(map(len, parts))
        kept = [part[task.is_proven(model, part)] for part in parts]
        found += [part for part in kept if len(part)]
        if sum(map(len, found)) >= count:
            break
    if not found:
        raise ValueError(
            f"of {drawn} examples of {task.name} none passed the proof; expected a model that "
            "answers by the cause."
        )
    return _first(_same_shapes(found), count), {"drawn": drawn, "proven": sum(map(len, found))}


def _same_shapes(parts: list[Examples]) -> list[Examples]:
    shapes: dict[Any, list[Examples]] = {}
    for part in parts:
        shapes.setdefault(part.inputs.shape[1:], []).append(part)
    return [Examples.joined(each) for each in shapes.values()]


def _first(parts: list[Examples], count: int) -> list[Examples]:
    # As many of each shape as possible.
    while sum(map(len, parts)) > count:
        largest = max(range(len(parts)), key=lambda k: len(parts[k]))
        parts[largest] = parts[largest][:-1]
    return parts
