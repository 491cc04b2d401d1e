"""One text and a model of classes: which class the text is of, or each of its tokens, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm.capture.check_inputs import check_inputs
from captum_ssm.errors import InputError, TargetError
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.inputs.reading import TokenizedText, positions_in
from captum_ssm.explanation.make.questions.base import Questions, Setup, Steps, TextSetup
from captum_ssm.explanation.make.questions.explained import explained_text
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.labels import class_of
from captum_ssm.explanation.make.questions.observed import Look, Seen
from captum_ssm.explanation.parts import LABEL


@dataclass(frozen=True)
class ClassQuestion:
    """What is asked about one text, of which the model tells one class."""

    task: Task
    text: TokenizedText
    target: int | None
    against: int | None
    spans: Mapping[str, tuple[int, int]]

    @classmethod
    def of(
        cls, task: Task, text: TokenizedText, target: object, against: object, asked: TextSetup
    ) -> ClassQuestion:
        """The question, checked: a ``position`` has no meaning here.

        Raises:
            TargetError: for a class that there is not.
            InputError: for a position.
        """
        if asked.position is not None:
            raise InputError(
                f"position is {asked.position!r}, and the model has one output for a whole text; "
                "leave position out."
            )
        return cls(task, text, *_classes(task, target, against), asked.spans)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.text.tokens)

    def answer(self, setup: Setup) -> Steps[Example]:
        """The text, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        questions, ids, seen = yield from questions_of(setup, self.task, self.text)
        logits = seen.scores[0].float()
        chosen = int(logits.argmax()) if self.target is None else self.target
        if chosen == self.against:
            raise _itself(self.task.names[chosen])
        choices = replace(questions.choices, read_at=seen.read_at)
        questions.add(logits, None, chosen, self.against, choices=choices)
        return (
            yield from explained_text(questions, ids, self.text, len(self.text.tokens), self.spans)
        )


@dataclass(frozen=True)
class LabelQuestion:
    """What is asked about the tokens of one text, of which the model tells a label each."""

    task: Task
    text: TokenizedText
    positions: Sequence[int]
    target: int | None
    against: int | None
    spans: Mapping[str, tuple[int, int]]

    @classmethod
    def of(
        cls, task: Task, text: TokenizedText, target: object, against: object, asked: TextSetup
    ) -> LabelQuestion:
        """The question, checked: without a position all tokens of the text are asked about.

        Raises:
            TargetError: for a label that there is not.
            InputError, TypeError: for a position outside the text.
        """
        positions = positions_in(asked.position, len(text.tokens))
        if positions is None:
            positions = [k for k, one in enumerate(text.tokens) if one.end > one.start]
        return cls(task, text, positions, *_classes(task, target, against), asked.spans)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.text.tokens)

    def answer(self, setup: Setup) -> Steps[Example]:
        """The text, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        questions, ids, seen = yield from questions_of(setup, self.task, self.text)
        logits = seen.scores[0, list(self.positions)].float()
        chosen = [int(row.argmax()) if self.target is None else self.target for row in logits]
        if {*chosen} == {self.against}:
            raise _itself(self.task.names[chosen[0]])
        labels = replace(questions.choices, role=LABEL)
        for position, row, one in zip(self.positions, logits, chosen, strict=True):
            against = None if one == self.against else self.against
            questions.add(row, position, one, against, choices=labels)
        return (
            yield from explained_text(questions, ids, self.text, len(self.text.tokens), self.spans)
        )


def questions_of(
    setup: Setup, task: Task, text: TokenizedText
) -> Steps[tuple[Questions, Tensor, Seen]]:
    """No questions yet about a text, its ids ``(1, L)``, and what the model returns for them.

    Raises:
        ValueError, TypeError: for ids that the model does not take.
    """
    ids = torch.tensor([text.ids], device=next(setup.model.parameters()).device)
    check_inputs(ids, setup.model)
    if setup.lens:
        setup.note("no lens: the model has no vocabulary")
    names = task.names.__getitem__
    run = task.run_on(text)
    seen = yield Look(run, ids, first=task.first)
    return Questions(setup, names, run, task.probabilities), ids, seen


def _classes(task: Task, target: object, against: object) -> tuple[int | None, int | None]:
    chosen = class_of("target", target, task.names)
    other = class_of("against", against, task.names)
    if other is not None and chosen == other:
        raise _itself(task.names[other])
    return chosen, other


def _itself(name: str) -> TargetError:
    return TargetError(f"against is {name!r}, the class that is explained; expected another class.")
