"""One scan of a mixer: the values of its tokens by tap of the convolution, and what each adds.

All choices of LaTIM's activation f are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm import kernels
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import SkipOperator, TokenOperator
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.lazy import cached_property

PIECE = 1 << 19  # numbers of the maps' rows that are made at a time

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    # Expansions of SiLU around zero, of the first and the second order.
    "taylor1": lambda x: x / 2,
    "taylor2": lambda x: x / 2 + x.square() / 4,
    "relu": torch.relu,
    "identity": lambda x: x,
}
# The choices of f: "gate" freezes the factor of the model's own activation.
ACTIVATIONS = (*_FUNCTIONS, "gate")


@dataclass(frozen=True)
class ScanPart:
    """One scan of a mixer, which reads the tokens in an order of its own.

    Args:
        mixer (FrozenMixer): the mixer, with this scan alone, in the scan's order.
        weight (Tensor): of the output projection, ``(E, D)``.
        lagged (list of Tensor): by lag, the inputs of the recurrence, ``(B, L, D)`` each.
        left (Tensor, optional): row factors, ``(B, L, D)``.
        order (Tensor, optional): which token the scan reads at each of its steps; None for all in
            turn.
        position (Tensor, optional): the step of the scan at which it reads each token.
    """

    mixer: FrozenMixer
    weight: Tensor
    lagged: list[Tensor]
    left: Tensor | None
    order: Tensor | None
    position: Tensor | None

    @classmethod
    def of(
        cls,
        mixer: FrozenMixer,
        projection: Tensor,
        order: Tensor | None,
        weight: float,
        activation: str,
        mask: Tensor | None,
    ) -> ScanPart:
        if order is not None and bool((order.diff() == 1).all()):
            order = None
        if mask is not None and order is not None:
            mask = mask[:, order]
        lagged = _lagged_values(mixer, activation, mask)
        if weight != 1.0:
            lagged = [weight * values for values in lagged]
        position = None if order is None else torch.argsort(order)
        return cls(mixer, projection, lagged, mixer.left, order, position)

    @classmethod
    def of_skip(cls, skip: Tensor) -> ScanPart:
        """What each token adds to its own output, ``(B, L, E)``, past the output projection."""
        eye = torch.eye(skip.shape[-1], dtype=skip.dtype, device=skip.device)
        itself = SkipOperator(torch.ones_like(skip))
        mixer = FrozenMixer(recurrence=itself, inputs=skip, out_proj=nn.Identity(), out_weight=eye)
        return cls(mixer, eye, [skip], None, None, None)

    @property
    def is_sum_of_maps(self) -> bool:
        """Whether T_ij is a sum over maps of their entry times a vector of token j, as attention's.

        Row factors, taps and skips differ by channel.
        """
        _, _, D, M = self.mixer.recurrence.sizes
        rest = (self.left, self.position, self.mixer.skip)
        return M < D and len(self.lagged) == 1 and all(factor is None for factor in rest)

    def maps(self, index: Tensor) -> Tensor:
        """The rows ``index (B, R)`` of the maps, ``(B, M, R, L)``."""
        return self.mixer.recurrence.map_rows(index, 0, self.mixer.recurrence.sizes[3])

    def projected(self, tokens: slice) -> Tensor:
        """What each map adds of some tokens, ``(B, c, M, E)``."""
        M = self.mixer.recurrence.sizes[3]
        values = self.lagged[0][:, tokens].unflatten(2, (M, -1))
        return torch.einsum("emp,bcmp->bcme", self.weight.unflatten(1, (M, -1)), values)

    def restore(self, values: Tensor, dim: int) -> Tensor:
        # The values, from the scan's order of the tokens to the model's.
        return values if self.position is None else values.index_select(dim, self.position)

    def total(self) -> Tensor:
        y = self.mixer.mix(sum_of(self.lagged))
        if self.left is not None:
            y = y * self.left
        return y @ self.weight.mT

    def scored(self, direction: Tensor) -> Iterator[tuple[int, TokenOperator]]:
        # One operator per tap; the sum over their channels is the dot product with the direction.
        direction = direction if self.order is None else direction[:, self.order]
        score = direction @ self.weight  # (B, L, D)
        if self.left is not None:
            score = score * self.left
        for lag, values in enumerate(self.lagged):
            recurrence, skip = self.mixer.recurrence, self.mixer.skip
            yield lag, recurrence.compose(left=score, skip=skip, right=values)

    @cached_property
    def values(self) -> Tensor:
        # By lag, the inputs of the recurrence with tokens last, as they are read: (K, B, D, L).
        return torch.stack([values.mT for values in self.lagged])

    def fill(self, z: Tensor, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
        # Writes to z (B, D, R, C) what each token adds to the rows index (B, R), with row factors.
        if self.position is None:
            yield from self._fill(z, index)
            return
        ordered = torch.empty_like(z)
        for _ in self._fill(ordered, self.position[index]):
            pass
        torch.index_select(ordered, 3, self.position, out=z)
        yield slice(0, z.shape[1]), z

    def _fill(self, z: Tensor, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
        # Few enough maps at a time that what is made of them stays in the cache.
        recurrence = self.mixer.recurrence
        B, L, D, M = recurrence.sizes
        P, R = D // M, index.shape[1]
        left = None if self.left is None else _at(self.left.mT, index)  # (B, D, R)
        skipped = self._skipped(left, index)
        step = max(1, PIECE // (B * R * L * P))
        for first in range(0, M, step):
            last = min(M, first + step)
            part = slice(first * P, last * P)
            out = z[:, part]
            kernels.tap_rows(
                recurrence.map_rows(index, first, last),
                self.values[:, :, part],
                None if left is None else left[:, part],
                out,
            )
            for column, value in skipped:
                column = column[:, None].expand(-1, out.shape[1], -1)
                out.scatter_add_(3, column[..., None], value[:, part, :, None])
            yield part, out

    def _skipped(self, left: Tensor | None, index: Tensor) -> list[tuple[Tensor, Tensor]]:
        # What reaches the rows (B, R) by the skip, by lag: its columns, and values (B, D, R).
        if self.mixer.skip is None:
            return []
        factor = _at(self.mixer.skip.expand_as(self.lagged[0]).mT, index)
        factor = factor if left is None else factor * left
        columns = []
        for lag, values in enumerate(self.values):
            column = index - lag
            inside = (column >= 0)[:, None]
            columns.append((column.clamp(min=0), factor * _at(values, index) * inside))
        return columns


def _at(values: Tensor, index: Tensor) -> Tensor:
    # Tokens index (B, R) of values (B, D, L): (B, D, R).
    return values.gather(2, index[:, None].expand(-1, values.shape[1], -1))


def _lagged_values(mixer: FrozenMixer, activation: str, mask: Tensor | None) -> list[Tensor]:
    # By lag, the input of token s - lag to the recurrence at token s: (B, L, D) each.
    if mixer.conv is None:
        return [mixer.values]
    taps, u = mixer.conv.flip(-1), mixer.inputs  # by lag
    out = []
    for lag in range(taps.shape[1]):
        if lag >= u.shape[1]:
            break
        shifted = nn.functional.pad(u, (0, 0, lag, 0))[:, : u.shape[1]] * taps[:, lag]
        if lag == 0 and mixer.conv_bias is not None:
            shifted = shifted + mixer.conv_bias  # once, to the current token
        if mixer.activation is None:
            value = shifted
        elif activation == "gate":
            value = mixer.activation * shifted
        else:
            value = _FUNCTIONS[activation](shifted)
            if mask is not None:  # a frozen activation includes the model's mask
                value = value * mask[..., None]
        out.append(value)
    return out
