"""The directions of a scan: the orders in which parts of it run over the module's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm.discovery.measure.cut_run import CutScan
from captum_ssm.discovery.measure.projection import Projection
from captum_ssm.discovery.measure.rerun import Rerun
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.readers import Entries, readers
from captum_ssm.graph.relevance_rules import mean_size, ruled
from captum_ssm.operators import (
    MovedOperator,
    PermutedOperator,
    SkipOperator,
    SumOperator,
    TokenOperator,
)
from captum_ssm.operators.part import examples, part_of
from captum_ssm.operators.permuted import scattered
from captum_ssm.utils.nested import same_values


@dataclass(frozen=True)
class Direction:
    """Channels of some examples of a scan, which run over the module's tokens in one order.

    A scan over some of the tokens only, over padding too, or whose results land on other tokens
    than its values come from, is taken in the module's own order, as a scan over all of them.

    Args:
        cut (CutScan): the scan.
        rows (Tensor): ``(B,)``, its examples; ``(B, k)`` where it has heads or channels in its
            batch; ``(B W,)`` or ``(B W, k)`` where it runs in W windows of the tokens.
        start (int): the first of its channels.
        stop (int): the one after the last.
        order (Tensor): ``(L,)``: token t of the scan is this one of the module's.
        channels (Tensor): ``(D,)``, those of the input of the output projection.
        factor (Tensor): ``(B, L, D)``, gate times norm, in the scan's order.
        centered (int, optional): the channels over which a norm that follows subtracts their mean,
            one group of them after the other; 0 for none. Default: 0
        lands (Tensor, optional): ``(W l,)``, the module's token that each token of the scan's
            windows lands on, -1 for none; None where they are ``order``. Default: None
        enters (Tensor, optional): ``(W l,)``, the module's token that each is made of, -1 for
            padding. Default: None
    """

    cut: CutScan
    rows: Tensor
    start: int
    stop: int
    order: Tensor
    channels: Tensor
    factor: Tensor
    centered: int = 0
    lands: Tensor | None = None
    enters: Tensor | None = None

    @property
    def length(self) -> int:
        """The tokens of all windows of an example, W l."""
        return len(self.order if self.lands is None else self.lands)

    @property
    def windows(self) -> int:
        """W, the sequences in which the scan runs over the tokens of an example."""
        return self.length // self.cut.leaf.shape[1]

    def in_scan(self, x: Tensor) -> Tensor:
        """The direction's part of ``x (B', l, D')``, ``(B, W l, D)`` in the scan's own order."""
        part = examples(x, self.rows, slice(self.start, self.stop))  # (B W, l, D)
        return part.reshape(-1, self.length, part.shape[-1])

    def of(self, x: Tensor, fill: float = 0) -> Tensor:
        """The direction's part of ``x (B', l, D')``, by the tokens that its values are made of."""
        part = self.in_scan(x)
        if self.enters is None:
            return part
        return scattered(part, self.enters, len(self.order), fill)

    @property
    def positions(self) -> Tensor:
        """``(B, k, W l)``, where its tokens are among all of the scan."""
        rows, length = self.rows.view(len(self.rows), -1), self.cut.leaf.shape[1]
        at = rows[..., None] * length + torch.arange(length, device=rows.device)  # (B W, k, l)
        return at.unflatten(0, (-1, self.windows)).transpose(1, 2).flatten(2)

    @property
    def numbers(self) -> Tensor:
        """``(B' l,)``, by token of the scan its number in the direction, counted through; or -1.

        Tokens that are laid side by side have one number.
        """
        numbers = torch.full((math.prod(self.cut.leaf.shape[:2]),), -1, device=self.order.device)
        at = self.positions
        count = torch.arange(at[:, 0].numel(), device=at.device)
        numbers[at.flatten()] = count.view(len(at), 1, -1).expand_as(at).flatten()
        return numbers

    def readers(self, rerun: Rerun) -> Tensor | None:
        """By the module's tokens, ``(B, L)``, the number of the token that each is read by.

        None where a token of the direction reads several, by its values; -1 for what none reads.
        """
        assert self.cut.values is not None
        channels = torch.arange(self.start, self.stop, device=self.order.device)
        at, labels = self.positions.flatten(), self.numbers.clamp(min=0)
        read_by = readers(self.cut.values, rerun.tokens, channels, tokens=at, labels=labels)
        return None if read_by is None else read_by.view(rerun.B, rerun.L)

    @property
    def values(self) -> Tensor:
        """``(B, L, D)``, in the scan's order."""
        return self.of(self.cut.scan.values.detach())

    @property
    def operator(self) -> TokenOperator:
        """The recurrence, with the scan's own skip where that lands on other tokens."""
        inner = self._inner
        if self.enters is None or self.lands is None:
            every = torch.arange(len(self.order), device=self.order.device)
            return inner if self.windows == 1 else PermutedOperator(inner, every)
        if self._skip is not None and not self.lands_back:
            diagonal = self._skip.reshape(inner.sizes[:3]).to(inner.dtype)
            inner = SumOperator((inner, SkipOperator(diagonal)))
        return MovedOperator(inner, self.enters, self.lands, len(self.order))

    @property
    def _inner(self) -> TokenOperator:
        return part_of(self.cut.scan.operator, self.rows, self.start, self.stop)

    @property
    def lands_back(self) -> bool:
        """Whether its results land on the tokens that its values are made of."""
        assert self.enters is not None
        assert self.lands is not None
        both = (self.enters >= 0) & (self.lands >= 0)
        return torch.equal(self.enters[both], self.lands[both])

    @property
    def padding(self) -> Tensor | None:
        """What the scan makes of tokens that are none of the module's, ``(B, L, D)``, if any."""
        if self.enters is None or self.lands is None or bool((self.enters >= 0).all()):
            return None
        values = self.in_scan(self.cut.scan.values.detach()) * (self.enters < 0)[:, None]
        y = self._inner.matvec(values.reshape(self._inner.sizes[:3])).reshape(values.shape)
        y = y if self._skip is None else torch.addcmul(y, self._skip, values)
        added = scattered(y, self.lands, len(self.order))
        return added if bool(added.any()) else None

    @property
    def skip(self) -> Tensor | None:
        """The scan's own factor of its values, ``(B, L, D)``."""
        if self._skip is None or self.enters is None:
            return self._skip
        return scattered(self._skip, self.enters, len(self.order)) if self.lands_back else None

    @property
    def _skip(self) -> Tensor | None:
        skip, like = self.cut.scan.skip, self.cut.leaf
        return None if skip is None else self.in_scan(skip.to(like.dtype).expand_as(like))

    def where(self) -> Tensor:
        """The direction's entries among those of the scan, ``(B' L, D')`` bool."""
        is_part = torch.zeros(self.cut.leaf.shape, dtype=torch.bool, device=self.cut.leaf.device)
        is_part[self.rows, :, self.start : self.stop] = True
        return is_part.flatten(0, 1)


