"""The answers at one output, which of them are explained, and by which rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.explanation import Answer, Contrast, Output, Validation
from captum_ssm.explanation.make.answers.whole import AskedAnswer, WholeAnswer
from captum_ssm.explanation.make.recorded import Recorded
from captum_ssm.explanation.make.relevance.removal import Replacement, validated
from captum_ssm.explanation.make.relevance.rows import InputQuestions, Question, Rows, RowSource
from captum_ssm.explanation.make.relevance.run import OneInput, Run
from captum_ssm.explanation.parts import NEXT
from captum_ssm.inspection.support import first_line
from captum_ssm.utils.memory import memory_limit as limit_memory
from captum_ssm.utils.memory import require

TOP = 5  # the likeliest answers, which are kept at each output
SOFTMAX = partial(torch.softmax, dim=-1)
# What a method raises that does not fit a model.
FAILS = (ValueError, TypeError, RuntimeError, NotImplementedError, ImportError)

T = TypeVar("T")
# A question is a generator of the steps that need the model, and returns its example: steps of the
# same kind are taken together for several inputs.
Steps: TypeAlias = Generator[Any, Any, T]


@dataclass(frozen=True)
class Setup:
    """How inputs are explained: as ``explain`` takes it, checked.

    ``methods`` are by name; those that fail are left out where all were asked for. ``replacement``
    is what a removed token becomes. ``position``, named parts, and a whole answer are asked of
    texts; ``recorded`` is what a server recorded of one of them, and ``processor`` that of images.
    ``notes`` say what could not be done.
    """

    model: Any
    methods: dict[str, RowSource]
    tokenizer: Any
    processor: Any
    labels: Sequence[str] | Mapping[int, str] | None
    alternatives: int
    maps: tuple[str, ...]
    layers: Any
    lens: bool
    circuit: bool
    memory_limit: int | None
    replacement: Replacement
    validate: bool
    skips_failing: bool
    position: Any
    spans: Mapping[str, tuple[int, int]]
    answer: AskedAnswer
    recorded: Recorded | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep what could not be done, once."""
        if text not in self.notes:
            self.notes.append(text)

    def goes_on_without(self, name: str, error: Exception) -> bool:
        """Whether a method that failed is left out, since all that work were asked for."""
        if not self.skips_failing or list(self.methods) == [name]:
            return False
        self.methods.pop(name, None)
        self.note(f"without {name}: {first_line(error)}")
        return True


@dataclass(frozen=True)
class Choices:
    """The answers that there are at an output.

    Args:
        text_of (Callable): an answer's text, by its index among the logits.
        probabilities (Callable, optional): of answers, from their logits ``(V,)``; None for numbers
            that are not logits. Default: softmax
        role (str, optional): of the output. Default: ``"next"``
        ask (Callable, optional): makes a question of ``(position, answer, against)``.
            Default: Question
        id_of (Callable, optional): an answer's id, from its index among the logits.
            Default: the index
        read_at (int, optional): the token from which the output of a whole text is read.
            Default: None
        is_ranked (bool, optional): whether a larger one is likelier; numbers that are not are in
            their own order. Default: True
    """

    text_of: Callable[[int], str]
    probabilities: Callable[[Tensor], Tensor] | None = SOFTMAX
    role: str = NEXT
    ask: Callable[..., Question] = Question
    id_of: Callable[[int], int] = int
    read_at: int | None = None
    is_ranked: bool = True


