r"""The vector that each token adds to a mixer's output (Pitorro & Treviso, 2025, eq. 16-25).

With all data-dependent coefficients frozen, the output at token i is a sum over tokens j of

.. math::
    T_i(x_j) = W_{out}\, n_i \odot g_i \odot \sum_k (\alpha_{i, j+k} + \delta_{i, j+k} s) \odot
        \varphi_j^{(k)},

where :math:`\varphi_j^{(k)} = f(c_k u_j + [k = 0]\, b)` is the input of token j to the recurrence
at token j + k, through tap k of the convolution. All choices of f are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captum_ssm import kernels
from captum_ssm._memory import tile_entries
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.composed import sum_of

ACTIVATIONS = ("silu", "taylor1", "taylor2", "relu", "identity", "gate")

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    # Expansions of SiLU around zero, of the first and the second order.
    "taylor1": lambda x: x / 2,
    "taylor2": lambda x: x / 2 + x.square() / 4,
    "relu": torch.relu,
    "identity": lambda x: x,
}


class Contributions:
    """The contributions of tokens to the output of one layer.

    Args:
        mixers (sequence of FrozenMixer): the layer's mixer, or its parallel mixers.
        activation (str): f, one of :data:`ACTIVATIONS`; ``"gate"`` freezes the activation's
            factor, which makes the sum over tokens exact. A mixer without an activation is
            exact for all of them.
        mask (Tensor, optional): ``(B, L)``, zero for padding. Default: None
    """

    def __init__(
        self, mixers: Sequence[FrozenMixer], activation: str, mask: Tensor | None = None
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {ACTIVATIONS}.")
        self.mixers = mixers
        self.parts = [
            _Part.of(scan, order, weight, activation, mask)
            for mixer in mixers
            for scan, order, weight in mixer.scans_in_order()
        ]
        self.batch, self.length, _, _ = mixers[0].recurrence.sizes
        self.width = mixers[0].out_weight.shape[0]
        self.is_causal = all(mixer.recurrence.is_causal for mixer in mixers)

    def vectors(self, index: Tensor) -> Tensor:
        """T_i(x_j) for the rows ``index (B, R)``: ``(B, R, L, E)``."""
        return self._tile(index, self.length).permute(0, 2, 3, 1)

    def total(self) -> Tensor:
        """The sum of all contributions at each token, ``(B, L, E)``, in linear time."""
        return sum_of([part.restore(part.total(), 1) for part in self.parts])

    def bias(self) -> Tensor:
        """The part of the output that no token contributes, ``(B, L, E)``."""
        return sum_of([mixer.out_proj(mixer.remainder()) for mixer in self.mixers])

    def dot_row(self, direction: Tensor) -> Tensor:
        """sum_i direction_i . T_i(x_j), of ``direction (B, L, E)``: ``(B, L)``, in linear time."""
        total = direction.new_zeros(self.batch, self.length)
        ones = torch.ones_like(total)
        for part in self.parts:
            out = torch.zeros_like(total)
            for lag, operator in part.scored(direction):
                row = operator.rmatvec(ones, "mean") * operator.channels
                out[:, : self.length - lag] += row[:, lag:]
            total += part.restore(out, 1)
        return total

    def dot_matrix(self, direction: Tensor) -> Tensor:
        """direction_i . T_i(x_j) for every pair: ``(B, L, L)``, without the vectors."""
        total = direction.new_zeros(self.batch, self.length, self.length)
        for part in self.parts:
            out = torch.zeros_like(total)
            for lag, operator in part.scored(direction):
                matrix = operator.matrix("mean") * operator.channels
                out[..., : self.length - lag] += matrix[..., lag:]
            total += part.restore(part.restore(out, 1), 2)
        return total

    def reduced_tiles(
        self, reduce: Callable[[Tensor, slice], Tensor]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Tiles of rows of a reduction of the vectors, ``(rows, (B, R, L))``.

        ``reduce`` takes vectors ``(B, E, R, C)`` of the first C columns and their rows.
        """
        start, L, entries = 0, self.length, tile_entries(1 << 22)
        while start < L:
            width = min(L, start + 64) if self.is_causal else L
            step = max(1, min(64, entries // (self.batch * self.width * width)))
            rows = slice(start, min(L, start + step))
            columns = rows.stop if self.is_causal else L
            index = torch.arange(rows.start, rows.stop, device=self.parts[0].weight.device)
            found = reduce(self._tile(index.expand(self.batch, -1), columns), rows)
            yield rows, nn.functional.pad(found, (0, L - columns))
            start = rows.stop

    def _tile(self, index: Tensor, columns: int) -> Tensor:
        return sum_of([part.tile(index, columns) for part in self.parts])


@dataclass(frozen=True)
class _Part:
    # One scan of a mixer in its own order of the tokens, the inputs of its recurrence by lag, its
    # row factors, and the position of each token in the scan.
    mixer: FrozenMixer
    lagged: list[Tensor]
    left: Tensor | None
    order: Tensor | None
    position: Tensor | None

    @classmethod
    def of(
        cls,
        mixer: FrozenMixer,
        order: Tensor | None,
        weight: float,
        activation: str,
        mask: Tensor | None,
    ) -> _Part:
        if mask is not None and order is not None:
            mask = mask[:, order]
        lagged = _lagged_values(mixer, activation, mask)
        if weight != 1.0:
            lagged = [weight * values for values in lagged]
        position = None if order is None else torch.argsort(order)
        return cls(mixer, lagged, mixer.left, order, position)

    @property
    def weight(self) -> Tensor:
        return self.mixer.out_weight

    def restore(self, values: Tensor, dim: int) -> Tensor:
        # From the scan's order of the tokens to the model's.
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

    def tile(self, index: Tensor, columns: int, channels: int = 2048) -> Tensor:
        # Vectors of the rows index (B, R) and the first columns: (B, E, R, C). One matrix product
        # per block of channels; the block is filled in pieces that are small enough for the cache.
        operator, weight = self.mixer.recurrence, self.weight
        B, _, D, M = operator.sizes
        if self.position is not None:
            index = self.position[index]
        P, R = D // M, index.shape[1]
        out = weight.new_zeros(B, weight.shape[0], R * columns)
        size = B * R * columns
        maps = max(1, channels // P)
        piece = max(1, min(maps, (1 << 17) // (size * P)))
        for block in range(0, M, maps):
            end = min(M, block + maps)
            z = weight.new_empty(B, (end - block) * P, R, columns)
            for first in range(block, end, piece):
                last = min(end, first + piece)
                part = slice(first * P, last * P)
                self._fill(z[:, (first - block) * P : (last - block) * P], index, first, last, part)
            out.baddbmm_(weight[:, block * P : end * P].expand(B, -1, -1), z.flatten(2))
        return self.restore(out.unflatten(-1, (R, columns)), 3)

    def _fill(self, z: Tensor, index: Tensor, first: int, last: int, part: slice) -> None:
        # z (B, c, R, C): each token's part of each row, for some channels, with row factors.
        rows = self.mixer.recurrence.map_rows(index, first, last)  # (B, m, R, L)
        if self.mixer.skip is not None:
            skip = self.mixer.skip.expand_as(self.lagged[0])[..., part].mT  # (B, c, L)
            if rows.shape[1] < skip.shape[1]:
                rows = rows.repeat_interleave(skip.shape[1] // rows.shape[1], 1)
            at = index[:, None].expand(-1, skip.shape[1], -1)  # (B, c, R)
            rows = rows.scatter_add(3, at[..., None], skip.gather(2, at)[..., None])
        left = None
        if self.left is not None:
            at = index[..., None].expand(-1, -1, z.shape[1])
            left = self.left[..., part].gather(1, at).mT
        values = torch.stack([lagged[..., part].mT for lagged in self.lagged])
        kernels.tap_rows(rows, values, left, z)


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
