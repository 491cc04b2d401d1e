"""Relevance for questions, one row each: answers, and one answer against another.

Questions about several inputs are answered together: inputs of similar length make one batch, and
in it each row has its input, and its own token at which the answer is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from captum_ssm.attr import SpanTarget, TokenAttribution
from captum_ssm.capture import resolve_model
from captum_ssm.explanation.make.relevance.batches import batches
from captum_ssm.explanation.make.relevance.run import OneInput, Run, joined
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
        answer = _at(logits, self.entry(self.answer))
        return answer if self.against is None else answer - _at(logits, self.entry(self.against))

    def entry(self, answer: int) -> tuple[int, ...]:
        """Where an answer is in the output of one example, as a method's ``target`` names it."""
        return (answer,) if self.position is None else (self.position, answer)


def _at(logits: Tensor, index: tuple[int, ...]) -> Tensor:
    every: Any = slice(None)
    return logits[(every, *index)]


@dataclass(frozen=True)
class InputQuestions(OneInput):
    """Questions about one input ``(1, ...)``."""

    questions: Sequence[Question] = ()


Rows = tuple[Tensor, Tensor | None]  # relevance (R, ...) of one input, and deltas (R,) of some


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

    def rows(self, asked: Sequence[InputQuestions], what: str) -> list[Rows]:
        """Relevance ``(R, ...)`` of each input, and deltas ``(R,)`` or None."""


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

    def rows(self, asked: Sequence[InputQuestions], what: str) -> list[Rows]:
        return rows(self.method, asked, what=what, **self.options)


class PaddingIsReadError(RuntimeError):
    """Tokens that stand for nothing have relevance: the texts have to be explained one by one."""


def rows(
    method: TokenAttribution,
    asked: Sequence[InputQuestions],
    *,
    step: int | None = None,
    what: str = "",
    **options: Any,
) -> list[Rows]:
    """Relevance ``(R, ...)`` of each input, token ids ``(1, L)`` or an image ``(1, C, H, W)``.

    It is zero after the token that is explained. With it come the deltas ``(R,)`` of a method that
    adds up, else None. At most ``step`` rows are computed at a time; None is as many as fit a batch
    (:func:`~captum_ssm.explanation.make.relevance.batches.batches`). A name for ``what`` switches
    on the progress bar.

    Raises:
        PaddingIsReadError: where a model reads what texts of a batch are padded with.
    """
    needs_target, whole = method.needs_target(**options), method.reads_whole_maps(**options)
    jobs = [
        job for k, example in enumerate(asked) for job in _jobs(example, k, needs_target, whole)
    ]
    adds_up = has_delta(method, options)
    relevances: list[list[Any]] = [[None] * len(example.questions) for example in asked]
    deltas = [
        torch.zeros(len(example.questions), device=example.inputs.device) for example in asked
    ]
    computed = _by_row if needs_target or whole else _off_one_run
    for group, of in computed(method, jobs, step, what):
        relevance, delta = _attributed(of, group, adds_up, options)
        for i, job in enumerate(group):
            row = relevance[i]
            if job.is_text:
                L, read = asked[job.index].inputs.shape[1], job.inputs.shape[1]
                row = nn.functional.pad(row[:read], (0, L - read))
            for k in job.rows:
                relevances[job.index][k] = row
                if delta is not None:
                    deltas[job.index][k] = delta[i]
    pairs = zip(relevances, deltas, strict=True)
    return [(torch.stack(each), delta if adds_up else None) for each, delta in pairs]


def has_delta(method: TokenAttribution, options: dict[str, Any]) -> bool:
    """Whether a method's relevance claims to add up to the score, with these options."""
    return method.has_convergence_delta() and method.needs_target(**options)


@dataclass(frozen=True)
class _Job(OneInput):
    # One row of a method, which explains one or several questions about an input, of which the
    # method may be given the first tokens alone.
    index: int
    rows: list[int]
    question: Question
    needs_target: bool
    kind: tuple[Any, ...]

    @property
    def group(self) -> tuple[Any, ...]:
        return super().group + self.kind


