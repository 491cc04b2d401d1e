"""Relevance handed on along a chain of thought, from the rows of any method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from captum.attr import LayerGradientXActivation
from torch import Tensor
from transformers import PreTrainedModel

from captum_ssm import LaTIM, MambaLRP, UnifiedImplicitAttention
from captum_ssm.explanation.make.captum_llm import continuation_relevance

SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda rows: rows.clamp(min=0),
    "net": lambda rows: rows,
    "size": lambda rows: rows.abs(),
}
Rows = Callable[[Tensor, Tensor], Tensor]
"""A prompt ``(P,)`` and words that follow it ``(T,)``, as ids, to relevance ``(T, P + T - 1)``."""


@dataclass(frozen=True)
class Handed:
    """Relevance by hop.

    Args:
        relevance (Tensor): ``(K + 1, P + T - 1)``, hop k with the weights that it was handed.
        on (Tensor): ``(K + 1,)``, the share of each hop on words of the continuation.
    """

    relevance: Tensor
    on: Tensor

    @property
    def normalized(self) -> Tensor:
        """Each hop divided by its sum."""
        return normalized(self.relevance)


def normalized(rows: Tensor) -> Tensor:
    """Rows divided by their sums; a row that sums to zero stays."""
    whole = rows.sum(-1, keepdim=True)
    return rows / torch.where(whole == 0, 1.0, whole)


def hand_on(rows: Tensor, prompt: int, signs: str = "positive", hops: int = 3) -> Handed:
    r"""Hops from the last row: :math:`w_{k+1} = w_k R_{own}`, with the rows of R normalized.

    Args:
        rows (Tensor): ``(T, P + T - 1)``, one row per word of the continuation.
        prompt (int): P.
        signs (str): what of the rows counts.
        hops (int): K.
    """
    shares = normalized(SIGNS[signs](rows))
    own = torch.nn.functional.pad(shares[:, prompt:], (0, 1))  # (T, T)
    weights = torch.zeros(len(rows), dtype=rows.dtype)
    weights[-1] = 1.0
    found, on = [], []
    for _ in range(hops + 1):
        found.append(weights @ shares)
        on.append((weights @ own).sum() / weights.sum() if weights.sum() else weights.sum())
        weights = weights @ own
    return Handed(torch.stack(found), torch.stack(on))


def closed_form(rows: Tensor, prompt: int, signs: str = "positive") -> Tensor:
    r"""All hops at once, on the prompt: :math:`(I - R_{own})^{-1} R_{prompt}`'s last row."""
    shares = normalized(SIGNS[signs](rows))
    own = torch.nn.functional.pad(shares[:, prompt:], (0, 1))
    return torch.linalg.solve(torch.eye(len(rows), dtype=rows.dtype) - own, shares[:, :prompt])[-1]


def strongest(rows: Tensor, prompt: int, signs: str = "positive", hops: int = 3) -> Tensor:
    """Hops that go on from one word only, the most relevant: ``(K + 1, P + T - 1)``."""
    shares = normalized(SIGNS[signs](rows))
    found, word = [], len(rows) - 1
    for _ in range(hops + 1):
        found.append(shares[word])
        if word == 0:
            break
        word = int(shares[word, prompt : prompt + word].argmax())
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
