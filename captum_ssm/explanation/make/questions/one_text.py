"""A question about one text that the model reads once, and in which all outputs lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from captum_ssm.explanation import Example
from captum_ssm.explanation.make.inputs.media import check_ids
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.questions.base import Questions, Setup, Steps
from captum_ssm.explanation.make.questions.explained import explained_text
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.observed import Look, Seen


@dataclass(frozen=True)
class OneTextQuestion(ABC):
    """What is asked about one text, whatever the model tells of it."""

    task: Task
    text: TokenizedText
    spans: Mapping[str, tuple[int, int]]

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.text.tokens)

    def answer(self, setup: Setup) -> Steps[Example]:
        """The text, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        ids = torch.tensor([self.text.ids], device=next(setup.model.parameters()).device)
        check_ids(ids, setup.model, self.text.media)
        if setup.lens:
            setup.note("no lens: the model has no vocabulary")
        run = self.task.run_on(self.text)
        seen = yield Look(run, ids, first=self.task.first)
        questions = Questions(setup, self.task.names.__getitem__, run, self.task.probabilities)
        self.ask(questions, seen)
        return (yield from explained_text(questions, ids, self.text, self.size, self.spans))

    @abstractmethod
    def ask(self, questions: Questions, seen: Seen) -> None:
        """Add the outputs that are explained, given what the model returned."""
