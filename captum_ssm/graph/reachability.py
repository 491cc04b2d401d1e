"""What depends on what in an autograd graph, read off its nodes without a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from captum_ssm.graph.kinds import kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.relevance_rules import carrying_before

# Operations whose inputs are multiplied.
_FACTORS = ("Mul", "Div")
# Nodes of these names keep what they are given, as it is or in a sum.
_VIEWS = ("Clone", "ToCopy", "View", "Reshape", "Unsafe", "Transpose", "T0", "Permute")
KEEPING = ("Add", *_VIEWS)
# Kinds whose inputs are added up, with one of them times a number.
_WEIGHTED = frozenset(("Add", "Div", "Mul", "Rsub", "Sub"))


def dependencies(roots: Sequence[Point | None], leaves: Sequence[Point]) -> list[frozenset[int]]:
    """The leaves that each root depends on, read off the graph without a backward pass.

    Leaves before another leaf count too. A root that is None depends on nothing.
    """
    bits = {leaf.edge.node: 1 << i for i, leaf in enumerate(leaves)}
    known: dict[Node, int] = {}
    _add_bits([root.edge.node for root in roots if root is not None], bits, known)
    return [
        frozenset() if root is None else frozenset(_members(known[root.edge.node]))
        for root in roots
    ]


def _add_bits(roots: Iterable[Node], bits: Mapping[Node, int], known: dict[Node, int]) -> None:
    # To what is known by node, for all nodes before the roots: the bits of those it depends on.
    for root in roots:
        stack = [root]
        before: dict[Node, list[Node]] = {}  # of the nodes on the stack: slow to ask for
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
            elif node not in before:
                before[node] = [n for n, _ in node.next_functions if n is not None]
                stack.extend(n for n in before[node] if n not in known)
            else:
                stack.pop()
                mask = bits.get(node, 0)
                for n in before.pop(node):
                    mask |= known[n]
                known[node] = mask


def _members(bits: int) -> Iterator[int]:
    return (i for i in range(bits.bit_length()) if bits >> i & 1)


def is_read_past(root: Point, leaf: Point, *between: Point) -> bool:
    """Whether a root depends on a leaf by another way too than through points between them."""
    return leaf.edge.node in nodes_before([root.edge.node], {point.edge.node for point in between})


@dataclass(frozen=True)
class Joints:
    """Where the graph before a root joins that before an earlier point, by no leaf.

    Args:
        stream (list of GradientEdge): before no other joint, and of no finer tokens than the point:
            the residual stream around a mixer whose tokens the point holds.
        past (list of GradientEdge): the others, by which something skips what leads to the point.
        leaves (frozenset of int): those that the root reads by no joint.
    """

    stream: list[GradientEdge]
    past: list[GradientEdge]
    leaves: frozenset[int]


@dataclass(frozen=True)
class Side:
    """What joins a way, and does not come of the leaves that the way comes of.

    Args:
        edge (GradientEdge): the tensor.
        read (frozenset of int): the leaves that it is made of.
        is_factor (bool, optional): whether it only multiplies, as a gate does. Default: False
        count (int, optional): how often it joins. Default: 1
    """

    edge: GradientEdge
    read: frozenset[int]
    is_factor: bool = False
    count: int = 1


class SegmentGraph:
    """A graph that is cut at its leaves: how its tensors read these by way of no other one.

    Args:
        leaves (mapping of int to Point): by name, where it is cut.
    """

    def __init__(self, leaves: Mapping[int, Point]) -> None:
        self._names = list(leaves)
        self._ends = {leaf.edge.node: 1 << k for k, leaf in enumerate(leaves.values())}
        self._known = dict(self._ends)
        self._carries: dict[Node, dict[Node, bool]] = {}

    def read_by(self, edge: GradientEdge) -> frozenset[int]:
        """The leaves that a tensor reads by way of no other."""
        return self._named(self._bits(edge))

    def joints(self, root: Point, entries: Sequence[Point]) -> Joints:
        """Where the graph before ``root`` joins that before ``entries``, earlier points.

        The last of them is the one whose tokens count.
        """
        before = nodes_before([entry.edge.node for entry in entries], self._ends)
        joints, direct = dict[GradientEdge, set[Node]](), 0
        for _, edge in edges_before(root.edge.node, self._ends, lambda one: one.node not in before):
            if edge.node in self._ends:
                direct |= self._ends[edge.node]
            elif edge.node in before and edge.node.next_functions:  # a parameter has none
                joints[edge] = nodes_before([edge.node], self._ends)
        stream = [
            edge
            for edge in joints
            if _times_finer(edge, entries[-1].tokens) <= 1
            and not any(
                edge.node in known for o, known in joints.items() if o.node is not edge.node
            )
        ]
        past = [edge for edge in joints if edge not in stream]
        return Joints(stream, past, self._named(direct))

    def added(
        self, root: Point, passed: Collection[int], before: Collection[int], tokens: int | None
    ) -> frozenset[int]:
        """The leaves read by what is added, on the way to ``root``, to what comes of some leaves.

        Factors are not added: a gate is no residual stream. Nor are finer tokens, as those of a
        skip connection.

        Args:
            root (Point): after the leaves.
            passed (collection of int): the leaves on whose way it is added.
            before (collection of int): what is added reads no others.
            tokens (int, optional): T, those of the leaves passed, where there are finer ones.
        """
        sides = self.sides(root, passed, tokens)
        reads = (side.read for side in sides if not side.is_factor)
        return frozenset().union(*(read for read in reads if read <= frozenset(before)))

    def sides(self, root: Point, passed: Collection[int], tokens: int | None) -> list[Side]:
        """What joins, on the way to ``root``, what comes of some leaves, and reads others.

        The arguments are those of :meth:`added`.
        """
        through, start = self._bits_of(passed), root.edge.node
        if start not in self._carries:
            self._carries[start] = carrying_before(start, self._ends)
        carries = self._carries[start]

        def passes(edge: GradientEdge) -> bool:
            return self._bits(edge) & through != 0

        def goes_on(edge: GradientEdge) -> bool:
            # What is multiplied by a gate that comes of the leaves is no gate of them.
            return passes(edge) and carries.get(edge.node, False)

        joining: dict[GradientEdge, list[bool]] = {}
        for node, edge in edges_before(start, self._ends, goes_on):
            if self._bits(edge) and not passes(edge):
                is_product = node.name().startswith(_FACTORS)
                is_factor = is_product and any(map(goes_on, _inputs(node)))
                joining.setdefault(edge, []).append(is_factor)
        return [
            Side(edge, self.read_by(edge), all(are_factors), len(are_factors))
            for edge, are_factors in joining.items()
            if tokens is None or _times_finer(edge, tokens) < 2
        ]

    def parted(self, sides: Sequence[Side], entries: Sequence[Point]) -> list[Side]:
        """The sides, where a sum of earlier states and of the stream joins, each by itself.

        A model may add up weighted states of all layers before it adds them to the stream: what the
        sum is made of does not tell it from the stream, which joins too.

        Args:
            sides (sequence of Side): of :meth:`sides`.
            entries (sequence of Point): what the mixers are given around which the stream goes.
        """
        before = nodes_before([entry.edge.node for entry in entries], self._ends)
        streams = {side.read for side in sides if side.edge.node in before}
        parts = []
        for side in sides:
            is_sum = side.read in streams and side.edge.node not in before
            states = self._states(side.edge, before) if is_sum and not side.is_factor else None
            parts += [side] if states is None else [Side(e, self.read_by(e)) for e in states]
        return parts

    def _states(self, edge: GradientEdge, before: Collection[Node]) -> list[GradientEdge] | None:
        # The earlier tensors that one is a weighted sum of; None where it is made of others too.
        node = edge.node
        if node in before:
            is_result = node in self._ends and any(k >= 0 for k in self.read_by(edge))
            return None if is_result else [edge]
        terms = [term for term in _inputs(node) if self._bits(term)]
        is_product = node.name().startswith(_FACTORS) and len(terms) > 1
        if is_product or not (kind_of(node) in _WEIGHTED or node.name().startswith(_VIEWS)):
            return None
        states = [self._states(term, before) for term in terms]
        return None if None in states else [e for edges in states if edges for e in edges] or None

    def sums(self, root: Point, passed: Collection[int]) -> list[GradientEdge]:
        """Where, on the way to ``root``, something else is first added to what comes of leaves.

        The arguments are those of :meth:`added`.
        """
        through = self._bits_of(passed)

        def passes(edge: GradientEdge) -> bool:
            return self._bits(edge) & through != 0

        nodes = {
            node
            for node, edge in edges_before(root.edge.node, self._ends, passes)
            if self._bits(edge) and not passes(edge) and not node.name().startswith(_FACTORS)
        }
        later = {node for node in nodes if len(nodes & nodes_before([node], self._ends)) > 1}
        return [GradientEdge(node, 0) for node in nodes - later]

    def is_added(self, root: Point, passed: Collection[int], point: Point) -> bool:
        """Whether a point itself is added, on the way to ``root``, to what comes of some leaves."""

        def keeps(edge: GradientEdge) -> bool:
            name = edge.node.name()
            is_scaled = name.startswith(_FACTORS) and not _is_product(edge.node)
            return edge.node not in self._ends and (is_scaled or name.startswith(KEEPING))

        def kept(edge: GradientEdge) -> Iterator[GradientEdge]:
            yield edge
            if keeps(edge):
                yield from (earlier for _, earlier in edges_before(edge.node, self._ends, keeps))

        at = point.edge.node, point.edge.output_nr
        sides = self.sides(root, passed, None)
        kept_of = (kept(side.edge) for side in sides if not side.is_factor)
        return any(
            (earlier.node, earlier.output_nr) == at for edges in kept_of for earlier in edges
        )

    def _bits(self, edge: GradientEdge) -> int:
        if edge.node not in self._known:
            _add_bits([edge.node], self._ends, self._known)
        return self._known[edge.node]

    def _bits_of(self, names: Collection[int]) -> int:
        return sum(1 << self._names.index(name) for name in names)

    def _named(self, bits: int) -> frozenset[int]:
        return frozenset(self._names[k] for k in _members(bits))


def meetings(roots: Sequence[Point], leaves: Sequence[Point]) -> Iterator[GradientEdge]:
    """The tensors that all ways from some roots to some leaves pass, the earliest first.

    The roots and the leaves themselves are left out.
    """
    ends = {leaf.edge.node for leaf in leaves}
    known = dict.fromkeys(ends, 1)
    _add_bits([root.edge.node for root in roots], {}, known)
    # Earlier ones first.
    nodes = [node for node, bits in known.items() if bits and node not in ends]
    ways: dict[Any, int] = dict.fromkeys(ends, 1)  # to the leaves
    for node in nodes:
        ways[node] = sum(ways.get(earlier, 0) for earlier, _ in node.next_functions)
    starts = [root.edge.node for root in roots if root.edge.node in ways]
    total = sum(ways[node] for node in starts)
    # From the roots, by node, and by which of the tensors that it returned: -1 to begin with.
    arriving = {node: dict[int, int]() for node in nodes}
    for node in starts:
        if node in arriving:
            arriving[node][-1] = 1 + arriving[node].get(-1, 0)
    for node in reversed(nodes):
        count = sum(arriving[node].values())
        for earlier, output in node.next_functions:
            if earlier is not None and earlier in arriving:
                arriving[earlier][output] = count + arriving[earlier].get(output, 0)
    for node in nodes:
        for output, count in arriving[node].items():
            # What as many ways pass as there are, all do.
            if output >= 0 and count * ways[node] == total:
                yield GradientEdge(node, output)


def edges_before(
    root: Node,
    ends: Collection[Node] = (),
    enters: Callable[[GradientEdge], bool] = lambda edge: True,
) -> Iterator[tuple[Node, GradientEdge]]:
    """The nodes from a root to the ends, each with each of its inputs.

    What is before an input is looked at only where the input is entered.
    """
    seen, stack = set(ends), [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in _inputs(node):
            yield node, edge
            if enters(edge):
                stack.append(edge.node)


def reaches_by_sums(root: Node, start: Node, ends: Collection[Node]) -> bool:
    """Whether a way from a node back to one of the ends passes no product with another tensor."""

    def is_alone(edge: GradientEdge) -> bool:
        return not _is_product(edge.node)

    first = GradientEdge(root, 0)
    return is_alone(first) and any(e.node is start for _, e in edges_before(root, ends, is_alone))


def _is_product(node: Node) -> bool:
    # Several tensors are multiplied, not one by a number.
    return node.name().startswith(_FACTORS) and len([*_inputs(node)]) > 1


def _inputs(node: Node) -> Iterator[GradientEdge]:
    return (GradientEdge(n, output) for n, output in node.next_functions if n is not None)


def nodes_before(roots: Iterable[Node], ends: Collection[Node] = ()) -> set[Node]:
    """Some nodes and those that they depend on; the ends too, but not what is before these."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack.extend(n for n, _ in node.next_functions if n is not None)
    return seen


def _times_finer(edge: GradientEdge, tokens: int) -> float:
    # How many times as many tokens a tensor holds, channels being its second or last axis.
    shape = Point.at(edge).shape
    sizes = [math.prod(shape) / shape[axis] for axis in (1, -1) if len(shape) > 1]
    return min(sizes, default=math.inf) / tokens


def is_closed(root: Tensor, tensors: Collection[Tensor], parameters: Collection[int]) -> bool:
    """Whether a tensor depends on some tensors, and else on nothing but some parameters."""
    ends = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)}
    stops = {node for node, _ in ends}
    start = get_gradient_edge(root).node
    for _, edge in edges_before(start, (), lambda edge: edge.node not in stops):
        leaf = getattr(edge.node, "variable", None)
        if edge.node in stops:
            if (edge.node, edge.output_nr) not in ends:
                return False
        elif leaf is not None and id(leaf) not in parameters:
            return False
    return True


def before_view(point: Point) -> Point | None:
    """What a tensor is a view or a copy of, its channels last; None where it is computed."""
    node = point.edge.node
    inputs = [GradientEdge(n, k) for n, k in node.next_functions if n is not None]
    if len(inputs) != 1 or not node.name().startswith(_VIEWS):
        return None
    return Point.at(inputs[0])
