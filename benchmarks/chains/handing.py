"""Relevance handed on along a chain of thought, from the rows of any method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def strongest(rows: Tensor, prompt: int, hops: int) -> Tensor:
    """Hops that go on from one word only, the most relevant: ``(K + 1, P + T - 1)`` or fewer."""
    found, word = [], len(rows) - 1
    for _ in range(hops + 1):
        found.append(rows[word])
        if word == 0:
            break
        word = int(rows[word, prompt : prompt + word].argmax())
    return torch.stack(found)


def methods(model: PreTrainedModel) -> Iterator[tuple[str, Rows]]:
    """Each method by name; all explain logits."""

    def ours(method: Any, **options: Any) -> Rows:
        return lambda prompt, words: continuation_relevance(
            method, prompt, words, **options
        ).detach()

    yield "MambaLRP", ours(MambaLRP(model))
    yield "LaTIM", ours(LaTIM(model))
    rollout = ours(UnifiedImplicitAttention(model), aggregation="rollout")
    yield "Unified rollout", rollout
    yield (
        "Unified rollout, without the reading token",
        lambda prompt, words: _without_reader(rollout(prompt, words), len(prompt)),
    )
    yield "Input x gradient (Captum)", partial(_gradient_rows, model)
    generator = torch.Generator().manual_seed(0)
    yield (
        "Random",
        lambda prompt, words: torch.rand(
            len(words), len(prompt) + len(words) - 1, generator=generator
        ).tril(len(prompt) - 1),
    )


def _without_reader(rows: Tensor, prompt: int) -> Tensor:
    rows = rows.clone()
    rows[torch.arange(len(rows)), prompt - 1 + torch.arange(len(rows))] = 0.0
    return rows


def _gradient_rows(model: PreTrainedModel, prompt: Tensor, words: Tensor) -> Tensor:
    P, T = len(prompt), len(words)
    ids = torch.cat([prompt, words[:-1]]).expand(T, -1)
    product = LayerGradientXActivation(
        lambda ids: model(ids, use_cache=False).logits[range(T), range(P - 1, P + T - 1)],
        model.get_input_embeddings(),
    )
    return product.attribute(ids, target=words).sum(-1).detach()
