"""What lies between the mixers of a model, measured on the graph that the cuts of one run left.

A backward pass through it shows whether each token is handled by itself and in its place. Where it
is not, the order of the tokens that a mixer is given is decoded. Where there is no order, as
between stages of different numbers of tokens, it is measured how strongly each token reads each
earlier one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm._capture.cuts import Cuts, Start
from captum_ssm._capture.exchanges import exchange
from captum_ssm._capture.ledger import (
    Gathered,
    gathered,
    source_of,
    structure,
    token_tensors,
    weights,
)
from captum_ssm._capture.mixing import is_local, is_mixed, share_of_others, shares_of_others
from captum_ssm._capture.orders import Orders
from captum_ssm._capture.skips import Skips
from captum_ssm._capture.streams import ResidualStreams
from captum_ssm._capture.ways import Way, feature_axis, portions, shares, stem_of
from captum_ssm._capture.wiring import (
    INPUT,
    Link,
    Read,
    Stage,
    Wiring,
    nearest,
    sequence,
    side_by_side,
)
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import Point, dependencies, gradients, joints, meetings, readers
from captum_ssm._rules import goes_through_activation
from captum_ssm._transport import Patches, Transport, copies, pulling

# Operations in which tokens act on one another, and which no measured transport may hide.
_MIXERS = (
    "Softmax",
    "ScaledDotProduct",
    "CumSum",
    "Cumsum",
    "Rnn",
    "Lstm",
    "Gru",
    "Stack",
    "Unbind",
)
# The size of what a zero adds to the tokens that it is a part of.
_TINY = 1e-150
# The largest share of what a token reads from others without a mixer.
_EXCHANGED = 0.5


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
    cuts.measuring = True
    try:
        return _Measurement(cuts, output, batch, score, in_grid).wiring()
    except UnsupportedModelError as error:
        count, tokens = len(cuts.ports), cuts.ports[-1].exit.tokens // batch
        return replace(sequence(count, tokens), refused=str(error))
    finally:
        cuts.measuring = False


class _Measurement:
    # Mixers are numbered from 0 in forward order; the start of the graph is INPUT.
    def __init__(
        self,
        cuts: Cuts,
        output: Tensor | None,
        batch: int,
        score: Tensor | None,
        in_grid: bool,
    ) -> None:
        self.ports, self.batch = cuts.ports, batch
        self.exits = {i: port.exit for i, port in enumerate(cuts.ports)}
        self.score = None if score is None or not score.requires_grad else Point.of(score, None)
        self.output = None
        if output is not None and output.requires_grad and output.is_floating_point():
            self.output = Point.of(output)
        self.entries = {i: port.entry for i, port in enumerate(cuts.ports)}
        self.entries[len(cuts.ports)] = self.output
        self.ways = self._ways(cuts.starts)
        if not in_grid:
            self.exits |= {INPUT - k: way.leaf for k, way in enumerate(self.ways)}
        self.direct = self._direct()
        self.pool: Point | None = None
        # How strongly a pooled output reads what goes past these tokens, by mixer: (T,).
        self.left: dict[int, Tensor] = {}
        self._find_pool()
        if self.pool is not None:
            self.entries[len(cuts.ports)] = self.pool
        self.groups = side_by_side(self.direct)
        self.orders = Orders(batch)
        self.unmixed: list[set[int]] = []
        self.links: dict[tuple[int, int], Link] = {}
        lead_of = {i: group[0] for group in self.groups for i in group}
        self.skips = Skips(
            self.entries,
            self.exits,
            self.direct,
            self.reads,
            lead_of,
            self.links,
            self.orders,
            is_pooled=not self._is_per_token(),
        )
        # By what reads: its reads, and those of what is added past an exchange of tokens.
        self.read_by: dict[int, tuple[Read, ...]] = {}
        self.read_past: dict[int, tuple[Read, ...]] = {}
        self.exchanged_at: set[int] = set()
        # By what reads past others: the ways to what it reads.
        self.past: dict[int, dict[int, Transport]] = {}
        self.exchanged = 0.0
        self.is_far = False

    def _ways(self, starts: dict[int, Start]) -> tuple[Way, ...]:
        if not starts or sorted(starts) != list(range(len(starts))):
            return ()
        leaves = [starts[k].point for k in range(len(starts))]
        ports = list(self.exits.values())
        roots = [entry for entry in self.entries.values() if entry is not None]
        found = dependencies(roots, [*leaves, *ports])
        ways = []
        for k, leaf in enumerate(leaves):
            # Tokens that are made of it without another mixer between.
            mine = [
                root
                for root, one in zip(roots, found, strict=True)
                if k in one and max(one) < len(leaves)
            ]
            stem = None
            if starts[k].embedded:
                mine = []
            elif mine and leaf.channels is not None:
                stem = stem_of(mine, leaf, self.batch)
                axis = feature_axis(mine[0] if stem is None else stem, leaf, self.batch)
                leaf = replace(leaf, channels=axis)
            ways.append(Way(leaf, starts[k].values, tuple(mine), self.batch, stem))
        return tuple(ways)

    def name(self, i: int) -> str:
        if i < 0:
            return "the input" if len(self.ways) == 1 else f"input {INPUT - i}"
        return self.ports[i].name if i < len(self.ports) else "the output"

    def _count(self, i: int) -> str:
        return str((self.batch, self.exits[i].tokens // self.batch))

    def _refuse_calls(self) -> None:
        # A loop over the examples calls each mixer once per example.
        calls = Counter(port.name for port in self.ports)
        for port in self.ports:
            given, returned = (None if p is None else p.tokens for p in (port.entry, port.exit))
            if given not in (None, returned):
                raise UnsupportedModelError(
                    f"{port.name} is given {given} tokens and returns {returned}, so that its maps "
                    "are not over the tokens of one sequence; expected a mixer that returns one "
                    "token for each. Register an adapter with captum_ssm.register_mixer."
                )
            is_part = port.exit.shape[0] % self.batch != 0
            if is_part and calls[port.name] % self.batch == 0:
                raise UnsupportedModelError(
                    f"the model runs {port.name} on one example at a time, "
                    f"{calls[port.name]} times for {self.batch} examples, and maps through the "
                    "layers are of all at once; explain one example at a time."
                )

    def _direct(self) -> dict[int, frozenset[int]]:
        # What each mixer's tokens, and the output, are made of without another mixer between.
        keys = list(self.exits)
        found = dependencies(list(self.entries.values()), list(self.exits.values()))
        reads = {i: {keys[k] for k in one} for i, one in zip(self.entries, found, strict=True)}
        self.reads = reads
        direct, end = nearest(reads), len(self.ports)
        lost = [i for i in range(end) if not direct[i]]
        if lost and any(i < 0 for one in direct.values() for i in one):
            raise UnsupportedModelError(
                f"{self.name(lost[0])} is given tokens that do not come from the input, "
                f"(batch, tokens) = {self._count(lost[0])}, and {self.name(0)} is given "
                f"{self._count(0)}; expected a forward_func that runs the model once (not "
                "generate()), differentiably."
            )
        return direct

    def wiring(self) -> Wiring:
        self._refuse_calls()
        end, stage_of = len(self.ports), {i: i for i in self.exits if i < 0}
        for s, group in enumerate(self.groups):
            stage_of |= dict.fromkeys(group, s)
        per_token = self._is_per_token()
        simple = self._counts_agree() and not self._is_mixed(list(self.exits), per_token)
        if not simple:
            self.unmixed = self._unmixed(per_token)
        stages = []
        for group in self.groups:
            reads = self._reads(group[0], stage_of, simple)
            for sibling in group[1:]:
                if not simple:
                    self._place_sibling(sibling, group[0])
            if simple:
                self.orders |= dict.fromkeys(group)
            tokens = self.exits[group[0]].tokens // self.batch
            stages.append(Stage(tuple(group), reads, tokens))
        if per_token:
            output = self._reads(end, stage_of, simple)
        else:
            sources = sorted({stage_of[i]: i for i in reversed(sorted(self.direct[end]))}.values())
            if not simple and len(sources) == 1:
                self.past[end] = self.skips.of(end, sources[0])
                sources += self.past[end]
            output = tuple((stage_of[i], Link()) for i in sources)
        streams = self._streams()
        around = self._around(streams, simple)
        stages = [
            replace(stage, around=a, is_given_stream=streams.is_given(s) if 0 in a else None)
            for s, (stage, a) in enumerate(zip(stages, around, strict=True))
        ]
        if not simple:
            self._check_orders(per_token)
        if per_token and self.score is None and self.pool is None:
            readout: list[Tensor | None] = [None] * len(output)
        else:
            readout = self._readouts(output, stages)
        past = self._past_pool(streams, stages, readout)
        for k, read in past.items():
            # The tokens of the output do not read them: only the output as a whole does.
            output += ((stage_of[k], Link().of(torch.zeros_like(read))),)
            readout.append(read)
        orders = [self._windows(i) for i in range(end)]
        roots = [point.edge.node for point in (*self.entries.values(), self.output) if point]
        return Wiring(
            stages,
            output,
            orders,
            readout,
            self.exchanged,
            self.is_far,
            inputs=self.ways,
            unknown=self._unknown_after() if simple else None,
            past=self._said_past(past, readout),
            rows=self._rows(),
            structure=structure(roots, is_cut=True),
        )

    def _said_past(self, past: dict[int, Tensor], readout: Sequence[Tensor | None]) -> str | None:
        # The balance of what a pooled output reads.
        parts = []
        for k, read in past.items():
            at = (read > 0.01 * read.amax(1, keepdim=True)).any(0).nonzero()[:, 0].tolist()
            where = f"token {at[0]}" if len(at) == 1 else f"{len(at)} tokens"
            parts.append(
                f"{float(read.sum(1).mean()):.0%} goes past, from {self.name(k)} at {where}"
            )
        if not parts:
            return None
        held = sum(float(read.sum(1).mean()) for read in readout if read is not None)
        held -= sum(float(read.sum(1).mean()) for read in past.values())
        return f"the maps hold {held:.0%} of what the score reads; {', '.join(parts)}"

    def _rows(self) -> Tensor | None:
        # How far an output's rows are from those of the last tokens, where it has fewer rows.
        root, leaf = self.output, self.exits[len(self.ports) - 1]
        T = leaf.tokens // self.batch
        if root is None or len(root.shape) != 3 or root.shape[1] >= T:
            return None
        source = source_of(root, leaf, self.batch)
        if source is None:
            return None
        n = root.shape[1]
        return source[:n].cpu() - torch.arange(T - n, T)

    def _unknown_after(self) -> str | None:
        # What mixes tokens between the last mixers and a score that holds none.
        root, T = self._read_root, self.exits[max(self.exits)].tokens // self.batch
        if root is None or self.pool is None or T < 2:
            return None
        leaves = {
            i: one for i, one in self.exits.items() if i >= 0 and one.tokens == T * self.batch
        }
        found = token_tensors(root, [self.pool, *self.exits.values()], T, self.batch)
        ends = {len(self.ports) + k: point for k, point in enumerate(found)}
        if not ends or not is_mixed(ends, leaves, Orders(self.batch)):
            return None
        kinds = sorted({k for p in found for k in _kinds_between(p, self.pool, [self.pool])})
        how = ", ".join(kind for kind in kinds if kind.startswith(_MIXERS))
        pool = self.pool.edge.node
        if not how and not any(goes_through_activation(p.edge.node, pool) for p in found):
            return ""  # linear
        how = f" ({how})" if how else ""
        return f"after {self.name(len(self.ports) - 1)} tokens are mixed by no known mixer{how}"

    def _streams(self) -> ResidualStreams:
        leaves = self.exits | {INPUT - k: way.leaf for k, way in enumerate(self.ways)}
        entries = {i: entry for i, entry in self.entries.items() if entry is not None}
        return ResidualStreams(self.groups, entries, leaves, self.direct)

    def _around(self, streams: ResidualStreams, simple: bool) -> list[tuple[int, ...]]:
        # By stage, where its residual streams leave.
        found = []
        for s, group in enumerate(self.groups):
            finer = not (simple or self.skips.partial & set(group) or self._is_selected(group[0]))
            try:
                found.append(streams.around(s, self.skips.is_in_place, finer=finer))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{self.name(group[0])} {error} {_ADVICE}") from None
        return found

    def _is_selected(self, i: int) -> bool:
        # Whether the tokens of a mixer are some of earlier ones, past which the others go.
        links = [link for (k, _), link in self.links.items() if k == i]
        return any(link.source is not None for link in links)

    def _find_pool(self) -> None:
        # The tokens in which all that a pooled output, or the score, reads comes together, and what
        # it reads past them.
        root, read = self._read_root, self.direct[len(self.ports)]
        if root is None or self._is_per_token():
            return
        held = {i: gathered(root, self.exits[i], self.batch) for i in read}
        last = max(read)
        some = [one for one in held[last][1:] if one.holds_all_of(self.exits[last])]
        for one in sorted(reversed(some), key=lambda one: not one.is_permuted):
            if not self._left_over([one]):
                self.pool = one.point
                return
        pool = some[-1] if len(read) == 1 and some and some[-1].is_permuted else None
        left = self._left_over([one[-1] for one in held.values()] if pool is None else [pool])
        if all(self.exits[k].tokens == self.exits[last].tokens for k in left):
            self.left, self.pool = left, None if pool is None else pool.point
        # Else they are of other grids: see Skips.

    def _left_over(self, held: Sequence[Gathered]) -> dict[int, Tensor]:
        keys, direct = list(self.exits), self.direct[len(self.ports)]
        found = self._weights([*self.exits.values()], [one.point.edge for one in held])
        left = {k: one for k, one in zip(keys, found, strict=True) if one is not None}
        return {k: one for k, one in left.items() if k not in direct and bool(one.any())}

    @property
    def _read_root(self) -> Point | None:
        return self.output if self.score is None else self.score

    def _is_per_token(self) -> bool:
        point = self.output
        if point is None or self.pool is not None:
            return True
        last = [self.exits[i].tokens for i in self.direct[len(self.ports)]]
        shape = point.shape
        return len(shape) == 3 and shape[0] == self.batch and point.tokens in last

    def _counts_agree(self) -> bool:
        points = [*self.exits.values(), *(e for e in self.entries.values() if e is not None)]
        if not self._is_per_token() and self.output is not None:
            points.remove(self.output)
        alike = {point.tokens for point in points}
        return len(alike) == 1 and all(p.shape[0] == self.batch for p in points)

    def _unmixed(self, per_token: bool) -> list[set[int]]:
        # Mixers of equally many tokens, in groups in which each token is read in its place only.
        found: dict[int, list[int]] = {}
        for i, leaf in self.exits.items():
            root = self.entries.get(i)
            if root is not None and {root.shape[0], leaf.shape[0]} == {self.batch}:
                found.setdefault(leaf.tokens if root.tokens == leaf.tokens else 0, []).append(i)
        groups = [group for tokens, group in found.items() if tokens and len(group) > 1]
        if sum(map(len, groups)) == len(self.exits):
            return []  # they are mixed
        return [
            set(group) for group in groups if not self._is_mixed(group, per_token, all_read=True)
        ]

    def _reads(self, i: int, stage_of: dict[int, int], simple: bool) -> tuple[Read, ...]:
        # One read per stage, by way of its first mixer.
        leads = sorted({stage_of[j]: j for j in sorted(self.direct[i], reverse=True)}.values())
        root, inputs = self.entries[i], [j for j in leads if j < 0]
        for j in leads:
            self.links[i, j] = Link() if simple else self._link(i, j)
        if not simple and len(leads) == 1 and i not in self.exchanged_at:
            leads += self._skipped(i, leads[0])
            leads += self._moved(i, leads)
        if len(inputs) > 1 and root is not None:
            sizes = [
                self.ways[INPUT - j].added(root).clamp(min=_TINY) * self.links[i, j].is_read(root)
                for j in inputs
            ]
            for j, share in zip(inputs, portions(sizes), strict=True):
                self.links[i, j] = replace(self.links[i, j], share=share)
        reads = [(stage_of[j], self.links[i, j]) for j in leads]
        if not simple:
            self._check_unread(i, [link for _, link in reads])
        self.orders.setdefault(i, None)
        self.read_by[i] = (*reads, *self.read_past.get(i, ()))
        return self.read_by[i]

    def _skipped(self, i: int, j: int) -> list[int]:
        """What i reads past j, on other tokens, as by the skip connections of a U-shape.

        The links are added, and all of them get the share of the tokens that they make up.
        """
        past, root, B = self.skips.of(i, j), self.entries[i], self.batch
        if self.links[i, j].is_in_place:  # what is added to a residual stream by no mixer stays out
            past = {k: way for k, way in past.items() if k >= 0}
        if not past or root is None:
            return []
        self.past[i] = past
        ways = {j: Transport(root, self.exits[j], B), **past}
        for (k, way), share in zip(ways.items(), shares([*ways.values()]), strict=True):
            self.links[i, k] = replace(self._link_past(i, k, way), share=share)
        return list(past)

    def _moved(self, i: int, known: Sequence[int]) -> list[int]:
        """What i reads past its residual stream, of the same tokens in other places.

        As an input that is added once more, turned around, after later mixers. The links are added,
        and all of them get the share of the tokens that they make up.
        """
        j, root, B = known[0], self.entries[i], self.batch
        entry = self.entries.get(j)
        if root is None or entry is None or len(known) > 1:
            return []
        keys, leaves = list(self.exits), list(self.exits.values())
        found = joints(root, entry, leaves)
        seen, ways = found.leaves, dict[int, Transport]()
        points = [replace(root, edge=edge) for edge in found.past]
        near = frozenset().union(*dependencies(points, leaves, past_leaves=False))
        for k in (keys[m] for m in near | (seen if found.stream else frozenset())):
            is_same = self.exits[k].tokens == root.tokens and self.skips.is_in_place(j, k)
            if k != j and is_same:
                ways[k] = Transport(root, self.exits[k], B, tuple(found.stream))
        moved = {k: way for k, way in ways.items() if self._is_moved(i, k, way)}
        if not moved:
            return []
        k = max(moved)
        if set(moved) != {k, *self._stream_read_by(k)}:
            raise self._refused(k, i, "in other places, without the residual stream there")
        own = Transport(root, self.exits[j], B)
        for (m, way), share in zip(((j, own), (k, moved[k])), shares([own, moved[k]]), strict=True):
            link = self.links[i, j] if m == j else self._link_past(i, m, way)
            self.links[i, m] = replace(link, share=share)
        return [k]

    def _is_moved(self, i: int, k: int, way: Transport) -> bool:
        # Whether i reads tokens of k in other places by a way, each of them by one token; where
        # they are mixed, that is refused or said.
        with pulling(way):
            place = readers(way.root, way.leaf)
        if place is not None:
            here = self.skips.order(k).to(place.device)
            there = self.skips.order(i).to(place.device)[place.clamp(min=0)]
            return not bool(((there == here) | (place < 0)).all())
        if copies(way) is not None:
            return True
        self._refuse_mixers(i, k)
        share = share_of_others(way, self.orders)
        self.is_far |= share > 0
        if share > _EXCHANGED:
            raise self._refused(i, k, f"by something that is no mixer ({share:.0%})")
        self.exchanged = max(self.exchanged, share)
        return False

    def _check_unread(self, i: int, links: Sequence[Link]) -> None:
        # Tokens that are made of none that are known are made of nothing else.
        root, sources = self.entries[i], [one.source for one in links if one.source is not None]
        if root is None or not sources or len(sources) < len(links):
            return
        read = torch.stack([source >= 0 for source in sources]).any(0)
        if len(read) * self.batch != root.tokens:
            return
        seed = root.noise(torch.Generator().manual_seed(0))
        seed = seed * ~read.repeat(self.batch)[:, None].to(seed.device)
        for k, found in zip(
            self.exits, gradients([root], [seed], [*self.exits.values()]), strict=True
        ):
            if found is not None and bool(found.any()):
                raise self._refused(i, k, "past a mixer that is given some of their copies")

    def _stream_read_by(self, k: int) -> frozenset[int]:
        # The mixers and inputs whose sum is the residual stream around k.
        entry = self.entries.get(k)
        if k < 0 or entry is None:
            return frozenset()
        (read,) = dependencies([entry], list(self.exits.values()), past_leaves=False)
        return frozenset(list(self.exits)[m] for m in read)

    def _link(self, i: int, j: int) -> Link:
        """How the tokens given to i read those of j; decodes the order of i on the way."""
        root, leaf = self.entries[i], self.exits[j]
        if root is None:  # an output without a graph
            return Link()
        if any({i, j} <= group for group in self.unmixed):
            self.orders.setdefault(i, self.orders.get(j))
            return Link()
        B = self.batch
        T, S = root.tokens // B, leaf.tokens // B
        stem = self.ways[INPUT - j].stem if j < 0 else None
        # Where tokens share those of a stem, they share what those are made of.
        is_shared = stem is not None and readers(root, stem) is None
        place = None if is_shared else readers(root, leaf)
        source = self._source(root, j, place)
        if place is None and root.tokens > leaf.tokens:
            source = self._copied(Transport(root, leaf, B), j)
        if source is not None:
            if root.tokens == leaf.tokens and bool((source >= 0).all()):
                here = torch.arange(root.tokens)
                known = self.orders.get(i, source)
                if not torch.equal(here if known is None else known, source):
                    raise self._refused(i, j, "in two orders")
                self.orders[i] = None if torch.equal(source, here) else source
                if self.orders[i] is None or i < len(self.ports):
                    return Link()
            return self._sourced(i, j, source)
        # What a stem makes of its neighbors is the way from an input, not mixing between tokens.
        is_way = j < 0 and bool(self.ways[INPUT - j].roots)
        if S == T and not is_way:
            self.orders.setdefault(i, self.orders.get(j))
            if self._is_exchanged(i, j):
                return self._exchange(i, j)
            return Link()  # tokens act on one another, each in its place: see _check_orders
        self._refuse_mixers(i, j)
        order = self._order_in_example(j)
        has_none = order is None and self.orders.get(j) is not None
        if has_none or not self._examples_are_apart(root, leaf):
            raise self._refused(i, j, "across the examples of the batch")
        if place is not None:
            values = self.ways[INPUT - j].values if j < 0 else None
            way: Transport = Patches(root, leaf, B, values=values, owner=place)
        elif j < 0:
            way = self.ways[INPUT - j].transport(root)
        else:
            way = Transport(root, leaf, B)
        return Link(transport=way, order=order, count=S)

    def _is_exchanged(self, i: int, j: int) -> bool:
        # Whether most of a token comes from others, further away than its neighbors.
        root, leaf = self.entries[i], self.exits[j]
        if root is None or j < 0 or any(self.orders.get(k) is not None for k in (i, j)):
            return False
        share = shares_of_others(i, root, {j: leaf}, self.orders).get(j, 0)
        return share > _EXCHANGED and not is_local(i, root, j, leaf, self.orders)

    def _exchange(self, i: int, j: int) -> Link:
        # On the way from j to i, which are of one grid, tokens are mixed by what is no mixer.
        root, B = self.entries[i], self.batch
        assert root is not None
        self._refuse_mixers(i, j)
        found = exchange(root, self.exits[j], list(self.exits.values()), B)
        others = {k for k in self.direct[i] if not any({j, k} <= set(g) for g in self.groups)}
        if found is None or others:
            raise self._refused(i, j, "by something that is no mixer, past which others are read")
        if found.past is not None and found.share is not None:
            # What goes past is made of the tokens that the first mixer behind it is made of.
            reads = self.read_by[self._given(found.past, i, j)]
            self.read_past[i] = tuple((s, link.of(1 - found.share)) for s, link in reads)
        self.exchanged_at.add(i)
        return Link(transport=found.way, count=root.tokens // B, share=found.share)

    def _given(self, edge: GradientEdge, i: int, j: int) -> int:
        # The first mixer that is given tokens made of this tensor, which all ways to them pass.
        for group in self.groups:
            entry = self.entries.get(group[0])
            leaves = [self.exits[k] for k in self.direct[group[0]]]
            if entry is not None and edge in meetings([entry], leaves):
                return group[0]
        raise self._refused(i, j, "by something that is no mixer, past which others are read")

    def _source(self, root: Point, j: int, place: Tensor | None) -> Tensor | None:
        # The one token of j, in its order, that each of the root's reads, -1 for none, by the
        # reader of each; None where some tokens are pooled.
        if place is None:
            return None
        place = place.cpu()
        read, before = (place >= 0).nonzero()[:, 0], self.orders.get(j)
        if len(place[read].unique()) < len(read):
            return None
        source = torch.full((root.tokens,), -1)
        source[place[read]] = read if before is None else before[read]
        return source

    def _copied(self, way: Transport, j: int) -> Tensor | None:
        # The same where one token is read by several, as where an image is made larger.
        found, before = copies(way), self.orders.get(j)
        found = None if found is None else found.cpu()
        if found is None or before is None:
            return found
        return torch.where(found >= 0, before[found.clamp(min=0)], -1)

    def _sourced(self, i: int, j: int, source: Tensor) -> Link:
        T, S = len(source) // self.batch, self.exits[j].tokens // self.batch
        local = self.orders.of_example(source, T, S)
        if local is None:
            raise UnsupportedModelError(
                f"between {self.name(j)} and {self.name(i)} tokens are chosen, in each example of "
                f"the batch in a way of its own (as by a router), and maps through the layers are "
                "of all examples at once; explain one example at a time."
            )
        return Link(source=local, count=S)

    def _link_past(self, i: int, j: int, way: Transport) -> Link:
        # How i reads tokens of j by a way past other mixers.
        known = self.links.get((i, j))
        if known is not None:
            return known
        with pulling(way):
            place = readers(way.root, way.leaf)
        if place is not None and way.kept is not None:
            place = torch.where(way.kept, place, -1)
        source = self._copied(way, j) if place is None else self._source(way.root, j, place)
        if source is not None:
            return self._sourced(i, j, source)
        count = way.leaf.tokens // self.batch
        return Link(transport=way, order=self._order_in_example(j), count=count)

    def _order_in_example(self, j: int) -> Tensor | None:
        # That of the tokens of j; None too where examples have orders of their own.
        S, order = self.exits[j].tokens // self.batch, self.orders.get(j)
        return None if order is None else self.orders.of_example(order, S, S)

    def _examples_are_apart(self, root: Point, leaf: Point) -> bool:
        if self.batch == 1:
            return True
        seed = root.noise(torch.Generator().manual_seed(0))
        seed[root.tokens // self.batch :] = 0
        (found,) = gradients([root], [seed], [leaf])
        return found is None or not bool(found[leaf.tokens // self.batch :].any())

    def _place_sibling(self, i: int, lead: int) -> None:
        # The order of a mixer side by side with another, by what both read, or are read by.
        given, other = self.entries[i], self.entries[lead]
        if given is not None and other is not None and given.edge == other.edge:
            self.orders[i] = self.orders.get(lead)
            return
        T = self.exits[i].tokens
        place = torch.full((T,), -1)  # of the lead's tokens, for each of this mixer's
        for k in sorted(self.direct[i] & self.direct[lead]):
            reading = [readers(e, self.exits[k]) for e in (given, other) if e is not None]
            if len(reading) == 2 and all(one is not None for one in reading):
                mine, theirs = (one.cpu() for one in reading if one is not None)
                both = (mine >= 0) & (theirs >= 0)
                place[mine[both]] = theirs[both]
        consumer = next(k for k, one in self.direct.items() if i in one)
        root = self.entries[consumer]
        if root is not None and bool((place < 0).any()):
            read = [readers(root, self.exits[k]) for k in (i, lead)]
            if all(one is not None for one in read):
                mine, theirs = (one.cpu() for one in read if one is not None)
                by_root = torch.full((root.tokens,), -1)
                by_root[theirs[theirs >= 0]] = (theirs >= 0).nonzero()[:, 0]
                more = torch.where(mine >= 0, by_root[mine.clamp(min=0)], -1)
                place = torch.where(place < 0, more, place)
        left = torch.ones(T, dtype=torch.bool)
        left[place[place >= 0]] = False
        if int(left.sum()) == 1:
            place[place < 0] = int(left.nonzero())
        if torch.equal(place.sort().values, torch.arange(T)):
            self.orders.put(i, lead, place)
        elif root is not None and root.tokens == T == self.exits[lead].tokens:
            self.orders[i] = self.orders.get(lead)  # unless _check_orders knows better
        else:
            raise self._refused(i, lead, "side by side, in orders that could not be told apart")

    def _is_mixed(self, leaves: Sequence[int], per_token: bool, *, all_read: bool = False) -> bool:
        # Whether not everything between acts on each token by itself, in its order.
        end = len(self.ports)
        roots = {i: self.entries[i] for i in leaves if i >= 0}
        output = self.entries[end]
        is_read = per_token and self.direct[end] <= set(leaves)
        if is_read and output is not None and output.tokens == self.exits[leaves[0]].tokens:
            roots[end] = output
        known = {i: root for i, root in roots.items() if root is not None}
        return is_mixed(known, {i: self.exits[i] for i in leaves}, self.orders, all_read=all_read)

    def _check_orders(self, per_token: bool) -> None:
        # Of mixers whose tokens are the same, in their orders: from one transport to the next.
        for space in self._spaces():
            if any(set(space) <= group for group in self.unmixed):
                continue
            if not self._is_mixed(space, per_token):
                continue
            for i in [*space, *([len(self.ports)] if per_token else [])]:
                root, leaves = self.entries.get(i), self._near(i, space)
                if root is None or not leaves:
                    continue
                for j, share in shares_of_others(i, root, leaves, self.orders).items():
                    self._refuse_mixers(i, j)
                    is_far = not is_local(i, root, j, self.exits[j], self.orders)
                    self.is_far |= is_far
                    if share > _EXCHANGED and is_far:
                        raise self._refused(i, j, f"by something that is no mixer ({share:.0%})")
                    self.exchanged = max(self.exchanged, share)

    def _near(self, i: int, space: Sequence[int]) -> dict[int, Point]:
        # What happens between two stages shows in what the later one reads of the one before both.
        near = self.direct.get(i, frozenset())
        near = near.union(*(self.direct[k] for k in near if k >= 0))
        return {j: self.exits[j] for j in space if j in near and j in self.reads[i]}

    def _spaces(self) -> list[list[int]]:
        space_of: dict[int, int] = {i: i for i in self.exits if i < 0}
        for i in range(len(self.ports)):
            linked = [j for j in self.direct[i] if self.links.get((i, j), _UNKNOWN).is_in_place]
            lead = next(group[0] for group in self.groups if i in group)
            space_of[i] = space_of[linked[0]] if linked else space_of.get(lead, i)
        spaces: dict[int, list[int]] = {}
        for i, space in space_of.items():
            if i in self.exits:
                spaces.setdefault(space, []).append(i)
        return [space for space in spaces.values() if len(space) > 1]

    def _readouts(self, output: Sequence[Read], stages: Sequence[Stage]) -> list[Tensor | None]:
        """The shares in which the output, or the score, reads tokens after its stages: ``(B, T)``.

        Where it is read from several of them past one another, they share it.
        """
        if self.pool is not None:
            read = self._read_at(self.pool)
            if read is None or not bool((read.sum(1) > 0).all()):
                return [None] * len(output)
            return [link.rmatvec(_normalized(read)) for _, link in output]
        past = self.past.get(len(self.ports), {})
        mixers = [s if s < 0 else stages[s].calls[0] for s, _ in output]
        found = [self._read_of(i, past.get(i)) for i in mixers]
        read_of = [one for one in found if one is not None]
        whole = torch.stack([one.sum(1) for one in read_of]).sum(0) if read_of else torch.zeros(1)
        if len(read_of) < len(found) or not bool((whole > 0).all()):
            return [None] * len(found)
        weights = [_normalized(one) for one in read_of]
        if past:
            sizes = [self._read_of(i, past.get(i), power=2) for i in mixers]
            parts = portions([one.sum(1, keepdim=True) for one in sizes if one is not None])
            weights = [one * part for one, part in zip(weights, parts, strict=True)]
        return list(weights)

    def _past_pool(
        self, streams: ResidualStreams, stages: Sequence[Stage], readout: list[Tensor | None]
    ) -> dict[int, Tensor]:
        """What a pooled output reads past its tokens: the shares ``(B, T)``, by mixer.

        The shares that it is known to read elsewhere are changed in place.
        """
        end = len(self.ports)
        main = [one for one in readout if one is not None]
        if not self.left or not main or len(main) < len(readout):
            return {}
        left = {k: self._in_order(k, one.view(self.batch, -1)) for k, one in self.left.items()}
        if self.pool is None:  # a residual stream that joins where tokens are no longer apart
            read = reduce(torch.logical_or, [one > 0 for one in main])
            left = {
                k: one for k, one in left.items() if one.shape != read.shape or one[~read].any()
            }
        past: dict[int, Tensor] = {}
        while left:
            k = max(left)
            past[k] = left.pop(k)
            stage = next((one for one in stages if k in one.calls), None)
            stream = streams.read.get(k, frozenset()) if stage and stage.around else frozenset()
            for m in stream & left.keys():
                left[m] = left[m] * (past[k] == 0)
            if not stream <= self.left.keys() or (stage and len(stage.calls) > 1):
                raise self._refused(k, end, "past all others, without the residual stream there")
            self._refuse_mixers(end, k)
            left = {m: one for m, one in left.items() if bool(one.any())}
        found = self._read_at(self.exits[max(self.direct[end])])
        sums = [one.sum(1, keepdim=True) for one in past.values()]
        own = sums[0] if found is None else found.sum(1, keepdim=True)
        total = reduce(torch.add, sums, own)
        readout[:] = [None if one is None else one * (own / total) for one in readout]
        return {k: one / total for k, one in past.items()}

    def _weights(
        self, leaves: Sequence[Point], closed: Sequence[GradientEdge] = (), *, power: int = 1
    ) -> list[Tensor | None]:
        root = self._read_root
        if root is None:
            return [None] * len(leaves)
        return weights(root, leaves, self.batch, self.exits.values(), closed, power=power)

    def _read_at(self, leaf: Point) -> Tensor | None:
        # How strongly tokens are read, (B, T), where they are last apart.
        root = self._read_root
        if root is None:
            return None
        last = gathered(root, leaf, self.batch)[-1]
        (read,) = self._weights([last.point])
        return None if read is None else last.weights(read, self.batch, leaf.tokens)

    def _read_of(self, i: int, past: Transport | None, *, power: int = 1) -> Tensor | None:
        # How strongly tokens after mixer i are read, in the model's order.
        leaf = self.exits[i]
        if past is None and power == 1:
            found = self._read_at(leaf)
        else:
            (found,) = self._weights([leaf], () if past is None else past.around, power=power)
            if found is not None and past is not None and past.kept is not None:
                found = found * past.kept.to(found)
            found = None if found is None else found.view(self.batch, -1)
        return None if found is None else self._in_order(i, found)

    def _in_order(self, i: int, found: Tensor) -> Tensor:
        # Numbers of tokens after mixer i, (B, T), in the model's order.
        order = self.orders.get(i)
        if order is None:
            return found
        flat = torch.empty_like(found.flatten())
        flat[order.to(flat.device)] = found.flatten()
        return flat.view(self.batch, -1)

    def _windows(self, i: int) -> Tensor | None:
        try:
            return self.orders.windows(i, self.exits[i])
        except ValueError:
            raise UnsupportedModelError(
                f"{self.name(i)} is given the tokens of each example in an order of its own; "
                "explain one example at a time."
            ) from None

    def _refuse_mixers(self, i: int, j: int) -> None:
        root, leaf = self.entries[i], self.exits[j]
        assert root is not None
        for kind in _kinds_between(root, leaf, list(self.exits.values())):
            if kind.startswith(_MIXERS):
                raise self._refused(i, j, f"by an operation that is no known mixer ({kind})")

    def _refused(self, i: int, j: int, how: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"between {self.name(j)} and {self.name(i)} tokens are mixed {how}. {_ADVICE}"
        )


def _normalized(read: Tensor) -> Tensor:
    return read / read.sum(1, keepdim=True).clamp(min=1e-300)


_UNKNOWN = Link(source=torch.empty(0))
_ADVICE = (
    "A map through the layers would be wrong. The maps of single layers are right all the same "
    "(captum_ssm.hidden_attention), and MambaLRP goes through the model's own graph: look at its "
    "convergence delta. Or register the module that mixes the tokens with "
    "captum_ssm.register_mixer."
)


def _kinds_between(root: Point, leaf: Point, leaves: Sequence[Point]) -> set[str]:
    # The operations from the root back to the leaf, other leaves not passed.
    ends = {point.edge.node for point in leaves}
    seen, stack, kinds = set(), [root.edge.node], set()
    while stack:
        node = stack.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        kinds.add(node.name().partition("Backward")[0])
        stack.extend(n for n, _ in node.next_functions if n is not None)
    return kinds
