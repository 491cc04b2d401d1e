"""A whole answer as the target: several tokens of a text, each read at a position of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import TargetError, brief
from captum_ssm.utils.integers import as_integers

SCORES = ("logit", "log_prob", "contrast")
FOR_TEXTS = ": for a text, explain(model, tokenizer, text, target=target), or its token's id"


@dataclass(frozen=True, eq=False)
class SpanTarget:
    r"""Several answers of a language model at once: a target whose score is their weighted sum.

    Each token is read at its own position: what the model puts out at position i is about token
    i + 1. Methods that take gradients explain :math:`\sum_k w_k s_k` in one backward pass, and
    methods that ignore the target read the sum of rows :math:`\sum_k w_k R_{p_k}`, at the cost of
    one row.

    Args:
        positions (sequence of int or Tensor): where the tokens are read, ``(S,)`` or ``(B, S)``,
            negative from the end.
        tokens (sequence of int or Tensor): their ids, ``(S,)`` or ``(B, S)``; as in Captum, -1 is
            the last of the vocabulary.
        weights (sequence of float or Tensor, optional): ``(S,)`` or ``(B, S)``; 1 / S makes the
            sum a mean. Default: 1 for each
        score (str, optional): of one token. ``"logit"``; ``"log_prob"``, its log probability; or
            ``"contrast"``, its logit minus the mean logit of all other tokens, weighted by their
            probabilities, which count as constants. Default: ``"logit"``

    Raises:
        TargetError: for shapes that do not fit each other, no token, ids or positions that are
            not integers, and an unknown score.

    Examples::

        >>> span = captum_ssm.attr.SpanTarget(positions=[4, 5], tokens=[7, 9])
        >>> MambaLRP(model).attribute(input_ids, target=span).shape
        torch.Size([1, 7])
    """

    positions: Any
    tokens: Any
    weights: Any = None
    score: str = "logit"

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise TargetError(f"score is {self.score!r}; expected one of {SCORES}.")
        positions, tokens = (_integers(self, name) for name in ("positions", "tokens"))
        if positions.shape != tokens.shape or positions.numel() == 0:
            raise TargetError(
                f"positions has shape {tuple(positions.shape)} and tokens {tuple(tokens.shape)}; "
                "expected the same shape, (S,) or (B, S), and at least one token."
            )
        weights = torch.ones(positions.shape, device="cpu")
        if self.weights is not None:
            weights = torch.as_tensor(self.weights, device="cpu").detach()
        if weights.shape[-1:] != positions.shape[-1:] or weights.dim() > 2:
            raise TargetError(
                f"weights has shape {tuple(weights.shape)}; expected one weight per token, "
                f"{tuple(positions.shape)}."
            )
        floats = torch.promote_types(weights.dtype, torch.float32)
        object.__setattr__(self, "weights", weights.to(floats))

    def at(self, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions from the start, and weights, ``(B, S)``, in a batch of texts of a length.

        Raises:
            TargetError: for positions outside the texts, or of another batch.
        """
        positions, weights = self.positions.to(device), self.weights.to(device)
        if bool(((positions < -length) | (positions >= length)).any()):
            raise TargetError(
                f"positions of the span are {positions.min().item()} .. {positions.max().item()}; "
                f"expected positions in the sequence of {length} tokens, 0 .. {length - 1}."
            )
        return _of_batch(positions % length, batch), _of_batch(weights, batch)

    def query(self, batch: int, length: int, device: torch.device) -> Tensor:
        """The weights of the tokens whose rows are explained, ``(B, L)``."""
        positions, weights = self.at(batch, length, device)
        return weights.new_zeros(batch, length).scatter_add_(1, positions, weights)

    def read(self, logits: Tensor, length: int) -> Tensor:
        """The score ``(B,)``, of the logits ``(B, n, V)`` of the last n of L tokens.

        Raises:
            TargetError: for positions or tokens that they do not hold.
        """
        return (self.scores(logits, length) * self.at(len(logits), length, logits.device)[1]).sum(1)

    def scores(self, logits: Tensor, length: int) -> Tensor:
        """The score of each token ``(B, S)``, not weighted; arguments as for :meth:`read`.

        Raises:
            TargetError: as for :meth:`read`.
        """
        batch, n, vocabulary = logits.shape
        rows = self.at(batch, length, logits.device)[0] - (length - n)
        if bool((rows < 0).any()):
            raise TargetError(
                f"the model returned logits for its last {n} of {length} tokens, and the span "
                "holds positions before them; expected positions among these. Have the model "
                "return logits for all tokens."
            )
        tokens = _of_batch(token_ids(self.tokens.to(logits.device), vocabulary), batch)
        example = torch.arange(batch, device=logits.device)[:, None]
        if self.score == "logit":
            return logits[example, rows, tokens]
        asked = logits[example, rows]
        if self.score == "log_prob":
            return asked.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        answer = asked.gather(2, tokens[..., None])[..., 0]
        return answer - mean_of_others(asked, tokens)


