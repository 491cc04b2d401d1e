"""What lies between the mixers of a model, measured on the graph that the cuts of one run left.

A backward pass through it shows whether each token is handled by itself, at its position. Where it
is not, the order of the tokens that a mixer is given is decoded. Where there is no order, as
between steps of different numbers of tokens, it is measured how strongly each token reads each
earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import meetings, reaches_by_sums
from captum_ssm.graph.relevance_rules import carrying
from captum_ssm.graph.token_weights import NoSecondDerivativeError, Pairs, TokenWeights, pairs
from captum_ssm.models.token_grid import TokenGrid
from captum_ssm.wiring.cuts import RunCuts
from captum_ssm.wiring.grids import leaves_grid
from captum_ssm.wiring.joined_streams import in_parts
from captum_ssm.wiring.ledger import structure
from captum_ssm.wiring.mixer_graph import ADVICE, MixerGraph
from captum_ssm.wiring.mixing_test import is_mixed, unread
from captum_ssm.wiring.output import OutputReads
from captum_ssm.wiring.residual_streams import is_given_stream, streams_around
from captum_ssm.wiring.skips import Skips
from captum_ssm.wiring.token_map import MixerReads, TokenMaps
from captum_ssm.wiring.token_products import token_products
from captum_ssm.wiring.wiring import Step, TokenMap, Wiring, sequence

# How many tensors that two mixers are made of are asked for the order of their tokens.
_MEETINGS = 4


def measure(
    cuts: RunCuts,
    output: Tensor | None,
    batch: int,
    *,
    score: Tensor | None = None,
    grid: TokenGrid | None = None,
    mask: Tensor | None = None,
    decodes: bool = False,
) -> Wiring:
    """The wiring of the run that ``cuts`` was made for.

    Args:
        cuts (RunCuts): with at least one port.
        output (Tensor, optional): what the model returned, if it depends on the mixers.
        batch (int): B.
        score (Tensor, optional): ``(B,)``, an entry of the output, where the tokens that it is
            read from are asked for, not those of the whole output. Default: None
        grid (TokenGrid, optional): which token is which patch, as far as a model says. The way
            from the input is measured only where it is not so. Default: None
        mask (Tensor, optional): ``(B, L)`` bool, False for padding. Default: None
        decodes (bool, optional): whether the output's rows are tokens of a decoder. Default: False
    """
    end = at = None
    if output is not None and output.requires_grad and output.is_floating_point():
        end = Point.of(output)
    if score is not None and score.requires_grad:
        at = Point.of(score, None)
    with cuts.measured():
        graph: MixerGraph | None = None
        try:
            graph = MixerGraph(cuts, end, batch, in_grid=grid is not None)
            readout = OutputReads(graph, at, decodes=decodes)
            if grid is not None and leaves_grid(graph, grid):
                graph = MixerGraph(cuts, end, batch, in_grid=False)
                readout = OutputReads(graph, at, decodes=decodes)
            wiring = _measured(graph, readout, mask)
        except UnsupportedModelError as error:
            count, tokens = len(cuts.ports), cuts.ports[-1].exit.tokens // batch
            unknown: str | None = str(error)
            if graph is not None and all(leaf.shape[0] == batch for leaf in graph.leaves):
                # What is in no map may be linear, and right in the model's own graph.
                unknown = token_products(graph, end if at is None else at)
            wiring = replace(
                sequence(count, tokens),
                refused=str(error),
                lacks_second=isinstance(error, NoSecondDerivativeError),
                unknown=unknown,
            )
    ends = [*(port.entry for port in cuts.ports), end]
    nodes = (point.edge.node for point in ends if point is not None)
    return replace(wiring, structure=structure(nodes, is_cut=True))


def _measured(graph: MixerGraph, readout: OutputReads, mask: Tensor | None) -> Wiring:
    graph.refuse_calls()
    mixing = _Mixing(graph, mask, per_token=readout.is_per_token)
    simple = _counts_agree(graph, readout) and not mixing.between(list(graph.exits), all_read=True)
    skips = Skips(graph, is_pooled=not readout.is_per_token)
    maps = TokenMaps(graph, skips, None if simple else mixing.unmixed())
    steps, read = _steps(graph, maps), _output(graph, maps, readout)
    output = read.every
    for s, step in enumerate(steps):
        chosen = skips.partial & set(step.calls) or _is_selected(graph, step.calls[0])
        around = streams_around(graph, s, finer=not (simple or chosen))
        is_given = is_given_stream(graph, s) if 0 in around else None
        steps[s] = replace(step, around=around, is_given_stream=is_given)
    for s, step in enumerate(steps):
        steps[s] = replace(step, reads=in_parts(graph, step.calls[0], step.reads, steps))
    if readout.is_per_token:
        output = in_parts(graph, graph.end, output, steps)
    if not simple:
        mixing.check(maps)
    shares: list[Tensor | None] = [None] * len(output)
    if not readout.is_whole:
        shares = readout.shares(output, steps, read.skips)
    of_pool, shares, factor = readout.skips_of_pool(steps, shares)
    said = readout.unheld(of_pool, read.again, shares[len(read.direct) :])
    # The tokens of the output do not read what goes around: only the output as a whole does.
    output += tuple(
        (graph.step_of[k], TokenMap().of(torch.zeros_like(share))) for k, share in of_pool.items()
    )
    unknown = None
    if not (simple and readout.is_per_token and readout.pool is None):
        unknown = token_products(graph, readout.root)
    if unknown is None and simple and readout.mixes_after():
        unknown = ""
    return Wiring(
        steps,
        output,
        [graph.windows(i) for i in range(graph.end)],
        [None if share is None else factor * share for share in (*shares, *of_pool.values())],
        maps.neighbor_share,
        maps.is_far,
        inputs=graph.inputs,
        unknown=unknown,
        main=len(read.direct),
        unheld=said,
        rows=readout.rows(),
        unread=_unread(graph),
        gates=_gates(graph),
    )


def _steps(graph: MixerGraph, maps: TokenMaps) -> list[Step]:
    steps = []
    for group in graph.groups:
        reads = maps.reads(group[0])
        for i in group[1:]:
            if maps.is_simple:
                graph.orders[i] = None
            else:
                _order_sibling(graph, i, group[0])
            graph.put(i)
        tokens = graph.tokens(group[0])
        steps.append(Step(tuple(group), reads.every, tokens, is_aside=reads.is_aside))
    return steps


def _output(graph: MixerGraph, maps: TokenMaps, readout: OutputReads) -> MixerReads:
    end = graph.end
    if readout.is_per_token:
        return maps.reads(end)
    leads, skips = graph.leads(end), dict[int, TokenWeights]()
    if not maps.is_simple and len(leads) == 1:
        skips = maps.skips.ways(end, leads[0])
    return MixerReads(tuple((graph.step_of[i], TokenMap()) for i in (*leads, *skips)), skips=skips)


def _counts_agree(graph: MixerGraph, readout: OutputReads) -> bool:
    entries = [entry for entry in graph.entries.values() if entry is not None]
    if not readout.is_per_token and readout.output is not None:
        entries.remove(readout.output)
    points = [*graph.leaves, *entries]
    is_one = len({point.tokens for point in points}) == 1
    return is_one and all(point.shape[0] == graph.batch for point in points)


def _unread(graph: MixerGraph) -> str | None:
    # The mixers whose results reach nothing.
    roots = [root for root in graph.entries.values() if root is not None]
    if graph.entries[graph.end] is None:
        return None
    mixers = {i: leaf for i, leaf in graph.exits.items() if i >= 0}
    return ", ".join(map(graph.name, unread(roots, mixers))) or None


def _gates(graph: MixerGraph) -> str | None:
    # The mixers whose results are coefficients alone of what others hold.
    ends = {point.edge.node for point in graph.leaves}
    roots = {i: root.edge.node for i, root in graph.entries.items() if root is not None}
    gates = []
    for i, leaf in graph.exits.items():
        start, readers = leaf.edge.node, [node for k, node in roots.items() if i in graph.reads[k]]
        carries = carrying(readers, [start], ends - {start})
        if i < 0 or any(carries[node] for node in readers):
            continue
        # A root that is a coefficient itself, such as a probability, tells nothing.
        holding = [node for node in readers if carrying([node], ends)[node]]
        if holding and not any(reaches_by_sums(node, start, ends) for node in holding):
            gates.append(graph.name(i))
    return ", ".join(gates) or None


def _is_selected(graph: MixerGraph, i: int) -> bool:
    # Whether the tokens of a mixer are some of earlier ones, around which the others go.
    links = [link for (k, _), link in graph.links.items() if k == i]
    return any(link.source is not None for link in links)


class _Mixing:
    # Whether tokens act on one another between mixers whose tokens are the same.
    def __init__(self, graph: MixerGraph, mask: Tensor | None, *, per_token: bool) -> None:
        self.graph, self.mask, self.per_token = graph, mask, per_token
        self._unmixed: list[set[int]] = []

    def between(self, leaves: Sequence[int], *, all_read: bool = False) -> bool:
        # Whether not everything between acts on each token by itself, in its order.
        graph, end = self.graph, self.graph.end
        roots = {i: graph.entries[i] for i in leaves if i >= 0}
        output = graph.entries[end]
        is_read = self.per_token and graph.direct[end] <= set(leaves)
        if is_read and output is not None and output.tokens == graph.exits[leaves[0]].tokens:
            roots[end] = output
        known = {i: root for i, root in roots.items() if root is not None}
        exits = {i: graph.exits[i] for i in leaves}
        return is_mixed(known, exits, graph.orders, all_read=all_read, mask=self.mask)

    def unmixed(self) -> list[set[int]]:
        # Mixers of equally many tokens, in groups in which each token is read at its position only.
        graph = self.graph
        by_tokens: dict[int, list[int]] = {}
        for i, leaf in graph.exits.items():
            root = graph.entries.get(i)
            if root is not None and {root.shape[0], leaf.shape[0]} == {graph.batch}:
                by_tokens.setdefault(leaf.tokens if root.tokens == leaf.tokens else 0, []).append(i)
        groups = [group for tokens, group in by_tokens.items() if tokens and len(group) > 1]
        if sum(map(len, groups)) < len(graph.exits):  # else they are mixed
            self._unmixed = [
                set(mixers) for mixers in groups if not self.between(mixers, all_read=True)
            ]
        return self._unmixed

    def check(self, maps: TokenMaps) -> None:
        # Mixers of the same tokens, in their orders, from one transport to the next. What happens
        # between two steps shows in what the later one reads of the one before both.
        graph = self.graph
        spaces: dict[int, list[int]] = {}
        for i, grid in graph.grid_of.items():
            if i != graph.end:
                spaces.setdefault(grid, []).append(i)
        for space in spaces.values():
            if len(space) < 2 or any(set(space) <= group for group in self._unmixed):
                continue
            if not self.between(space):
                continue
            for i in [*space, *([graph.end] if self.per_token else [])]:
                near = graph.direct.get(i, frozenset())
                near = near.union(*(graph.direct[k] for k in near if k >= 0))
                leaves = [j for j in space if j in near and j in graph.reads.get(i, ())]
                if leaves:
                    maps.leak(i, leaves)


def _order_sibling(graph: MixerGraph, i: int, lead: int) -> None:
    # The order of a mixer side by side with another, by what both read, or are read by.
    entry, other = graph.entries[i], graph.entries[lead]
    if entry is not None and other is not None and entry.is_at(other):
        graph.orders[i] = graph.orders.get(lead)
        return
    T, others = graph.exits[i].tokens, graph.exits[lead].tokens
    if others != T:
        raise UnsupportedModelError(
            f"{graph.name(lead)} and {graph.name(i)} are side by side, on {others} and {T} tokens "
            "of the batch (as an encoder and a decoder); expected mixers of the same tokens there. "
            f"{ADVICE}"
        )
    root = graph.entries[next(k for k, read in graph.direct.items() if i in read)]
    order = torch.full((T,), -1)  # of the lead's tokens, for each of this mixer's
    for mine, theirs in _alike(graph, i, lead, root):
        both = (mine >= 0) & (theirs >= 0)
        order[mine[both]] = theirs[both]
        if bool((order >= 0).all()):
            break
    left = torch.ones(T, dtype=torch.bool)
    left[order[order >= 0]] = False
    if int(left.sum()) == 1:
        order[order < 0] = int(left.nonzero())
    if torch.equal(order.sort().values, torch.arange(T)):
        graph.orders.put(i, lead, order)
    elif root is not None and root.tokens == T:
        graph.orders[i] = graph.orders.get(lead)  # unless the check of mixing knows better
    else:
        raise graph.refused(i, lead, "side by side, in orders that could not be told apart")


def _alike(
    graph: MixerGraph, i: int, lead: int, root: Point | None
) -> Iterator[tuple[Tensor, Tensor]]:
    # Which token of each of two mixers reads a token of a third one, or is read by one of a root.
    def read(reading: Point | None, leaf: Point) -> Pairs | None:
        if reading is None:
            return None
        return pairs(TokenWeights(reading, leaf, graph.batch), repeated=False)

    earlier = (graph.exits[k] for k in sorted(graph.direct[i] & graph.direct[lead]))
    for leaf in chain(earlier, _made_of_both(graph, i, lead)):
        both = [read(graph.entries[j], leaf) for j in (i, lead)]
        mine, theirs = (None if paired is None else paired.reader for paired in both)
        if mine is not None and theirs is not None:
            yield mine, theirs
    both = [read(root, graph.exits[j]) for j in (i, lead)]
    mine, theirs = (
        None if paired is None or root is None else paired.source(root.tokens) for paired in both
    )
    if mine is not None and theirs is not None:
        yield mine, theirs


def _made_of_both(graph: MixerGraph, i: int, lead: int) -> Iterator[Point]:
    # What two mixers are both made of, and of nothing else, the latest first: as of channels that
    # are divided among them. Where tokens are mixed before it, no earlier mixer tells their order.
    T, entries = graph.exits[i].tokens, [graph.entries[j] for j in (i, lead)]
    leaves = [graph.exits[k] for k in graph.reads[i] | graph.reads[lead]]
    edges = [*meetings([entry for entry in entries if entry is not None], leaves)]
    for edge in edges[: -1 - _MEETINGS : -1]:
        for channels in (-1, 1):
            point = Point.at(edge, channels)
            if len(point.shape) > 2 and point.tokens == T:
                yield point
