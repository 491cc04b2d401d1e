r"""ALTI: how much of each token's output is whose, and relevance carried along it.

Row i of the mixing P compares the output y with the vectors T of its sources (Pitorro & Treviso,
2025, eq. 6):

.. math::
    P_{ij} = \frac{n_{ij}}{\sum_k n_{ik}}, \qquad
        n_{ij} = \big[\|y_i\|_1 - \|y_i - T_{ij}\|_1\big]_+.

where y is the sum of the vectors that are compared with it (eq. 23), also where the activation
makes them miss the layer's output. Rows are not negative and sum to one. Relevance v after a layer
becomes v P before it.

**With a tolerance** most vectors are not made. Entry by entry, with s the signs of y_i, t an
entry of T_ij, and s and y the same entry's of y_i,

.. math::
    |y| - |y - t| = s t - 2\,[s t - |y|]_+,

so that :math:`n_{ij} = [s_i \cdot T_{ij} - c_{ij}]_+` with :math:`c_{ij} = 2 \sum_e [s_e T_e -
|y_e|]_+`. The dot product needs no vector: :math:`s \cdot T = (s W)\, z` for a vector :math:`T =
W z`, where W is the output projection. What is missing is small for a small vector, because a
vector counts only where it is larger than the output. With the norms of the rows of W,
:math:`|T_e| \le \|W_e\|\,\|z\|`, so

.. math::
    0 \le c_{ij} \le \bar c_i(\|z_{ij}\|), \qquad
    \bar c_i(\rho) = 2 \sum_e \big[\|W_e\|\,\rho - |y_{ie}|\big]_+.

A source whose vector is not made gets :math:`\hat n = [s \cdot T]_+`, which is too large by
:math:`\delta = \min(\bar c, \hat n)` at most. Let :math:`\Delta_i` be the sum of these over the
row. If a and b are not negative and b is less than a by :math:`\Delta` in all, then :math:`\|a /
|a| - b / |b|\|_1 = 2 \sum_j [a_j / |a| - b_j / |b|]_+ \le 2 \sum_j (a_j - b_j) / |a| = 2 \Delta /
|a|`, so the row is wrong by

.. math::
    \epsilon_i = \min\Big(2, \frac{2 \Delta_i}{\sum_j \hat n_{ij}}\Big)

at most. A row of little relevance is not made at all: its relevance stays with its own token, and
:math:`\epsilon_i = 2`, the largest distance of two rows that sum to one.

**The bound.** Let :math:`\hat v` be the relevance that is carried with the rows :math:`\hat P`,
and v the exact one. For any signs of v, with :math:`\|w P\|_1 \le \|w\|_1`,

.. math::
    \|v P - \hat v \hat P\|_1 \le \|(v - \hat v) P\|_1 + \|\hat v (P - \hat P)\|_1
        \le \|v - \hat v\|_1 + \sum_i |\hat v_i|\, \epsilon_i.

What layers add to the relevance is the same for both. The errors of ALTI-Logit over all layers
are therefore at most :math:`\sum_\lambda \sum_i |\hat v^\lambda_i|\, \epsilon^\lambda_i`, and its
sum is the exact one, because the rows still sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.attr.latim_parts.contributions import BLOCK, Contributions
from captum_ssm.utils.lazy import cached_property

ROWS_SHARE = 0.25  # of the tolerance, for rows that are not made; the rest is for sources
NARROW = 128  # a vector of so few numbers costs less than to tell whether it matters


@dataclass(frozen=True)
class Alti:
    """The rows of eq. 6 of one layer.

    The residual stream, ``(B, L, E)``, is what each token adds to its own output in addition.
    """

    parts: Contributions
    residual: Tensor | None = None

    @cached_property
    def output(self) -> Tensor:
        """What the vectors add up to, y, ``(B, L, E)``.

        A layer's own output is this plus bias terms with ``"gate"`` only. Vectors that miss it are
        all far from it, and the few that come near by chance would get the whole row.
        """
        total = self.parts.total()
        return total if self.residual is None else self.residual + total.to(self.residual)

    def tiles(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Ascending rows ``(R,)`` of P: tiles of them, each with ``(B, r, C)``, zero beyond."""
        for chosen in self.parts.tiles(rows):
            if self.parts.is_sum_of_maps:
                near = self._near_of_maps(chosen)
            else:
                index, columns = chosen.expand(self.parts.batch, -1), self.parts.columns(chosen)
                near = self.parts.reduced(index, columns, self._near_block(chosen))
            yield chosen, shares_of(near, chosen)

    def _near_of_maps(self, chosen: Tensor) -> Tensor:
        # n of some rows, (B, r, C), without their vectors.
        y = self.output[:, chosen]
        stream = None if self.residual is None else self.residual[:, chosen]
        size = y.abs().sum(-1, keepdim=True)
        return _positive(size - self.parts.distances(chosen, y, stream), size)

    def _near_block(self, chosen: Tensor) -> Callable[[Tensor, slice, slice], Tensor]:
        y = self.output[:, chosen].mT[..., None]  # (B, E, r, 1)
        tokens = chosen.tolist()

        def near(vectors: Tensor, rows: slice, columns: slice) -> Tensor:
            if self.residual is not None:
                for r, i in enumerate(tokens[rows]):
                    if columns.start <= i < columns.stop:
                        vectors[:, :, r, i - columns.start] += self.residual[:, i]
            return _near(vectors, y[:, :, rows], 1)

        return near

    def carry(
        self, relevance: Tensor, tolerance: float, advance: Callable[[float], None]
    ) -> tuple[Tensor, Tensor]:
        """Relevance ``(B, T, L)`` of T targets before the layer, v P, of that after it.

        And the bound on its error's l1 norm, ``(B, T)``, half of which is the share of the
        relevance that the tolerance lets end on wrong tokens. ``advance`` is told after each tile
        what part of the work was done.
        """
        weight = relevance.abs()
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
        weight = weight.amax(1)  # (B, L): of the target that needs a row most
        rows = (weight != 0).any(0).nonzero()[:, 0]
        # All vectors of a row are made.
        is_narrow = self.parts.weight.shape[0] <= NARROW
        makes_all = tolerance == 0 or is_narrow or self.parts.gate is not None
        # Rows of the least relevance stay what they are.
        order = rows[weight[:, rows].amax(0).argsort()]
        spent = 2 * weight[:, order].cumsum(1)
        allowed = (1 if makes_all else ROWS_SHARE) * 2 * tolerance
        count = int((spent <= allowed).all(0).sum())
        skipped, made = order[:count], order[count:].sort().values
        carried = torch.zeros_like(relevance)
        carried[..., skipped] = relevance[..., skipped]
        bound = 2 * carried.abs().sum(-1)
        if makes_all:
            for chosen, shares in self.tiles(made):
                carried[..., : shares.shape[2]] += relevance[..., chosen] @ shares
                advance(len(chosen) / len(made))
            return carried, bound
        budget = torch.full_like(weight[:, 0], 2 * tolerance)
        if count:
            budget = budget - spent[:, count - 1]
        # Tiles of little relevance spend little of the tolerance, and leave it to the others.
        tiles = self.parts.tiles(made)
        tiles.sort(key=lambda chosen: float(weight[:, chosen].sum()))
        left = len(made)
        for chosen in tiles:
            near, unsure = self._near_some(chosen, weight, budget * len(chosen) / left)
            error = (2 * unsure / near.sum(-1).clamp(min=1e-30)).clamp(max=2)  # (B, r)
            budget = (budget - (weight[:, chosen] * error).sum(-1)).clamp(min=0)
            left -= len(chosen)
            moved = relevance[..., chosen]
            carried[..., : near.shape[2]] += moved @ shares_of(near, chosen)
            bound = bound + (moved.abs() @ error[..., None])[..., 0]
            advance(len(chosen) / len(made))
        return carried, bound

    def _near_some(self, chosen: Tensor, weight: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        # n (B, r, C) of some rows, in which some entries are only upper bounds, and by how much
        # these may be too large in all, (B, r).
        B, C = self.parts.batch, self.parts.columns(chosen)
        y = self.output[:, chosen]
        directions = y.sign() @ self.parts.weight  # (B, r, D)
        dots, squares = y.new_zeros(2, B, len(chosen), C)

        def visit(channels: slice, z: Tensor) -> None:
            dots.add_(torch.einsum("brd,bdrc->brc", directions[..., channels], z))
            squares.add_(_squares(z))

        z = self.parts.unprojected(chosen.expand(B, -1), C, visit)
        near = _positive(dots, y.abs().sum(-1, keepdim=True))
        most = torch.minimum(self._most_missing(y, squares.sqrt_()), near)
        at = torch.arange(len(chosen), device=chosen.device)
        for b in range(B):
            wanted = at * C + chosen  # the own tokens, to which the residual belongs
            while len(wanted):
                near[b].view(-1)[wanted] = self._near_pairs(b, z[b], wanted, chosen)
                most[b].view(-1)[wanted] = 0
                # Vectors with the least to lose may stay as they are.
                total = near[b].sum(-1, keepdim=True).clamp(min=1e-30)
                lost = (2 * weight[b, chosen, None] * most[b] / total).view(-1)
                ranked = lost.sort()
                count = int((ranked.values.cumsum(0) <= allowed[b]).sum())
                wanted = ranked.indices[count:].sort().values
        return near, most.sum(-1)

    def _near_pairs(self, b: int, z: Tensor, pairs: Tensor, chosen: Tensor) -> Tensor:
        # n of some pairs of one example's rows and columns, (n,).
        columns, blocks = z.shape[2], []
        z = z.flatten(1)
        y = self.output[b, chosen].mT  # (E, r)
        for block in pairs.split(BLOCK):
            row, column = block // columns, block % columns
            (vectors,) = self.parts.project(z.index_select(1, block)[None])
            if self.residual is not None:
                at_itself = (chosen[row] == column).nonzero()[:, 0]
                vectors[:, at_itself] += self.residual[b, column[at_itself]].mT
            blocks.append(_near(vectors, y.index_select(1, row), 0))
        return torch.cat(blocks)

    @cached_property
    def _row_norms(self) -> Tensor:
        return self.parts.weight.norm(dim=1).clamp(min=1e-30)

    def _most_missing(self, y: Tensor, length: Tensor) -> Tensor:
        # The bound on c for vectors z of some lengths: (B, r, C), of y (B, r, E). It is linear
        # between the lengths at which an entry of the vector may exceed that of the output.
        starts, order = (y.abs() / self._row_norms).sort()
        slopes = torch.nn.functional.pad(self._row_norms[order].cumsum(-1), (1, 0))
        offsets = torch.nn.functional.pad((self._row_norms[order] * starts).cumsum(-1), (1, 0))
        at = torch.searchsorted(starts, length)
        return 2 * (slopes.gather(-1, at) * length - offsets.gather(-1, at)).clamp(min=0)


def of_tiles(tiles: Iterator[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """All rows of a layer's map, ``(B, L, L)``, of tiles of them."""
    return torch.cat(
        [torch.nn.functional.pad(tile, (0, length - tile.shape[2])) for _, tile in tiles], 1
    )


def _squares(z: Tensor) -> Tensor:
    # The squared norms (B, r, C) of vectors (B, D, r, C). A sum over the first of many axes is slow
    # in PyTorch.
    total = torch.zeros_like(z[:, 0])
    for block in z.split(64, 1):
        total += (block * block).sum(1)
    return total


def _near(vectors: Tensor, output: Tensor, dim: int) -> Tensor:
    # Eq. 6's numerator; the vectors are overwritten.
    size = output.abs().sum(dim)
    distance = vectors.sub_(output).abs_().sum(dim)
    return _positive(size - distance, size)


def _positive(near: Tensor, size: Tensor) -> Tensor:
    # A vector of zeros changes nothing, but two sums of the same numbers differ by rounding.
    return torch.where(near > 8 * torch.finfo(near.dtype).eps * size, near, 0)


def shares_of(near: Tensor, chosen: Tensor) -> Tensor:
    """Rows ``(B, r, C)`` that sum to one, of some tokens ``(r,)``, from entries of at least zero.

    A row without an entry is the token's own: no vector alone leads nearer to the output.
    """
    total = near.sum(-1, keepdim=True)
    identity = torch.zeros_like(near)
    identity[:, torch.arange(len(chosen), device=chosen.device), chosen] = 1
    return torch.where(total > 0, near / total.clamp(min=1e-30), identity)
