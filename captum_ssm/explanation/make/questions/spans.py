"""One question and a text that answers it: which part the model takes as the answer, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import InputError, TargetError, brief
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.questions.base import Choices, Questions, Setup
from captum_ssm.explanation.make.questions.explained import OneTextQuestion
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.labels import itself
from captum_ssm.explanation.make.questions.observed import Seen
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.explanation.parts import END, SPAN, START
from captum_ssm.utils.integers import pair_of

LONGEST = 15  # tokens of an answer that nobody asked for, as in pipelines of transformers


@dataclass(frozen=True)
class SpanQuestion(OneTextQuestion):
    """What is asked about one text, of which the model tells where an answer starts and ends.

    ``target`` and ``against`` are the first and the last token of an answer.
    """

    target: tuple[int, int] | None
    against: tuple[int, int] | None

    @classmethod
    def of(
        cls, setup: Setup, task: Task, text: TokenizedText, target: Any, against: Any
    ) -> SpanQuestion:
        """The question, checked.

        Raises:
            TargetError: for an answer that does not stand in the text.
            InputError: for a text without a question, or a position.
        """
        if setup.position is not None:
            raise InputError(
                f"position is {brief(setup.position)}, and the model tells where an answer starts "
                "and ends; expected target=, a part of the text, in its place."
            )
        if not text.parts and setup.tokenizer is not None:
            raise InputError(
                f"the model answers a question by a part of a text, and it is given {text.text!r} "
                "alone; expected {'question': ..., 'context': ...}, or a list of these."
            )
        chosen, other = _span("target", target, text), _span("against", against, text)
        if chosen is not None and chosen == other:
            raise _itself(text, chosen)
        return cls(setup, task, text, chosen, other)

    def ask(self, questions: Questions, seen: Seen) -> None:
        """The answer as a whole, its start and its end."""
        starts, ends = self._possible(seen.scores[0].double())
        asked = [span for span in (self.target, self.against) if span is not None]
        width = max(LONGEST, *(last - first + 1 for first, last in asked), 1)
        answers = _Answers(self.text, starts, ends, min(width, len(starts)))
        chosen = answers.best if self.target is None else answers.index(self.target)
        against = None if self.against is None else answers.index(self.against)
        if chosen == against:
            raise _itself(self.text, answers.span(chosen))
        answers.ask_of(questions, chosen, against)

    def _possible(self, logits: Tensor) -> Tensor:
        # An answer lies in the second text.
        is_possible = [part == 1 for part in self.text.parts] or [True] * logits.shape[1]
        outside = ~torch.tensor(is_possible, device=logits.device)
        return logits.masked_fill(outside, -torch.inf)


@dataclass(frozen=True)
class BoundQuestion(Question):
    """What one row explains: where an answer starts, or ends, or (``side`` of None) both.

    With ``width`` an answer is numbered by its first token and its length.
    """

    side: int | None = None
    width: int = 0

    @property
    def is_target(self) -> bool:
        return False

    def score(self, logits: Tensor) -> Tensor:
        """The explained score ``(n,)`` of the starts and ends ``(n, 2, L)``."""
        answer = self._of(logits, self.answer)
        return answer if self.against is None else answer - self._of(logits, self.against)

    def _of(self, logits: Tensor, answer: int) -> Tensor:
        if self.side is not None:
            return logits[:, self.side, answer]
        first, more = divmod(answer, self.width)
        return logits[:, 0, first] + logits[:, 1, first + more]


@dataclass(frozen=True)
class _Answers:
    # The parts of a text of at most ``width`` tokens: each is numbered by its first token, and by
    # how many more it has.
    text: TokenizedText
    starts: Tensor
    ends: Tensor
    width: int

    @property
    def scores(self) -> Tensor:
        """Start and end together, ``(L * width,)``."""
        return (self.starts[:, None] + self._windows(self.ends, -torch.inf)).flatten()

    def probabilities(self, scores: Tensor) -> Tensor:
        """The start's probability times the end's, as pipelines of transformers have it."""
        starts, ends = self.starts.softmax(0), self.ends.softmax(0)
        return (starts[:, None] * self._windows(ends, 0.0)).flatten()

    def _windows(self, ends: Tensor, nothing: float) -> Tensor:
        # (L, width): of each token and those after it.
        padded = torch.nn.functional.pad(ends, (0, self.width - 1), value=nothing)
        return padded.unfold(0, self.width, 1)

    @property
    def best(self) -> int:
        return int(self.scores.argmax())

    def index(self, span: tuple[int, int]) -> int:
        first, last = span
        return first * self.width + last - first

    def span(self, index: int) -> tuple[int, int]:
        first, more = divmod(index, self.width)
        return first, first + more

    def number(self, index: int) -> int:
        """The id of an answer: that of its first token times L, plus that of its last one."""
        first, last = self.span(index)
        return first * len(self.text.tokens) + last

    def part(self, index: int) -> str:
        first, last = self.span(index)
        return self.text.part(first, last + 1)

    def token(self, index: int) -> str:
        return self.text.tokens[index].text.strip()

    def ask_of(self, questions: Questions, chosen: int, against: int | None) -> None:
        """The answer as a whole, then its start, then its end."""
        ask = partial(BoundQuestion, width=self.width)
        whole = Choices(self.part, self.probabilities, SPAN, ask, self.number)
        questions.add(self.scores, None, chosen, against, choices=whole)
        others = (None, None) if against is None else self.span(against)
        for side, (position, other) in enumerate(zip(self.span(chosen), others, strict=True)):
            logits, role = ((self.starts, START), (self.ends, END))[side]
            ask = partial(BoundQuestion, side=side)
            choices = Choices(self.token, role=role, ask=ask)
            questions.add(
                logits, None, position, None if other == position else other, choices=choices
            )


def _span(name: str, wanted: Any, text: TokenizedText) -> tuple[int, int] | None:
    # The first and the last token of an answer.
    if wanted is None:
        return None
    if isinstance(wanted, str):
        return _found(name, wanted, text)
    bounds, L = pair_of(wanted), len(text.tokens)
    if bounds is None or not 0 <= bounds[0] <= bounds[1] < L:
        raise TargetError(
            f"{name} is {brief(wanted)}; expected a part of the text, or its first and its last "
            f"token, 0 .. {L - 1}."
        )
    return bounds


def _found(name: str, wanted: str, text: TokenizedText) -> tuple[int, int]:
    # Where the context begins, if there is a question before it.
    begins = [
        token.start for token, part in zip(text.tokens, text.parts, strict=False) if part == 1
    ]
    at = text.text.find(wanted.strip(), begins[0] if begins else 0)
    if at < 0 or not wanted.strip():
        raise TargetError(
            f"{name} is {brief(wanted)}, which does not stand in the text; expected a part of "
            f"{text.text[begins[0] if begins else 0 :].strip()!r}."
        )
    end = at + len(wanted.strip())
    inside = [k for k, token in enumerate(text.tokens) if token.start < end and at < token.end]
    inside = [k for k in inside if text.tokens[k].end > text.tokens[k].start]
    return inside[0], inside[-1]


def _itself(text: TokenizedText, span: tuple[int, int]) -> TargetError:
    said = text.part(span[0], span[1] + 1)
    return itself(said, "the answer that is explained", "another part of the text")
