"""Relevance handed on along a chain of thought, from the rows of any method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from captum.attr import LayerGradientXActivation
from swaps import Subject
from torch import Tensor

from captum_ssm import LaTIM, MambaLRP, UnifiedImplicitAttention
from captum_ssm.examples.chains import Puzzle, encode
from captum_ssm.explanation.make.captum_llm import continuation_relevance

SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda rows: rows.clamp(min=0),
    "net": lambda rows: rows,
    "size": lambda rows: rows.abs(),
}
Rows = Callable[[Puzzle], Tensor]
"""Relevance of all words before each word of the continuation up to the answer."""


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


def methods(subject: Subject) -> Iterator[tuple[str, Rows]]:
    """Each method by name; all explain logits."""

    def ours(method: Any, **options: Any) -> Rows:
        def rows(puzzle: Puzzle) -> Tensor:
            prompt, words = _ids(subject, puzzle)
            return continuation_relevance(method, prompt, words, **options).detach()

        return rows

    yield "MambaLRP", ours(MambaLRP(subject.model))
    yield "LaTIM", ours(LaTIM(subject.model))
    rollout = ours(UnifiedImplicitAttention(subject.model), aggregation="rollout")
    yield "Unified rollout", rollout
    yield (
        "Unified rollout, without the reading token",
        lambda puzzle: _without_reader(rollout(puzzle), len(puzzle.prompt)),
    )
    yield "Input x gradient (Captum)", lambda puzzle: _gradient_rows(subject, puzzle)
    generator = torch.Generator().manual_seed(0)

    def random_rows(puzzle: Puzzle) -> Tensor:
        prompt, words = _ids(subject, puzzle)
        P, T = prompt.shape[1], len(words)
        return torch.rand(T, P + T - 1, generator=generator).tril(P - 1)

    yield "Random", random_rows


def _ids(subject: Subject, puzzle: Puzzle) -> tuple[Tensor, Tensor]:
    """The prompt ``(1, P)`` and the continuation up to the number ``(T,)``."""
    words = subject.task.continuation(puzzle)[:-1]
    return torch.tensor([encode(puzzle.prompt)]), torch.tensor(encode(words))


def _without_reader(rows: Tensor, prompt: int) -> Tensor:
    rows = rows.clone()
    rows[torch.arange(len(rows)), prompt - 1 + torch.arange(len(rows))] = 0.0
    return rows


def _gradient_rows(subject: Subject, puzzle: Puzzle) -> Tensor:
    prompt, words = _ids(subject, puzzle)
    P, T = prompt.shape[1], len(words)
    ids = torch.cat([prompt[0], words[:-1]]).expand(T, -1)
    product = LayerGradientXActivation(
        lambda ids: subject.model(ids, use_cache=False).logits[range(T), range(P - 1, P + T - 1)],
        subject.model.get_input_embeddings(),
    )
    return product.attribute(ids, target=words).sum(-1).detach()
