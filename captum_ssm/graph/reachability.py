"""What depends on what in an autograd graph, read off its nodes without a backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from captum_ssm.graph.points import Point

# Operations whose inputs are multiplied.
FACTORS = ("Mul", "Div")
# Nodes of these names keep what they are given, as it is or in a sum.
_AXES = ("Transpose", "T0", "Permute", "Squeeze", "Unsqueeze")
VIEWS = ("Clone", "ToCopy", "View", "Reshape", "Unsafe", *_AXES)
KEEPING = ("Add", *VIEWS)
_STEPS = 4  # of a loop, at least: fewer may be parts that are added to one another
JOINS, PARTS = ("Stack", "Cat"), ("Select", "Slice", "Unbind", "Split")


def dependencies(later: Sequence[Point | None], earlier: Sequence[Point]) -> list[frozenset[int]]:
    """The earlier points that each later one depends on, without a backward pass.

    Those before another earlier point count too. A later point that is None depends on nothing.
    """
    bits = {point.edge.node: 1 << i for i, point in enumerate(earlier)}
    known: dict[Node, int] = {}
    add_bits([point.edge.node for point in later if point is not None], bits, known)
    return [
        frozenset() if point is None else frozenset(members(known[point.edge.node]))
        for point in later
    ]


def add_bits(later: Iterable[Node], bits: Mapping[Node, int], known: dict[Node, int]) -> None:
    """Add to what is ``known`` by node, for all nodes up to later ones, the bits they depend on."""
    for start in later:
        stack = [start]
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


def members(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    return (i for i in range(bits.bit_length()) if bits >> i & 1)


def is_read_around(later: Point, earlier: Point, *between: Point) -> bool:
    """Whether one point depends on another by another way too than through points between them."""
    return earlier.edge.node in nodes_before(
        [later.edge.node], {point.edge.node for point in between}
    )


def meetings(later: Sequence[Point], earlier: Sequence[Point]) -> Iterator[GradientEdge]:
    """The tensors that all ways from later points to earlier ones pass, the earliest first.

    These points themselves are left out.
    """
    ends = {point.edge.node for point in earlier}
    known = dict.fromkeys(ends, 1)
    add_bits([point.edge.node for point in later], {}, known)
    # Earlier ones first.
    nodes = [node for node, bits in known.items() if bits and node not in ends]
    ways: dict[Any, int] = dict.fromkeys(ends, 1)  # to the earlier points
    for node in nodes:
        ways[node] = sum(ways.get(before, 0) for before, _ in node.next_functions)
    starts = [point.edge.node for point in later if point.edge.node in ways]
    total = sum(ways[node] for node in starts)
    # From the later points, by node, and by which of its results: -1 to begin with.
    arriving = {node: dict[int, int]() for node in nodes}
    for node in starts:
        if node in arriving:
            arriving[node][-1] = 1 + arriving[node].get(-1, 0)
    for node in reversed(nodes):
        count = sum(arriving[node].values())
        for before, output in node.next_functions:
            if before is not None and before in arriving:
                arriving[before][output] = count + arriving[before].get(output, 0)
    for node in nodes:
        for output, count in arriving[node].items():
            # What as many ways pass as there are, all do.
            if output >= 0 and count * ways[node] == total:
                yield GradientEdge(node, output)


def edges_before(
    later: Node,
    ends: Collection[Node] = (),
    enters: Callable[[GradientEdge], bool] = lambda edge: True,
) -> Iterator[tuple[Node, GradientEdge]]:
    """The nodes from a later one to the ends, each with each of its inputs.

    What is before an input is looked at only where the input is entered.
    """
    seen, stack = set(ends), [later]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in inputs_of(node):
            yield node, edge
            if enters(edge):
                stack.append(edge.node)


def reaches_by_sums(later: Node, start: Node, ends: Collection[Node]) -> bool:
    """Whether a way from a node back to one of the ends passes no product with another tensor."""

    def is_alone(edge: GradientEdge) -> bool:
        return not is_product(edge.node)

    first = GradientEdge(later, 0)
    return is_alone(first) and any(e.node is start for _, e in edges_before(later, ends, is_alone))


def is_product(node: Node) -> bool:
    """Whether several tensors are multiplied, not one by a number."""
    return node.name().startswith(FACTORS) and len([*inputs_of(node)]) > 1


def inputs_of(node: Node) -> Iterator[GradientEdge]:
    """What a node was given, as far as it was recorded."""
    return (GradientEdge(n, output) for n, output in node.next_functions if n is not None)


def nodes_before(later: Iterable[Node], ends: Collection[Node] = ()) -> set[Node]:
    """Some nodes and those that they depend on; the ends too, but not what is before these."""
    seen: set[Node] = set()
    stack = list(later)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack.extend(n for n, _ in node.next_functions if n is not None)
    return seen


def takes_steps(nodes: Collection[Node]) -> bool:
    """Whether nodes are of a loop, whose steps take one entry of an axis each.

    What first reads ``x[:, t]`` is then at another depth for each t, however the results are put
    together.
    """
    depth = dict[Node, int]()
    waiting = [*nodes]
    while waiting:
        node = waiting[-1]
        before = [n for n, _ in node.next_functions if n is not None and n in nodes]
        if later := [n for n in before if n not in depth]:
            waiting += later
        else:
            depth[node] = 1 + max((depth[n] for n in before), default=0)
            waiting.pop()
    readers = defaultdict[Any, dict[int, int]](dict)  # the depth of the first, by entry
    for node in nodes:
        reads: list[Any] = [n for n, _ in node.next_functions if n in nodes]
        for taken in reads:
            if taken.name().startswith("Select"):
                first = readers[taken.next_functions[0], taken._saved_dim]
                entry = taken._saved_index
                first[entry] = min(depth[node], first.get(entry, depth[node]))
    return any(len({*first.values()}) >= _STEPS for first in readers.values())


def is_closed(later: Tensor, tensors: Collection[Tensor], parameters: Collection[int]) -> bool:
    """Whether a tensor depends on some tensors, and else on nothing but some parameters."""
    ends = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)}
    stops = {node for node, _ in ends}
    start = get_gradient_edge(later).node
    for _, edge in edges_before(start, (), lambda edge: edge.node not in stops):
        variable = getattr(edge.node, "variable", None)
        if edge.node in stops:
            if (edge.node, edge.output_nr) not in ends:
                return False
        elif variable is not None and id(variable) not in parameters:
            return False
    return True


def before_view(point: Point) -> Point | None:
    """What a tensor is a view or a copy of, or is put together of views of, its channels last.

    None where it is computed.
    """
    inputs, name = [*inputs_of(point.edge.node)], point.edge.node.name()
    if name.startswith(VIEWS) and len(inputs) == 1:
        return Point.at(inputs[0])
    if not inputs or not name.startswith(JOINS):
        return None
    first, *others = (_viewed(edge) for edge in inputs)
    shared = (key for key in first if all(key in other for other in others))
    return next((Point.at(GradientEdge(*key)) for key in shared), None)


def _viewed(edge: GradientEdge) -> list[tuple[Node, int]]:
    # What a tensor is a part or a view of, by node and output, itself first.
    viewed = [(edge.node, edge.output_nr)]
    while edge.node.name().startswith((*VIEWS, *PARTS)):
        (edge,) = inputs_of(edge.node)
        viewed.append((edge.node, edge.output_nr))
    return viewed
