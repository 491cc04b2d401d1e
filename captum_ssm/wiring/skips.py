"""Ways past mixers: skip connections, and tokens that a mixer does not work on.

A U-shape adds finer tokens to those of a coarser grid. A class token may go past mixers that work
on the patches only. An input may be added once more, turned around, after later mixers. What a
residual stream hands on around a mixer is none of these: the mixer's map counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import Joints, Side, meetings, shape_of
from captum_ssm.graph.token_weights import (
    Pairs,
    PatchWeights,
    TokenWeights,
    orthogonal,
    pairs,
    pulling,
    pushed,
)
from captum_ssm.utils.lazy import cached_property
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.mixing_test import separating
from captum_ssm.wiring.wiring import INPUT


@dataclass(frozen=True)
class Again:
    """What is read once more of tokens that a residual stream holds, past some of its mixers.

    Args:
        read (frozenset of int): the mixers and inputs that it is made of.
        last (int): the last of them.
        first (int, optional): the first mixer that is given the sum of just these.
        way (TokenWeights): the way to the last one.
        every (TokenWeights): all ways to it that do not go through the stream.
        is_factor (bool): whether it only multiplies the tokens, as a gate does.
    """

    read: frozenset[int]
    last: int
    first: int | None
    way: TokenWeights
    every: TokenWeights
    is_factor: bool

    @cached_property
    def strength(self) -> Tensor:
        r"""How strongly each token reads it, next to the stream, which counts one: ``(B, T)``.

        The ratio of the norms of the two Jacobians of the last of what both are made of, negative
        for what :attr:`is_subtracted`.
        """
        whole = replace(self.way, around=())
        size = whole.leaf.width
        count = min(16, max(2, 256 // size)) if size > 16 else size
        total = torch.zeros(2, whole.root.tokens, dtype=torch.float64)
        for seed in orthogonal(whole.leaf, whole.batch, count, seed=1):
            parts = self._parts(whole.leaf.unflat(seed))
            total += torch.stack([part.square().sum(-1) for part in parts]).to(total)
        mine, stream = total.sqrt()
        ratio = torch.where(mine > 0, mine / stream.clamp(min=1e-150), 0)
        return torch.where(self.is_subtracted, -ratio, ratio).view(whole.batch, -1)

    @cached_property
    def is_subtracted(self) -> Tensor:
        """Whether each token reads it with the other sign than the stream, ``(B T,)`` bool.

        The cosine of the two Jacobians is below -1/2: it is near -1 for the input of a model that
        is taken off its last tokens again, and near 0 where a layer lies on the way.
        """
        leaf = self.way.leaf
        total = torch.zeros(3, self.way.root.tokens, dtype=torch.float64)
        for seed in orthogonal(leaf, self.way.batch, min(leaf.width, 4), seed=2):
            # All tokens move alike: others may be read by it than by the stream.
            mine, stream = self._parts(leaf.unflat(seed[:1].expand_as(seed)))
            products = (mine * stream, mine.square(), stream.square())
            total += torch.stack([one.sum(-1) for one in products]).to(total)
        both, *sizes = total
        return both < -0.5 * (sizes[0] * sizes[1]).sqrt()

    def _parts(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        # What a step of the last of what both are made of changes, by this way and by the stream.
        ways = (self.way, self.every, replace(self.way, around=()))
        mine, others, both = (pushed(way, direction)[0].double() for way in ways)
        return mine, both - others

    @cached_property
    def is_in_place(self) -> bool:
        """Whether each token reads the same tokens by it as by the stream."""
        root, whole = self.way.root, replace(self.way, around=())
        generator = torch.Generator().manual_seed(0)
        for chosen in separating(root.tokens, generator):
            seed = root.noise(generator) * chosen.to(root.device)[:, None]
            mine, others, both = (_pulled(way, seed) for way in (self.way, self.every, whole))
            read, held = ((x.double().square().sum(-1)) for x in (mine, both - others))
            if bool((read > 0)[held <= 1e-12 * held.amax()].any()):
                return False
        return True


class Skips:
    """What reads tokens past the mixer before it.

    Args:
        graph (MixerGraph): the run.
        is_pooled (bool): whether the output holds no tokens.

    Attributes:
        partial (set of int): the mixers that work on some of the tokens, which others go past.
    """

    def __init__(self, graph: MixerGraph, *, is_pooled: bool) -> None:
        self.graph, self.is_pooled = graph, is_pooled
        self.partial: set[int] = set()

    def of(self, i: int, j: int) -> dict[int, TokenWeights]:
        """What i reads past j, on other tokens than those of j, and the ways there."""
        graph, root, found = self.graph, self.graph.entries[i], self._joints(i, j)
        if root is None or found is None:
            return {}
        read = self._leads(found.leaves)
        near = [self._leads(graph.nearest(graph.cut.read_by(edge))) for edge in found.past]
        known = read.union(*near)
        ways: dict[int, TokenWeights] = {}
        passed, partly, waiting = set[int](), [j], set(known)
        while waiting - passed:
            k = max(waiting - passed)
            passed.add(k)
            if graph.is_same_grid(j, k):
                if k not in read:  # some of the tokens may go past these mixers too
                    waiting |= self._start(k)
                continue
            # No way goes through a mixer, where the graph was left whole.
            cut = [*found.stream, *(point.edge for m, point in graph.exits.items() if 0 <= m != k)]
            cut += [e for e, one in zip(found.past, near, strict=True) if k in known - one]
            way = TokenWeights(root, graph.exits[k], graph.batch, tuple(cut))
            handed = self._handed_on(i, partly, k)
            if handed is not None:
                self.partial.add(j)
                partly.append(k)
                waiting |= self._start(k)
                left = replace(way, kept=~handed)
                if _is_read(left):
                    ways[k] = left
            elif k in known:
                ways[k] = way
                here = TokenWeights(root, graph.exits[j], graph.batch)
                if not _read_all([here, *ways.values()]):
                    # Others may go past these mixers too.
                    partly.append(k)
                    waiting |= self._start(k)
        return dict(sorted(ways.items()))

    def again(self, i: int, leads: Sequence[int]) -> list[Again]:
        """What i reads once more, past the residual stream around its leads that holds it."""
        root = self.graph.entries[i]
        if root is None:
            return []
        stream, found = self._repeated(root, leads)
        return [
            again
            for read, mine in found.items()
            if (again := self._again(root, read, mine, found, stream, leads[0])) is not None
        ]

    def is_in_stream(self, i: int, leads: Sequence[int], read: frozenset[int]) -> bool:
        """Whether what i reads once more goes around i too, and is not for i alone."""
        graph = self.graph
        roots = [graph.entries[k] for k, direct in graph.direct.items() if i in direct]
        return not roots or any(
            root is not None and read in self._repeated(root, leads)[1] for root in roots
        )

    def _repeated(
        self, root: Point, leads: Sequence[int]
    ) -> tuple[list[GradientEdge], dict[frozenset[int], list[Side]]]:
        # What makes up the streams around the leads, and what reads once more what these hold.
        graph = self.graph
        passed = {k for j in leads if j >= 0 for k in graph.groups[graph.step_of[j]]}
        sides = graph.cut.sides(root, passed, None) if passed else []
        sides.sort(key=lambda side: (side.is_factor, -len(side.read)))
        streams, held = {graph.read_by(j) for j in leads}, frozenset[int]()
        stream: list[GradientEdge] = []
        found: dict[frozenset[int], list[Side]] = {}
        for side in sides:
            is_first = not side.is_factor and not side.read & held
            if is_first or side.read in streams:
                streams.add(side.read)
                stream.append(side.edge)
                held |= side.read
            elif side.read & held:
                found.setdefault(side.read, []).append(side)
        return stream, found

    def _again(
        self,
        root: Point,
        read: frozenset[int],
        mine: Sequence[Side],
        found: Mapping[frozenset[int], Sequence[Side]],
        stream: Sequence[GradientEdge],
        lead: int,
    ) -> Again | None:
        graph, last = self.graph, max(read)
        first = next((one[0] for one in graph.groups if graph.read_by(one[0]) == read), None)
        if not any(k is not None and graph.is_same_grid(lead, k) for k in (first, last)):
            return None  # of another grid
        leaf = graph.exits[last] if last >= 0 else graph.ways[INPUT - last].leaf
        later = [side.edge for one, sides in found.items() if one > read for side in sides]
        way = TokenWeights(root, leaf, graph.batch, (*stream, *later))
        every = TokenWeights(root, leaf, graph.batch, tuple(stream))
        return Again(read, last, first, way, every, all(side.is_factor for side in mine))

    def _joints(self, i: int, j: int) -> Joints | None:
        # Where what goes around j joins on the way to i. It may go around mixers before j too, with
        # which j is in series in one branch.
        graph, root = self.graph, self.graph.entries[i]
        earlier = [graph.entries[k] for k in range(j + 1) if graph.is_same_grid(k, j)]
        entries = [entry for entry in earlier if entry is not None]
        if root is None or graph.entries.get(j) is None:
            return None
        return graph.cut.joints(root, entries)

    def _leads(self, found: Iterable[int]) -> set[int]:
        # An input may be left out, where it is known which token is which patch.
        return {self.graph.lead(i) for i in found if i in self.graph.exits}

    def _start(self, i: int) -> set[int]:
        # What the first of the mixers reads that work on the same tokens.
        first = self.graph.first(i)
        return {k for m, k in self.graph.links if m == first}

    def _handed_on(self, i: int, around: Iterable[int], k: int) -> Tensor | None:
        """Which tokens of k residual streams hand on to i, ``(T,)`` bool; None for none.

        Tokens of some mixers are made of these, and what is given to i reads them together with
        that: a skip must not count them twice.
        """
        found = [one for j in around if (one := self._handed_on_around(i, j, k)) is not None]
        return reduce(torch.logical_or, found) if found else None

    def _handed_on_around(self, i: int, j: int, k: int) -> Tensor | None:
        graph, made = self.graph, self._made(self.graph.first(j), k)
        if made is None:
            return None
        made_of = defaultdict[int, set[int]](set)
        for token, source in zip(made.root.tolist(), made.leaf.tolist(), strict=True):
            made_of[token].add(source)
        for root in self._tokens_of(i, (j, k)):
            # Tokens that are merged and then repeated are not handed on.
            by_j, by_k = (
                pairs(TokenWeights(root, graph.exits[m], graph.batch), repeated=made.reader is None)
                for m in (j, k)
            )
            if by_j is None or by_k is None:
                continue
            reads = zip(by_j.root.tolist(), graph.order(j)[by_j.leaf].tolist(), strict=True)
            together = {(token, one) for token, read in reads for one in made_of[read]}
            known = zip(by_k.root.tolist(), graph.order(k)[by_k.leaf].tolist(), strict=True)
            alike = torch.tensor([read in together for read in known], dtype=torch.bool)
            handed = torch.zeros(graph.exits[k].tokens, dtype=torch.bool)
            handed[by_k.leaf[alike]] = True
            if bool(handed[by_k.leaf[~alike]].any()):
                raise UnsupportedModelError(
                    "tokens are repeated, and a mixer is given some of the copies, past which the "
                    "others go; expected one that is given all copies of a token or none. Use "
                    "MambaLRP, which goes through the model's own graph."
                )
            return handed.to(root.device) if bool(handed.any()) else None
        return None

    def _made(self, first: int, k: int) -> Pairs | None:
        # Which of the model's tokens after k each token is made of that a mixer is given.
        graph, link = self.graph, self.graph.links.get((first, k))
        if link is None:
            return None
        if isinstance(link.transport, PatchWeights):
            found = Pairs.of_reader(link.transport.owner)
            return replace(found, leaf=graph.order(k)[found.leaf])
        if link.source is None:
            return None
        S = graph.tokens(k)
        every = [torch.where(link.source >= 0, link.source + b * S, -1) for b in range(graph.batch)]
        return Pairs.of_source(torch.cat(every))

    def _tokens_of(self, i: int, leaves: Iterable[int]) -> list[Point]:
        # What i is given; before a pooled output, the tensor in which the tokens come together.
        root = self.graph.entries[i]
        if root is None or i < self.graph.end or not self.is_pooled:
            return [] if root is None else [root]
        edge = next(meetings([root], [self.graph.exits[m] for m in leaves]), None)
        if edge is None:
            return []
        return [replace(root, edge=edge, shape=shape_of(edge), channels=axis) for axis in (-1, 1)]


def _pulled(way: TokenWeights, seed: Tensor) -> Tensor:
    with pulling(way) as pull:
        found = pull(way.root.unflat(seed))
    shape = way.leaf.tokens, way.leaf.width
    return seed.new_zeros(shape) if found is None else way.leaf.flat(found)


def _is_read(way: TokenWeights) -> bool:
    return bool(way.energy([way.root.noise(torch.Generator().manual_seed(0))]).any())


def _read_all(ways: Iterable[TokenWeights]) -> bool:
    # Whether each token of the root reads something by one of the ways.
    noise = torch.Generator().manual_seed(0)
    found = [pushed(way, way.leaf.unflat(way.leaf.noise(noise)))[0] for way in ways]
    return bool(torch.stack([(one != 0).any(-1) for one in found]).any(0).all())
