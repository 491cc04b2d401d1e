"""Products of tokens with others, outside of the mixers: a recurrence that nobody knows has them.

The rules of relevance halve a product. That is right of a gate, whose factors are made of the same
token, or of its neighbors. In a recurrence one of the factors is a coefficient, and has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.kinds import Node, kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.relevance_rules import products, ruled
from captum_ssm.wiring.mixer_graph import MixerGraph

# So many products are looked at, at so many of their entries. Those of a loop are alike.
_PRODUCTS, _ENTRIES = 32, 2
# Neighbors, as a token shift or a short convolution reads them, and the least share of others: of a
# recurrence it falls with what it forgets, and rounding is less.
_NEAR, _LEAST = 4, 1e-7


def token_products(graph: MixerGraph, output: Point | None) -> str | None:
    """The kinds of products of tokens with others than their neighbors, in words; None for none.

    Patches of an image, whose neighbors are others, are not looked at.

    Args:
        graph (MixerGraph): the run, its orders known.
        output (Point, optional): what the run ends with.
    """
    if min(graph.exits) >= 0:
        return None
    points = [point for point in (*graph.entries.values(), output) if point is not None]
    ends = list(dict.fromkeys(point.edge.node for point in points))
    leaves = {i: leaf for i, leaf in graph.exits.items() if leaf.shape[0] == graph.batch}
    starts = [leaf.edge.node for leaf in graph.leaves]
    every = products(ends, starts)
    step = -(-len(every) // _PRODUCTS) or 1
    kinds = set[str]()
    with torch.enable_grad(), ruled(ends, starts):
        for node, factors in every[::step]:
            if kind_of(node) not in kinds and _is_far(node, factors, graph, leaves):
                kinds.add(kind_of(node))
    if not kinds:
        return None
    how = ", ".join(sorted(kinds))
    return f"outside of its mixers tokens are mixed by products with other tokens ({how})"


def _is_far(
    node: Node, factors: Sequence[int], graph: MixerGraph, leaves: dict[int, Point]
) -> bool:
    # Whether an entry of a product is made of tokens far apart.
    for gradients in _of_entries(node):
        made_of = [
            _energies(GradientEdge(*node.next_functions[i]), gradient, graph, leaves)
            for i in factors
            if (gradient := gradients[i]) is not None
        ]
        for k, first in enumerate(made_of):
            for second in made_of[k + 1 :]:
                if any(_are_apart(first[T], second[T]) for T in first.keys() & second.keys()):
                    return True
    return False


def _of_entries(node: Node) -> Iterator[tuple[Tensor | None, ...]]:
    # The gradients of some entries of a product at what it is made of, rules aside.
    form = node._input_metadata[0]
    generator = torch.Generator().manual_seed(0)
    seed = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
    for entry in torch.randint(seed.numel(), (_ENTRIES,), generator=generator).tolist():
        seed.zero_().view(-1)[entry] = 1
        with torch.no_grad():
            yield node(seed)


def _energies(
    edge: GradientEdge, gradient: Tensor, graph: MixerGraph, leaves: dict[int, Point]
) -> dict[int, Tensor]:
    # How strongly a factor reads tokens (T,), in the model's order, by their number: those of the
    # latest mixer, as around earlier ones token shifts add up to longer ones.
    form = Point.at(edge)
    pulled = torch.autograd.grad(
        edge,
        [leaf.edge for leaf in leaves.values()],
        gradient.sum_to_size(form.shape).to(form.dtype),
        retain_graph=True,
        allow_unused=True,
    )
    total: dict[int, Tensor] = {}
    for (i, leaf), g in sorted(zip(leaves.items(), pulled, strict=True), key=_number):
        if g is not None and bool(g.any()):
            energy = graph.in_order(i, leaf.flat(g).abs().double().square().sum(-1).cpu())
            total[energy.shape[1]] = energy.sum(0)
    return total


def _number(read: tuple[tuple[int, Point], Tensor | None]) -> int:
    return read[0][0]


def _are_apart(first: Tensor, second: Tensor) -> bool:
    # Whether more than a little of two tokens' product is of tokens that are no neighbors.
    place = torch.arange(len(first))
    near = (place[:, None] - place).abs() <= min(_NEAR, max(1, len(first) // 4))
    whole = float(first.sum() * second.sum())
    return whole > 0 and float(first @ near.double() @ second) < (1 - _LEAST) * whole
