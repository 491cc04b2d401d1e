"""The log probabilities that a server recorded, held against those of the local model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.check_inputs import check_inputs
from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.served.records import ServedRecord

WORST = 3  # tokens that an error names


@dataclass(frozen=True)
class TokenDifference:
    """A token's log probability as it was recorded, and by the local model.

    Args:
        position (int): of the token, in the prompt and its answer.
        text (str): of the token.
        recorded, local (float): log probabilities.
    """

    position: int
    text: str
    recorded: float
    local: float

    @property
    def difference(self) -> float:
        """The local one minus the recorded one."""
        return self.local - self.recorded

    @property
    def data(self) -> dict[str, Any]:
        """As an explanation keeps it."""
        return vars(self) | {"difference": self.difference}


@dataclass(frozen=True)
class Comparison:
    """All tokens of a record whose log probability was recorded."""

    tokens: tuple[TokenDifference, ...]

    @property
    def sizes(self) -> list[float]:
        """How large each difference is."""
        return [abs(token.difference) for token in self.tokens]

    def data(self, record: ServedRecord, temperature: float) -> dict[str, Any]:
        """As an explanation keeps it in its settings."""
        sizes = self.sizes
        return {
            "format": record.format,
            "sampling": record.sampling,
            "temperature": temperature,
            "compared": len(sizes),
            "max": max(sizes, default=None),
            "mean": sum(sizes) / len(sizes) if sizes else None,
            "tokens": [token.data for token in self.tokens],
        }

    def exceeding(self, bound: float) -> str:
        """What differs by more than a bound, in words; empty if nothing does."""
        worst = sorted(self.tokens, key=lambda token: -abs(token.difference))
        worst = [token for token in worst if abs(token.difference) > bound]
        if not worst:
            return ""
        named = ", ".join(
            f"{one.text!r} at {one.position} ({one.recorded:.4f} recorded, {one.local:.4f} here)"
            for one in worst[:WORST]
        )
        return (
            f"the log probabilities of {len(worst)} of {len(self.tokens)} tokens differ from the "
            f"recorded ones by more than {bound:g}: {named}"
        )


def compared(
    model: nn.Module,
    record: ServedRecord,
    prompt: TokenizedText,
    answer: TokenizedText,
    temperature: float,
) -> Comparison:
    """The recorded log probabilities next to the model's own, in one run.

    Args:
        model (nn.Module): the local checkpoint.
        record (ServedRecord): what was recorded.
        prompt, answer (TokenizedText): of P and T tokens.
        temperature (float): by which the server divided the logits before it recorded.

    Raises:
        InputError: for ids that the model does not have.
    """
    tokens, P = (*prompt.tokens, *answer.tokens), len(prompt.tokens)
    told = record.prompt_logprobs if len(record.prompt_logprobs) == P else (None,) * P
    recorded = [*told, *(token.logprob for token in record.answer)]
    places = [k for k, value in enumerate(recorded) if k and value is not None]
    device = next(model.parameters()).device
    ids = torch.tensor([[token.id for token in tokens]], device=device)
    check_inputs(ids, model)
    local = _logprobs(model, ids, places, temperature)
    found = []
    for k, value in zip(places, local.tolist(), strict=True):
        given = recorded[k]
        assert given is not None
        found.append(TokenDifference(k, tokens[k].text, given, value))
    return Comparison(tuple(found))


def _logprobs(model: nn.Module, ids: Tensor, places: list[int], temperature: float) -> Tensor:
    # Each of these tokens is predicted at the one before it.
    named = {"use_cache": False} if "use_cache" in parameter_names(model) else {}
    with torch.no_grad():
        logits = extract_logits(model(ids[:, :-1], **named))[0]
    if not places:
        return ids.new_zeros(0)
    at = torch.tensor(places, device=ids.device)
    scores = logits[at - 1].float() / temperature
    return scores.gather(1, ids[0, at, None])[:, 0] - scores.logsumexp(1)


def check_bound(bound: Any, temperature: Any) -> None:
    """Raise for what is neither a bound nor None, and for a temperature that is not above zero."""
    for name, value, least in (("bound", bound, 0), ("temperature", temperature, 1e-6)):
        if name == "bound" and value is None:
            continue
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
            kind = "a number from 0 on, or None" if name == "bound" else "a number above 0"
            raise InputError(f"{name} is {value!r}; expected {kind}.")
