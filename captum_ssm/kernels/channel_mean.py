"""Rows of the channel mean of a diagonal recurrence, in PyTorch, as an operation of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.kernels.convolution import causal_conv_transpose
from captum_ssm.kernels.diagonal import RECURRENCE, DiagonalCoefficients
from captum_ssm.kernels.diagonal_states import HUGE, decay, scaled
from captum_ssm.kernels.registration import operation


@operation(
    f"diagonal_mean({RECURRENCE}, Tensor? conv, Tensor? columns, int start, int stop) -> Tensor",
    DiagonalCoefficients,
    fake=lambda c, start, stop: c.dt.new_empty(len(c.dt), stop - start, c.dt.shape[1]),
)
def diagonal_mean_torch(c: DiagonalCoefficients, start: int = 0, stop: int | None = None) -> Tensor:
    # Rows are cut into tiles. The columns left of a tile are one matrix product, with decays split
    # at the tile's first row. The triangle on the diagonal of a tile is halved recursively, each
    # level of all tiles being one batched product.
    (batch, length, channels), states = c.dt.shape, c.A.shape[1]
    stop = length if stop is None else stop
    rows = stop - start
    tile = min(256, 1 << (rows - 1).bit_length())
    padded = -(-rows // tile) * tile
    extra = 0 if c.conv is None else c.conv.shape[1] - 1

    def near(x: Tensor) -> Tensor:
        """The positions of the rows themselves, padded to whole tiles."""
        return F.pad(x[:, start:stop], [0, 0] * (x.dim() - 2) + [0, padded - rows])

    # Columns are stored `extra` further right: the taps extend the first sources to the left.
    width = extra + start + padded
    out = c.dt.new_zeros(batch, padded, width)
    halves = [tile >> k for k in range(1, tile.bit_length())]
    triangles = {h: c.dt.new_zeros(batch, padded // (2 * h), h, extra + h) for h in halves}
    diagonal = c.dt.new_zeros(batch, padded, extra + 1)

    for part in _channel_chunks(c, max(1, 1024 // states)):
        A, B, right, conv = part.A, part.B, part.right, part.conv
        t = part.dt.clamp(max=HUGE).double()
        t_near, r_near, b_near, c_near = near(t), near(right), near(B), near(part.C)
        f = None if part.left is None else near(part.left)
        # They begin where panels do that a convolution has extended to the left.
        columns, ends = part.columns, (0, 0, extra, padded - rows)
        columns = None if columns is None else F.pad(columns[:, :stop], ends)

        for first in range(0, padded, tile):
            edge, at = start + first, slice(first, first + tile)
            if edge == 0:
                continue
            p = _panel(t_near[:, at].cumsum(1), A, c_near[:, at], None if f is None else f[:, at])
            q = _panel(_after(t[:, :edge], 1), A, B[:, :edge], right[:, :edge])
            out[:, at, : extra + edge] += p @ _fold(q, conv, columns).mT

        for h in halves:
            early, late = partial(_half, h, 0), partial(_half, h, 1)  # the sources and the rows
            q = _panel(_after(early(t_near), 2), A, early(b_near), early(r_near))
            p = _panel(late(t_near).cumsum(2), A, late(c_near), None if f is None else late(f))
            triangles[h] += p @ _fold(q, conv, columns, start, 2 * h).mT

        z = (b_near * c_near).sum(-1, keepdim=True) * r_near.unflatten(-1, (B.shape[2], -1))
        z = scaled(z.flatten(2), f)[:, :, None]
        diagonal += _fold(z, conv, columns, start, 1).sum(-1)

    for h in halves:
        strides = (padded * width, 2 * h * (width + 1), width, 1)
        out.as_strided(triangles[h].shape, strides, h * width + start).add_(triangles[h])
    out.as_strided(diagonal.shape, (padded * width, width + 1, 1), start).add_(diagonal)
    return F.pad(out[:, :rows, extra : extra + stop], (0, length - stop)) / channels


def _channel_chunks(c: DiagonalCoefficients, width: int) -> Iterator[DiagonalCoefficients]:
    """The coefficients of at most ``width`` channels at a time: whole groups, or part of one."""
    channels, groups = c.dt.shape[2], c.B.shape[2]
    size = channels // groups
    block = max(1, width // size) * size
    for first in range(0, channels, block):
        last = min(channels, first + block)
        for start in range(first, last, width):
            yield c.narrow(start, min(last, start + width))


def _after(dt: Tensor, dim: int) -> Tensor:
    """Sums over all later positions: out[j] = sum(dt[j + 1:]).

    Sums of the steps between, never differences of longer sums: in those the rounding of a huge
    step (a reset) would hide the small steps after it.
    """
    later = dt.narrow(dim, 1, dt.shape[dim] - 1).flip(dim).cumsum(dim).flip(dim)
    return torch.cat([later, torch.zeros_like(dt.narrow(dim, 0, 1))], dim)


def _half(h: int, which: int, x: Tensor) -> Tensor:
    # The first or the second h positions of each block of two halves, (B, blocks, h, ...).
    return x.unflatten(1, (-1, 2, h))[:, :, which]


def _panel(exponent: Tensor, rate: Tensor, coefficient: Tensor, factor: Tensor | None) -> Tensor:
    """One side of the products: (..., positions, D * N) of decay, coefficient and factor.

    exponent (float64) and factor are (..., D), rate (D, N), coefficient (..., G, N).
    """
    groups = coefficient.shape[-2]
    x = decay(exponent.to(rate.dtype).unsqueeze(-1) * rate).unflatten(-2, (groups, -1))
    x = x * coefficient.unsqueeze(-2)
    if factor is not None:
        x = x * factor.unflatten(-1, (groups, -1)).unsqueeze(-1)
    return x.flatten(-3)


def _fold(
    q: Tensor, conv: Tensor | None, columns: Tensor | None, start: int = 0, step: int | None = None
) -> Tensor:
    """Fold taps into a panel of sources, which then extends K - 1 columns further left.

    The factors of the columns begin there too; in blocks of sources, one every ``step`` columns.
    """
    if conv is not None:
        taps = conv.repeat_interleave(q.shape[-1] // len(conv), 0)
        q = causal_conv_transpose(F.pad(q, (0, 0, conv.shape[1] - 1, 0)), taps)
    if columns is None:
        return q
    reached = q.shape[-2]
    columns = columns[:, start:]
    columns = columns[:, :reached] if step is None else columns.unfold(1, reached, step).mT
    return (q.unflatten(-1, (columns.shape[-1], -1)) * columns.unsqueeze(-1)).flatten(-2)