def mean_of_others(logits: Tensor, answer: Tensor) -> Tensor:
    """The mean logit of all answers but one: ``(...)`` of ``logits (..., V)`` and ``answer (...)``.

    Weighted by the probabilities that they have among themselves, which count as constants.
    """
    with torch.inference_mode(False), torch.enable_grad():
        rivals = logits.detach().float().scatter(-1, answer[..., None], -torch.inf)
        weights = torch.softmax(rivals, -1).to(logits)
        return (torch.where(weights > 0, logits, 0) * weights).sum(-1)


def token_ids(target: Tensor, vocabulary: int) -> Tensor:
    """Targets as ids from 0 on; as in Captum and Python, -1 is the last of the vocabulary."""
    if bool(((target < -vocabulary) | (target >= vocabulary)).any()):
        raise TargetError(
            f"target is {brief(target)}, outside the vocabulary: expected ids "
            f"0 .. {vocabulary - 1} (or -{vocabulary} .. -1 from its end)."
        )
    return target % vocabulary


def _integers(span: SpanTarget, name: str) -> Tensor:
    value = getattr(span, name)
    integers = as_integers(value, torch.device("cpu"))
    if integers is None and isinstance(value, (list, tuple)) and not value:
        integers = torch.zeros(0, dtype=torch.long, device="cpu")
    if integers is None or integers.dim() not in (1, 2):
        raise TargetError(
            f"{name} of the span is {brief(value)}; expected integers (S,) or (B, S)."
        )
    object.__setattr__(span, name, integers)
    return integers


def _of_batch(values: Tensor, batch: int) -> Tensor:
    if values.dim() == 2 and len(values) not in (1, batch):
        raise TargetError(
            f"the span has {len(values)} rows for a batch of {batch}; expected one row for each "
            "example, or one for all."
        )
    return values.expand(batch, -1) if values.dim() == 2 else values[None].expand(batch, -1)


def as_tokens(target: Any, logits: Tensor) -> Tensor:
    """A target as one token of each row of logits, ``(B,)``."""
    token = as_integers(target, logits.device)
    if token is None or token.dim() > 1:
        raise TargetError(
            f"target is {brief(target)}; for logits of shape {tuple(logits.shape)} expected a "
            "token id, one id per example (list or 1-D tensor), or (position, token)"
            f"{FOR_TEXTS if isinstance(target, str) else ''}."
        )
    if token.dim() == 1 and token.numel() > 1:
        check_count(token.numel(), logits.shape[0])
    return token.reshape(-1).expand(logits.shape[0])


def check_count(count: int, batch: int) -> None:
    """Raise unless there are as many entries of a target as examples."""
    if count != batch:
        raise TargetError(
            f"target has {count} entries for a batch of {batch}; expected one per example, or an "
            "int for all."
        )
