"""Products of tokens with others, outside of the mixers: a recurrence that nobody knows has them.

The rules of relevance halve a product. That is right of a gate, whose factors are made of the same
token of some tensor, or of its neighbors. In a recurrence one of the factors is a coefficient, and
has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.kinds import Node, followed_by, kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.relevance_rules import products, ruled
from captum_ssm.wiring.ledger import points
from captum_ssm.wiring.mixer_graph import MixerGraph

# So many products are looked at of those that look alike, such as the steps of a loop, at so many
# of their entries.
_PRODUCTS, _ENTRIES = 8, 8
# Neighbors, as a token shift or a short convolution reads them. What is further away is read by
# exactly nothing, and by a recurrence, however fast it forgets.
_NEAR = 4


def token_products(graph: MixerGraph, output: Point | None) -> str | None:
    """The kinds of products of tokens with others than their neighbors, in words; None for none.

    Args:
        graph (MixerGraph): the run, its orders known.
        output (Point, optional): what the run ends with.
    """
    ends = [point for point in (*graph.entries.values(), output) if point is not None]
    roots = list(dict.fromkeys(point.edge.node for point in ends))
    starts = _cuts(graph)
    kinds, shifts = set[str](), set[Node]()
    with torch.enable_grad(), ruled(roots, starts) as carries:
        order = {node: k for k, node in enumerate(carries) if carries[node]}
        # No relevance goes through products that only gates are made of.
        every = [(node, factors) for node, factors in products(roots, starts) if node in order]
        for node, factors in sorted(_unlike(every), key=lambda product: order[product[0]]):
            if kind_of(node) in kinds:
                continue
            if _is_of_others(node, factors, order, graph, shifts):
                kinds.add(kind_of(node))
    if not kinds:
        return None
    how = ", ".join(sorted(kinds))
    return f"outside of its mixers tokens are mixed by products with other tokens ({how})"


def _cuts(graph: MixerGraph) -> list[Node]:
    # The inputs too, where it is known which token is which patch.
    leaves = (*graph.leaves, *(way.leaf for way in graph.inputs))
    return list(dict.fromkeys(leaf.edge.node for leaf in leaves))


def _unlike(every: Sequence[tuple[Node, list[int]]]) -> Iterator[tuple[Node, list[int]]]:
    # Some of the products that look alike, the first and the last of them too.
    groups: dict[object, list[tuple[Node, list[int]]]] = {}
    for node, factors in every:
        edges = _inputs(node, factors)
        look = [(edge.node.name(), Point.at(edge).shape) for edge in edges]
        groups.setdefault((node.name(), *look), []).append((node, factors))
    for group in groups.values():
        chosen = torch.linspace(0, len(group) - 1, min(len(group), _PRODUCTS)).round()
        yield from (group[int(k)] for k in chosen)


def _inputs(node: Node, indices: Collection[int]) -> list[GradientEdge]:
    return [GradientEdge(*node.next_functions[i]) for i in indices]


def _is_of_others(
    node: Node,
    factors: Sequence[int],
    order: Mapping[Node, int],
    graph: MixerGraph,
    shifts: set[Node],
) -> bool:
    # Whether a product is that of a recurrence. Tensors that all ways from its factors pass tell:
    # an entry that is made of one token of the latest is a gate, and of tokens far apart, none.
    # Neighbors are multiplied by gates of a token shift, which are noted, and by recurrences: they
    # multiply what was multiplied, and so on until it is far.
    edges, entries = _inputs(node, factors), [*_of_entries(node, factors)]
    counts = {graph.exits[i].tokens for i in range(graph.end)}
    is_shift, vectors = False, list[GradientEdge]()
    for meeting, is_passed in _meetings(edges, order, _cuts(graph), shifts):
        held = (point for point in points(meeting, graph.batch) if point.tokens in counts)
        point = next(held, None)
        if point is None:
            vectors.append(meeting)
            continue
        if is_shift and not is_passed:
            continue
        if not is_shift and any(_is_vector(edge, point) for edge in vectors):
            return False
        places, is_one = _places(point, graph), True
        for seeds in entries:
            reads = [places[_read(*factor, point)] for factor in zip(edges, seeds, strict=True)]
            if _are_apart(reads, places):
                return True
            is_one = is_one and len(torch.cat(reads).unique(dim=0)) < 2
        if not is_shift and (is_one or is_passed):
            return not is_one
        is_shift = True
        shifts.add(node)
    return not is_shift and any(_are_apart_in_mixers(edges, seeds, graph) for seeds in entries)


def _are_apart_in_mixers(
    edges: Sequence[GradientEdge], entry: Sequence[Tensor | None], graph: MixerGraph
) -> bool:
    # Where no tensor joins them, tokens of several mixers tell, in the model's order: of the latest
    # one that each factor reads, as around earlier ones token shifts add up to longer ones.
    leaves = {i: leaf for i, leaf in graph.exits.items() if leaf.shape[0] == graph.batch}
    for count in {leaf.tokens for i, leaf in leaves.items() if i >= 0}:
        alike = [i for i in sorted(leaves, reverse=True) if leaves[i].tokens == count]
        places = _places(leaves[alike[0]], graph)
        reads = []
        for edge, seed in zip(edges, entry, strict=True):
            every = ((_read(edge, seed, leaves[i]), i) for i in alike)
            reads += [places[graph.order(i)[read]] for read, i in every if len(read)][:1]
        if _are_apart(reads, places):
            return True
    return False


def _meetings(
    edges: Sequence[GradientEdge],
    order: Mapping[Node, int],
    ends: Collection[Node],
    marked: Collection[Node],
) -> Iterator[tuple[GradientEdge, bool]]:
    # The tensors that all ways from some edges to the ends pass, the latest first, and whether a
    # marked node lies on the ways there.
    waiting: dict[int, set[GradientEdge]] = {}
    new, is_passed = list(edges), False
    while True:
        for edge in new:
            waiting.setdefault(order[edge.node], set()).add(edge)
        latest = waiting.pop(max(waiting))
        edge = next(iter(latest))
        if not waiting and len(latest) == 1:
            yield edge, is_passed
        if edge.node in ends:
            return
        is_passed = is_passed or edge.node in marked
        before = _inputs(edge.node, followed_by(edge.node))
        new = [edge for edge in before if edge.node in order]


def _is_vector(edge: GradientEdge, point: Point) -> bool:
    # Whether an edge holds a vector of each example that is made of the same tokens throughout, as
    # what is pooled: products within it are gates.
    form = Point.at(edge)
    if sum(size > 1 for size in form.shape[1:]) > 1:
        return False
    seeds = torch.zeros(2, math.prod(form.shape), dtype=form.dtype, device=form.device)
    seeds[0, 0] = seeds[1, seeds.shape[1] // form.shape[0] - 1] = 1
    first, last = (_read(edge, seed.view(form.shape), point) for seed in seeds)
    return len(first) > 0 and torch.equal(first, last)


def _of_entries(node: Node, factors: Sequence[int]) -> Iterator[list[Tensor | None]]:
    # The gradients of some entries of a product at its factors, rules aside: of the first, of the
    # last, and of others between.
    form = node._input_metadata[0]
    seed = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(seed.numel(), (_ENTRIES - 2,), generator=generator).tolist()
    for entry in {0, seed.numel() - 1, *others}:
        seed.zero_().view(-1)[entry] = 1
        with torch.no_grad():
            gradients = node(seed)
        yield [gradients[i] for i in factors]


def _read(edge: GradientEdge, gradient: Tensor | None, point: Point) -> Tensor:
    # The tokens of a point that are read by an edge, by number. What is not read is exactly zero.
    form = Point.at(edge)
    if gradient is None:
        return torch.zeros(0, dtype=torch.long)
    seed = gradient.sum_to_size(form.shape).to(form.dtype)
    (pulled,) = torch.autograd.grad(edge, [point.edge], seed, retain_graph=True, allow_unused=True)
    if pulled is None:
        return torch.zeros(0, dtype=torch.long)
    return (point.flat(pulled).abs() > 0).any(-1).nonzero()[:, 0].cpu()


def _places(point: Point, graph: MixerGraph) -> Tensor:
    # Where the tokens of a point are: (T, axes), the first one that of the batch.
    shape = list(point.shape)
    shape.pop(-1 if point.channels is None else point.channels)
    sizes = [way.leaf.shape[-2:] for way in graph.inputs if len(way.leaf.shape) == 4]
    if len(shape) == 2 and sizes:  # patches, row by row, perhaps after other tokens
        rows, columns = sizes[0]
        columns = max(1, round(math.sqrt(shape[1] * columns / rows)))
        at = torch.arange(shape[1]) - shape[1] % columns
        at = torch.stack([at // columns, at % columns], 1).repeat(shape[0], 1)
        of_batch = torch.arange(shape[0]).repeat_interleave(shape[1])
        return torch.cat([of_batch[:, None], at], 1)
    return torch.cartesian_prod(*map(torch.arange, shape)).view(point.tokens, -1)


def _are_apart(reads: Sequence[Tensor], places: Tensor) -> bool:
    # Whether some of the factors are made of tokens, at these places, that are no neighbors.
    near = ((places.amax(0) + 1) // 4).clamp(1, _NEAR)
    near[0] = 0
    return any(
        bool((torch.maximum(a.amax(0) - b.amin(0), b.amax(0) - a.amin(0)) > near).any())
        for a, b in combinations([read for read in reads if len(read)], 2)
    )
