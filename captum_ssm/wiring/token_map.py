"""How the tokens that a mixer is given are made of earlier ones: each token's map, decided once.

A token is the one in its place, one other token, several of which each is read by it alone, or it
reads any in shares that are estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.reachability import meetings
from captum_ssm.graph.token_weights import Pairs, PatchWeights, TokenWeights, pairs
from captum_ssm.wiring.inputs import portions, shares
from captum_ssm.wiring.ledger import gathered, points
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.mixing_test import leaks
from captum_ssm.wiring.skips import Again, Skips
from captum_ssm.wiring.wiring import INPUT, Read, TokenMap

# The largest share of what a token reads from others without a mixer.
_EXCHANGED = 0.5
# Keeps shares defined where an input adds exactly zero to the tokens that it is a part of.
_TINY = 1e-150


class TokenMaps:
    """By what each mixer's tokens are read, and the orders in which they are.

    Args:
        graph (MixerGraph): the run; its orders and links are filled in.
        skips (Skips): of the run.
        unmixed (list of set of int): mixers between which each token is read in its place only;
            None for all of them.

    Attributes:
        past (dict): by what reads past others, the ways to what it reads.
        read_again (dict): by what reads tokens once more that a stream holds, or that go past an
            exchange of tokens, these reads.
        neighbor_share (float): the largest share that tokens read from one another.
        is_far (bool): whether they read others than their neighbors so.
        aside (set of int): the mixers that read past others what is no part of the stream.
    """

    def __init__(self, graph: MixerGraph, skips: Skips, unmixed: list[set[int]] | None) -> None:
        self.graph, self.skips, self.unmixed = graph, skips, unmixed
        self.past: dict[int, dict[int, TokenWeights]] = {}
        self.neighbor_share, self.is_far = 0.0, False
        self.aside: set[int] = set()
        # By mixer, its reads, to which those of what it reads again belong.
        self._read_by: dict[int, tuple[Read, ...]] = {}
        self.read_again: dict[int, tuple[Read, ...]] = {}

    def reads(self, i: int) -> tuple[Read, ...]:
        """What i, a mixer or the output, reads: one read per step, by way of its first mixer."""
        graph, links, simple = self.graph, self.graph.links, self.unmixed is None
        leads = graph.leads(i)
        inputs = [j for j in leads if j < 0]
        for j in leads:
            links[i, j] = TokenMap() if simple else self._map(i, j)
        if not simple and len(leads) == 1 and i not in self.read_again:
            leads += self._others(i, leads[0])
        root = graph.entries[i]
        if len(inputs) > 1 and root is not None:
            sizes = [
                graph.ways[INPUT - j].added(root).clamp(min=_TINY) * links[i, j].is_read(root)
                for j in inputs
            ]
            for j, share in zip(inputs, portions(sizes), strict=True):
                links[i, j] = replace(links[i, j], share=share)
        if i not in self.read_again:
            self._add_again(i, graph.leads(i))
        found = [(graph.step_of[j], links[i, j]) for j in leads]
        if not simple:
            self._check_unread(i, [link for _, link in found])
        graph.orders.setdefault(i, None)
        graph.put(i)
        self._read_by[i] = (*found, *self.read_again.get(i, ()))
        return self._read_by[i]

    def leak(self, i: int, leaves: Sequence[int], around: Sequence[GradientEdge] = ()) -> None:
        """Raise where tokens given to i read others most of all; say it where they do at all."""
        graph, root = self.graph, self.graph.entries[i]
        if root is None:
            return
        exits = {j: graph.exits[j] for j in leaves}
        for j, leak in leaks(i, root, exits, graph.orders, around).items():
            graph.refuse_mixers(i, j)
            is_far = leak.is_far or bool(around)  # no token shift goes past mixers
            self.is_far |= is_far
            if leak.share > _EXCHANGED and is_far:
                raise graph.refused(i, j, f"by something that is not a mixer ({leak.share:.0%})")
            self.neighbor_share = max(self.neighbor_share, leak.share)

    def _map(self, i: int, j: int, way: TokenWeights | None = None) -> TokenMap:
        """How the tokens given to i read those of j, or by one way past others to them.

        Decodes the order of i.
        """
        graph = self.graph
        root, leaf, B = graph.entries[i], graph.exits[j], graph.batch
        if root is None:  # an output without a graph
            return TokenMap()
        if way is None and any({i, j} <= group for group in self.unmixed or ()):
            graph.orders.setdefault(i, graph.orders.get(j))
            return TokenMap()
        stem = graph.ways[INPUT - j].stem if way is None and j < 0 else None
        # Where tokens share those of a stem, they share what those are made of.
        is_shared = stem is not None and pairs(TokenWeights(root, stem, B), repeated=False) is None
        found = None
        if not is_shared:
            repeated = way is not None or root.tokens > leaf.tokens
            found = pairs(way or TokenWeights(root, leaf, B), repeated=repeated)
        source = None if found is None else self._source(found, i, j)
        is_alike = way is None and root.tokens == leaf.tokens
        if source is not None:
            if is_alike and bool((source >= 0).all()) and self._is_order(i, j, source):
                return TokenMap()
            return self._sourced(i, j, source)
        # What a stem makes of its neighbors is the way from an input, not mixing between tokens.
        if is_alike and not (j < 0 and graph.ways[INPUT - j].roots):
            graph.orders.setdefault(i, graph.orders.get(j))
            # Tokens that act on one another, each in its place, are looked at when all are known.
            return self._exchange(i, j) if self._is_exchanged(i, j) else TokenMap()
        return self._weights(i, j, way, found)

    def _source(self, found: Pairs, i: int, j: int) -> Tensor | None:
        # The model's token of j that each token given to i reads, -1 for none; None for several.
        root = self.graph.entries[i]
        source = None if root is None else found.source(root.tokens)
        if source is None:
            return None
        return torch.where(source >= 0, self.graph.order(j)[source.clamp(min=0)], -1)

    def _is_order(self, i: int, j: int, source: Tensor) -> bool:
        # Whether all is said by the order of i, which this is.
        orders, here = self.graph.orders, torch.arange(len(source))
        order = None if torch.equal(source, here) else source
        known = orders.get(i, order)
        if not torch.equal(here if known is None else known, source):
            raise self.graph.refused(i, j, "in two orders")
        orders[i] = order
        return order is None or i < self.graph.end

    def _sourced(self, i: int, j: int, source: Tensor) -> TokenMap:
        graph = self.graph
        S = graph.tokens(j)
        local = graph.orders.of_example(source, len(source) // graph.batch, S)
        if local is None:
            raise UnsupportedModelError(
                f"between {graph.name(j)} and {graph.name(i)} tokens are chosen, in each example "
                "of the batch in a way of its own (as by a router), and maps through the layers "
                "are of all examples at once; explain one example at a time."
            )
        return TokenMap(source=local, count=S)

    def _weights(self, i: int, j: int, way: TokenWeights | None, found: Pairs | None) -> TokenMap:
        graph = self.graph
        root, leaf, B, S = graph.entries[i], graph.exits[j], graph.batch, graph.tokens(j)
        assert root is not None
        order = graph.orders.get(j)
        local = None if order is None else graph.orders.of_example(order, S, S)
        if way is not None:
            return TokenMap(transport=way, order=local, count=S)
        graph.refuse_mixers(i, j)
        if (local is None and order is not None) or not self._are_apart(root, leaf):
            raise graph.refused(i, j, "across the examples of the batch")
        if found is not None and found.reader is not None:
            values = graph.ways[INPUT - j].values if j < 0 else None
            way = PatchWeights(root, leaf, B, values=values, owner=found.reader)
        elif j < 0:
            way = graph.ways[INPUT - j].transport(root)
        else:
            way = TokenWeights(root, leaf, B)
        return TokenMap(transport=way, order=local, count=S)

    def _are_apart(self, root: Point, leaf: Point) -> bool:
        # Whether examples do not read one another.
        if self.graph.batch == 1:
            return True
        seed = root.noise(torch.Generator().manual_seed(0))
        seed[root.tokens // self.graph.batch :] = 0
        (found,) = gradients([root], [seed], [leaf])
        return found is None or not bool(found[leaf.tokens // self.graph.batch :].any())

    def _others(self, i: int, j: int) -> list[int]:
        """What i reads past j: other tokens, or those of j in other places.

        Other tokens are those of skip connections, as in a U-shape. The links are added, and all of
        them get the share of the tokens that they make up.
        """
        graph, root = self.graph, self.graph.entries[i]
        past = self.skips.of(i, j)
        if graph.links[i, j].is_in_place:  # what is added to a stream by no mixer stays out
            past = {k: way for k, way in past.items() if k >= 0}
        self.past[i] = past
        if not past or root is None:
            return []
        ways = {j: TokenWeights(root, graph.exits[j], graph.batch), **past}
        for (k, way), share in zip(ways.items(), shares([*ways.values()]), strict=True):
            known = graph.links.get((i, k))
            link = self._map(i, k, way) if known is None else known
            graph.links[i, k] = replace(link, share=share)
        return list(past)

    def _add_again(self, i: int, leads: Sequence[int]) -> None:
        # What goes past mixers and joins the stream that holds it: a way of its own, which counts
        # as much as it adds, where the stream counts one.
        found, is_aside = [], i < self.graph.end
        for again in self.skips.again(i, leads):
            if self.unmixed is None or again.is_in_place:
                reads = () if again.is_factor else self._in_place(i, again)
            else:
                reads = self._moved(i, again)
            if reads and bool(again.strength.any()):
                found.append((reads, self.graph.in_order(i, again.strength)))
                is_aside &= not self.skips.is_in_stream(i, leads, again.read)
        if not found:
            return
        if is_aside:
            self.aside.add(i)
        whole = 1 + reduce(torch.add, [strength.abs() for _, strength in found])
        self.read_again[i] = tuple(
            (step, link.of(strength / whole)) for reads, strength in found for step, link in reads
        )
        for j in leads:
            self.graph.links[i, j] = self.graph.links[i, j].of(1 / whole)

    def _in_place(self, i: int, again: Again) -> tuple[Read, ...]:
        graph, k = self.graph, again.last
        if again.first is not None and again.first < i:
            return self._read_by[again.first]
        if again.read != {k, *graph.read_by(k)}:
            raise graph.refused(i, k, "once more, without the residual stream there")
        return ((graph.step_of[k], TokenMap()),)

    def _moved(self, i: int, again: Again) -> tuple[Read, ...]:
        # Such as an input that is added once more, turned around, after later mixers.
        graph, k = self.graph, again.last
        root, found = again.way.root, None
        if again.way.leaf.tokens == root.tokens:
            found = pairs(again.way)
        if found is None:  # mixed, which is refused or said
            graph.refuse_mixers(i, k)
            self.leak(i, [k], again.way.around)
            return ()
        source = self._source(found, i, k)
        if source is None or again.read != {k, *graph.read_by(k)}:
            raise graph.refused(k, i, "in other places, without the residual stream there")
        return ((graph.step_of[k], self._sourced(i, k, graph.in_order(i, source).flatten())),)

    def _check_unread(self, i: int, links: Sequence[TokenMap]) -> None:
        # Tokens that are made of none that are known are made of nothing else.
        graph, root = self.graph, self.graph.entries[i]
        sources = [one.source for one in links if one.source is not None]
        if root is None or not sources or len(sources) < len(links):
            return
        read = torch.stack([source >= 0 for source in sources]).any(0)
        if len(read) * graph.batch != root.tokens:
            return
        seed = root.noise(torch.Generator().manual_seed(0))
        seed = seed * ~read.repeat(graph.batch)[:, None].to(seed.device)
        for k, found in zip(graph.exits, gradients([root], [seed], graph.leaves), strict=True):
            if found is not None and bool(found.any()):
                raise graph.refused(i, k, "past a mixer that is given some of their copies")

    def _is_exchanged(self, i: int, j: int) -> bool:
        # Whether most of a token comes from others, further away than its neighbors.
        graph, root = self.graph, self.graph.entries[i]
        if root is None or j < 0 or any(graph.orders.get(k) is not None for k in (i, j)):
            return False
        leak = leaks(i, root, {j: graph.exits[j]}, graph.orders).get(j)
        return leak is not None and leak.share > _EXCHANGED and leak.is_far

    def _exchange(self, i: int, j: int) -> TokenMap:
        """How i reads j, of the same grid, where others are mixed in, as by a convolution.

        It reads the last tokens of the stream that are still in their places. A stream may go
        around the mixers and the exchange: its tokens are those that the first mixer after them is
        given.
        """
        graph, root = self.graph, self.graph.entries[i]
        assert root is not None
        graph.refuse_mixers(i, j)
        unclear = graph.refused(
            i, j, "by something that is not a mixer, past which others are read"
        )
        held = gathered(root, graph.exits[j], graph.batch)
        stream = [one.point for one in held if one.is_in_place][-1]
        found, way = graph.cut.joints(root, [stream]), TokenWeights(root, stream, graph.batch)
        others = {k for k in graph.direct[i] if graph.lead(k) != graph.lead(j)}
        if others or found.leaves or len(found.stream) != 1 or len(found.past) > 1:
            raise unclear
        self.read_again[i] = ()
        share = None
        for edge in found.past:
            first = next((k for k, *_ in graph.groups if self._is_given(k, edge)), None)
            share = self._share(way, edge)
            if share is None or first is None:
                raise unclear
            self.read_again[i] = tuple((s, link.of(1 - share)) for s, link in self._read_by[first])
        return TokenMap(transport=way, count=graph.tokens(j), share=share)

    def _share(self, way: TokenWeights, edge: GradientEdge) -> Tensor | None:
        # The part of each token that comes by a way; the rest is the token there in its place.
        for point in points(edge, way.batch):
            past = TokenWeights(way.root, point, way.batch, (way.leaf.edge,))
            found = pairs(past, repeated=False) if point.tokens == way.root.tokens else None
            reader = None if found is None else found.reader
            if reader is not None and torch.equal(reader, torch.arange(point.tokens)):
                return shares([way, past])[0]
        return None

    def _is_given(self, k: int, edge: GradientEdge) -> bool:
        # Whether all tokens that a mixer is given come by way of a tensor.
        entry = self.graph.entries[k]
        leaves = [self.graph.exits[m] for m in self.graph.direct[k]]
        return entry is not None and edge in meetings([entry], leaves)