def _jobs(example: InputQuestions, k: int, needs_target: bool, whole: bool) -> list[_Job]:
    # Without a target, rows of one token are the same.
    same: dict[Any, list[int]] = {}
    for i, question in enumerate(example.questions):
        is_own = needs_target or _has_position_of_its_own(question, example.run)
        same.setdefault(i if is_own else ("at", question.position), []).append(i)
    jobs = []
    for rows in same.values():
        question = example.questions[rows[0]]
        of, end = OneInput(example.run, example.inputs), question.position
        if whole and end is not None:  # a row must not see later tokens, nor padding
            of = OneInput(replace(example.run, is_causal=False), example.inputs).until(end + 1)
        kind = (question.is_target, question.explained) if needs_target else ()
        jobs.append(_Job(of.run, of.inputs, k, rows, question, needs_target, kind))
    return jobs


def _by_row(
    method: TokenAttribution, jobs: Sequence[_Job], step: int | None, what: str
) -> Iterator[tuple[list[_Job], TokenAttribution]]:
    groups = list(batches(jobs, step))
    for numbers in progress(groups, what) if what else groups:
        yield [jobs[k] for k in numbers], method


def _off_one_run(
    method: TokenAttribution, jobs: Sequence[_Job], step: int | None, what: str
) -> Iterator[tuple[list[_Job], TokenAttribution]]:
    # The model runs once for all tokens of a batch of texts: their first rows, then the second.
    of_inputs: dict[int, list[_Job]] = {}
    for job in jobs:
        of_inputs.setdefault(job.index, []).append(job)
    each = list(of_inputs.values())
    for numbers in batches([ks[0] for ks in each], step):
        several = [each[k] for k in numbers]
        of = method
        if several[0][0].question.position is not None:
            batch = joined([ks[0] for ks in several])
            of = method.freeze_once(batch.inputs, batch.run.extra(batch.inputs))
        turns = range(max(map(len, several)))
        for k in progress(turns, what) if what else turns:
            yield [ks[min(k, len(ks) - 1)] for ks in several], of


def _attributed(
    method: TokenAttribution, group: Sequence[_Job], adds_up: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    batch = joined(group)
    run, inputs, questions = batch.run, batch.inputs, [job.question for job in group]
    extra: Any = run.extra(inputs)
    needs_target, is_text = group[0].needs_target, questions[0].position is not None
    selects: dict[str, Any] = {}
    if needs_target and questions[0].is_target and run.is_plain:
        selects["target"] = _targets(questions)
    else:
        positions = [question.position for question in questions]
        selects["position"] = torch.tensor(positions, device=inputs.device) if is_text else None
        if needs_target or _has_position_of_its_own(questions[0], run):
            method, extra = _of_scores(method, run, questions), None
    if extra is not None:
        selects["additional_forward_args"] = extra
    if adds_up:
        selects["return_convergence_delta"] = True
    returned = method.attribute(inputs, **selects, **options)
    relevance, delta = returned if adds_up else (returned, None)
    _require_nothing_of_padding(relevance, group)
    return relevance, delta


def _require_nothing_of_padding(relevance: Tensor, group: Sequence[_Job]) -> None:
    lengths = [job.inputs.shape[1] for job in group]
    if not group[0].is_text or min(lengths) == max(lengths):
        return
    ends = torch.tensor(lengths, device=relevance.device)
    size = relevance.detach().abs()
    of_padding = size * (torch.arange(size.shape[1], device=size.device) >= ends[:, None])
    if bool((of_padding.amax(1) > 1e-6 * size.amax(1)).any()):
        raise PaddingIsReadError(
            "relevance falls on the padding of a batch of texts; expected a model that reads no "
            "later token. Explain the texts one by one."
        )


def _targets(questions: Sequence[Question]) -> Any:
    # The target of a batch, one row for each question.
    explained = questions[0].explained
    if explained == "logit":
        return [question.entry(question.answer) for question in questions]
    positions = [[question.position] for question in questions]
    return SpanTarget(positions, [[question.answer] for question in questions], score=explained)


def _has_position_of_its_own(question: Question, run: Run) -> bool:
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
