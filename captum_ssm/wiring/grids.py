"""Where in the input the tokens of each step lie, measured, and the grids that they form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from captum_ssm.graph.points import gradients
from captum_ssm.models.token_grid import TokenGrid
from captum_ssm.wiring.inputs import InputMap
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.wiring import INPUT, TokenMap, Wiring

# Passes for the mean places of tokens. One tells clear lines apart.
PROBES = (1, 8)
# So many patches around its own may be read by a token, as convolutions do that overlap.
_NEAR = 3


def leaves_grid(graph: MixerGraph, grid: TokenGrid) -> bool:
    """Whether tokens are made of more of an input than the patches that a model says they are.

    The first patch is looked at before the first mixer and at the end. What mixes tokens without
    being a mixer makes it read the far half of the input there.
    """
    if len(graph.inputs) != 1 or grid.index.numel() < 2:
        return False
    way, first, last = graph.inputs[0], int(grid.index.flatten()[0]), int(grid.index.max())
    roots = [graph.entries[0], graph.entries[graph.end]]
    points = [
        root
        for root in roots
        if root is not None and len(root.shape) == 3 and last < root.tokens // graph.batch
    ]
    size = _axes(way)
    if not points or len(size) != grid.index.dim():
        return False
    seeds = [point.noise().view(graph.batch, -1, point.width) for point in points]
    for seed in seeds:
        seed[:, :first] = seed[:, first + 1 :] = 0
    (gradient,) = gradients(points, [seed.flatten(0, 1) for seed in seeds], [way.leaf])
    if gradient is None:
        return False
    # NaN, as at the norm of a patch that is zero, tells nothing.
    is_read = (gradient.abs() > 0).any(-1).view(graph.batch, *size).any(0)
    return any(
        bool(is_read.movedim(axis, 0)[math.ceil(n * max(0.5, _NEAR / patches)) :].any())
        for axis, (n, patches) in enumerate(zip(size, grid.index.shape, strict=True))
        if patches > _NEAR
    )


class StepGrids:
    """The grid of each step's tokens; None where they form none, and for texts.

    A token lies at the mean of the places it is made of, weighted as by a transport. Tokens that
    are made of no place (CLS, registers) are left out. Measured for the steps up to the one that
    is asked for.

    Args:
        wiring (Wiring): of a run with one input.
        declared (TokenGrid, optional): that of the first step, where the model tells.
    """

    def __init__(self, wiring: Wiring, declared: TokenGrid | None) -> None:
        way = wiring.inputs[0] if len(wiring.inputs) == 1 else None
        self._wiring = wiring
        self._known: dict[int, TokenGrid | None] = {}
        self._size: tuple[int, ...] = ()
        if way is None or not way.roots or way.leaf.channels is None:
            return
        self._size = _axes(way)
        start = _points(self._size)
        if declared is not None:
            start = _of_tokens(declared, wiring.steps[0].tokens)
        self._after = {n: {INPUT: start.expand(way.batch, -1, -1)} for n in PROBES}

    def __getitem__(self, step: int) -> TokenGrid | None:
        step %= len(self._wiring.steps)
        if step not in self._known:
            self._known[step] = self._measured(step) if self._size else None
        return self._known[step]

    def _measured(self, step: int) -> TokenGrid | None:
        for probes in PROBES:
            grid = _grid(self._places(step, probes)[0], self._size)
            if grid is not None:
                return grid
        return None

    def _places(self, last: int, probes: int) -> Tensor:
        # The coordinates of a step's tokens, (B, T, axes + 1); zero for those that have none.
        after = self._after[probes]
        for i, step in enumerate(self._wiring.steps[: last + 1]):
            if i in after:
                continue
            reads = step.reads or ((INPUT, TokenMap()),)
            if any(link.share is not None for _, link in reads):  # the finest tokens say it best
                reads = (max(reads, key=lambda read: after[read[0]].shape[1]),)
            parts = [link.matvec(after[earlier], probes) for earlier, link in reads]
            rows = reduce(torch.add, parts)
            after[i] = rows / rows[..., -1:].clamp(min=1e-12)
        return after[last]


def _axes(way: InputMap) -> tuple[int, ...]:
    # The axes of the input that are places.
    shape = way.leaf.shape
    channels = None if way.leaf.channels is None else way.leaf.channels % len(shape)
    return tuple(n for axis, n in enumerate(shape) if axis not in (0, channels))


def _points(size: tuple[int, ...]) -> Tensor:
    # Coordinates in (0, 1) of every place, and a one: (S, axes + 1).
    axes = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in size]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    return torch.cat([points, torch.ones(len(points), 1, dtype=torch.float64)], 1)


def _of_tokens(grid: TokenGrid, tokens: int) -> Tensor:
    points = torch.zeros(tokens, len(grid.shape) + 1, dtype=torch.float64)
    points[grid.index.flatten()] = _points(grid.shape)
    return points


def _grid(places: Tensor, size: tuple[int, ...]) -> TokenGrid | None:
    kept = (places[:, -1] > 0.5).nonzero()[:, 0]
    points = places[kept, :-1]
    best: tuple[float, TokenGrid] | None = None
    for shape in _shapes(len(kept), len(size)):
        flat = torch.zeros(len(kept), dtype=torch.long)
        for values, n in zip(points.T, shape, strict=True):
            flat = flat * n + _lines(values, n)
        if bool((flat >= 0).all()) and len(flat.unique()) == len(kept):
            index = torch.empty_like(kept)
            index[flat] = kept
            ratios = [math.log(n / m) for n, m in zip(shape, size, strict=True)]
            uneven = max(ratios) - min(ratios)
            if best is None or uneven < best[0]:
                best = uneven, TokenGrid(index.view(shape))
    return None if best is None else best[1]


def _lines(values: Tensor, count: int) -> Tensor:
    # On which of so many lines each coordinate lies, below zero where they form none. Lines need
    # not be even: strided tokens lie on the borders of cells.
    order = values.argsort()
    lines = values[order].view(count, -1)
    gaps, widths = lines.mean(1).diff(), lines.amax(1) - lines.amin(1)
    if count > 1 and bool(gaps.min() < max(gaps.mean() / 4, widths.max())):
        return torch.full_like(order, -(len(values) ** 2))
    line_of = torch.empty_like(order)
    line_of[order] = torch.arange(count).repeat_interleave(len(values) // count)
    return line_of


def _shapes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    if count == 0:
        return
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for first in itertools.product(divisors, repeat=axes - 1):
        rest, left = divmod(count, math.prod(first))
        if left == 0:
            yield (*first, rest)
