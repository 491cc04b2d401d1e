"""What a mixer keeps of the tokens before its first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from captum_ssm.errors import InputError


@dataclass(frozen=True, eq=False)
class Past:
    """What a mixer has kept of earlier tokens when it is called, and what it keeps for later ones.

    Args:
        tails (sequence of Tensor, optional): the last inputs of its convolutions and token shifts,
            ``(B, K - 1, D)`` each, in the order in which its adapter asks for them. Empty where no
            token came before. Default: ()
        state (Tensor, optional): of its recurrence, as values of N tokens, ``(B, N, D)``: each is
            the part of the state that the n-th unit vector reads. Default: None, which is zero

    Examples::

        >>> past = Past()
        >>> past.before(torch.ones(1, 5, 2), 3).abs().max(), past.then(None).tails[0].shape
        (tensor(0.), torch.Size([1, 3, 2]))
    """

    tails: Sequence[Tensor] = ()
    state: Tensor | None = None
    _kept: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def before(self, x: Tensor, count: int) -> Tensor:
        """The ``count`` inputs before those of ``x (B, L, D)``, whose last ones are kept."""
        B, _, D = x.shape
        shape, k = (B, count, D), len(self._kept)
        if not self.tails:
            tail = x.new_zeros(shape)
        elif k < len(self.tails) and self.tails[k].shape == shape:
            tail = self.tails[k].to(x)
        else:
            given = tuple(self.tails[k].shape) if k < len(self.tails) else "none"
            raise InputError(
                f"the cache holds inputs of a convolution of shape {given}; expected {shape}, "
                "(batch, kernel size - 1, channels). Pass a cache that this model filled, with as "
                "many examples as the inputs have."
            )
        self._kept.append(torch.cat([tail, x[:, -count:]], 1)[:, -count:])
        return tail

    def then(self, state: Tensor | None) -> Past:
        """What the mixer has kept after its tokens, given the ``state`` after the last of them."""
        return Past(tuple(self._kept), state)

    @property
    def tensors(self) -> list[Tensor]:
        """The tails, and the state if there is one."""
        return [*self.tails, *([] if self.state is None else [self.state])]

    def of(self, tensors: Sequence[Tensor]) -> Past:
        """It with other tensors in the places of :attr:`tensors`."""
        n = len(self.tails)
        return Past(tuple(tensors[:n]), None if self.state is None else tensors[n])
