r"""An answer traced back through the words that the model wrote before it.

A model that thinks aloud rests its last token on its own words, and a plain explanation ends there.
A hop explains these words in turn, weighted by the relevance that fell on them. With the row
:math:`R_j` of generated token j, which its score :math:`c_j` is the sum of, and the weights
:math:`w` of the hop before,

.. math::
    r^0 = \sum_{k \in \text{span}} R_k, \qquad
    r^{h+1} = \sum_{j \text{ generated}} w_j \frac{R_j}{c_j}, \qquad w = r^h_{\text{generated}},

so that each hop adds up to what the one before handed on. A method that explains a sum of scores
takes one backward pass for a hop; of the others, rows of single tokens are weighted.

Relevance need not know which word to go on from: one by which the model finds another (a key) works
through coefficients that methods hold constant. With ``through="swaps"`` the shares of the model's
own words are measured, by :func:`~captum_ssm.interventions.swap_effects`, and relevance says where
in the prompt the rest lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from captum_ssm.attr import TokenAttribution
from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.answers.continuation import Continued
from captum_ssm.explanation.make.relevance.rows import has_delta
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.explanation.parts import RELEVANCE, SWAPS, THROUGH
from captum_ssm.interventions import swap_effects
from captum_ssm.utils.integers import count_of, pair_of

SIGNS = ("net", "positive")


@dataclass(frozen=True, eq=False)
class Trace:
    r"""Where an answer comes from, hop by hop.

    Args:
        relevance (Tensor): ``(K + 1, P + T - 1)``. Hop 0 is the relevance of all tokens for the
            answer; hop k that for the generated tokens which hop k - 1 fell on. Its unit is that of
            the answer's score.
        prompt (int): P, the tokens of the prompt.
        span (tuple of int): the first and the last explained token of the continuation.
        handed_on (Tensor): ``(K + 1,)``, the share of each hop's relevance, by size, that lies on
            generated tokens: what the next hop starts from.
        kept (Tensor): ``(K + 1, P + T - 1)``, what of each hop is not handed on: that of the
            prompt's tokens, of generated tokens whose own score is not positive, and all of the
            last hop.
        delta (Tensor): ``(K + 1,)``, what each hop misses of what it should add up to: hop 0 of the
            answer's score, hop k of what hop k - 1 handed on. NaN for methods that do not add up to
            a score.

    Examples::

        >>> traced = captum_ssm.trace(MambaLRP(model), input_ids, torch.tensor([4, 5, 6]), hops=2)
        >>> traced.relevance.shape, traced.handed_on.shape
        (torch.Size([3, 9]), torch.Size([3]))
    """

    relevance: Tensor
    prompt: int
    span: tuple[int, int]
    handed_on: Tensor
    kept: Tensor
    delta: Tensor

    @property
    def hops(self) -> int:
        """K, how many times relevance was handed on."""
        return len(self.relevance) - 1

    @property
    def total(self) -> Tensor:
        """All hops together, ``(P + T - 1,)``: what each token keeps of the answer's score.

        It hides what a single hop shows, where each hands on a small share: look at
        :attr:`normalized` first.
        """
        return self.kept.sum(0)

    @property
    def normalized(self) -> Tensor:
        """Each hop divided by the sum of its sizes, ``(K + 1, P + T - 1)``."""
        return self.relevance / self.relevance.abs().sum(1, keepdim=True).clamp(min=1e-30)

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.handed_on.tolist())
        first, last = self.span
        return (
            f"<Trace of tokens {first} .. {last} after a prompt of {self.prompt}: {self.hops} "
            f"hops, handed on {shares}>"
        )


def trace(
    method: TokenAttribution,
    prompt: Tensor,
    continuation: Tensor,
    *,
    span: tuple[int, int] | None = None,
    hops: int | None = None,
    score: str = "logit",
    signs: str = "net",
    through: str | Tensor = RELEVANCE,
    least: float = 0.02,
    internal_batch_size: int = 8,
    **options: Any,
) -> Trace:
    r"""The relevance of a whole answer, followed back through the words that the model wrote.

    Args:
        method (TokenAttribution): a method of this library.
        prompt (Tensor): token ids ``(1, P)`` or ``(P,)``.
        continuation (Tensor): token ids ``(T,)``, thoughts and answer.
        span (tuple of int, optional): the first and the last token of the answer, from 0 on,
            negative from the end; None for the whole continuation. Default: None
        hops (int, optional): how many times relevance is handed on; None for as many as it takes
            until less than ``least`` is left to hand on. Default: None
        score (str, optional): of a token, as for :class:`~captum_ssm.attr.SpanTarget`.
            Default: ``"logit"``
        signs (str, optional): ``"net"`` hands on relevance with its sign. ``"positive"`` drops what
            speaks against the answer in each hop, and scales the rest to the same sum.
            Default: ``"net"``
        through (str or Tensor, optional): what says on which of its own words the model rests.
            ``"relevance"``, that of the method; or ``"swaps"``: how far the score falls as other
            tokens that fit there take the place of each of them, by
            :func:`~captum_ssm.interventions.swap_effects`; or such effects, ``(T, T - 1)``. With
            swaps, the rest of the score is shared among the prompt's tokens by the positive part
            of relevance. Default: ``"relevance"``
        least (float, optional): a share of hop 0's size. Default: 0.02
        internal_batch_size (int, optional): how many tokens are explained at a time, where rows of
            single tokens are needed. Default: 8
        **options: the method's own.

    Returns:
        Trace: with a row per hop.

    Raises:
        ValueError, TypeError: as for :func:`continuation_relevance`, and for an unknown score or
            signs, effects of another shape, or a share ``least`` that is not between 0 and 1.

    Examples::

        >>> captum_ssm.trace(MambaLRP(model), input_ids, torch.tensor([4, 5, 6]), hops=1).hops
        1
    """
    text = Continued.of(method, prompt, continuation, score, internal_batch_size, options)
    asked = _Asked.of(text.prompt, len(text.continuation), span, hops, signs, least)
    effects = through if isinstance(through, Tensor) else None
    if effects is None and through not in THROUGH:
        raise ValueError(
            f"through is {brief(through)}; expected one of {THROUGH}, or effects of swaps."
        )
    # Later tokens cannot have made the model write the span.
    text = text.until(asked.last + 1)
    if effects is None and through == SWAPS:
        ids = text.ids[:, : text.prompt], text.continuation
        effects = nn.functional.pad(
            swap_effects(text.model, *ids, score=score, batch_size=text.step),
            (0, asked.length - asked.last - 1) * 2,
        )
    return _traced(asked, _source(text), effects)


def trace_rows(
    rows: Tensor,
    prompt: int,
    *,
    scores: Tensor | None = None,
    deltas: Tensor | None = None,
    span: tuple[int, int] | None = None,
    hops: int | None = None,
    signs: str = "net",
    through: Tensor | None = None,
    least: float = 0.02,
) -> Trace:
    """A trace made of the relevance of single tokens, of any method, Captum's too.

    Args:
        rows (Tensor): ``(T, P + T - 1)``, as :func:`continuation_relevance` returns them.
        prompt (int): P.
        scores (Tensor, optional): ``(T,)``, what each row is divided by where it is handed on;
            None for its own sum. Default: None
        deltas (Tensor, optional): ``(T,)``, of the rows. Default: None
        through (Tensor, optional): effects of swaps, as for :func:`trace`; None for relevance.
            Default: None
        span, hops, signs, least: as for :func:`trace`.

    Raises:
        ValueError: for rows of another shape, and as for :func:`trace`.

    Examples::

        >>> rows = captum_ssm.continuation_relevance(
        ...     MambaLRP(model), input_ids, torch.tensor([4, 5, 6])
        ... )
        >>> captum_ssm.trace_rows(rows, prompt=7, span=(2, 2), hops=1).relevance.shape
        torch.Size([2, 9])
    """
    if rows.dim() != 2 or rows.shape[1] != prompt + len(rows) - 1 or prompt < 1:
        raise InputError(
            f"rows has shape {tuple(rows.shape)} and the prompt {prompt} tokens; expected "
            "(T, P + T - 1), one row for each of the T tokens after the prompt."
        )
    asked = _Asked.of(prompt, len(rows), span, hops, signs, least)
    count = asked.last + 1
    rows = rows.detach()[:count, : prompt + count - 1]
    sums = rows.sum(1) if scores is None else scores.detach()[:count].to(rows)
    return _traced(asked, _Rows(rows, sums, None if deltas is None else deltas[:count]), through)


@dataclass(frozen=True)
class _Asked:
    # The arguments of a trace, checked; the length is T.
    prompt: int
    length: int
    first: int
    last: int
    hops: int | None
    signs: str
    least: float

    @property
    def enough(self) -> float:
        # The share of hop 0 that is not worth a hop.
        return self.least if self.hops is None else 0.0

    @classmethod
    def of(cls, prompt: int, length: int, span: Any, hops: Any, signs: str, least: float) -> _Asked:
        if signs not in SIGNS:
            raise ValueError(f"signs is {brief(signs)}; expected one of {SIGNS}.")
        if not 0 <= least < 1:
            raise ValueError(f"least is {brief(least)}; expected a share from 0 to below 1.")
        count = count_of("hops", hops, 0, or_none=True)
        first, last = ends_of((0, length - 1) if span is None else span, length)
        return cls(prompt, length, first, last, count, signs, least)


def ends_of(span: Any, length: int) -> tuple[int, int]:
    """The first and the last token of a span of a continuation of so many, from 0 on.

    Raises:
        InputError: for what are not two of its tokens, in order.
    """
    ends = [end + length if end < 0 else end for end in pair_of(span) or ()]
    if ends and 0 <= ends[0] <= ends[1] < length:
        return ends[0], ends[1]
    raise InputError(
        f"span is {brief(span)}; expected the first and the last of its tokens in the "
        f"continuation, which has {length}: 0 .. {length - 1} (or -{length} .. -1 from the end)."
    )


class _Source(Protocol):
    # Relevance of weighted sums of the scores of T tokens.

    @property
    def sums(self) -> Tensor:
        # What the row of each token adds up to, (T,).
        ...

    def row(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        # The relevance (P + T - 1,) of a sum of scores with weights (T,), and its delta ().
        ...


@dataclass(frozen=True)
class _Rows:
    # The rows of single tokens, (T, P + T - 1), what they add up to, (T,), and their deltas.
    rows: Tensor
    sums: Tensor
    deltas: Tensor | None

    def row(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        row = weights.to(self.rows) @ self.rows
        if self.deltas is None:
            return row, torch.full_like(row[0], torch.nan)
        return row, weights.to(self.deltas) @ self.deltas


@dataclass(frozen=True)
class _Passes:
    # One pass of the method for each row.
    text: Continued

    @cached_property
    def sums(self) -> Tensor:
        text = self.text
        if not text.method.needs_target(**text.options):
            return text.rows()[0].sum(1)
        with torch.no_grad():
            logits = extract_logits(Run(text.model)(text.ids))
        return text.target().scores(logits, text.ids.shape[1])[0]

    def row(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        text, options = self.text, dict(self.text.options)
        target = text.target(weights)
        if has_delta(text.method, options):
            options["return_convergence_delta"] = True
            row, delta = text.method.attribute(text.ids, target=target, **options)
            return row[0], delta[0]
        row = text.method.attribute(text.ids, target=target, **options)[0]
        return row, torch.full_like(row[0], torch.nan)


@dataclass(frozen=True)
class _Swapped:
    # Another source's relevance of the prompt; that of the continuation by effects (T, T - 1).
    source: _Source
    prompt: int
    effects: Tensor

    @property
    def sums(self) -> Tensor:
        return self.source.sums

    @cached_property
    def shares(self) -> Tensor:
        # The prompt, without which there is no score, counts as much as the score.
        effects = self.effects.clamp(min=0)
        whole = self.sums.to(effects).clamp(min=0) + effects.sum(1)
        return effects / whole.clamp(min=1e-30)[:, None]

    def row(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        row, delta = self.source.row(weights)
        scores = (weights.to(self.sums) * self.sums).to(row)
        parts = scores.clamp(min=0)
        words = parts @ self.shares.to(row)
        before = row[: self.prompt].clamp(min=0)
        before = before * ((parts.sum() - words.sum()) / before.sum().clamp(min=1e-30))
        missing = (scores.sum() - before.sum() - words.sum()).to(delta)
        return torch.cat([before, words]), torch.where(delta.isnan(), delta, missing)


def _source(text: Continued) -> _Source:
    if text.method.is_additive(**text.options):
        return _Passes(text)
    rows, deltas = text.rows()
    return _Rows(rows, rows.sum(1), deltas)


def _traced(asked: _Asked, source: _Source, effects: Tensor | None) -> Trace:
    P, count = asked.prompt, asked.last + 1
    if effects is not None:
        if effects.shape != (asked.length, asked.length - 1):
            raise InputError(
                f"through has shape {tuple(effects.shape)}; expected the effects of {asked.length} "
                f"words, ({asked.length}, {asked.length - 1}), as swap_effects returns them."
            )
        source = _Swapped(source, P, effects[:count, : count - 1])
    weights = torch.zeros(count)
    weights[asked.first :] = 1
    rows, kept, deltas = [], [], []
    while True:
        row, delta = source.row(weights)
        row = _positive(row) if asked.signs == "positive" else row
        rows.append(row)
        deltas.append(delta)
        is_last = len(rows) > (count if asked.hops is None else asked.hops)
        handed = torch.zeros_like(row[P:])
        if not is_last:
            sums = source.sums[:-1].to(row)
            handed = torch.where(sums > 0, row[P:], handed)
            is_last = float(handed.abs().sum()) <= asked.enough * float(rows[0].abs().sum())
        kept.append(row if is_last else row - nn.functional.pad(handed, (P, 0)))
        if is_last:
            return _of_hops(asked, rows, kept, deltas)
        weights = nn.functional.pad(torch.where(handed == 0, handed, handed / sums), (0, 1))


def _positive(row: Tensor) -> Tensor:
    # The positive part, with the sum of the whole.
    part = row.clamp(min=0)
    return part * (row.sum().clamp(min=0) / part.sum().clamp(min=1e-30))


def _of_hops(asked: _Asked, rows: list[Tensor], kept: list[Tensor], deltas: list[Tensor]) -> Trace:
    # Nothing was handed on to the hops that were asked for after the last one.
    empty = 0 if asked.hops is None else asked.hops + 1 - len(rows)
    after = asked.length - asked.last - 1

    def whole(per_hop: list[Tensor]) -> Tensor:
        return nn.functional.pad(torch.stack(per_hop), (0, after, 0, empty))

    relevance = whole(rows)
    size = relevance.abs()
    handed = size[:, asked.prompt :].sum(1) / size.sum(1).clamp(min=1e-30)
    delta = nn.functional.pad(torch.stack(deltas), (0, empty))
    ends = asked.first, asked.last
    return Trace(relevance, asked.prompt, ends, handed, whole(kept), delta)
