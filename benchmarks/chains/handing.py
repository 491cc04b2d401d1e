"""Relevance handed on along a chain of thought, from the rows of any method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from captum.attr import LayerGradientXActivation
from torch import Tensor
from transformers import PreTrainedModel

from captum_ssm import (
    LaTIM,
    MambaLRP,
    Trace,
    UnifiedImplicitAttention,
    continuation_relevance,
    trace_rows,
)

Rows = Callable[[Tensor, Tensor], Tensor]
"""A prompt ``(P,)`` and words that follow it ``(T,)``, as ids, to relevance ``(T, P + T - 1)``."""

Swapped = tuple[Tensor, Tensor]
"""The effects of thoughts and of records on one word."""

WAYS = (
    "all words",
    "not the reading word",
    "thoughts only",
    "the strongest thought",
    "thoughts, by swaps",
)
SIGNS = ("positive", "positive of each word", "net")


def hops_of(rows: Tensor, prompt: int, signs: str, hops: int) -> Trace:
    """The trace of the last word, by one of three ways to treat signs.

    ``"net"`` and ``"positive"`` are those of :func:`captum_ssm.trace`; ``"positive of each word"``
    takes the positive part of each row before any of them are summed.
    """
    if signs == "positive of each word":
        rows, signs = rows.clamp(min=0), "positive"
    return trace_rows(rows, prompt, span=(-1, -1), hops=hops, signs=signs)


def on_prompt(relevance: Tensor, prompt: int) -> Tensor:
    """Relevance of the prompt's words, ``(..., P)``, divided by the sum of its sizes."""
    part = relevance[..., :prompt]
    return part / part.abs().sum(-1, keepdim=True).clamp(min=1e-30)


def handed_by(way: str, rows: Tensor, prompt: int, swapped: Sequence[Swapped]) -> Tensor:
    """Rows whose relevance of the continuation is what a way to hand it on takes it to be.

    Args:
        way (str): one of :data:`WAYS`.
        rows (Tensor): ``(T, P + T - 1)``; thoughts are every second word, from the first on.
        prompt (int): P.
        swapped (sequence): for each thought and the answer, the effects of swapping each thought
            before it and of changing each record.
    """
    rows, words = rows.clone(), torch.arange(len(rows))
    own = rows[:, prompt:]
    if way == "not the reading word":
        rows[words, prompt - 1 + words] = 0.0
    elif way != "all words":
        own[:, 1::2] = 0.0
    if way == "the strongest thought":
        kept = own.clamp(min=0).amax(1, keepdim=True)
        own[:] = torch.where((own == kept) & (own > 0), own, 0.0)
    elif way == "thoughts, by swaps":
        own[:] = 0.0
        for k, (thoughts, records) in enumerate(swapped):
            effects = [part.clamp(min=0).to(rows) for part in (thoughts, records)]
            share = effects[0] / torch.cat(effects).sum().clamp(min=1e-30)
            left = rows[2 * k, :prompt].abs().sum() / (1 - share.sum()).clamp(min=1e-6)
            own[2 * k, : 2 * k : 2] = left * share
    return rows


def methods(model: PreTrainedModel) -> Iterator[tuple[str, Rows]]:
    """Each method by name; all explain logits."""

    def ours(method: Any, **options: Any) -> Rows:
        return lambda prompt, words: continuation_relevance(
            method, prompt, words, **options
        ).detach()

    yield "MambaLRP", ours(MambaLRP(model))
    yield "LaTIM", ours(LaTIM(model))
    yield "Unified rollout", ours(UnifiedImplicitAttention(model), aggregation="rollout")
    yield "Input x gradient (Captum)", partial(_gradient_rows, model)
    generator = torch.Generator().manual_seed(0)
    yield (
        "Random",
        lambda prompt, words: torch.rand(
            len(words), len(prompt) + len(words) - 1, generator=generator
        ).tril(len(prompt) - 1),
    )


def _gradient_rows(model: PreTrainedModel, prompt: Tensor, words: Tensor) -> Tensor:
    P, T = len(prompt), len(words)
    ids = torch.cat([prompt, words[:-1]]).expand(T, -1)
    product = LayerGradientXActivation(
        lambda ids: model(ids, use_cache=False).logits[range(T), range(P - 1, P + T - 1)],
        model.get_input_embeddings(),
    )
    return product.attribute(ids, target=words).sum(-1).detach()
