"""Which of its own words a model uses: what it answers with another one in a word's place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.check_inputs import as_ids
from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.capture.span_target import SpanTarget
from captum_ssm.errors import InputError


def swap_effects(
    model: Any,
    prompt: Tensor,
    continuation: Tensor,
    *,
    others: Tensor | None = None,
    score: str = "logit",
    batch_size: int = 16,
) -> Tensor:
    r"""How far each word's score falls as another token stands in the place of an earlier one.

    Everything else is kept, so the effect is direct: entry :math:`E_{ji} = s_j - s_j^{(i)}` is the
    score of token j of the continuation minus that after token i was replaced. One forward pass for
    each token that is replaced.

    Args:
        model (nn.Module): a language model.
        prompt (Tensor): token ids ``(1, P)`` or ``(P,)``.
        continuation (Tensor): token ids ``(T,)``, what the model wrote.
        others (Tensor, optional): token ids ``(T,)`` that take the places; a token that is its own
            other is not replaced. None for what the model finds likeliest there, apart from what it
            wrote. Default: None
        score (str, optional): of a token, as for :class:`~captum_ssm.attr.SpanTarget`.
            Default: ``"logit"``
        batch_size (int, optional): how many texts run at a time. Default: 16

    Returns:
        Tensor: ``(T, T - 1)``, zero where token i is not before token j.

    Raises:
        ValueError: for ids of another shape, or outside the vocabulary.
        TypeError: for what is not a model.

    Examples::

        >>> captum_ssm.interventions.swap_effects(model, input_ids, torch.tensor([4, 5, 6])).shape
        torch.Size([3, 2])
    """
    found = resolve_model(model, None)
    prompt = as_ids("the prompt", prompt.reshape(1, -1), found)
    continuation = as_ids("the continuation", continuation.reshape(-1), found)
    module, P, T = unwrap(found), prompt.shape[1], len(continuation)
    ids = torch.cat([prompt, continuation[None, :-1].to(prompt)], 1)
    target = SpanTarget(range(P - 1, P + T - 1), continuation, score=score)
    named = {"use_cache": False} if "use_cache" in parameter_names(module) else {}
    with torch.no_grad():
        logits = extract_logits(module(ids, **named))
        whole = target.scores(logits, ids.shape[1])[0]
        others = _likeliest(logits[0, -T:], continuation) if others is None else others
        if others.shape != continuation.shape:
            raise InputError(
                f"others has shape {tuple(others.shape)}; expected a token for each of the {T} of "
                "the continuation."
            )
        others = as_ids("others", others, found).to(ids)
        effects = whole.new_zeros(T, max(T - 1, 0))
        for start in range(0, T - 1, batch_size):
            swapped = torch.arange(start, min(start + batch_size, T - 1), device=ids.device)
            texts = ids.repeat(len(swapped), 1)
            texts[torch.arange(len(swapped)), P + swapped] = others[swapped]
            scores = target.scores(extract_logits(module(texts, **named)), ids.shape[1])
            effects[:, swapped] = (whole - scores).T
    return effects.tril(-1)


def _likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    # The likeliest token at each place, (T,) of logits (T, V), apart from the one that is there.
    return logits.scatter(1, tokens.to(logits.device)[:, None], -torch.inf).argmax(1)
