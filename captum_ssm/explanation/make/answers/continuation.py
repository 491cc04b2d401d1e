"""A prompt and its continuation, as one text that a method explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import SpanTarget, TokenAttribution
from captum_ssm.attr.options import RESULTS
from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.check_inputs import as_ids
from captum_ssm.capture.span_target import SCORES
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.relevance.rows import InputQuestions, Question, rows
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.utils.integers import count_of

# Options of ``attribute`` that the continuation sets.
EXCLUDED = {
    "target": "the continuation is the target",
    "position": "each token is explained at the position that predicts it",
    "return_convergence_delta": "the result holds no delta",
    "additional_forward_args": "one text needs no mask",
    **dict.fromkeys(RESULTS, "the result holds relevance alone"),
}


@dataclass(frozen=True)
class Continued:
    """One text, P tokens of prompt and T of continuation, as a method explains it.

    Args:
        method (TokenAttribution): a method of this library.
        model (nn.Module): its language model.
        prompt (int): P.
        continuation (Tensor): token ids ``(T,)``.
        ids (Tensor): what the model reads, ``(1, P + T - 1)``: the last token is not read.
        score (str): of a token, ``"logit"``, ``"log_prob"`` or ``"contrast"``.
        step (int): how many tokens are explained at a time, by methods that need gradients.
        options (dict): the method's own.
    """

    method: TokenAttribution
    model: nn.Module
    prompt: int
    continuation: Tensor
    ids: Tensor
    score: str
    step: int
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        method: TokenAttribution,
        prompt: Tensor,
        continuation: Tensor,
        score: str,
        step: Any,
        options: Mapping[str, Any],
    ) -> Continued:
        """The text, checked."""
        check_attr_target(score)
        for name, why in EXCLUDED.items():
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(f"{name} was given, but {why}; remove it.")
        if not isinstance(method, TokenAttribution):
            raise TypeError(
                f"method is a {type(method).__name__}; expected a method of captum_ssm, such as "
                "MambaLRP(model)."
            )
        prompt, continuation = _checked(prompt, continuation)
        count = count_of("internal_batch_size", step, 1)
        model = resolve_model(method.forward_func, method.model)
        prompt = as_ids("the prompt", prompt, model)
        continuation = as_ids("the continuation", continuation, model)
        ids = torch.cat([prompt, continuation[None, :-1].to(prompt)], 1)
        P = prompt.shape[1]
        return cls(method, unwrap(model), P, continuation.to(ids), ids, score, count, options)

    @property
    def positions(self) -> Tensor:
        """The tokens at which those of the continuation are read, ``(T,)``."""
        return torch.arange(self.prompt - 1, self.ids.shape[1], device=self.ids.device)

    def until(self, count: int) -> Continued:
        """The text up to so many tokens of the continuation."""
        ids = self.ids[:, : self.prompt + count - 1]
        return replace(self, continuation=self.continuation[:count], ids=ids)

    def target(self, weights: Tensor | None = None) -> SpanTarget:
        """The continuation as one target, by weights ``(T,)`` of its tokens."""
        return SpanTarget(self.positions, self.continuation, weights, self.score)

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """A row for each token of the continuation, ``(T, P + T - 1)``, and deltas ``(T,)``."""
        pairs = zip(self.positions.tolist(), self.continuation.tolist(), strict=True)
        questions = [Question(i, token, explained=self.score) for i, token in pairs]
        asked = InputQuestions(Run(self.model), self.ids, questions)
        (rows_and_deltas,) = rows(self.method, [asked], step=self.step, **self.options)
        return rows_and_deltas


def check_attr_target(attr_target: str) -> None:
    """Raise for a score of tokens that there is not."""
    if attr_target not in SCORES:
        raise ValueError(f"attr_target is {attr_target!r}; expected one of {SCORES}.")


def _checked(prompt: Any, continuation: Any) -> tuple[Tensor, Tensor]:
    # The ids of one text, (1, P), and of what follows it, (T,).
    for name, value in (("prompt", prompt), ("continuation", continuation)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the {name} is a {type(value).__name__}; expected a tensor of token ids, as "
                "a tokenizer's encode(..., return_tensors='pt') returns."
            )
    prompt = prompt[None] if prompt.dim() == 1 else prompt
    if prompt.dim() != 2 or len(prompt) != 1 or prompt.numel() == 0:
        raise InputError(
            f"the prompt has shape {tuple(prompt.shape)}; expected the ids of one text, "
            "(1, P) or (P,)."
        )
    if continuation.dim() != 1 or continuation.numel() == 0:
        raise InputError(
            f"the continuation has shape {tuple(continuation.shape)}; expected token ids "
            "(T,), at least one. A text may be tokenized to nothing: give the ids then."
        )
    return prompt, continuation
