r"""The vector that each token adds to a mixer's output (Pitorro & Treviso, 2025, eq. 16-25).

With all data-dependent coefficients frozen, the output at token i is a sum over tokens j of

.. math::
    T_i(x_j) = o_i \odot W_{out}\, n_i \odot g_i \odot
        \sum_k (\alpha_{i, j+k} + \delta_{i, j+k} s) \odot \varphi_j^{(k)},

where :math:`\varphi_j^{(k)} = f(c_k u_j + [k = 0]\, b)` is the input of token j to the recurrence
at token j + k, through tap k of the convolution, and :math:`o_i` what follows the output projection
token by token, such as the gate of a GLU or a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.attr.latim_parts.scan_part import ACTIVATIONS, PIECE, ScanPart
from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.errors import UnsupportedModelError, brief
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.memory import tile_entries
from captum_ssm.utils.precision import products_dtype

TILE = 1 << 25  # numbers before the output projection that are kept at a time
MOST_ROWS = 64  # of a tile: the recurrences' kernels make rows by blocks of so many
BLOCK = 512  # vectors that are made, and reduced, at a time
ROUNDED = 256  # width from which on a product takes longer than to round what is multiplied


class Contributions:
    """The contributions of tokens to the output of one layer, of one mixer or parallel ones.

    The activation f is one of :data:`ACTIVATIONS`; ``"gate"`` freezes its factor, which makes the
    sum over tokens exact, as it is of a mixer without an activation. The mask ``(B, L)`` is zero
    for padding.
    """

    def __init__(
        self, mixers: Sequence[FrozenMixer], activation: str, mask: Tensor | None = None
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {brief(activation)}; expected one of {ACTIVATIONS}.")
        self.mixers, self.gate = mixers, _gate_of(mixers)
        self.parts = [
            ScanPart.of(scan, mixer.out_weight, order, weight, activation, mask)
            for mixer in mixers
            for scan, order, weight in mixer.scans_in_order()
        ]
        skips = [mixer.dense_skip for mixer in mixers if mixer.dense_skip is not None]
        self.parts += [ScanPart.of_skip(skip) for skip in skips]
        self.batch, self.length, _, _ = mixers[0].recurrence.sizes
        self.weight = torch.cat([part.weight for part in self.parts], 1)  # (E, D)
        self._workspace = self.weight.new_empty(0)
        self.is_causal = all(mixer.recurrence.is_causal for mixer in mixers)

    @classmethod
    def of(
        cls, frozen: FrozenModel, layers: Sequence[FrozenCall], activation: str
    ) -> Contributions:
        """The contributions to a layer of a frozen model, or to layers side by side."""
        return cls([layer.mixer for layer in layers], activation, frozen.mask_of(layers[0]))

    def project(self, z: Tensor) -> Tensor:
        """W z of vectors ``(B, D, n)`` before the output projection: ``(B, E, n)``.

        In bfloat16, sums in float32, where PyTorch's setting for products allows that.
        """
        weight = self._factor
        return torch.bmm(weight.expand(len(z), -1, -1), z.to(weight.dtype)).to(z.dtype)

    @cached_property
    def _factor(self) -> Tensor:
        return self.weight.bfloat16() if _may_be_rounded(self.weight) else self.weight

    def vectors(self, index: Tensor) -> Tensor:
        """T_i(x_j) for the rows ``index (B, R)``: ``(B, R, L, E)``."""
        z = self.unprojected(index, self.length)
        vectors = torch.einsum("ed,bdrl->brle", self.weight, z)
        return vectors if self.gate is None else vectors * self.gate_at(index)[:, :, None]

    def gate_at(self, index: Tensor) -> Tensor:
        """What follows the output projection at the rows ``index (B, R)``: ``(B, R, E)``."""
        assert self.gate is not None
        return self.gate.gather(1, index[..., None].expand(-1, -1, self.gate.shape[2]))

    def total(self) -> Tensor:
        """The sum of all contributions at each token, ``(B, L, E)``, in linear time."""
        return self._gated(sum_of([part.restore(part.total(), 1) for part in self.parts]))

    def bias(self) -> Tensor:
        """The part of the output that no token contributes, ``(B, L, E)``."""
        return self._gated(sum_of([mixer.out_proj(mixer.remainder()) for mixer in self.mixers]))

    def _gated(self, y: Tensor) -> Tensor:
        return y if self.gate is None else y * self.gate

    def dot_row(self, direction: Tensor) -> Tensor:
        """sum_i direction_i . T_i(x_j), of ``direction (B, L, E)``: ``(B, L)``, in linear time."""
        ones = direction.new_ones(self.batch, self.length)
        return self._dots(direction, lambda operator: operator.rmatvec(ones, "mean"))

    def dot_matrix(self, direction: Tensor) -> Tensor:
        """direction_i . T_i(x_j) for every pair: ``(B, L, L)``, without the vectors."""
        return self._dots(direction, lambda operator: operator.matrix("mean"))

    def _dots(self, direction: Tensor, read: Callable[[TokenOperator], Tensor]) -> Tensor:
        dots, direction = [], self._gated(direction)
        for part in self.parts:
            taps = [
                (lag, read(operator) * operator.channels)
                for lag, operator in part.scored(direction)
            ]
            out = torch.zeros_like(taps[0][1])
            for lag, values in taps:
                out[..., : self.length - lag] += values[..., lag:]
            for dim in range(1, out.dim()):
                out = part.restore(out, dim)
            dots.append(out)
        return sum_of(dots)

    def tiles(self, rows: Tensor) -> list[Tensor]:
        """Ascending rows ``(R,)``, cut into tiles whose vectors are made together."""
        tiles, entries = [], tile_entries(TILE)
        per_column = self.batch * self.weight.shape[1]
        while len(rows):
            count = entries // (per_column * self.columns(rows[:MOST_ROWS]))
            count = max(1, min(MOST_ROWS, count))
            tiles.append(rows[:count])
            rows = rows[count:]
        return tiles

    def columns(self, rows: Tensor) -> int:
        """How many tokens, from the first on, the rows may read."""
        return int(rows.max()) + 1 if self.is_causal else self.length

    def unprojected(
        self, index: Tensor, columns: int, visit: Callable[[slice, Tensor], None] | None = None
    ) -> Tensor:
        """Vectors before the output projection, T = W z, for the rows ``index (B, R)``.

        z is ``(B, D, R, columns)``, of the first columns and the channels of all scans. The next
        call writes into the same memory: new pages would take as long as the numbers. ``visit`` is
        given some channels, and z of these while it is in the cache.
        """
        B, R = index.shape
        shape = (B, self.weight.shape[1], R, columns)
        size = math.prod(shape)
        if self._workspace.numel() < size:
            # As much as tiles of more columns will need.
            later = min(tile_entries(TILE), size // columns * self.length)
            self._workspace = self.weight.new_empty(max(size, later))
        z = self._workspace[:size].view(shape)
        first = 0
        for part in self.parts:
            last = first + part.weight.shape[1]
            for chosen, filled in part.fill(z[:, first:last], index):
                if visit is not None:
                    visit(slice(first + chosen.start, first + chosen.stop), filled)
            first = last
        return z

    def reduced(
        self, index: Tensor, columns: int, reduce: Callable[[Tensor, slice, slice], Tensor]
    ) -> Tensor:
        """A reduction of the vectors of rows ``index (B, R)`` over their width: ``(B, R, C)``.

        ``reduce`` takes vectors ``(B, E, r, c)``, and which of the rows and columns they are. They
        are made in blocks that stay in the cache, and are never in memory as a whole. Where a row
        reads no token there is no vector, and the result is zero.
        """
        (B, R), size = index.shape, max(1, BLOCK // len(index))
        gate = None if self.gate is None else self.gate_at(index).mT[..., None]  # (B, E, R, 1)
        if self.is_sum_of_maps:
            height, block = min(R, size), self._blocks_of_maps(index, columns)
        else:
            height, block = max(1, size // columns), self._blocks_of_channels(index, columns)
        out = self.weight.new_zeros(B, R, columns)
        width = max(1, size // height)
        tokens = index.cpu()
        for top in range(0, R, height):
            rows = slice(top, min(R, top + height))
            for chosen in _even_slices(min(columns, self.columns(tokens[:, rows])), width):
                vectors = block(rows, chosen)
                vectors = vectors if gate is None else vectors * gate[:, :, rows]
                out[:, rows, chosen] = reduce(vectors, rows, chosen)
        return out

    @property
    def is_sum_of_maps(self) -> bool:
        """Whether a vector is a sum over few maps, as those of attention's heads."""
        return self.gate is None and all(part.is_sum_of_maps for part in self.parts)

    def distances(self, rows: Tensor, outputs: Tensor, residual: Tensor | None) -> Tensor:
        """The l1 distances of the outputs of some rows ``(R,)`` from their vectors of maps.

        They are ``(B, R, C)``, of the first columns. ``residual (B, R, E)`` is added to the vector
        of a row's own token.
        """
        columns, index = self.columns(rows), rows.expand(self.batch, -1)
        maps = torch.cat([part.maps(index)[..., :columns] for part in self.parts], 1)
        maps = maps.permute(0, 3, 1, 2).contiguous()  # (B, C, M, R)
        out = outputs.new_empty(self.batch, len(rows), columns)
        width = max(1, PIECE // (self.batch * maps.shape[2] * outputs.shape[2]))
        for first in range(0, columns, width):
            last = min(columns, first + width)
            values = torch.cat([part.projected(slice(first, last)) for part in self.parts], 2)
            out[..., first:last] = kernels.map_distances(maps[:, first:last], values, outputs)
            if residual is None:
                continue
            row = ((rows >= first) & (rows < last)).nonzero()[:, 0]
            token = rows[row]
            entries = maps[:, token, :, row].movedim(0, 1)[:, :, None]  # (B, n, 1, M)
            vectors = (entries @ values[:, token - first])[:, :, 0] + residual[:, row]
            out[:, row, token] = (vectors - outputs[:, row]).abs().sum(-1)
        return out

    def _blocks_of_channels(self, index: Tensor, columns: int) -> Callable[[slice, slice], Tensor]:
        # W z: as many products per pair of tokens as W has entries.
        z = self.unprojected(index, columns)

        def block(rows: slice, chosen: slice) -> Tensor:
            part = z[:, :, rows, chosen]
            return self.project(part.flatten(2)).unflatten(2, part.shape[2:])

        return block

    def _blocks_of_maps(self, index: Tensor, columns: int) -> Callable[[slice, slice], Tensor]:
        # The values of each head are projected first, so that a pair costs one vector per head.
        maps = torch.cat([part.maps(index)[..., :columns] for part in self.parts], 1)

        def block(rows: slice, chosen: slice) -> Tensor:
            projected = torch.cat([part.projected(chosen) for part in self.parts], 2)
            vectors = projected.mT @ maps[:, :, rows, chosen].permute(0, 3, 1, 2)  # (B, c, E, r)
            return vectors.permute(0, 2, 3, 1)

        return block


def _gate_of(mixers: Sequence[FrozenMixer]) -> Tensor | None:
    # What multiplies each token's vectors, (B, L, E); None for nothing.
    gates = [mixer.out_gate for mixer in mixers]
    if len(gates) > 1 and any(gate is not None for gate in gates):
        raise UnsupportedModelError(
            "one of several mixers side by side has a factor after its output projection that "
            "differs by token (a GLU, a norm), and LaTIM's vectors of all of them take one; use "
            "another method."
        )
    return gates[0]


def _even_slices(length: int, most: int) -> Iterator[slice]:
    # As few as there can be of at most so many: a product of few columns costs almost as much.
    count = -(-length // most)
    for k in range(count):
        yield slice(k * length // count, (k + 1) * length // count)


def _may_be_rounded(weight: Tensor) -> bool:
    # On other devices PyTorch follows the setting itself.
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or len(weight) < ROUNDED:
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_fast = any(has for name, has in capabilities.items() if name.endswith("bf16"))
    return is_fast and products_dtype(weight.device) == torch.bfloat16