def find_directions(rerun: Rerun, projection: Projection, cut: CutScan) -> list[Direction]:
    """The directions of a scan, by what of it reaches the output projection."""
    later, earlier = projection.inputs, Point.of(cut.leaf)
    exits = projection.entries(earlier, centered=False)
    with ruled([later.edge.node], [earlier.edge.node], centered=False) as carries:
        sizes = [mean_size(node) for node, is_between in carries.items() if is_between]
        centered = max((later.width if size is None else size for size in sizes), default=0)
    if exits is None:
        raise rerun.refused(f"what it does after {cut.scan.name} mixes channels or tokens")
    if bool((exits.token < 0).any()):
        exits = _completed(exits, cut.leaf.shape)
    if exits is None:
        convs = [conv.point for conv in rerun.run.convs]  # which are cut off, too
        is_convolved = any(dependencies(convs, [earlier]))
        what = "is convolved" if is_convolved else "does not reach its output"
        raise rerun.refused(f"a part of what {cut.scan.name} returns {what}")
    return parted(rerun, cut, exits, centered)


def _completed(exits: Entries, shape: tuple[int, ...]) -> Entries | None:
    # After an activation, as ReLU, entries that are zero are not read; they go where others of
    # their token and of their channel do. Tokens that no channel of a kind is read at are cropped.
    # None where a channel is not read at all.
    rows, length, width = shape
    to = exits.channel.view(rows, length, width)
    channel = torch.where(to >= 0, to, to.amax(1, keepdim=True)).view(exits.channel.shape)
    token = exits.token.clone()
    kinds: list[Tensor] = []  # of tokens that channels go to
    kind_of = [0] * width
    last = 0
    for column in sorted(range(width), key=lambda c: int((token[:, c] < 0).sum())):
        near = sorted(range(len(kinds)), key=lambda n: n != last)
        last = next((n for n in near if _agree(kinds[n], token[:, column])), len(kinds))
        kind_of[column] = last
        if last == len(kinds):
            kinds.append(token[:, column])
        kinds[last] = torch.maximum(kinds[last], token[:, column])
    if bool((channel < 0).any()):
        return None
    return Entries(torch.stack([kinds[n] for n in kind_of], 1), channel, exits.factor)


def _agree(first: Tensor, second: Tensor) -> bool:
    # Whether tokens are the same where both are known, at one of them at least.
    both = (first >= 0) & (second >= 0)
    return bool(both.any()) and torch.equal(first[both], second[both])


