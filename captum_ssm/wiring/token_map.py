"""How the tokens that a mixer is given are made of earlier ones: each token's map, decided once.

A mixer's *leads* are the steps and inputs that it reads by way of no other mixer. Gradients from
its tokens to those of a lead decide:

==========================================  ====================================================
each token reads of the lead                its map
==========================================  ====================================================
one token, and all are read                 the token at its position, in an order of the mixer's
one token                                   ``source``
several of the same grid, its own the most  the token at its position; the rest is a leak
several of the same grid, others the most   ``transport``, from where tokens last keep theirs
several of another grid                     ``transport``: shares, which are estimated
==========================================  ====================================================

What comes around the lead is added: other grids (``skips``), and states that rejoin a residual
stream (``rejoined``). What is made of several inputs gets the shares that these add.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.reachability import meetings
from captum_ssm.graph.segments import SegmentGraph
from captum_ssm.graph.token_weights import Pairs, PatchWeights, TokenWeights, pairs
from captum_ssm.wiring.inputs import portions, shares
from captum_ssm.wiring.ledger import gathered, points
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.mixing_test import leaks
from captum_ssm.wiring.rejoined import Rejoined, is_in_stream, rejoined
from captum_ssm.wiring.skips import Skips
from captum_ssm.wiring.wiring import INPUT, Source, TokenMap

# The largest share of what a token reads from others without a mixer.
_EXCHANGED = 0.5
# Keeps shares defined where an input adds exactly zero to the tokens that it is a part of.
_TINY = 1e-150


@dataclass(frozen=True)
class MixerReads:
    """What a mixer, or the output, reads.

    Args:
        direct (tuple of Source): the steps before it, and those that it reads around these.
        again (tuple of Source, optional): states that rejoin the residual stream, or go around an
            exchange of tokens. Default: ()
        skips (mapping of int to TokenWeights, optional): the ways around the step before, by what
            is read so. Default: {}
        is_aside (bool, optional): as of a :class:`~.wiring.Step`. Default: False
    """

    direct: tuple[Source, ...]
    again: tuple[Source, ...] = ()
    skips: Mapping[int, TokenWeights] = field(default_factory=dict)
    is_aside: bool = False

    @property
    def every(self) -> tuple[Source, ...]:
        """All reads, those that are read again last."""
        return (*self.direct, *self.again)


class TokenMaps:
    """By what each mixer's tokens are read, in forward order, and the orders in which they are.

    Args:
        graph (MixerGraph): the run; its orders and links are filled in.
        skips (Skips): of the run.
        unmixed (list of set of int): mixers between which each token is read at its position only;
            None for all of them.

    Attributes:
        neighbor_share (float): the largest share that tokens read from one another.
        is_far (bool): whether they read others than their neighbors so.
    """

    def __init__(self, graph: MixerGraph, skips: Skips, unmixed: list[set[int]] | None) -> None:
        self.graph, self.skips = graph, skips
        self.is_simple, self._unmixed = unmixed is None, unmixed or []
        self.neighbor_share, self.is_far = 0.0, False
        # All reads of the mixers so far: others may read just what one of these does.
        self._read_by: dict[int, tuple[Source, ...]] = {}

    def reads(self, i: int) -> MixerReads:
        """What i, a mixer or the output, reads: one read per step, by way of its first mixer."""
        graph, links = self.graph, self.graph.links
        leads = graph.leads(i)
        skips: dict[int, TokenWeights] = {}
        again: tuple[Source, ...] | None = None
        for j in leads:
            link = TokenMap() if self.is_simple else self._map(i, j)
            if link is None:
                link, again = self._exchange(i, j)
            links[i, j] = link
        if again is None and not self.is_simple and len(leads) == 1:
            skips = self._link_skips(i, leads[0])
        self._share_inputs(i, [j for j in leads if j < 0])
        is_aside = False
        if again is None:
            again, is_aside = self._join_again(i, leads, skips)
        direct = tuple((graph.step_of[j], links[i, j]) for j in (*leads, *skips))
        self._check_unread(i, [link for _, link in direct])
        graph.orders.setdefault(i, None)
        graph.put(i)
        reads = MixerReads(direct, again, skips, is_aside)
        self._read_by[i] = reads.every
        return reads

    def leak(self, i: int, leaves: Sequence[int], around: Sequence[GradientEdge] = ()) -> None:
        """Raise where tokens given to i read others most of all; say it where they do at all."""
        graph, root = self.graph, self.graph.entries[i]
        if root is None:
            return
        exits = {j: graph.exits[j] for j in leaves}
        for j, leak in leaks(i, root, exits, graph.orders, around).items():
            graph.refuse_mixers(i, j)
            is_far = leak.is_far or bool(around)  # no token shift goes around mixers
            self.is_far |= is_far
            if leak.share > _EXCHANGED and is_far:
                raise graph.refused(i, j, f"by something that is not a mixer ({leak.share:.0%})")
            self.neighbor_share = max(self.neighbor_share, leak.share)

    def _map(self, i: int, j: int) -> TokenMap | None:
        """How the tokens given to i read those of j; None where most are exchanged on the way.

        Decodes the order of i.
        """
        graph = self.graph
        root, leaf = graph.entries[i], graph.exits[j]
        if root is None:  # an output without a graph
            return TokenMap()
        if any({i, j} <= group for group in self._unmixed):
            graph.orders.setdefault(i, graph.orders.get(j))
            return TokenMap()
        paired = self._pairs(root, j)
        source = self._source(paired, i, j)
        is_alike = root.tokens == leaf.tokens
        if source is not None:
            if is_alike and bool((source >= 0).all()):
                self._put_order(i, j, source)
                if i < graph.end or graph.orders[i] is None:  # else an output in another order
                    return TokenMap()
            return self._sourced(i, j, source)
        # What a stem makes of its neighbors is the way from an input, not mixing between tokens.
        if is_alike and not (j < 0 and graph.inputs[INPUT - j].roots):
            graph.orders.setdefault(i, graph.orders.get(j))
            # Tokens that act on one another, each at its own, are looked at when all are known.
            return None if self._is_exchanged(i, j) else TokenMap()
        return self._weights(i, j, None if paired is None else paired.reader)

    def _pairs(self, root: Point, j: int) -> Pairs | None:
        # Which tokens of j each token reads; None where they are mixed.
        stem = self.graph.inputs[INPUT - j].stem if j < 0 else None
        leaf, B = self.graph.exits[j], self.graph.batch
        # Where tokens share those of a stem, they share what those are made of.
        if stem is not None and pairs(TokenWeights(root, stem, B), repeated=False) is None:
            return None
        return pairs(TokenWeights(root, leaf, B), repeated=root.tokens > leaf.tokens)

    def _source(self, paired: Pairs | None, i: int, j: int) -> Tensor | None:
        # The model's token of j that each token given to i reads, -1 for none; None for several.
        root = self.graph.entries[i]
        source = None if root is None or paired is None else paired.source(root.tokens)
        if source is None:
            return None
        return torch.where(source >= 0, self.graph.order(j)[source.clamp(min=0)], -1)

    def _put_order(self, i: int, j: int, source: Tensor) -> None:
        orders, here = self.graph.orders, torch.arange(len(source))
        order = None if torch.equal(source, here) else source
        known = orders.setdefault(i, order)
        if not torch.equal(here if known is None else known, source):
            raise self.graph.refused(i, j, "in two orders")

    def _sourced(self, i: int, j: int, source: Tensor) -> TokenMap:
        graph = self.graph
        S = graph.tokens(j)
        local = graph.orders.of_example(source, len(source) // graph.batch, S)
        if local is None:
            raise UnsupportedModelError(
                f"between {graph.name(j)} and {graph.name(i)} tokens are chosen, in each example "
                "of the batch in a way of its own (as by a router, or together with constants, "
                "as in classifier-free guidance), and maps through the layers are of all examples "
                "at once; explain one example at a time."
            )
        return TokenMap(source=local, count=S)

    def _weights(self, i: int, j: int, owner: Tensor | None) -> TokenMap:
        graph = self.graph
        root, leaf, B = graph.entries[i], graph.exits[j], graph.batch
        assert root is not None
        graph.refuse_mixers(i, j)
        order = self._order_of_example(j)
        if (order is None and graph.orders.get(j) is not None) or not self._are_apart(root, leaf):
            raise graph.refused(i, j, "across the examples of the batch")
        if owner is not None:
            values = graph.inputs[INPUT - j].values if j < 0 else None
            way: TokenWeights = PatchWeights(root, leaf, B, values=values, owner=owner)
        elif j < 0:
            way = graph.inputs[INPUT - j].transport(root)
        else:
            way = TokenWeights(root, leaf, B)
        return TokenMap(transport=way, order=order, count=graph.tokens(j))

    def _order_of_example(self, j: int) -> Tensor | None:
        order, S = self.graph.orders.get(j), self.graph.tokens(j)
        return None if order is None else self.graph.orders.of_example(order, S, S)

    def _are_apart(self, root: Point, leaf: Point) -> bool:
        # Whether examples do not read one another.
        if self.graph.batch == 1:
            return True
        seed = root.noise()
        seed[root.tokens // self.graph.batch :] = 0
        (gradient,) = gradients([root], [seed], [leaf])
        return gradient is None or not bool(gradient[leaf.tokens // self.graph.batch :].any())

    def _link_skips(self, i: int, j: int) -> dict[int, TokenWeights]:
        """Link i to what it reads around j: other tokens, or those of j at other positions.

        Other tokens are those of skip connections, as in a U-shape. All links get the share of the
        tokens that they make up. The ways around j are returned.
        """
        graph, root = self.graph, self.graph.entries[i]
        skips = self.skips.ways(i, j)
        if graph.links[i, j].keeps_positions:  # what is added to a stream by no mixer stays out
            skips = {k: way for k, way in skips.items() if k >= 0}
        if root is None or not skips:
            return {}
        for k, way in skips.items():
            graph.links[i, k] = self._by_way(i, k, way)
        ways = [TokenWeights(root, graph.exits[j], graph.batch), *skips.values()]
        self._share(i, (j, *skips), shares(ways))
        return skips

    def _by_way(self, i: int, k: int, way: TokenWeights) -> TokenMap:
        source = self._source(pairs(way), i, k)
        if source is not None:
            return self._sourced(i, k, source)
        order = self._order_of_example(k)
        return TokenMap(transport=way, order=order, count=self.graph.tokens(k))

    def _share_inputs(self, i: int, inputs: Sequence[int]) -> None:
        graph, root = self.graph, self.graph.entries[i]
        if root is None or len(inputs) < 2:
            return
        sizes = [
            graph.inputs[INPUT - j].added(root).clamp(min=_TINY) * graph.links[i, j].is_read(root)
            for j in inputs
        ]
        self._share(i, inputs, portions(sizes))

    def _share(self, i: int, read: Sequence[int], parts: Sequence[Tensor]) -> None:
        links = self.graph.links
        for j, part in zip(read, parts, strict=True):
            links[i, j] = replace(links[i, j], share=part)

    def _join_again(
        self, i: int, leads: Sequence[int], skips: Collection[int]
    ) -> tuple[tuple[Source, ...], bool]:
        """What joins the residual stream that holds it once more, and whether for i alone.

        It counts as much as it adds, where the stream counts one. The leads get what is left. What
        has a share as a skip is not counted again.
        """
        graph = self.graph
        joining = [
            (state, reads)
            for state in rejoined(graph, i, leads)
            if graph.lead(state.last) not in skips
            and (reads := self._reads_of(i, state))
            and bool(state.strength.any())
        ]
        if not joining:
            return (), False
        strengths = [graph.in_order(i, state.strength) for state, _ in joining]
        whole = 1 + reduce(torch.add, [strength.abs() for strength in strengths])
        held = graph.links[i, leads[0]].share if skips else None
        if held is not None:  # the stream has what the skips leave
            strengths = [held * strength for strength in strengths]
        for j in leads:
            graph.links[i, j] = graph.links[i, j].of(1 / whole)
        again = tuple(
            (step, link.of(strength / whole))
            for (_, reads), strength in zip(joining, strengths, strict=True)
            for step, link in reads
        )
        in_stream = [is_in_stream(graph, i, leads, state.made_of) for state, _ in joining]
        return again, i < graph.end and not any(in_stream)

    def _reads_of(self, i: int, state: Rejoined) -> tuple[Source, ...]:
        # By which reads i reads a state once more; none for what mixes tokens, which is said.
        graph, k, way = self.graph, state.last, state.way
        is_whole = state.made_of == {k, *graph.read_by(k)}
        if self.is_simple or state.keeps_positions:
            if state.is_factor:
                return ()
            if state.first is not None and state.first < i:
                return self._read_by[state.first]
            if not is_whole:
                raise graph.refused(i, k, "once more, without the residual stream there")
            is_alike = way.leaf.tokens == way.root.tokens  # else tokens are merged once more
            return ((graph.step_of[k], TokenMap() if is_alike else self._by_way(i, k, way)),)
        # Such as an input that is added once more, turned around, after later mixers.
        paired = pairs(way) if way.leaf.tokens == way.root.tokens else None
        if paired is None:  # mixed, which is refused or said
            graph.refuse_mixers(i, k)
            if way.leaf.tokens != way.root.tokens:
                raise graph.refused(i, k, "around the mixers between, of which it is no stream")
            self.leak(i, [k], way.around)
            return ()
        source = self._source(paired, i, k)
        if source is None or not is_whole:
            raise graph.refused(i, k, "at other positions, without the residual stream there")
        return ((graph.step_of[k], self._sourced(i, k, graph.in_order(i, source).flatten())),)

    def _check_unread(self, i: int, links: Sequence[TokenMap]) -> None:
        # Tokens that are made of none that are known are made of nothing else.
        graph, root = self.graph, self.graph.entries[i]
        sources = [link.source for link in links if link.source is not None]
        if root is None or not sources or len(sources) < len(links):
            return
        read = torch.stack([source >= 0 for source in sources]).any(0)
        if len(read) * graph.batch != root.tokens:
            return
        seed = root.noise()
        seed = seed * ~read.repeat(graph.batch)[:, None].to(seed.device)
        for k, gradient in zip(graph.exits, gradients([root], [seed], graph.leaves), strict=True):
            if gradient is not None and bool(gradient.any()):
                raise graph.refused(i, k, "around a mixer that is given some of their copies")

    def _is_exchanged(self, i: int, j: int) -> bool:
        # Whether most of a token comes from others, further away than its neighbors.
        graph, root = self.graph, self.graph.entries[i]
        if root is None or j < 0 or any(graph.orders.get(k) is not None for k in (i, j)):
            return False
        leak = leaks(i, root, {j: graph.exits[j]}, graph.orders).get(j)
        return leak is not None and leak.share > _EXCHANGED and leak.is_far

    def _exchange(self, i: int, j: int) -> tuple[TokenMap, tuple[Source, ...]]:
        """How i reads j, of the same grid, where others are mixed in, as by a convolution.

        It reads the last tokens of the stream that still keep their positions. A stream may go
        around the mixers and the exchange: its tokens are those that the first mixer after them is
        given. What reads these is returned too.
        """
        graph, root = self.graph, self.graph.entries[i]
        assert root is not None
        graph.refuse_mixers(i, j)
        unclear = graph.refused(
            i, j, "by something that is not a mixer, around which others are read"
        )
        held = gathered(root, graph.exits[j], graph.batch)
        stream = [tensor.point for tensor in held if tensor.keeps_positions][-1]
        way = TokenWeights(root, stream, graph.batch)
        # The graph is cut at the stream too, which takes the number of what reads it.
        cut = SegmentGraph({**graph.cut.leaves, i: stream})
        joints = cut.around(root, [i]).joints(graph.cut.before([stream]), stream.tokens)
        others = {k for k in graph.direct[i] if graph.lead(k) != graph.lead(j)}
        if others or joints.leaves or len(joints.edges) > 1:
            raise unclear
        share, again = None, tuple[Source, ...]()
        for edge in joints.edges:
            first = next((k for k, *_ in graph.groups if self._is_given(k, edge)), None)
            share = self._share_of(way, edge)
            if share is None or first is None:
                raise unclear
            again = tuple((step, link.of(1 - share)) for step, link in self._read_by[first])
        return TokenMap(transport=way, count=graph.tokens(j), share=share), again

    def _share_of(self, way: TokenWeights, edge: GradientEdge) -> Tensor | None:
        # The part of each token that comes by a way; the rest is the token there at its position.
        for point in points(edge, way.batch):
            others = TokenWeights(way.root, point, way.batch, (way.leaf.edge,))
            paired = pairs(others, repeated=False) if point.tokens == way.root.tokens else None
            reader = None if paired is None else paired.reader
            if reader is not None and torch.equal(reader, torch.arange(point.tokens)):
                return shares([way, others])[0]
        return None

    def _is_given(self, k: int, edge: GradientEdge) -> bool:
        # Whether all tokens that a mixer is given come by way of a tensor.
        entry = self.graph.entries[k]
        leaves = [self.graph.exits[m] for m in self.graph.direct[k]]
        return entry is not None and edge in meetings([entry], leaves)
