"""Rules for relevance on the nodes of an autograd graph: one rule per kind of node.

Linear operations conserve gradient times input. Everything else between two frozen mixers (MLPs,
experts and their routers, gates, soft caps, norms) is in the graph that autograd recorded,
whichever module computed it, so the rules are attached to the graph's nodes. The values of the
forward pass do not change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor, nn

from captum_ssm.graph.in_place import COPY_SLICES, is_hidden
from captum_ssm.graph.kinds import (
    PRODUCTS,
    Node,
    followed_by,
    is_gate,
    is_without_rule,
    kind_of,
    missing_in,
)
from captum_ssm.graph.node_rules import BENDING, RULES, Rule, is_mean_of_channels, rule_of
from captum_ssm.utils.blocks import contextmanager


@contextmanager
def ruled(
    ends: Sequence[Node], starts: Sequence[Node], *, centered: bool = True
) -> Iterator[dict[Node, bool]]:
    """Attach the rules to the nodes between ``starts`` and ``ends``; gradients then obey them.

    Yields whether relevance goes on from a node to one of the starts, for each node visited. If
    ``centered``, a norm subtracts the mean over channels on the way back too.
    """
    visits, carries = _carrying(ends, starts)
    with ExitStack() as stack:
        for node, carrying, gates in visits:
            if carrying and not carries[node]:
                continue
            if carrying and kind_of(node) == COPY_SLICES:
                is_hidden(node)  # raises, unless nothing more can be seen
            rule = rule_of(node, carrying, gates, centered=centered)
            if rule is not None:
                # The user's own graph may share these nodes.
                stack.callback(node.register_hook(_where_reached(rule)).remove)
        yield carries


def _where_reached(rule: Rule) -> Rule:
    # A later function without a gradient may let none through to the node.
    return lambda inner, outer: (
        rule(inner, outer) if any(g is not None for g in outer) else (*inner,)
    )


class _NodeVisit(NamedTuple):
    # A node, the inputs by which relevance goes on to a start, and which of them are gates: factors
    # of a product that count as coefficients.
    node: Node
    carrying: set[int]
    gates: set[int]


def carrying(
    ends: Sequence[Node], starts: Collection[Node], stops: Collection[Node] = ()
) -> dict[Node, bool]:
    """Whether relevance goes on from a node to one of the starts, for each node before the ends.

    It does not go on from coefficients, or from the stops. Nodes that it does not come to are
    left out.
    """
    return _carrying(ends, starts, stops)[1]


def carrying_before(end: Node, starts: Collection[Node]) -> dict[Node, bool]:
    """What :func:`carrying` says of the values that the last functions make coefficients of.

    A model may return probabilities: relevance would go on from none of them.
    """
    last, passed = [end], dict[Node, bool]()
    while last:
        carries = carrying(last, starts)
        if any(carries[node] for node in last):
            return carries | passed
        passed |= dict.fromkeys(last, True)
        last = [child for node in last for child, _ in node.next_functions if child is not None]
    return passed


def _carrying(
    ends: Sequence[Node], starts: Collection[Node], stops: Collection[Node] = ()
) -> tuple[list[_NodeVisit], dict[Node, bool]]:
    # The nodes between, after their inputs.
    visits: list[_NodeVisit] = []
    carries: dict[Node, bool] = dict.fromkeys(stops, False) | dict.fromkeys(starts, True)
    stack = list(ends)
    while stack:
        node = stack[-1]
        children = [child for child, _ in node.next_functions]
        followed = {i: children[i] for i in followed_by(node) if children[i] is not None}
        unvisited = [child for child in followed.values() if child not in carries]
        if node in carries:
            stack.pop()
        elif unvisited:
            stack.extend(unvisited)
        else:
            carrying = {i for i, child in followed.items() if carries[child]}
            carries[node] = bool(carrying)
            visits.append(_NodeVisit(node, carrying, _gates(node, carrying, children)))
    if any(visit.gates for visit in visits):
        _leave_out(visits, ends, carries)
    return visits, carries


def _gates(node: Node, carrying: set[int], inputs: Sequence[Node]) -> set[int]:
    factors = carrying.intersection(PRODUCTS.get(kind_of(node), ())) if len(carrying) > 1 else ()
    gates = {i for i in factors if is_gate(inputs[i])}
    return gates if len(gates) < len(factors) else set()


def _leave_out(
    visits: Sequence[_NodeVisit], ends: Sequence[Node], carries: dict[Node, bool]
) -> None:
    # No relevance goes on from nodes that only gates are computed by.
    reached = set(ends)
    for visit in reversed(visits):  # each before its inputs
        if visit.node in reached:
            inputs = visit.node.next_functions
            reached.update(inputs[i][0] for i in visit.carrying - visit.gates)
        else:
            carries[visit.node] = False


def products(ends: Sequence[Node], starts: Collection[Node]) -> list[tuple[Node, list[int]]]:
    """The products between whose factors relevance is shared, and which inputs these are."""
    visits = _carrying(ends, starts)[0]
    shared = (
        (visit, visit.carrying.intersection(PRODUCTS.get(kind_of(visit.node), ())) - visit.gates)
        for visit in visits
    )
    return [(visit.node, sorted(factors)) for visit, factors in shared if len(factors) > 1]


def goes_through_activation(end: Node, start: Node) -> bool:
    """Whether an activation, or a product of two signals, as in an MLP, lies between two nodes."""

    def bends(visit: _NodeVisit) -> bool:
        kind = kind_of(visit.node)
        if kind in PRODUCTS:
            return visit.carrying.issuperset(PRODUCTS[kind])
        return bool(visit.carrying) and kind in BENDING

    return any(map(bends, _carrying([end], [start])[0]))


def without_rule(carries: Mapping[Node, bool]) -> list[str]:
    """The functions that relevance goes through by their plain gradient, by name.

    It is asked while the rules of :func:`ruled`, which told what carries, are still attached.
    """
    kinds = set(map(kind_of, _nodes_without_rule(carries)))
    return sorted("a function applied in place to a view" if x == COPY_SLICES else x for x in kinds)


@contextmanager
def stopped(carries: Mapping[Node, bool]) -> Iterator[None]:
    """Let no relevance through functions without a rule, while rules are attached."""
    with ExitStack() as stack:
        for node in _nodes_without_rule(carries):
            stack.callback(node.register_hook(lambda inner, outer: (None,) * len(inner)).remove)
        yield


def _nodes_without_rule(carries: Mapping[Node, bool]) -> list[Node]:
    return [node for node, carry in carries.items() if carry and is_without_rule(node, RULES)]


def added_coefficients(carries: Mapping[Node, bool]) -> list[str]:
    """What is added to what relevance goes through, and counts as a constant, by name.

    A sigmoid or an exponential of the tokens is a coefficient of what it multiplies. As a summand,
    or as a part of a tensor whose rest carries relevance, it is missing from the relevance.
    """
    return sorted(set().union(*(missing_in(node, carries) for node in carries if carries[node])))


def mean_size(node: Node) -> int | None:
    """The channels over which a norm's node takes the mean that it subtracts; 0 for other nodes.

    None for a fused norm, which takes that of all.
    """
    kind = kind_of(node)
    if kind == "NativeLayerNorm":
        return math.prod(node._saved_normalized_shape)
    if kind == "NativeGroupNorm":  # token by token
        return node._saved_C // node._saved_group if node._saved_HxW == 1 else 0
    if is_mean_of_channels(node):
        return node._saved_self_sym_sizes[-1]
    return None if "LayerNorm" in kind else 0


def is_constant(x: Tensor) -> bool:
    """Whether no relevance goes on from a tensor, because what computed it counts as constant."""
    return x.grad_fn is not None and not followed_by(x.grad_fn)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its class's name."""
    return isinstance(module, nn.LayerNorm) or "norm" in type(module).__name__.lower()
