"""A whole answer, explained in one row, and followed back through the words before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import TokenAttribution
from captum_ssm.errors import InputError, brief
from captum_ssm.explanation import Answer, Output, Token
from captum_ssm.explanation.make.answers.trace import Trace, ends_of, trace, trace_rows
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.relevance.rows import InputQuestions, Question, RowSource
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.explanation.parts import PART, RELEVANCE, SWAPS, THROUGH
from captum_ssm.interventions import swap_effects
from captum_ssm.utils.integers import count_of, pair_of

THOUGHTS = ("<think>", "</think>")  # what chat templates write around them


@dataclass(frozen=True)
class AskedAnswer:
    """Which tokens of a continuation are explained together, as ``explain`` takes it.

    Args:
        span (str or tuple, optional): a text of the continuation, or the first and the last of its
            tokens. None is what comes after the thoughts. Default: None
        hops (int, optional): how often relevance is handed on. Default: None
        reasoning (tuple of str, optional): what thoughts begin and end with.
            Default: ``THOUGHTS``
        through (str, optional): what says on which of its own words the model rests, as for
            :func:`captum_ssm.trace`. Default: ``"relevance"``
    """

    span: str | tuple[int, int] | None = None
    hops: int | None = None
    reasoning: tuple[str, str] = THOUGHTS
    through: str = RELEVANCE

    @classmethod
    def of(cls, span: Any, hops: Any, reasoning: Any, through: Any = RELEVANCE) -> AskedAnswer:
        """The arguments, checked."""
        if span is not None and not isinstance(span, str):
            raw, span = span, pair_of(span)
            if span is None:
                raise InputError(
                    f"span is {brief(raw)}; expected a text of the continuation, or the first and "
                    "the last of its tokens, such as (0, 4) or (-3, -1)."
                )
        count = count_of("hops", hops, 0, or_none=True)
        if through not in THROUGH:
            raise InputError(f"through is {brief(through)}; expected one of {THROUGH}.")
        if through != RELEVANCE and not count:
            raise InputError(
                f"through is {brief(through)}, which says how hops are found, and hops is "
                f"{brief(hops)}; expected hops=1 or more, or no through."
            )
        marks = THOUGHTS if reasoning is None else reasoning
        is_pair = isinstance(marks, (tuple, list)) and len(marks) == 2
        if not is_pair or not all(isinstance(mark, str) for mark in marks) or not marks[1]:
            raise TypeError(
                f"reasoning is {brief(reasoning)}; expected two texts, what the model's thoughts "
                "begin with (an empty text for the continuation's start) and what they end with, "
                f"such as {THOUGHTS}."
            )
        return cls(span, count, (marks[0], marks[1]), through)

    @property
    def is_asked(self) -> bool:
        """Whether tokens are explained together."""
        return self.span is not None or self.hops is not None

    def thoughts(self, tokens: Sequence[Token], prompt: int) -> tuple[int, int] | None:
        """The tokens ``(first, end)`` of the continuation that are thoughts; None for none.

        A prompt that ends inside of them, as templates leave it, counts as their beginning.
        """
        opening, closing = self.reasoning
        chars = _Characters(tokens, prompt)
        end = chars.text.rfind(closing)
        if end < 0:
            return None
        start = chars.text.find(opening) if opening else 0
        if start < 0 or start > end:
            before = _Characters(tokens[:prompt], 0).text
            if before.rfind(opening) <= before.rfind(closing):
                return None
            start = 0
        return chars.tokens(start, end + len(closing))

    def part(
        self, tokens: Sequence[Token], prompt: int, thoughts: tuple[int, int] | None
    ) -> tuple[int, int]:
        """The tokens ``(first, end)`` that are explained together.

        Raises:
            InputError: for a span that the continuation does not hold.
        """
        if isinstance(self.span, tuple):
            first, last = ends_of(self.span, len(tokens) - prompt)
            return prompt + first, prompt + last + 1
        chars = _Characters(tokens, prompt)
        if self.span is not None:
            start = chars.text.rfind(self.span) if self.span.strip() else -1
            if start < 0:
                raise InputError(
                    f"span is {brief(self.span)}, which the continuation does not hold: "
                    f"{chars.text!r}. Expected a part of it, as it stands there."
                )
            return chars.tokens(start, start + len(self.span))
        first = prompt if thoughts is None or thoughts[1] == len(tokens) else thoughts[1]
        said = [k for k in range(first, len(tokens)) if tokens[k].text.strip()]
        said = [k for k in said if tokens[k].end > tokens[k].start] or said
        return (said[0], said[-1] + 1) if said else (first, len(tokens))


class _Characters:
    # The text of tokens from one on, and which token each character of it belongs to.
    def __init__(self, tokens: Sequence[Token], first: int) -> None:
        self.text = "".join(token.text for token in tokens[first:])
        self.owner = [k for k in range(first, len(tokens)) for _ in tokens[k].text]

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        while start < end - 1 and self.text[start].isspace():
            start += 1
        return self.owner[start], self.owner[end - 1] + 1


@dataclass(frozen=True)
class WholeAnswer:
    """One part of a continuation, and the rows that explain it.

    Args:
        asked (AskedAnswer): how it is explained.
        whole (TokenizedText): the text of L tokens.
        prompt (int): how many of them are the prompt's.
        part (tuple of int): the tokens ``(first, end)`` that are explained together.
        run (Run): of the model.
        ids (Tensor): the n tokens that the model reads, ``(1, n)``.
    """

    asked: AskedAnswer
    whole: TokenizedText
    prompt: int
    part: tuple[int, int]
    run: Run
    ids: Tensor

    @property
    def count(self) -> int:
        """How many rows there are: one, and one for each hop."""
        return 1 + (self.asked.hops or 0)

    def output(self, logits: Tensor, row: int) -> Output:
        """The output, explained by the rows from ``row`` on; ``logits (T, V)`` of its tokens."""
        first, end = self.part
        L, ids = len(self.whole.tokens), torch.tensor(self.whole.ids[first:end])
        logits = logits[first - self.prompt : end - self.prompt].double().cpu()
        each = logits.gather(1, ids[:, None])
        likely = float(logits.log_softmax(1).gather(1, ids[:, None]).sum().exp())
        rank = 1 + int((logits > each).sum(1).max())
        id = first * L + end - 1
        answer = Answer(self.whole.part(first, end), id, likely, float(each.sum()), rank, row)
        hops = tuple(range(row + 1, row + self.count))
        through = self.asked.through
        return Output(None, (answer,), 0, role=PART, part=self.part, hops=hops, through=through)

    @cached_property
    def _words(self) -> Tensor:
        # The tokens of the continuation, (T,).
        return torch.tensor(self.whole.ids[self.prompt :], device=self.ids.device)

    @cached_property
    def _effects(self) -> Tensor | None:
        # Effects of swaps, (T, T - 1), which are those of the model and the same for all methods.
        if self.asked.through != SWAPS:
            return None
        words, count = self._words, self.part[1] - self.prompt
        effects = swap_effects(self.run.module, self.ids[:, : self.prompt], words[:count])
        return nn.functional.pad(effects, (0, len(words) - count) * 2)

    def rows(
        self, source: RowSource, what: str, single: tuple[Tensor, Tensor | None] | None = None
    ) -> Trace:
        """A row per hop, ``(K + 1, n)`` of the n tokens that the model reads.

        ``single`` are rows and deltas of each token of the continuation, where they are there.
        """
        P, words, effects = self.prompt, self._words, self._effects
        hops = self.asked.hops or 0
        span = self.part[0] - P, self.part[1] - P - 1
        method = getattr(source, "method", None)
        # Rows of single tokens know of images that the model reads with the text.
        is_alone = self.run.media is None
        if (
            is_alone
            and isinstance(method, TokenAttribution)
            and (single is None or method.is_additive(**source.options))
        ):
            how = dict(source.options, through=self.asked.through if effects is None else effects)
            return trace(method, self.ids[:, :P], words, span=span, hops=hops, **how)
        if single is None:
            questions = [Question(P - 1 + k, int(word)) for k, word in enumerate(words)]
            (single,) = source.rows([InputQuestions(self.run, self.ids, questions)], what)
        rows, deltas = single
        return trace_rows(rows, P, deltas=deltas, span=span, hops=hops, through=effects)