class Questions:
    """The outputs of one example, and the rows that explain them, in order.

    Args:
        setup (Setup): what is the same for all examples.
        run (Run): of the model.
        choices (Choices): the answers at each output that has no other ones.
    """

    def __init__(self, setup: Setup, run: Run, choices: Choices) -> None:
        self.setup, self.run, self.choices = setup, run, choices
        self.questions: list[Question] = []
        self.outputs: list[Output] = []
        self.answer: WholeAnswer | None = None
        self.validation: Validation | None = None

    def add(
        self,
        logits: Tensor,
        position: int | None = None,
        chosen: int | None = None,
        against: int | None = None,
        lens: Sequence[Tensor] = (),
        typed: str | None = None,
        choices: Choices | None = None,
    ) -> None:
        """One output of ``logits (V,)``: its likeliest answers, and those that are explained.

        ``chosen`` is explained first, or the likeliest answer; ``lens`` are the logits after each
        layer, and ``typed`` the text of the chosen answer where its token does not tell. What
        cannot be answered has a logit of minus infinity. ``choices`` are those of this output,
        where they are other ones.
        """
        choices = self.choices if choices is None else choices
        possible = int(torch.isfinite(logits).sum())
        count = min(possible, 1 + max(TOP, self.setup.alternatives + 1))
        likely = top = logits.topk(count).indices.tolist()
        if not choices.is_ranked:
            first, top = chosen or 0, list(range(len(logits)))
            likely = [*top[first:], *top[:first]]
        first = likely[0] if chosen is None else chosen
        others = [answer for answer in likely if answer not in (first, against)]
        explained = [first, *([] if against is None else [against])]
        explained += others[: self.setup.alternatives]
        rows = {answer: len(self.questions) + k for k, answer in enumerate(explained)}
        self.questions += [choices.ask(position, answer) for answer in explained]
        shown = dict.fromkeys([*top[:TOP], *explained])
        answers = _answers(choices, logits, list(shown), rows, {first: typed})
        ranks = {answer.id: k for k, answer in enumerate(answers)}
        index = {candidate: ranks[choices.id_of(candidate)] for candidate in shown}
        contrasts = []
        if against is not None:
            contrasts = [Contrast(index[first], index[against], len(self.questions))]
            self.questions.append(choices.ask(position, first, against))
        layers = (
            _answers(choices, after, after.topk(TOP).indices.tolist(), {}, {}) for after in lens
        )
        self.outputs.append(
            Output(
                position,
                answers,
                index[first],
                tuple(contrasts),
                tuple(layers),
                choices.role,
                possible,
                choices.read_at,
            )
        )

    def add_answer(self, answer: WholeAnswer, logits: Tensor) -> None:
        """A whole answer, explained after all single ones, from ``logits (T, V)`` of its tokens."""
        self.answer = answer
        self.outputs.append(answer.output(logits, len(self.questions)))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.questions) + (0 if self.answer is None else self.answer.count)

    def require_memory(self, entries: int) -> None:
        """Raise where the rows do not fit the memory limit.

        Raises:
            MemoryLimitError: says what would fit.
        """
        R, M = self.rows, len(self.setup.methods)
        with limit_memory(self.setup.memory_limit):
            require(
                4 * R * M * entries,
                f"an explanation of {R} rows of {entries} numbers by {M} method(s)",
                [
                    ("alternatives=0", 4 * len(self.outputs) * M * entries),
                    ("one method", 4 * R * entries),
                    ("one output", 4 * M * entries),
                ],
            )

    def explained(
        self, inputs: Tensor, shaped: Callable[[Tensor], Tensor]
    ) -> Steps[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Relevance and deltas, by method: the last steps of a question, one for each method.

        Args:
            inputs (Tensor): of one example, ``(1, ...)``.
            shaped (Callable): from rows in the shape of the input to those that are kept.
        """
        by_method: dict[str, Rows] = {}
        for name in list(self.setup.methods):
            try:
                by_method[name] = yield Explain(self.run, inputs, self, name)
            except FAILS as error:
                if not self.setup.goes_on_without(name, error):
                    raise
        by_method = {name: rows for name, rows in by_method.items() if name in self.setup.methods}
        whole = {name: rows for name, (rows, _) in by_method.items()}
        if self.setup.validate:
            rows = [answer.row for out in self.outputs for answer in out.answers[out.chosen :][:1]]
            asked = {row: self.questions[row] for row in rows if row is not None}
            self.validation = validated(self.run, inputs, whole, asked, self.setup.replacement)
        relevance = {name: to_numpy(shaped(rows)) for name, rows in whole.items()}
        deltas = {name: to_numpy(each) for name, (_, each) in by_method.items() if each is not None}
        return relevance, deltas

    def rows_of_answer(self, method: RowSource, inputs: Tensor, name: str) -> Rows:
        """Rows of the single tokens, if any are asked about, and of the whole answer."""
        assert self.answer is not None
        if not self.questions:
            traced = self.answer.rows(method, name)
            return traced.relevance, traced.delta if method.adds_up else None
        ((each, delta),) = method.rows([InputQuestions(self.run, inputs, self.questions)], name)
        chosen = [out.answers[out.chosen].row for out in self.outputs if out.part is None]
        single = each[chosen], None if delta is None else delta[chosen]
        traced = self.answer.rows(method, name, single)
        rows = torch.cat([each, traced.relevance.to(each)])
        return rows, None if delta is None else torch.cat([delta, traced.delta.to(delta)])


@dataclass(frozen=True)
class Explain(OneInput):
    """The step of a question that needs the rows of its input ``(1, ...)``, by one method."""

    questions: Questions
    method: str

    @property
    def group(self) -> tuple[Any, ...]:
        """What steps that are taken together have in common."""
        return self.method, *super().group

    @staticmethod
    def together(several: Sequence[Explain]) -> list[Rows]:
        """The rows of each of a batch; whole answers are followed one by one."""
        name = several[0].method
        method = several[0].questions.setup.methods[name]
        what = name if len(several) == 1 else ""
        asked = [
            InputQuestions(step.run, step.inputs, step.questions.questions)
            for step in several
            if step.questions.answer is None
        ]
        rows = iter(method.rows(asked, what) if asked else ())
        return [
            next(rows)
            if step.questions.answer is None
            else step.questions.rows_of_answer(method, step.inputs, what)
            for step in several
        ]


def per_example(name: str, target: Any, B: int, is_one: bool = True) -> list[Any]:
    """A target for each example: one for all, or a list with one each.

    With ``is_one``, a list of integers is one target.

    Raises:
        InputError: for a list of another length.
    """
    if torch.is_tensor(target) and not is_one and target.dim():
        target = target.tolist()
    is_listed = isinstance(target, list) or (isinstance(target, tuple) and is_one)
    if not is_listed or not target or (is_one and not isinstance(target[0], str)):
        return [target] * B
    if len(target) != B:
        raise InputError(
            f"{name} holds {len(target)} targets for {B} example(s); expected one per example, or "
            "one for all."
        )
    return list(target)


def to_numpy(values: Tensor) -> np.ndarray:
    """A tensor as an explanation holds it, float32."""
    return np.ascontiguousarray(values.detach().float().cpu().numpy())


def _answers(
    choices: Choices,
    logits: Tensor,
    ids: list[int],
    rows: Mapping[int, int],
    typed: Mapping[int, str | None],
) -> tuple[Answer, ...]:
    logits = logits.double()
    likely: list[float | None] = [None] * len(ids)
    if choices.probabilities is not None:
        likely = choices.probabilities(logits)[ids].tolist()
    ranks = [1 + (int((logits > logits[i]).sum()) if choices.is_ranked else i) for i in ids]
    answers = [
        Answer(
            typed.get(i) or choices.text_of(i),
            choices.id_of(i),
            p,
            float(logits[i]),
            rank,
            rows.get(i),
        )
        for i, p, rank in zip(ids, likely, ranks, strict=True)
    ]
    return tuple(sorted(answers, key=lambda answer: (answer.rank, answer.id)))
