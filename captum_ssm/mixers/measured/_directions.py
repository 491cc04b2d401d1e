"""The directions of a scan: the orders in which parts of it run over the module's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm._graph import Entries, Point
from captum_ssm._rules import mean_size, ruled
from captum_ssm.mixers._cut import CutScan
from captum_ssm.mixers.measured._projection import Projection
from captum_ssm.mixers.measured._rerun import Rerun
from captum_ssm.operators import TokenOperator, WindowedOperator
from captum_ssm.operators.part import examples, part_of


@dataclass(frozen=True)
class Direction:
    """Channels of some examples of a scan, which run over the module's tokens in one order.

    Args:
        cut (CutScan): the scan.
        rows (Tensor): ``(B,)``, its examples; ``(B, k)`` where it has heads or channels in its
            batch; ``(B W,)`` or ``(B W, k)`` where it runs in windows of the tokens.
        start (int): the first of its channels.
        stop (int): the one after the last.
        order (Tensor): ``(L,)``: token t of the scan is this one of the module's.
        channels (Tensor): ``(D,)``, those of the input of the output projection.
        factor (Tensor): ``(B, L, D)``, gate times norm, in the scan's order.
        centered (int, optional): the channels over which a norm that follows subtracts their mean,
            one group of them after the other; 0 for none. Default: 0
        windows (int, optional): W. Default: 1
    """

    cut: CutScan
    rows: Tensor
    start: int
    stop: int
    order: Tensor
    channels: Tensor
    factor: Tensor
    centered: int = 0
    windows: int = 1

    def of(self, x: Tensor) -> Tensor:
        """The direction's part of ``x (B', l, D')``, ``(B, L, D)``."""
        return _of_windows(examples(x, self.rows, slice(self.start, self.stop)), self.windows)

    @property
    def places(self) -> Tensor:
        """``(B, k, L)``, where its tokens are among all of the scan."""
        rows, length = self.rows.view(len(self.rows), -1), self.cut.leaf.shape[1]
        steps = torch.arange(length, device=rows.device)
        places = rows.mT.contiguous().mT[..., None] * length + steps  # (B W, k, l)
        return places.unflatten(0, (-1, self.windows)).transpose(1, 2).flatten(2)

    @property
    def values(self) -> Tensor:
        """``(B, L, D)``, in the scan's order."""
        return self.of(self.cut.scan.values.detach())

    @property
    def operator(self) -> TokenOperator:
        """The recurrence."""
        found = part_of(self.cut.scan.operator, self.rows, self.start, self.stop)
        return found if self.windows == 1 else WindowedOperator(found, self.windows)

    @property
    def skip(self) -> Tensor | None:
        """The scan's own factor of its values, broadcasts to ``(B, L, D)``."""
        skip = self.cut.scan.skip
        if skip is None:
            return None
        return (
            self.of(skip.expand_as(self.cut.leaf))
            if skip.dim() > 1
            else skip[self.start : self.stop].to(self.cut.leaf.dtype).repeat(self.rows[0].numel())
        )

    def where(self) -> Tensor:
        """The direction's entries among those of the scan, ``(B' L, D')`` bool."""
        found = torch.zeros(self.cut.leaf.shape, dtype=torch.bool, device=self.cut.leaf.device)
        found[self.rows, :, self.start : self.stop] = True
        return found.flatten(0, 1)


def find_directions(rerun: Rerun, projection: Projection, cut: CutScan) -> list[Direction]:
    """The directions of a scan, by what of it reaches the output projection."""
    root, leaf = projection.root, Point.of(cut.leaf)
    with ruled([root.edge.node], [leaf.edge.node], centered=False) as carries:
        exits = projection.entries(leaf)
        sizes = [mean_size(node) for node, c in carries.items() if c]
        centered = max((root.width if size is None else size for size in sizes), default=0)
    if exits is None:
        raise rerun.refused(f"what it does after {cut.scan.name} mixes channels or tokens")
    if bool((exits.token < 0).any()):
        exits = _completed(exits, cut.leaf.shape)
    if exits is None:
        raise rerun.refused(f"a part of what {cut.scan.name} returns does not reach its output")
    return parted(rerun, cut, exits, centered)


