"""One text and a model of classes: which class the text is of, or each of its tokens, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from captum_ssm.errors import InputError, TargetError
from captum_ssm.explanation.make.inputs.reading import TokenizedText, positions_in
from captum_ssm.explanation.make.questions.base import Questions, TextSetup
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.labels import class_of
from captum_ssm.explanation.make.questions.observed import Seen
from captum_ssm.explanation.make.questions.one_text import OneTextQuestion
from captum_ssm.explanation.parts import LABEL


@dataclass(frozen=True)
class ClassQuestion(OneTextQuestion):
    """What is asked about one text, of which the model tells one class."""

    target: int | None
    against: int | None

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
        return cls(task, text, asked.spans, *_classes(task, target, against))

    def ask(self, questions: Questions, seen: Seen) -> None:
        """One output, of the whole text."""
        logits = seen.scores[0].float()
        chosen = int(logits.argmax()) if self.target is None else self.target
        if chosen == self.against:
            raise _itself(self.task.names[chosen])
        choices = replace(questions.choices, read_at=seen.read_at)
        questions.add(logits, None, chosen, self.against, choices=choices)


@dataclass(frozen=True)
class LabelQuestion(OneTextQuestion):
    """What is asked about the tokens of one text, of which the model tells a label each."""

    positions: Sequence[int]
    target: int | None
    against: int | None

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
        return cls(task, text, asked.spans, positions, *_classes(task, target, against))

    def ask(self, questions: Questions, seen: Seen) -> None:
        """One output for each token that is asked about."""
        logits = seen.scores[0, list(self.positions)].float()
        chosen = [int(row.argmax()) if self.target is None else self.target for row in logits]
        if {*chosen} == {self.against}:
            raise _itself(self.task.names[chosen[0]])
        labels = replace(questions.choices, role=LABEL)
        for position, row, one in zip(self.positions, logits, chosen, strict=True):
            against = None if one == self.against else self.against
            questions.add(row, position, one, against, choices=labels)


def _classes(task: Task, target: object, against: object) -> tuple[int | None, int | None]:
    chosen = class_of("target", target, task.names)
    other = class_of("against", against, task.names)
    if other is not None and chosen == other:
        raise _itself(task.names[other])
    return chosen, other


def _itself(name: str) -> TargetError:
    return TargetError(f"against is {name!r}, the class that is explained; expected another class.")
