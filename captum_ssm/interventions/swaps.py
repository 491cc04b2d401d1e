"""Which of its own words a model uses: what it answers with another one in a word's place.

What takes a word's place decides what a swap shows. The likeliest other token may not fit there (a
number where a name belongs, after which the next word is not written either), and a word of form,
such as a sign at which an answer is read, can be replaced by nothing that fits: without it the
model is elsewhere in the text, and all that follows falls. So

- a word is *of form* if the model writes it without having read the prompt, whatever the words of
  its own that it rests on say. It carries nothing from them, and is not replaced;
- the likeliest other tokens take the place of every other word, weighted by how likely the model
  finds each of them there, and the next word after it where that is of form: they fit between their
  neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.check_inputs import as_ids
from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.capture.span_target import SpanTarget
from captum_ssm.errors import InputError
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.copies import copied
from captum_ssm.utils.integers import count_of


def swap_effects(
    model: Any,
    prompt: Tensor,
    continuation: Tensor,
    *,
    others: Tensor | None = None,
    candidates: int = 8,
    score: str = "logit",
    batch_size: int = 16,
) -> Tensor:
    r"""How far each word's score falls as another token stands in the place of an earlier one.

    Everything else is kept, so the effect is direct: entry :math:`E_{ji} = s_j - \sum_c p_c
    s_j^{(i, c)}` is the score of token j of the continuation minus that after token i was replaced
    by token c, by the weights :math:`p_c` of the tokens that take its place. One forward pass for
    each of these.

    Args:
        model (nn.Module): a language model.
        prompt (Tensor): token ids ``(1, P)`` or ``(P,)``.
        continuation (Tensor): token ids ``(T,)``, what the model wrote.
        others (Tensor, optional): token ids ``(T,)`` that take the places; a token that is its own
            other is not replaced. None for tokens that the model would write there, in place of
            words that depend on the prompt. Words of form, which the model writes without having
            read the prompt, are not replaced: their effects are zero. Default: None
        candidates (int, optional): how many tokens take a word's place one after another, where
            ``others`` is None: the likeliest there apart from the word itself, weighted by their
            probability times that of the next word after them, if that is of form. Default: 8
        score (str, optional): of a token, as for :class:`~captum_ssm.attr.SpanTarget`.
            Default: ``"logit"``
        batch_size (int, optional): how many texts run at a time. Default: 16

    Returns:
        Tensor: ``(T, T - 1)``, zero where token i is not before token j.

    Raises:
        ValueError: for ids of another shape, or outside the vocabulary, and for numbers of
            candidates or of a batch below 1.
        TypeError: for what is not a model.

    Examples::

        >>> captum_ssm.interventions.swap_effects(model, input_ids, torch.tensor([4, 5, 6])).shape
        torch.Size([3, 2])
    """
    candidates = count_of("candidates", candidates, 1)
    batch_size = count_of("batch_size", batch_size, 1)
    resolved = resolve_model(model, None)
    prompt = as_ids("the prompt", prompt.reshape(1, -1), resolved)
    continuation = as_ids("the continuation", continuation.reshape(-1), resolved).to(prompt)
    if others is not None:
        if others.shape != continuation.shape:
            raise InputError(
                f"others has shape {tuple(others.shape)}; expected a token for each of the "
                f"{len(continuation)} of the continuation."
            )
        others = as_ids("others", others, resolved).to(prompt)
    with torch.no_grad():
        text = _Text(unwrap(resolved), prompt, continuation, score, batch_size)
        if others is None:
            return _by_candidates(text, candidates).tril(-1)
        return _by_others(text, others).tril(-1)


@dataclass(frozen=True)
class _Text:
    # A prompt (1, P), the words (T,) after it, and how they are scored.
    module: nn.Module
    prompt: Tensor
    words: Tensor
    score: str
    batch_size: int

    @repeated
    def logits(self, prompt: Tensor, words: Tensor) -> Tensor:
        # What is predicted at the position of each word of texts with words (n, T): (n, T, V).
        ids = torch.cat([prompt.expand(len(words), -1), words[:, :-1]], 1)
        named = {"use_cache": False} if "use_cache" in parameter_names(self.module) else {}
        with copied(self.module) as copies:
            return extract_logits(copies.root(ids, **named))[:, -words.shape[1] :]

    def swapped(self, swaps: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        # The logits (T, V) with another token at one position, for each position and token.
        for start in range(0, len(swaps), self.batch_size):
            batch = torch.tensor(swaps[start : start + self.batch_size], device=self.words.device)
            words = self.words.repeat(len(batch), 1)
            words[torch.arange(len(batch)), batch[:, 0]] = batch[:, 1]
            yield from self.logits(self.prompt, words)

    def scores(self, logits: Tensor) -> Tensor:
        # The score of each word, (T,) of logits (T, V).
        T = len(self.words)
        return SpanTarget(range(T), self.words, score=self.score).scores(logits[None], T)[0]


def _by_others(text: _Text, others: Tensor) -> Tensor:
    T = len(text.words)
    whole = text.scores(text.logits(text.prompt, text.words[None])[0])
    effects = whole.new_zeros(T, T - 1)
    swaps = [(i, int(others[i])) for i in range(T - 1) if others[i] != text.words[i]]
    for (i, _), logits in zip(swaps, text.swapped(swaps), strict=True):
        effects[:, i] = whole - text.scores(logits)
    return effects


def _by_candidates(text: _Text, count: int) -> Tensor:
    words, T = text.words, len(text.words)
    logits = text.logits(text.prompt, words[None])[0]
    whole, logs = text.scores(logits), logits.log_softmax(1)
    logs = logs.scatter(1, words[:, None], -torch.inf)
    likely, tokens = logs.topk(min(count, logs.shape[1] - 1), 1)
    is_form = _without_prompt(text)
    effects, todo = whole.new_zeros(T, T - 1), (~is_form[:-1]).nonzero()[:, 0].tolist()
    while todo:
        runs = text.swapped([(i, int(token)) for i in todo for token in tokens[i]])
        later = torch.zeros_like(is_form)
        for i in todo:
            fits, scores, written = likely[i].clone(), [], []
            for c in range(len(fits)):
                swapped = next(runs)
                scores.append(text.scores(swapped))
                written.append(swapped.argmax(1) == words)
                if is_form[i + 1]:
                    fits[c] += swapped[i + 1].log_softmax(0)[words[i + 1]]
            weights = fits.softmax(0)
            effects[:, i] = whole - weights @ torch.stack(scores)
            # A word of form that is not written after most of what may stand here rests on it.
            later[i + 1 :] |= (weights @ torch.stack(written).to(weights) < 0.5)[i + 1 :]
        later &= is_form
        is_form = is_form & ~later
        todo = later[:-1].nonzero()[:, 0].tolist()
    return effects


def _without_prompt(text: _Text) -> Tensor:
    # Whether the model writes each word also after the prompt's last token alone, (T,).
    if text.prompt.shape[1] == 1:  # there is nothing else to leave unread
        return torch.zeros_like(text.words, dtype=torch.bool)
    return text.logits(text.prompt[:, -1:], text.words[None])[0].argmax(1) == text.words
