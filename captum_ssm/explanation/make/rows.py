"""Relevance for questions, one row each: answers, and one answer against another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from captum_ssm.attr import TokenAttribution
from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.utils.progress import progress


@dataclass(frozen=True)
class Question:
    """What one row explains: an answer, perhaps against another one.

    An answer is a token's id, a class, or the index ``(step, feature)`` of a number of a forecast.
    The position is that of the token at which it is read; None for an image or a series.
    """

    position: int | None
    answer: int | tuple[int, ...]
    against: int | tuple[int, ...] | None = None

    def score(self, logits: Tensor) -> Tensor:
        """The scores ``(B,)`` that it asks for, in the model's output ``(B, ...)``."""
        rows = logits if self.position is None else logits[:, self.position]
        score = _at(rows, self.answer)
        return score if self.against is None else score - _at(rows, self.against)


def _at(rows: Tensor, answer: int | tuple[int, ...]) -> Tensor:
    every: Any = slice(None)
    return rows[(every, *_index(answer))]


def _index(answer: int | tuple[int, ...]) -> tuple[int, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


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
        self, inputs: Tensor, questions: Sequence[Question], what: str
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
        self, inputs: Tensor, questions: Sequence[Question], what: str
    ) -> tuple[Tensor, Tensor | None]:
        return rows(self.method, inputs, questions, what=what, **self.options)


def rows(
    method: TokenAttribution,
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
    elif not method.needs_target(**options):
        # Without a target, rows of one token are the same.
        kinds, step = [question.position for question in questions], len(questions)
        if kinds[0] is not None:
            method = method.freeze_once(inputs)
    else:
        kinds = [question.against is None for question in questions]
    of_kind: dict[Any, list[int]] = {}
    for k, kind in enumerate(kinds):
        of_kind.setdefault(kind, []).append(k)
    groups = [ks[i : i + step] for ks in of_kind.values() for i in range(0, len(ks), step)]
    relevance: dict[int, Tensor] = {}
    deltas = inputs.new_zeros(len(questions), dtype=torch.float32)
    adds_up = has_delta(method, options)
    for group in progress(groups, what) if what else groups:
        rows, delta = _attributed(method, inputs, [questions[k] for k in group], adds_up, options)
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
    if method.needs_target(**options):
        inputs = inputs.expand(len(questions), *inputs.shape[1:])
        answers = [question.answer for question in questions]
        if questions[0].against is not None:
            places = torch.tensor(positions, device=inputs.device) if is_text else None
            method, selects = _of_contrasts(method, questions), {"position": places}
        elif is_text:
            selects = {"target": list(zip(positions, answers, strict=True))}
        else:
            selects = {"target": [_index(answer) for answer in answers]}
    if adds_up:
        selects["return_convergence_delta"] = True
    returned = method.attribute(inputs, **selects, **options)
    relevance, delta = returned if adds_up else (returned, None)
    if whole and is_text:
        relevance = nn.functional.pad(relevance, (0, length - relevance.shape[1]))
    return relevance, delta


def _of_contrasts(method: TokenAttribution, questions: Sequence[Question]) -> TokenAttribution:
    # The method explains another score: one logit minus another one.
    model = resolve_model(method.forward_func, method.model)
    module = unwrap(model)
    # Nothing is generated, and a cache that is written in place takes no gradient.
    named = {"use_cache": False} if "use_cache" in parameter_names(module) else {}

    def score(inputs: Tensor) -> Tensor:
        # A method may run one text alone, to make something once for all answers.
        logits = extract_logits(module(inputs, **named))
        logits = logits.expand(len(questions), *logits.shape[1:])
        rows = [question.score(logits[k : k + 1]) for k, question in enumerate(questions)]
        return torch.cat(rows)

    contrasting = copy(method)
    contrasting.model, contrasting.forward_func = model, score
    return contrasting
