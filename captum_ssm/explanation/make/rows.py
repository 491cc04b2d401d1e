"""Relevance for questions, one row each: answers, and one answer against another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from captum_ssm.attr import SpanTarget, TokenAttribution
from captum_ssm.capture import resolve_model
from captum_ssm.explanation.make.run import Run
from captum_ssm.utils.progress import progress


@dataclass(frozen=True)
class Question:
    """What one row explains: an answer, a token's id or a class, perhaps against another one.

    The position is that of the token at which it is read; None where the output is of the whole
    input. What is explained of a language model's token is a score of
    :class:`~captum_ssm.attr.SpanTarget`, where it is not its logit.
    """

    position: int | None
    answer: int
    against: int | None = None
    explained: str = "logit"

    @property
    def is_target(self) -> bool:
        """Whether a method's own ``target`` can name it."""
        return self.against is None

    def score(self, logits: Tensor) -> Tensor:
        """The explained score ``(n,)`` of ``logits (n, V)``, or ``(n, L, V)`` at a position."""
        answer = _at(logits, self.place(self.answer))
        return answer if self.against is None else answer - _at(logits, self.place(self.against))

    def place(self, answer: int) -> tuple[int, ...]:
        """Where an answer is in the output of one example, as a method's ``target`` names it."""
        return (answer,) if self.position is None else (self.position, answer)


def _at(logits: Tensor, place: tuple[int, ...]) -> Tensor:
    every: Any = slice(None)
    return logits[(every, *place)]


class RowSource(Protocol):
    """A method with its options, as a source of rows: one of this library, or of Captum.

    The fields are those of :class:`~captum_ssm.explanation.Method`.
    """

    @property
    def title(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def adds_up(self) -> bool: ...
    @property
    def options(self) -> Mapping[str, Any]: ...

    def rows(
        self, run: Run, inputs: Tensor, questions: Sequence[Question], what: str
    ) -> tuple[Tensor, Tensor | None]:
        """Relevance ``(R, ...)`` of one input ``(1, ...)``, and deltas ``(R,)`` or None."""


@dataclass(frozen=True)
class TokenRows:
    """The rows of a method of this library."""

    method: TokenAttribution
    options: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.method.get_name()

    @property
    def note(self) -> str:
        return self.method.summary

    @property
    def adds_up(self) -> bool:
        return has_delta(self.method, dict(self.options))

    def rows(
        self, run: Run, inputs: Tensor, questions: Sequence[Question], what: str
    ) -> tuple[Tensor, Tensor | None]:
        return rows(self.method, run, inputs, questions, what=what, **self.options)


def rows(
    method: TokenAttribution,
    run: Run,
    inputs: Tensor,
    questions: Sequence[Question],
    *,
    step: int = 8,
    what: str = "",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Relevance ``(R, ...)`` of token ids ``(1, L)``, or of one image ``(1, C, H, W)``.

    It is zero after the token that is explained. The second result is the deltas ``(R,)`` of a
    method that adds up, else None. Methods that need gradients explain ``step`` questions at a
    time. A name for ``what`` switches on the progress bar.
    """
    if method.reads_whole_maps(**options):
        kinds: list[Any] = list(range(len(questions)))  # a row must not see later tokens
    elif method.needs_target(**options):
        kinds, step = [question.is_target for question in questions], run.most(step)
    elif any(_has_place_of_its_own(question, run) for question in questions):
        kinds = list(range(len(questions)))
    else:
        # Without a target, rows of one token are the same.
        kinds, step = [question.position for question in questions], len(questions)
        if kinds[0] is not None:
            method = method.freeze_once(inputs, run.extra(inputs))
    of_kind: dict[Any, list[int]] = {}
    for k, kind in enumerate(kinds):
        of_kind.setdefault(kind, []).append(k)
    groups = [ks[i : i + step] for ks in of_kind.values() for i in range(0, len(ks), step)]
    relevance: dict[int, Tensor] = {}
    deltas = inputs.new_zeros(len(questions), dtype=torch.float32)
    adds_up = has_delta(method, options)
    for group in progress(groups, what) if what else groups:
        rows, delta = _attributed(
            method, run, inputs, [questions[k] for k in group], adds_up, options
        )
        for i, k in enumerate(group):
            relevance[k] = rows[i % len(rows)]
            if delta is not None:
                deltas[k] = delta[i]
    return torch.stack([relevance[k] for k in range(len(questions))]), deltas if adds_up else None


def has_delta(method: TokenAttribution, options: dict[str, Any]) -> bool:
    """Whether a method's relevance claims to add up to the score, with these options."""
    return method.has_convergence_delta() and method.needs_target(**options)


def _attributed(
    method: TokenAttribution,
    run: Run,
    inputs: Tensor,
    questions: Sequence[Question],
    adds_up: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    positions = [question.position for question in questions]
    is_text = positions[0] is not None
    whole = method.reads_whole_maps(**options)
    length = inputs.shape[1]
    if whole and is_text:
        inputs = inputs[:, : positions[0] + 1]  # type: ignore[operator]
    selects: dict[str, Any] = {"position": positions[0]}
    needs_target = method.needs_target(**options)
    if needs_target:
        inputs = inputs.expand(len(questions), *inputs.shape[1:])
    extra = run.extra(inputs)
    if needs_target and questions[0].is_target and run.is_plain:
        selects = {"target": _targets(questions)}
    elif needs_target or _has_place_of_its_own(questions[0], run):
        places = torch.tensor(positions, device=inputs.device) if is_text else None
        method, selects, extra = _of_scores(method, run, questions), {"position": places}, None
    if extra is not None:
        selects["additional_forward_args"] = extra
    if adds_up:
        selects["return_convergence_delta"] = True
    returned = method.attribute(inputs, **selects, **options)
    relevance, delta = returned if adds_up else (returned, None)
    if whole and is_text:
        relevance = nn.functional.pad(relevance, (0, length - relevance.shape[1]))
    return relevance, delta


def _targets(questions: Sequence[Question]) -> Any:
    # The target of a batch, one row for each question.
    explained = questions[0].explained
    if explained == "logit":
        return [question.place(question.answer) for question in questions]
    positions = [[question.position] for question in questions]
    return SpanTarget(positions, [[question.answer] for question in questions], score=explained)


def _has_place_of_its_own(question: Question, run: Run) -> bool:
    # Whether only its score tells at which tokens an answer is read.
    return question.position is None and not run.is_plain


def _of_scores(
    method: TokenAttribution, run: Run, questions: Sequence[Question]
) -> TokenAttribution:
    # The method explains other scores than entries of the output, one of each input.
    def score(inputs: Tensor) -> Tensor:
        # A method may run one text alone, to make something once for all answers.
        logits = run(inputs)
        logits = logits.expand(len(questions), *logits.shape[1:])
        rows = zip(questions, logits.split(1), strict=True)
        return torch.cat([question.score(row) for question, row in rows])

    scoring = copy(method)
    scoring.model = resolve_model(method.forward_func, method.model)
    scoring.forward_func = score
    return scoring
