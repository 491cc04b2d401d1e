"""One text and a model of classes: which class the text is of, or each of its tokens, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.inputs.reading import TokenizedText, positions_in
from captum_ssm.explanation.make.questions.base import Questions, Setup
from captum_ssm.explanation.make.questions.explained import OneTextQuestion
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.labels import class_of, itself
from captum_ssm.explanation.make.questions.observed import Seen
from captum_ssm.explanation.parts import LABEL


@dataclass(frozen=True)
class ClassQuestion(OneTextQuestion):
    """What is asked about one text, of which the model tells one class, or each token's label.

    ``positions`` are the tokens that are asked about; None stands for the whole text.
    """

    positions: Sequence[int] | None
    target: int | None
    against: int | None

    @classmethod
    def of(
        cls, setup: Setup, task: Task, text: TokenizedText, target: object, against: object
    ) -> ClassQuestion:
        """The question, checked: without a position all tokens of the text have their labels.

        Raises:
            TargetError: for a class that there is not.
            InputError, TypeError: for a position outside the text, or one class for all of it.
        """
        positions = None
        if task.kind == "labels":
            positions = positions_in(setup.position, len(text.tokens))
            if positions is None:
                positions = [k for k, token in enumerate(text.tokens) if token.end > token.start]
        elif setup.position is not None:
            raise InputError(
                f"position is {brief(setup.position)}, and the model has one output for a whole "
                "text; leave position out."
            )
        chosen, other = (
            class_of(name, wanted, task.names)
            for name, wanted in (("target", target), ("against", against))
        )
        if other is not None and chosen == other:
            raise itself(task.names[other])
        return cls(setup, task, text, positions, chosen, other)

    def ask(self, questions: Questions, seen: Seen) -> None:
        """One output of the whole text, or for each token that is asked about."""
        scores, positions = seen.scores[0].float(), self.positions
        logits = scores[None] if positions is None else scores[list(positions)]
        chosen = [int(row.argmax()) if self.target is None else self.target for row in logits]
        if {*chosen} == {self.against}:
            raise itself(self.task.names[chosen[0]])
        choices = replace(questions.choices, read_at=seen.read_at)
        if positions is not None:
            choices = replace(questions.choices, role=LABEL)
        each: Sequence[int | None] = [None] if positions is None else positions
        for position, row, answer in zip(each, logits, chosen, strict=True):
            against = None if answer == self.against else self.against
            questions.add(row, position, answer, against, choices=choices)
