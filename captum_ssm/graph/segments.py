"""A graph that is cut at its leaves, and the ways in it that go around some of these.

Between two cuts a tensor reads leaves by way of no other leaf. What joins on the way from some
leaves to a later tensor, and does not come of them, goes around them: a residual stream, a skip
connection, a state that is added once more. One walk finds all that joins; what it is made of, and
where, tells which of these it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.autograd.graph import GradientEdge, Node

from captum_ssm.graph.kinds import kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import (
    FACTORS,
    KEEPING,
    VIEWS,
    add_bits,
    edges_before,
    inputs_of,
    is_product,
    members,
    nodes_before,
)
from captum_ssm.graph.relevance_rules import carrying_before
from captum_ssm.utils.lazy import cached_property

# Kinds whose inputs are added up, with one of them times a number.
_WEIGHTED = frozenset(("Add", "Div", "Mul", "Rsub", "Sub"))


class SegmentGraph:
    """A graph that is cut at its leaves: how its tensors read these by way of no other one."""

    def __init__(self, leaves: Mapping[int, Point]) -> None:
        self.leaves, self._names = leaves, list(leaves)
        self.ends = {leaf.edge.node: 1 << k for k, leaf in enumerate(leaves.values())}
        self._known = dict(self.ends)
        self._carries: dict[Node, dict[Node, bool]] = {}

    def read_by(self, edge: GradientEdge) -> frozenset[int]:
        """The leaves that a tensor reads by way of no other."""
        return frozenset(self._names[k] for k in members(self.bits(edge)))

    def around(self, root: Point, passed: Iterable[int]) -> Around:
        """What joins, on the way to ``root``, what comes of some leaves, and reads others."""
        return Around(self, root.edge.node, frozenset(passed))

    def before(self, points: Iterable[Point]) -> set[Node]:
        """The nodes of some points, and those that they depend on by way of no leaf."""
        return nodes_before([point.edge.node for point in points], self.ends)

    def bits(self, edge: GradientEdge) -> int:
        """The leaves that a tensor reads, a bit for each."""
        if edge.node not in self._known:
            add_bits([edge.node], self.ends, self._known)
        return self._known[edge.node]

    def bits_of(self, names: Iterable[int]) -> int:
        """A bit for each leaf."""
        return sum(1 << self._names.index(name) for name in names)

    def carries(self, root: Node) -> dict[Node, bool]:
        """Which nodes before a root hold what it holds, and are no coefficients of it."""
        if root not in self._carries:
            self._carries[root] = carrying_before(root, self.ends)
        return self._carries[root]


@dataclass(frozen=True)
class Side:
    """What joins a way, and does not come of the leaves that the way comes of.

    Args:
        edge (GradientEdge): the tensor.
        read (frozenset of int): the leaves that it is made of.
        is_factor (bool, optional): whether it only multiplies, as a gate does. Default: False
        nodes (tuple of Node, optional): where it joins. Default: ()
    """

    edge: GradientEdge
    read: frozenset[int]
    is_factor: bool = False
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Joints:
    """Where ways around some mixers leave the graph before these.

    Args:
        stream (list of GradientEdge): before no other joint, and of no finer tokens than the
            mixers': the residual stream around them.
        skips (list of GradientEdge): the others, by which something skips what leads to the mixers.
        leaves (frozenset of int): those that are read by no joint.
    """

    stream: list[GradientEdge]
    skips: list[GradientEdge]
    leaves: frozenset[int]

    @property
    def edges(self) -> list[GradientEdge]:
        """All of them."""
        return [*self.stream, *self.skips]


class Around:
    """What joins, on the way to a root, what comes of some leaves, and reads others.

    Args:
        graph (SegmentGraph): the graph.
        root (Node): after the leaves.
        passed (frozenset of int): the leaves on whose way it joins.
    """

    def __init__(self, graph: SegmentGraph, root: Node, passed: frozenset[int]) -> None:
        self._graph, self._root, self._through = graph, root, graph.bits_of(passed)

    @cached_property
    def sides(self) -> list[Side]:
        """All that joins."""
        carries = self._graph.carries(self._root)

        def goes_on(edge: GradientEdge) -> bool:
            # What is multiplied by a gate that comes of the leaves is no gate of them.
            return self._passes(edge) and carries.get(edge.node, False)

        joining: dict[GradientEdge, list[tuple[Node, bool]]] = {}
        for node, edge in edges_before(self._root, self._graph.ends, goes_on):
            if self._graph.bits(edge) and not self._passes(edge):
                is_factor = node.name().startswith(FACTORS) and any(map(goes_on, inputs_of(node)))
                joining.setdefault(edge, []).append((node, is_factor))
        return [
            Side(
                edge,
                self._graph.read_by(edge),
                all(is_factor for _, is_factor in nodes),
                tuple(node for node, _ in nodes),
            )
            for edge, nodes in joining.items()
        ]

    @property
    def added(self) -> list[Side]:
        """What is added. Factors are not: a gate is no residual stream."""
        return [side for side in self.sides if not side.is_factor]

    @property
    def first_sums(self) -> list[GradientEdge]:
        """Where something is first added to what comes of the leaves."""
        ends, every = self._graph.ends, {node for side in self.sides for node in side.nodes}
        sums = {node for node in every if not node.name().startswith(FACTORS)}
        later = {node for node in sums if len(sums & nodes_before([node], ends)) > 1}
        return [GradientEdge(node, 0) for node in sums - later]

    def adds(self, point: Point) -> bool:
        """Whether a point itself is added, as it is or in a sum."""
        ends, at = self._graph.ends, (point.edge.node, point.edge.output_nr)

        def keeps(edge: GradientEdge) -> bool:
            name = edge.node.name()
            is_scaled = name.startswith(FACTORS) and not is_product(edge.node)
            return edge.node not in ends and (is_scaled or name.startswith(KEEPING))

        def kept(edge: GradientEdge) -> Iterator[GradientEdge]:
            yield edge
            if keeps(edge):
                yield from (earlier for _, earlier in edges_before(edge.node, ends, keeps))

        terms = (term for side in self.added for term in kept(side.edge))
        return any((term.node, term.output_nr) == at for term in terms)

    def parted(self, before: Collection[Node]) -> list[Side]:
        """All that joins, where a sum of earlier states and of the stream joins, each by itself.

        A model may add up weighted states of all layers before it adds them to the stream: what the
        sum is made of does not tell it from the stream, which joins too.

        Args:
            before (collection of Node): those before the mixers around which the stream goes.
        """
        streams = {side.read for side in self.sides if side.edge.node in before}
        parts = []
        for side in self.sides:
            is_sum = side.read in streams and side.edge.node not in before
            states = self._states(side.edge, before) if is_sum and not side.is_factor else None
            parts += [side] if states is None else [self._side(state) for state in states]
        return parts

    def joints(self, before: Collection[Node], tokens: int) -> Joints:
        """Where what joins leaves the graph before some mixers.

        Args:
            before (collection of Node): those before the mixers.
            tokens (int): T, those of the mixers.
        """
        ends = self._graph.ends
        joints, direct = dict[GradientEdge, set[Node]](), frozenset[int]()
        left, seen = [side.edge for side in self.sides], set[GradientEdge]()
        while left:
            edge = left.pop()
            if edge in seen:
                continue
            seen.add(edge)
            if edge.node in ends:
                direct |= self._graph.read_by(edge)
            elif edge.node in before:
                joints[edge] = nodes_before([edge.node], ends)
            else:
                left += [term for term in inputs_of(edge.node) if self._graph.bits(term)]
        stream = [
            edge
            for edge in joints
            if times_finer(edge, tokens) <= 1
            and not any(
                edge.node in known for o, known in joints.items() if o.node is not edge.node
            )
        ]
        return Joints(stream, [edge for edge in joints if edge not in stream], direct)

    def _passes(self, edge: GradientEdge) -> bool:
        return self._graph.bits(edge) & self._through != 0

    def _side(self, edge: GradientEdge) -> Side:
        return Side(edge, self._graph.read_by(edge))

    def _states(self, edge: GradientEdge, before: Collection[Node]) -> list[GradientEdge] | None:
        # The earlier tensors that one is a weighted sum of; None where it is made of others too.
        node = edge.node
        if node in before:
            is_result = node in self._graph.ends and max(self._graph.read_by(edge)) >= 0
            return None if is_result else [edge]
        terms = [term for term in inputs_of(node) if self._graph.bits(term)]
        is_sum = kind_of(node) in _WEIGHTED or node.name().startswith(VIEWS)
        if not is_sum or (node.name().startswith(FACTORS) and len(terms) > 1):
            return None
        states = [self._states(term, before) for term in terms]
        return None if None in states else [e for edges in states if edges for e in edges] or None


def times_finer(edge: GradientEdge, tokens: int) -> float:
    """How many times as many tokens a tensor holds, channels being its second or last axis."""
    shape = Point.at(edge).shape
    sizes = [math.prod(shape) / shape[axis] for axis in (1, -1) if len(shape) > 1]
    return min(sizes, default=math.inf) / tokens
