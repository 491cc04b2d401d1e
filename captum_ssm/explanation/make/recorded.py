"""The log probabilities that a server recorded, held against those of the run that is explained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.parts import Token
from captum_ssm.explanation.replayed import Replay, TokenDifference

BOUND = 0.5  # nats; docs/how_to/served_models.md has what it was chosen by


@dataclass(frozen=True)
class Recorded:
    """What a server recorded of the tokens of a prompt and its answer.

    Args:
        format (str): what the record is.
        logprobs (dict): log probabilities by the positions, from 1 on, of the tokens that each is
            of: one, or several that have it together.
        bound (float, optional): how much each may differ, per token; None for any amount.
        temperature (float): by which the server divided the logits before it recorded.
        sampling (dict, optional): by which options the tokens were drawn. Default: ``{}``
    """

    format: str
    logprobs: Mapping[tuple[int, ...], float]
    bound: float | None
    temperature: float
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read_at(self) -> list[int]:
        """The tokens at which the model predicts those that have a log probability."""
        return [position - 1 for positions in self.logprobs for position in positions]

    def compared(self, logits: Tensor, tokens: Sequence[Token]) -> Replay:
        """The comparison.

        ``logits (n, V)`` are those at the tokens :attr:`read_at`.

        Raises:
            InputError: where one differs by more than the bound.
        """
        scores = (logits.float() / self.temperature).log_softmax(-1)
        local = {
            k: float(row[tokens[k + 1].id]) for k, row in zip(self.read_at, scores, strict=True)
        }
        replay = Replay(
            self.format,
            tuple(
                TokenDifference(
                    positions[0],
                    "".join(tokens[k].text for k in positions),
                    recorded,
                    sum(local[k - 1] for k in positions),
                    len(positions),
                )
                for positions, recorded in self.logprobs.items()
            ),
            self.bound,
            self.temperature,
            self.sampling,
        )
        said = "" if self.bound is None else replay.exceeding(self.bound)
        if said:
            raise InputError(
                f"{said}. The record is of another checkpoint, template or temperature; pass those "
                "that were served (temperature=, where the server recorded what it drew from), or "
                "bound=None to explain it as it is."
            )
        return replay


def check_bound(bound: Any, temperature: Any) -> None:
    """Raise for what is neither a bound nor None, and for a temperature that is not above zero."""
    for name, value, least in (("bound", bound, 0), ("temperature", temperature, 1e-6)):
        if name == "bound" and value is None:
            continue
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
            kind = "a number from 0 on, or None" if name == "bound" else "a number above 0"
            raise InputError(f"{name} is {brief(value)}; expected {kind}.")
