"""Ways past mixers: skip connections, and tokens that a mixer does not work on.

A U-shape adds finer tokens to those of a coarser grid. A class token may go past mixers that work
on the patches only. What a residual stream hands on around a mixer is neither: the mixer's map
counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from captum_ssm._capture.orders import Orders
from captum_ssm._capture.wiring import Link, nearest
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import Point, dependencies, joints, meeting, readers, shape_of
from captum_ssm._transport import Transport, copies, pushed


@dataclass
class Skips:
    """What reads tokens past the mixer before it.

    Mixers are numbered in forward order, inputs below zero, and the output comes last.

    Args:
        entries (mapping of int to Point): the tokens that each mixer, and the output, is given.
        exits (mapping of int to Point): those that each mixer returned; those of the inputs.
        direct (mapping of int to frozenset): what each reads by way of no other mixer.
        reads (mapping of int to set): all that each depends on.
        lead_of (mapping of int to int): the first mixer side by side with each.
        links (mapping): how each reads others, as far as it is known.
        orders (Orders): in which each is given the tokens, as far as it is known.
        is_pooled (bool): whether the output holds no tokens.

    Attributes:
        partial (set of int): the mixers that work on some of the tokens, which others go past.
    """

    entries: Mapping[int, Point | None]
    exits: Mapping[int, Point]
    direct: Mapping[int, frozenset[int]]
    reads: Mapping[int, set[int]]
    lead_of: Mapping[int, int]
    links: Mapping[tuple[int, int], Link]
    orders: Orders
    is_pooled: bool
    partial: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """The number of the output."""
        return max(self.entries)

    def is_in_place(self, i: int, j: int) -> bool:
        """Whether the tokens of i are those of j, from one mixer to the next."""
        if i == j:
            return True
        before = [k for (one, k), link in self.links.items() if one == i and link.is_in_place]
        return any(self.is_in_place(k, j) for k in before)

    def of(self, i: int, j: int) -> dict[int, Transport]:
        """What i reads past j, and the ways there."""
        root, entry = self.entries[i], self.entries.get(j)
        if root is None or entry is None:
            return {}
        leaves, keys = list(self.exits.values()), list(self.exits)
        found = joints(root, entry, leaves)
        read = self._leads(keys[m] for m in found.leaves)
        points, near = [replace(root, edge=edge) for edge in found.past], []
        for one in dependencies(points, leaves, past_leaves=False):
            reads = {**self.reads, self.end: {keys[m] for m in one}}
            near.append(self._leads(nearest(reads)[self.end] if one else ()))
        known = read.union(*near)
        ways: dict[int, Transport] = {}
        passed, partly, waiting = set[int](), [j], set(known)
        while waiting - passed:
            k = max(waiting - passed)
            passed.add(k)
            if self.is_in_place(j, k):
                if k not in read:  # some of the tokens may go past these mixers too
                    waiting |= self._start(k)
                continue
            # Nor through a mixer, where the graph was left whole.
            cut = [*found.stream, *(point.edge for m, point in self.exits.items() if 0 <= m != k)]
            cut += [e for e, one in zip(found.past, near, strict=True) if k in known - one]
            way = Transport(root, self.exits[k], self.orders.batch, tuple(cut))
            handed = self._handed_on(i, partly, k)
            if handed is not None:
                self.partial.add(j)
                partly.append(k)
                waiting |= self._start(k)
                energy = way.energy(root.unflat(root.noise(torch.Generator().manual_seed(0))))
                if energy is not None and bool((energy > 0)[~handed].any()):
                    ways[k] = replace(way, kept=~handed)
            elif k in known:
                ways[k] = way
                here = Transport(root, self.exits[j], self.orders.batch)
                if not _read_all([here, *ways.values()]):
                    # Others may go past these mixers too.
                    partly.append(k)
                    waiting |= self._start(k)
        return dict(sorted(ways.items()))

    def _leads(self, found: Iterable[int]) -> set[int]:
        return {self.lead_of.get(i, i) for i in found}

    def _first(self, i: int) -> int:
        # The first of the mixers that work on the same tokens.
        return next((k for k in range(i + 1) if self.is_in_place(i, k)), i)

    def _start(self, i: int) -> set[int]:
        first = self._first(i)
        return {k for m, k in self.links if m == first}

    def _handed_on(self, i: int, around: Iterable[int], k: int) -> Tensor | None:
        """Which tokens of k residual streams hand on to i, ``(T,)`` bool; None for none.

        Those of which a token of a mixer is made that they go around, and which what is given to i
        reads together with that.

        Args:
            i (int): what reads.
            around (iterable of int): the mixers.
            k (int): what is read.
        """
        found = [one for j in around if (one := self._handed_on_around(i, j, k)) is not None]
        return reduce(torch.logical_or, found) if found else None

    def _handed_on_around(self, i: int, j: int, k: int) -> Tensor | None:
        first = self._first(j)
        entry = self.entries.get(first)
        made = None if entry is None else readers(entry, self.exits[k])
        if made is not None and not bool((made >= 0).any()):
            return None
        for root in self._tokens_of(i, (j, k)):
            by_k, by_j = (readers(root, self.exits[m]) for m in (k, j))
            if made is not None and by_k is not None and by_j is not None:
                order_of_first, order = (self.order(m).to(made.device) for m in (first, j))
                reader = torch.full_like(by_j, -2)
                reader[order] = by_j
                handed = (made >= 0) & (by_k >= 0)
                handed &= reader[order_of_first[made.clamp(min=0)]] == by_k
                return handed if bool(handed.any()) else None
        return self._copies_handed_on(i, j, k)

    def _copies_handed_on(self, i: int, j: int, k: int) -> Tensor | None:
        # The same where several tokens of a mixer are made of one: those whose readers all read it
        # together with what it is made into.
        link, batch = self.links.get((self._first(j), k)), self.orders.batch
        if link is None or link.source is None:
            return None
        S = self.exits[k].tokens // batch
        source = torch.cat(
            [torch.where(link.source >= 0, link.source + b * S, -1) for b in range(batch)]
        )
        for root in self._tokens_of(i, (j, k)):
            by_k, by_j = (copies(Transport(root, self.exits[m], batch)) for m in (k, j))
            if by_k is None or by_j is None:
                continue
            by_k, by_j = by_k.cpu(), by_j.cpu()
            made = torch.where(by_j >= 0, source[self.order(j)[by_j.clamp(min=0)]], -1)
            alike = (by_k >= 0) & (made == self.order(k)[by_k.clamp(min=0)])
            handed = torch.zeros(self.exits[k].tokens, dtype=torch.bool)
            handed[by_k[alike]] = True
            if bool(handed[by_k[(by_k >= 0) & ~alike]].any()):
                raise UnsupportedModelError(
                    "tokens are repeated, and a mixer is given some of the copies, past which the "
                    "others go; expected one that is given all copies of a token or none. Use "
                    "MambaLRP, which goes through the model's own graph."
                )
            return handed.to(root.device) if bool(handed.any()) else None
        return None

    def _tokens_of(self, i: int, leaves: Iterable[int]) -> list[Point]:
        # What i is given; before a pooled output, the tensor in which the tokens come together.
        root = self.entries[i]
        if root is None or i < self.end or not self.is_pooled:
            return [] if root is None else [root]
        edge = meeting(root, [self.exits[m] for m in leaves])
        if edge is None:
            return []
        return [replace(root, edge=edge, shape=shape_of(edge), channels=axis) for axis in (-1, 1)]

    def order(self, i: int) -> Tensor:
        """Which of the model's tokens each token of a mixer, an input or the output is."""
        order, point = self.orders.get(i), self.exits.get(i) or self.entries[i]
        assert point is not None
        return torch.arange(point.tokens) if order is None else order


def _read_all(ways: Iterable[Transport]) -> bool:
    # Whether each token of the root reads something by one of the ways.
    noise = torch.Generator().manual_seed(0)
    found = [pushed(way, way.leaf.unflat(way.leaf.noise(noise)))[0] for way in ways]
    return bool(torch.stack([(one != 0).any(-1) for one in found]).any(0).all())
