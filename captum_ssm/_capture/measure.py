"""What lies between the mixers of a model, measured on the graph that the cuts of one run left.

A backward pass through it shows whether each token is handled by itself and in its place. Where it
is not, the order of the tokens that a mixer is given is decoded. Where there is no order, as
between stages of different numbers of tokens, it is measured how strongly each token reads each
earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm._capture.cuts import Cuts
from captum_ssm._capture.ledger import structure
from captum_ssm._capture.mixer_graph import MixerGraph
from captum_ssm._capture.mixing import is_mixed
from captum_ssm._capture.readout import Readout
from captum_ssm._capture.skips import Skips
from captum_ssm._capture.streams import ResidualStreams
from captum_ssm._capture.token_map import TokenMaps
from captum_ssm._capture.wiring import Link, Read, Stage, Wiring, sequence
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import Point
from captum_ssm._transport import Transport, pairs


def measure(
    cuts: Cuts,
    output: Tensor | None,
    batch: int,
    *,
    score: Tensor | None = None,
    in_grid: bool = False,
) -> Wiring:
    """The wiring of the run that ``cuts`` was made for.

    Args:
        cuts (Cuts): with at least one port.
        output (Tensor, optional): what the model returned, if it depends on the mixers.
        batch (int): B.
        score (Tensor, optional): ``(B,)``, an entry of the output, where the tokens that it is
            read from are asked for, not those of the whole output. Default: None
        in_grid (bool, optional): whether it is known which token is which patch, so that the way
            from the input does not have to be measured. Default: False
    """
    end = at = None
    if output is not None and output.requires_grad and output.is_floating_point():
        end = Point.of(output)
    if score is not None and score.requires_grad:
        at = Point.of(score, None)
    cuts.measuring = True
    try:
        graph = MixerGraph(cuts, end, batch, in_grid=in_grid)
        return _measured(graph, Readout(graph, at))
    except UnsupportedModelError as error:
        count, tokens = len(cuts.ports), cuts.ports[-1].exit.tokens // batch
        return replace(sequence(count, tokens), refused=str(error))
    finally:
        cuts.measuring = False


def _measured(graph: MixerGraph, readout: Readout) -> Wiring:
    graph.refuse_calls()
    mixing = _Mixing(graph, readout.is_per_token)
    simple = _counts_agree(graph, readout) and not mixing.between(list(graph.exits))
    skips = Skips(graph, is_pooled=not readout.is_per_token)
    maps = TokenMaps(graph, skips, [] if simple else mixing.unmixed())
    stages, output = _stages(graph, maps, simple=simple), _output(graph, maps, readout, simple)
    streams = ResidualStreams(graph)
    for s, stage in enumerate(stages):
        chosen = skips.partial & set(stage.calls) or _is_selected(graph, stage.calls[0])
        around = streams.around(s, finer=not (simple or chosen))
        is_given = streams.is_given(s) if 0 in around else None
        stages[s] = replace(stage, around=around, is_given_stream=is_given)
    if not simple:
        mixing.check(maps)
    shares: list[Tensor | None] = [None] * len(output)
    if not readout.is_whole:
        shares = readout.shares(output, stages, maps.past.get(graph.end, {}))
    past = readout.past_pool(streams, stages, shares)
    balance = readout.balance(past, shares)
    # The tokens of the output do not read what goes past: only the output as a whole does.
    stage_of = _stage_of(graph)
    output += tuple((stage_of[k], Link().of(torch.zeros_like(read))) for k, read in past.items())
    ends = [*graph.entries.values(), readout.output]
    return Wiring(
        stages,
        output,
        [graph.windows(i) for i in range(graph.end)],
        [*shares, *past.values()],
        maps.exchanged,
        maps.is_far,
        inputs=graph.ways,
        unknown=readout.unknown() if simple else None,
        past=balance,
        rows=readout.rows(),
        structure=structure(point.edge.node for point in ends if point is not None),
    )


def _stage_of(graph: MixerGraph) -> dict[int, int]:
    inputs = {i: i for i in graph.exits if i < 0}
    return inputs | {i: s for s, group in enumerate(graph.groups) for i in group}


def _stages(graph: MixerGraph, maps: TokenMaps, *, simple: bool) -> list[Stage]:
    stages, stage_of = [], _stage_of(graph)
    for lead, *siblings in graph.groups:
        reads = maps.reads(lead, stage_of, simple=simple)
        for i in siblings:
            if simple:
                graph.orders[i] = None
            else:
                _place_sibling(graph, i, lead)
        stages.append(Stage((lead, *siblings), reads, graph.tokens(lead)))
    return stages


def _output(graph: MixerGraph, maps: TokenMaps, readout: Readout, simple: bool) -> tuple[Read, ...]:
    stage_of, end = _stage_of(graph), graph.end
    if readout.is_per_token:
        return maps.reads(end, stage_of, simple=simple)
    direct = sorted(graph.direct[end], reverse=True)
    sources = sorted({stage_of[i]: i for i in direct}.values())
    if not simple and len(sources) == 1:
        maps.past[end] = maps.skips.of(end, sources[0])
        sources += maps.past[end]
    return tuple((stage_of[i], Link()) for i in sources)


def _counts_agree(graph: MixerGraph, readout: Readout) -> bool:
    entries = [entry for entry in graph.entries.values() if entry is not None]
    if not readout.is_per_token and readout.output is not None:
        entries.remove(readout.output)
    points = [*graph.leaves, *entries]
    is_one = len({point.tokens for point in points}) == 1
    return is_one and all(point.shape[0] == graph.batch for point in points)


def _is_selected(graph: MixerGraph, i: int) -> bool:
    # Whether the tokens of a mixer are some of earlier ones, past which the others go.
    links = [link for (k, _), link in graph.links.items() if k == i]
    return any(link.source is not None for link in links)


class _Mixing:
    # Whether tokens act on one another between mixers whose tokens are the same.
    def __init__(self, graph: MixerGraph, per_token: bool) -> None:
        self.graph, self.per_token = graph, per_token
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
        return is_mixed(known, exits, graph.orders, all_read=all_read)

    def unmixed(self) -> list[set[int]]:
        # Mixers of equally many tokens, in groups in which each token is read in its place only.
        graph = self.graph
        found: dict[int, list[int]] = {}
        for i, leaf in graph.exits.items():
            root = graph.entries.get(i)
            if root is not None and {root.shape[0], leaf.shape[0]} == {graph.batch}:
                found.setdefault(leaf.tokens if root.tokens == leaf.tokens else 0, []).append(i)
        groups = [group for tokens, group in found.items() if tokens and len(group) > 1]
        if sum(map(len, groups)) < len(graph.exits):  # else they are mixed
            self._unmixed = [set(one) for one in groups if not self.between(one, all_read=True)]
        return self._unmixed

    def check(self, maps: TokenMaps) -> None:
        # Mixers of the same tokens, in their orders, from one transport to the next. What happens
        # between two stages shows in what the later one reads of the one before both.
        graph = self.graph
        for space in self._spaces():
            if any(set(space) <= group for group in self._unmixed) or not self.between(space):
                continue
            for i in [*space, *([graph.end] if self.per_token else [])]:
                near = graph.direct.get(i, frozenset())
                near = near.union(*(graph.direct[k] for k in near if k >= 0))
                leaves = [j for j in space if j in near and j in graph.reads.get(i, ())]
                if leaves:
                    maps.leak(i, leaves)

    def _spaces(self) -> list[list[int]]:
        graph = self.graph
        space_of: dict[int, int] = {i: i for i in graph.exits if i < 0}
        for i in range(graph.end):
            links = {j: graph.links.get((i, j)) for j in graph.direct[i]}
            linked = [j for j, link in links.items() if link is not None and link.is_in_place]
            space_of[i] = space_of[linked[0]] if linked else space_of.get(graph.lead(i), i)
        spaces: dict[int, list[int]] = {}
        for i, space in space_of.items():
            if i in graph.exits:
                spaces.setdefault(space, []).append(i)
        return [space for space in spaces.values() if len(space) > 1]


def _place_sibling(graph: MixerGraph, i: int, lead: int) -> None:
    # The order of a mixer side by side with another, by what both read, or are read by.
    given, other = graph.entries[i], graph.entries[lead]
    if given is not None and other is not None and given.edge == other.edge:
        graph.orders[i] = graph.orders.get(lead)
        return
    T = graph.exits[i].tokens
    place = torch.full((T,), -1)  # of the lead's tokens, for each of this mixer's
    for k in sorted(graph.direct[i] & graph.direct[lead]):
        mine, theirs = (_reading(graph, entry, k) for entry in (given, other))
        if mine is not None and theirs is not None:
            both = (mine >= 0) & (theirs >= 0)
            place[mine[both]] = theirs[both]
    root = graph.entries[next(k for k, one in graph.direct.items() if i in one)]
    if bool((place < 0).any()):
        mine, theirs = (_reading(graph, root, k) for k in (i, lead))
        if root is not None and mine is not None and theirs is not None:
            by_root = torch.full((root.tokens,), -1)
            by_root[theirs[theirs >= 0]] = (theirs >= 0).nonzero()[:, 0]
            more = torch.where(mine >= 0, by_root[mine.clamp(min=0)], -1)
            place = torch.where(place < 0, more, place)
    left = torch.ones(T, dtype=torch.bool)
    left[place[place >= 0]] = False
    if int(left.sum()) == 1:
        place[place < 0] = int(left.nonzero())
    if torch.equal(place.sort().values, torch.arange(T)):
        graph.orders.put(i, lead, place)
    elif root is not None and root.tokens == T == graph.exits[lead].tokens:
        graph.orders[i] = graph.orders.get(lead)  # unless the check of mixing knows better
    else:
        raise graph.refused(i, lead, "side by side, in orders that could not be told apart")


def _reading(graph: MixerGraph, root: Point | None, k: int) -> Tensor | None:
    # Which token of a root reads each of k, -1 for none; None where several do.
    if root is None:
        return None
    found = pairs(Transport(root, graph.exits[k], graph.batch), repeated=False)
    return None if found is None else found.reader
