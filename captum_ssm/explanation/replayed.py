"""How far a model's log probabilities are from those that a server recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORST = 3  # tokens that are named


@dataclass(frozen=True)
class TokenDifference:
    """A token's log probability as it was recorded, and by the local model.

    Args:
        position (int): of the token, in the prompt and its answer.
        text (str): of the token.
        recorded, local (float): log probabilities.
        count (int, optional): of how many tokens, from this one on, they are the sum. Default: 1

    Examples::

        >>> from captum_ssm.explanation import TokenDifference
        >>> TokenDifference(3, " red", recorded=-0.5, local=-0.25).difference
        0.25
    """

    position: int
    text: str
    recorded: float
    local: float
    count: int = 1

    @property
    def difference(self) -> float:
        """The local one minus the recorded one."""
        return self.local - self.recorded


@dataclass(frozen=True)
class Replay:
    """A record of a served model, and all its tokens whose log probability was recorded.

    Args:
        format (str): what the record is, such as ``"chat completion"``.
        tokens (tuple of TokenDifference): in their order.
        bound (float, optional): how much each may differ, per token; None for any amount. Default:
            None
        temperature (float, optional): by which the logits were divided. Default: 1.0
        sampling (dict, optional): by which options the tokens were drawn, as far as the record
            says. Default: ``{}``

    Examples::

        >>> from captum_ssm.explanation import Replay, TokenDifference
        >>> tokens = TokenDifference(3, " red", -0.5, -0.25), TokenDifference(4, ".", -0.25, -0.25)
        >>> replayed = Replay("completion", tokens)
        >>> replayed.max, replayed.mean, replayed.exceeding(0.5)
        (0.25, 0.125, '')
    """

    format: str
    tokens: tuple[TokenDifference, ...]
    bound: float | None = None
    temperature: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max(self) -> float:
        """The largest difference, 0 where nothing was compared."""
        return max((abs(token.difference) for token in self.tokens), default=0.0)

    @property
    def mean(self) -> float:
        """The mean size of the differences, 0 where nothing was compared."""
        return sum(abs(token.difference) for token in self.tokens) / max(1, len(self.tokens))

    def exceeding(self, bound: float) -> str:
        """What differs by more than a bound, in words; empty if nothing does."""
        worst = sorted(self.tokens, key=lambda token: -abs(token.difference))
        worst = [token for token in worst if abs(token.difference) > bound * token.count]
        if not worst:
            return ""
        named = ", ".join(
            f"{token.text!r} at {token.position} "
            f"({token.recorded:.4f} recorded, {token.local:.4f} here)"
            for token in worst[:WORST]
        )
        return (
            f"the log probabilities of {len(worst)} of {len(self.tokens)} tokens differ from the "
            f"recorded ones by more than {bound:g}: {named}"
        )
