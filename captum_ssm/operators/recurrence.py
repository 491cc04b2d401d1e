"""Recurrences that keep a state after each token, which can be read and written part by part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from captum_ssm.operators.base import TokenOperator


class StateOperator(TokenOperator):
    """A recurrence whose state is N numbers per channel, or per head a matrix of keys by values.

    Each channel of a head with N keys has N states too: a state is N parts ``(B, L, D)``.

    Attributes:
        written_by (tuple of str): the coefficients that the state depends on; others say how it is
            read.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4).state_shape
        (2, 3, 4)
    """

    written_by: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The state at a token: ``(D, N)``, or ``(H, N, P)``."""

    @abstractmethod
    def reading(self, vector: Tensor) -> StateOperator:
        """The recurrence, read by one vector ``(N,)`` at all tokens."""

    @abstractmethod
    def writing(self, vector: Tensor) -> StateOperator:
        """The recurrence, whose tokens write their values times one vector ``(N,)``."""

    @abstractmethod
    def of_features(self, directions: Tensor) -> StateOperator:
        """The recurrence, read by directions ``(F, D, N)`` or ``(F, H, N, P)``.

        It has one channel, or head of width one, for each feature and channel of the values.
        """

    @abstractmethod
    def carried(self, state: Tensor, t: int) -> Tensor:
        """What a state before token t is after it, without what it writes, ``(B, ...)``."""

    @abstractmethod
    def decays(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """A token's write ``(B, L, M, N)``, log decays ``(B, L, M, 1 or N)``, their factors (M, N).

        None where more than decays changes what is left of a write: a convolution, or erasing.
        """

    @abstractmethod
    def joined_states(self, parts: Sequence[Tensor]) -> Tensor:
        """The N parts of a state, ``(..., D)`` each, as ``(..., D, N)`` or ``(..., H, N, P)``."""

    @abstractmethod
    def split_states(self, state: Tensor) -> tuple[Tensor, ...]:
        """The N parts, ``(..., D)`` each, of a state ``(..., D, N)`` or ``(..., H, N, P)``."""


def for_each(x: Any, count: int, dim: int = -1) -> Any:
    """A tensor's channels along an axis, so many times one after the other; None stays None."""
    return x if x is None or count == 1 else torch.cat([x] * count, dim)
