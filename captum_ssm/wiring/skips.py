"""Skip connections: tokens of other grids that go around the mixer before, or part of its tokens.

A U-shape adds finer tokens to those of a coarser grid. A class token may go around mixers that work
on the patches only. What a residual stream hands on around a mixer is neither: the mixer's map
counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import meetings
from captum_ssm.graph.segments import Joints
from captum_ssm.graph.token_weights import Pairs, PatchWeights, TokenWeights, pairs, pushed
from captum_ssm.wiring.mixer_graph import MixerGraph


class Skips:
    """What reads tokens around the mixer before it.

    Args:
        graph (MixerGraph): the run.
        is_pooled (bool): whether the output holds no tokens.

    Attributes:
        partial (set of int): the mixers that work on some of the tokens, which others go around.
    """

    def __init__(self, graph: MixerGraph, *, is_pooled: bool) -> None:
        self.graph, self.is_pooled = graph, is_pooled
        self.partial: set[int] = set()

    def ways(self, i: int, j: int) -> dict[int, TokenWeights]:
        """What i reads around j, on other tokens than those of j, and the ways there.

        Mixers and inputs are looked at from the last to the first: those that the tensors that join
        the way are made of, and those before a mixer that some of the tokens may go around as well.
        """
        graph, root, joints = self.graph, self.graph.entries[i], self._joints(i, j)
        if root is None or joints is None:
            return {}
        direct = self._leads(joints.leaves)
        made_of = {e: self._leads(graph.nearest(graph.cut.read_by(e))) for e in joints.skips}
        known = direct.union(*made_of.values())
        here = TokenWeights(root, graph.exits[j], graph.batch)
        ways: dict[int, TokenWeights] = {}
        partly, waiting = [j], set(known)
        while waiting:
            k = max(waiting)
            waiting.remove(k)
            if graph.is_same_grid(j, k):
                if k not in direct:  # some of the tokens may go around these mixers too
                    waiting |= self._start(k)
                continue
            handed = self._handed_on(i, partly, k)
            if handed is None and k not in known:
                continue
            # No way goes through a mixer, where the graph was left whole.
            cut = [*joints.stream, *(point.edge for m, point in graph.exits.items() if 0 <= m != k)]
            cut += [edge for edge, leads in made_of.items() if k in known - leads]
            way = TokenWeights(root, graph.exits[k], graph.batch, tuple(cut))
            if handed is not None:
                self.partial.add(j)
                way = replace(way, kept=~handed.to(root.device))
            if handed is None or _is_read(way):
                ways[k] = way
            # Where tokens are left that read none of these, they may go around these mixers too.
            if handed is not None or not _read_all([here, *ways.values()]):
                partly.append(k)
                waiting |= self._start(k)
        return dict(sorted(ways.items()))

    def _joints(self, i: int, j: int) -> Joints | None:
        # Where what goes around j joins on the way to i. It may go around mixers before j too, with
        # which j is in series in one branch.
        graph, root = self.graph, self.graph.entries[i]
        entry = graph.entries.get(j)
        if root is None or entry is None:
            return None
        earlier = (graph.entries[k] for k in range(j + 1) if graph.is_same_grid(k, j))
        before = graph.cut.before(point for point in earlier if point is not None)
        around = graph.cut.around(root, graph.groups[graph.step_of[j]])
        return around.joints(before, entry.tokens)

    def _leads(self, leaves: Iterable[int]) -> set[int]:
        # An input may be left out, where it is known which token is which patch.
        return {self.graph.lead(i) for i in leaves if i in self.graph.exits}

    def _start(self, i: int) -> set[int]:
        # What the first of the mixers reads that work on the same tokens.
        first = self.graph.first(i)
        return {k for m, k in self.graph.links if m == first}

    def _handed_on(self, i: int, around: Iterable[int], k: int) -> Tensor | None:
        """Which tokens of k residual streams hand on to i, ``(T,)`` bool; None for none.

        Tokens of some mixers are made of these, and what is given to i reads them together with
        that: a skip must not count them twice.
        """
        graph = self.graph
        handed = torch.zeros(graph.exits[k].tokens, dtype=torch.bool)
        for j in around:
            made = self._made(graph.first(j), k)
            if made is None:
                continue
            # Tokens that are merged and then repeated are not handed on.
            both = self._decoded(i, j, k, repeated=made.reader is None)
            if both is None:
                continue
            by_j, by_k = both
            made_of = defaultdict[int, set[int]](set)
            for token, source in zip(made.root.tolist(), made.leaf.tolist(), strict=True):
                made_of[token].add(source)
            reads = zip(by_j.root.tolist(), graph.order(j)[by_j.leaf].tolist(), strict=True)
            together = {(token, earlier) for token, read in reads for earlier in made_of[read]}
            known = zip(by_k.root.tolist(), graph.order(k)[by_k.leaf].tolist(), strict=True)
            alike = torch.tensor([read in together for read in known], dtype=torch.bool)
            if bool(torch.isin(by_k.leaf[alike], by_k.leaf[~alike]).any()):
                raise UnsupportedModelError(
                    "tokens are repeated, and a mixer is given some of the copies, around which "
                    "the others go; expected one that is given all copies of a token or none. Use "
                    "MambaLRP, which goes through the model's own graph."
                )
            handed[by_k.leaf[alike]] = True
        return handed if bool(handed.any()) else None

    def _decoded(self, i: int, j: int, k: int, *, repeated: bool) -> tuple[Pairs, Pairs] | None:
        # Which tokens of j and of k each token reads that i is given.
        exits, batch = self.graph.exits, self.graph.batch
        for root in self._tokens_of(i, (j, k)):
            ways = (TokenWeights(root, exits[m], batch) for m in (j, k))
            by_j, by_k = (pairs(way, repeated=repeated) for way in ways)
            if by_j is not None and by_k is not None:
                return by_j, by_k
        return None

    def _made(self, first: int, k: int) -> Pairs | None:
        # Which of the model's tokens after k each token is made of that a mixer is given.
        graph, link = self.graph, self.graph.links.get((first, k))
        if link is None:
            return None
        if isinstance(link.transport, PatchWeights):
            paired = Pairs.of_reader(link.transport.owner)
            return replace(paired, leaf=graph.order(k)[paired.leaf])
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
        return [Point.at(edge, axis) for axis in (-1, 1)]


def _is_read(way: TokenWeights) -> bool:
    return bool(way.energy([way.root.noise()]).any())


def _read_all(ways: Iterable[TokenWeights]) -> bool:
    # Whether each token of the root reads something by one of the ways.
    derivatives = [pushed(way, way.leaf.unflat(way.leaf.noise()))[0] for way in ways]
    return bool(torch.stack([(derivative != 0).any(-1) for derivative in derivatives]).any(0).all())
