"""The answers at one output, which of them are explained, and by which rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from captum_ssm.errors import InputError
from captum_ssm.explanation import Answer, Contrast, Output, Validation
from captum_ssm.explanation.make.removal import Replacement
from captum_ssm.explanation.make.rows import Question, RowSource
from captum_ssm.explanation.make.validate import validated
from captum_ssm.utils.memory import memory_limit as limit_memory
from captum_ssm.utils.memory import require

TOP = 5  # the likeliest answers, which are kept at each output
# What a method raises that does not fit a model.
FAILS = (ValueError, TypeError, RuntimeError, NotImplementedError, ImportError)


@dataclass(frozen=True)
class Setup:
    """What is the same for all examples: as ``explain`` takes it.

    ``methods`` are by name; those that fail are left out where all were asked for. ``replacement``
    is what a removed token becomes, and ``notes`` say what could not be done.
    """

    model: Any
    methods: dict[str, RowSource]
    alternatives: int = 0
    maps: tuple[str, ...] = ()
    layers: Any = None
    lens: bool = False
    memory_limit: int | None = None
    replacement: Replacement = field(default_factory=partial(Replacement, 0, "token 0"))
    validate: bool = False
    skips_failing: bool = False
    notes: list[str] = field(default_factory=list)


class Questions:
    """The outputs of one example, and the rows that explain them, in order.

    Args:
        setup (Setup): what is the same for all examples.
        text_of (Callable): an answer's text, by its id.
    """

    def __init__(self, setup: Setup, text_of: Callable[[int], str]) -> None:
        self.setup, self.text_of = setup, text_of
        self.questions: list[Question] = []
        self.outputs: list[Output] = []
        self.validation: Validation | None = None

    def add(
        self,
        logits: Tensor,
        position: int | None = None,
        chosen: int | None = None,
        against: int | None = None,
        lens: Sequence[Tensor] = (),
        typed: str | None = None,
    ) -> None:
        """One output of ``logits (V,)``: its likeliest answers, and those that are explained.

        ``chosen`` is explained first, or the likeliest answer; ``lens`` are the logits after each
        layer, and ``typed`` the text of the chosen answer where its token does not tell.
        """
        count = min(len(logits), 1 + max(TOP, self.setup.alternatives + 1))
        likely = logits.topk(count).indices.tolist()
        first = likely[0] if chosen is None else chosen
        others = [answer for answer in likely if answer not in (first, against)]
        explained = [first, *([] if against is None else [against])]
        explained += others[: self.setup.alternatives]
        rows = {answer: len(self.questions) + k for k, answer in enumerate(explained)}
        self.questions += [Question(position, answer) for answer in explained]
        shown = dict.fromkeys([*likely[:TOP], *explained])
        answers = _answers(logits, list(shown), self.text_of, rows, {first: typed})
        index = {answer.id: i for i, answer in enumerate(answers)}
        contrasts = []
        if against is not None:
            contrasts = [Contrast(index[first], index[against], len(self.questions))]
            self.questions.append(Question(position, first, against))
        layers = (
            _answers(after, after.topk(TOP).indices.tolist(), self.text_of, {}, {})
            for after in lens
        )
        self.outputs.append(
            Output(position, answers, index[first], tuple(contrasts), tuple(layers), len(logits))
        )

    def add_forecast(
        self,
        numbers: Tensor,
        names: Mapping[tuple[int, ...], str],
        chosen: tuple[int, ...] | None = None,
        against: tuple[int, ...] | None = None,
    ) -> None:
        """One output of several numbers, of which one is explained: each has a name, by its index.

        The first is ``chosen`` where none is. Others are explained with ``alternatives``.
        """
        order = list(names)
        first = order[0] if chosen is None else chosen
        start = order.index(first)
        later = [one for one in (*order[start + 1 :], *order[:start]) if one != against]
        asked = [first, *([] if against is None else [against])]
        asked += later[: self.setup.alternatives]
        rows = {one: len(self.questions) + k for k, one in enumerate(asked)}
        self.questions += [Question(None, one) for one in asked]
        shown = sorted({*asked, *order[:TOP]})
        answers = tuple(
            Answer(names[one], k, None, float(numbers[one]), k + 1, rows.get(one))
            for one in shown
            for k in [order.index(one)]
        )
        contrasts = []
        if against is not None:
            contrasts = [Contrast(shown.index(first), shown.index(against), len(self.questions))]
            self.questions.append(Question(None, first, against))
        self.outputs.append(
            Output(None, answers, shown.index(first), tuple(contrasts), (), len(order))
        )

    def require_memory(self, entries: int) -> None:
        """Raise where the rows do not fit the memory limit.

        Raises:
            MemoryLimitError: says what would fit.
        """
        R, M = len(self.questions), len(self.setup.methods)
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
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Relevance and deltas, by method.

        Args:
            inputs (Tensor): of one example, ``(1, ...)``.
            shaped (Callable): from rows in the shape of the input to those that are kept.
        """
        whole, relevance, deltas = {}, {}, {}
        for name, method in list(self.setup.methods.items()):
            try:
                explained, delta = method.rows(inputs, self.questions, name)
            except FAILS as error:
                if not self.setup.skips_failing or len(self.setup.methods) == 1:
                    raise
                del self.setup.methods[name]
                self.setup.notes.append(f"without {name}: {str(error).splitlines()[0]}")
                continue
            whole[name] = explained
            relevance[name] = to_numpy(shaped(explained))
            if delta is not None:
                deltas[name] = to_numpy(delta)
        if self.setup.validate:
            rows = [answer.row for out in self.outputs for answer in out.answers[out.chosen :][:1]]
            asked = {row: self.questions[row] for row in rows if row is not None}
            self.validation = validated(
                self.setup.model, inputs, whole, asked, self.setup.replacement
            )
        return relevance, deltas


def per_example(name: str, target: Any, B: int) -> list[Any]:
    """A target for each example: one for all, or a list of texts with one each.

    Raises:
        InputError: for a list of another length.
    """
    if not isinstance(target, (list, tuple)) or not target or not isinstance(target[0], str):
        return [target] * B
    if len(target) != B:
        raise InputError(
            f"{name} holds {len(target)} texts for {B} example(s); expected one per example, or "
            "one text for all."
        )
    return list(target)


def to_numpy(values: Tensor) -> np.ndarray:
    """A tensor as an explanation holds it, float32."""
    return np.ascontiguousarray(values.detach().float().cpu().numpy())


def _answers(
    logits: Tensor,
    ids: list[int],
    text_of: Callable[[int], str],
    rows: Mapping[int, int],
    typed: Mapping[int, str | None],
) -> tuple[Answer, ...]:
    logits = logits.double()
    chosen = logits[ids]
    probabilities = (chosen - logits.logsumexp(0)).exp().tolist()
    ranks = [1 + int((logits > logit).sum()) for logit in chosen]
    answers = [
        Answer(typed.get(i) or text_of(i), i, p, float(logits[i]), rank, rows.get(i))
        for i, p, rank in zip(ids, probabilities, ranks, strict=True)
    ]
    return tuple(sorted(answers, key=lambda answer: (answer.rank, answer.id)))