def parted(rerun: Rerun, cut: CutScan, exits: Entries, centered: int = 0) -> list[Direction]:
    """The directions of a scan, by the module's token that each of its tokens reaches."""
    rows, length, width = cut.leaf.shape
    table = exits.token.reshape(rows * length, width)
    kinds, group = torch.unique(table, dim=1, return_inverse=True)
    goes = exits.channel.reshape(rows, length, width)
    factors = exits.factor.reshape(rows, length, width)
    directions: list[Direction] = []
    for n, channels in _runs(group, goes.amax((0, 1)), cut.scan.values.detach()):
        start, stop = int(channels[0]), int(channels[-1]) + 1
        if len(channels) != stop - start:
            raise rerun.refused(f"the directions of {cut.scan.name} lie between each other")
        lands = kinds[:, n].reshape(rows, length)
        for at, order in _orders(rerun, lands, goes[:, :, start].amax(1)):
            to = examples(goes, at, slice(start, stop))
            if bool(((to != to[:1, :1]) & (to >= 0)).any()):
                raise rerun.refused(f"{cut.scan.name} does not keep its channels")
            direction = Direction(cut, at, start, stop, order, to[0, 0], factors, centered)
            if len(order) != rerun.L or bool((order < 0).any()):
                every = torch.arange(rerun.L, device=order.device)
                direction = replace(direction, order=every, lands=order)
            directions.append(replace(direction, factor=_factor(direction, factors)))
    return sorted(directions, key=lambda direction: direction.start)


def _runs(group: Tensor, goes: Tensor, values: Tensor) -> Iterator[tuple[int, Tensor]]:
    # The channels of each group; those apart that are given the same values and go to the same
    # channels again, as by directions that are one in an image of one row.
    for n in range(int(group.max()) + 1):
        channels = (group == n).nonzero()[:, 0]
        runs = channels.split(len(goes[channels].unique()))
        both = [(goes[run], values[..., run]) for run in runs]
        is_again = all(same_values(both[0], of_run) for of_run in both)
        for run in runs if is_again else [channels]:
            yield n, run


def _factor(direction: Direction, factors: Tensor) -> Tensor:
    # By the module's tokens where the scan's are not these; one where nothing lands.
    factor = direction.in_scan(factors.to(direction.cut.leaf.dtype))
    if direction.lands is None:
        return factor
    factor = scattered(factor, direction.lands, len(direction.order))
    return torch.where((factor == 0).all(-1, keepdim=True), 1, factor)


def _orders(rerun: Rerun, lands: Tensor, channel: Tensor) -> list[tuple[Tensor, Tensor]]:
    # The rows of a scan's batch that run in one order, with that order; lands (B', l), -1 for what
    # is cropped. Rows of one example are told apart by the channel (B',) that they go to. Windows
    # of some of the tokens are put together, their orders one after the other.
    B, L = rerun.B, rerun.L
    is_read = lands >= 0
    example, token = (lands // L).amax(1), torch.where(is_read, lands % L, -1)
    if bool(((lands // L != example[:, None]) & is_read).any()):
        raise rerun.refused("a scan runs over tokens of several examples")
    kinds, group = torch.unique(token, dim=0, return_inverse=True)
    orders: list[tuple[Tensor, Tensor]] = []
    for n, kind in enumerate(kinds):
        if bool((kind < 0).all()):  # windows of padding
            continue
        rows = (group == n).nonzero()[:, 0]
        rows = rows[torch.argsort(channel[rows], stable=True)]
        rows = rows[torch.argsort(example[rows], stable=True)]
        several = max(1, len(rows) // B)
        owners = torch.arange(B, device=rows.device).repeat_interleave(several)
        if not torch.equal(example[rows], owners):
            raise rerun.refused("examples of the batch are scanned in different orders")
        known = kind[kind >= 0]
        if len(known.unique()) < len(known):
            raise rerun.refused("what a scan returns of several tokens lands on one")
        if several > 1:
            rows = rows.view(B, several)
            if bool((channel[rows].diff(dim=1) <= 0).any()):
                raise rerun.refused("several scans in one order go to the same channels")
        orders.append((rows, kind))
    return _joined(sorted(orders, key=lambda order: int(order[0].flatten()[0])))


def _joined(orders: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    # Windows that have no token in common, as one: those of an example one after the other.
    joined: list[tuple[list[Tensor], Tensor]] = []
    for rows, lands in orders:
        for n, (windows, taken) in enumerate(joined):
            apart = not bool(torch.isin(lands[lands >= 0], taken).any())
            if apart and rows.shape == windows[0].shape:
                joined[n] = [*windows, rows], torch.cat([taken, lands])
                break
        else:
            joined.append(([rows], lands))
    return [(torch.stack(windows, 1).flatten(0, 1), lands) for windows, lands in joined]