def _completed(exits: Entries, shape: tuple[int, ...]) -> Entries | None:
    # After an activation, as ReLU, entries that are zero are not read; they go where others of
    # their token and of their channel do. None where that is not known.
    rows, length, width = shape
    to = exits.channel.view(rows, length, width)
    channel = torch.where(to >= 0, to, to.amax(1, keepdim=True)).view(exits.channel.shape)
    token = exits.token.clone()
    kinds: list[Tensor] = []  # of tokens that channels go to, and which of them the last one
    last = 0
    for column in sorted(range(width), key=lambda c: bool((token[:, c] < 0).any())):
        read = token[:, column] >= 0
        near = sorted(range(len(kinds)), key=lambda n: n != last)
        fits = (n for n in near if torch.equal(kinds[n][read], token[read, column]))
        n = next(fits, None)
        if n is None:
            if not bool(read.all()):
                return None
            n = len(kinds)
            kinds.append(token[:, column])
        last, token[:, column] = n, kinds[n]
    if bool((channel < 0).any()):
        return None
    return Entries(token, channel, exits.factor)


def parted(rerun: Rerun, cut: CutScan, exits: Entries, centered: int = 0) -> list[Direction]:
    """The directions of a scan, by the module's token that each of its tokens reaches."""
    rows, length, width = cut.leaf.shape
    table = exits.token.reshape(rows * length, width)
    kinds, group = torch.unique(table, dim=1, return_inverse=True)
    goes = exits.channel.reshape(rows, length, width)
    factors = exits.factor.reshape(rows, length, width)
    found: list[Direction] = []
    for n in range(kinds.shape[1]):
        channels = (group == n).nonzero()[:, 0]
        start, stop = int(channels[0]), int(channels[-1]) + 1
        if len(channels) != stop - start:
            raise rerun.refused(f"the directions of {cut.scan.name} lie between each other")
        first = goes[:, 0, start]
        for at, order in _orders(rerun, kinds[:, n].reshape(rows, length), first):
            windows = len(at) // rerun.B
            to = examples(goes, at, slice(start, stop))
            if bool((to != to[:1, :1]).any()):
                raise rerun.refused(f"{cut.scan.name} does not keep its channels")
            factor = examples(factors, at, slice(start, stop)).to(cut.leaf.dtype)
            factor, to = _of_windows(factor, windows), to[0, 0]
            found.append(Direction(cut, at, start, stop, order, to, factor, centered, windows))
    return sorted(found, key=lambda direction: direction.start)


def _of_windows(x: Tensor, windows: int) -> Tensor:
    # (B W, l, D) as (B, W l, D).
    return x.unflatten(0, (-1, windows)).flatten(1, 2)


def _orders(rerun: Rerun, lands: Tensor, channel: Tensor) -> list[tuple[Tensor, Tensor]]:
    # The rows of a scan's batch that run in one order, with that order; lands (B', l). Rows of
    # one example are told apart by the channel (B',) that they go to.
    B, L = rerun.B, rerun.L
    example, token = lands // L, lands % L
    if bool((example != example[:, :1]).any()) or L % lands.shape[1]:
        raise rerun.refused("a scan does not run over all tokens of one example")
    kinds, group = torch.unique(token, dim=0, return_inverse=True)
    found = []
    for n in range(len(kinds)):
        rows = (group == n).nonzero()[:, 0]
        rows = rows[torch.argsort(channel[rows], stable=True)]
        rows = rows[torch.argsort(example[rows, 0], stable=True)]
        several = max(1, len(rows) // B)
        owners = torch.arange(B, device=rows.device).repeat_interleave(several)
        if not torch.equal(example[rows, 0], owners):
            raise rerun.refused("examples of the batch are scanned in different orders")
        if several > 1:
            rows = rows.view(B, several)
            if bool((channel[rows].diff(dim=1) <= 0).any()):
                raise rerun.refused("several scans in one order go to the same channels")
        found.append((rows, kinds[n]))
    found.sort(key=lambda one: int(one[0].flatten()[0]))
    return [_joined(rerun, one) for one in _windows(found)]


def _windows(found: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    # Orders of some of the tokens, each with the others of its direction.
    directions: list[tuple[set[int], list[tuple[Tensor, Tensor]]]] = []
    for rows, order in found:
        own = set(order.tolist())
        fits = (one for one in directions if own.isdisjoint(one[0]))
        tokens, windows = next(fits, (set[int](), list[tuple[Tensor, Tensor]]()))
        if not windows:
            directions.append((tokens, windows))
        tokens |= own
        windows.append((rows, order))
    return [windows for _, windows in directions]


def _joined(rerun: Rerun, windows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    # The windows of one direction, those of an example one after the other.
    order = torch.cat([order for _, order in windows])
    every = torch.arange(rerun.L, device=order.device)
    if not torch.equal(torch.sort(order).values, every):
        raise rerun.refused("a scan's tokens are not the module's")
    if len({rows.shape for rows, _ in windows}) > 1:
        raise rerun.refused("the windows of a scan are not alike")
    return torch.stack([rows for rows, _ in windows], 1).flatten(0, 1), order
