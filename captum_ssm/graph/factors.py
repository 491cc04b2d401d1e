"""How a stream of tokens holds an earlier one: as it is, times a factor, or through a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.kinds import MATRICES, kind_of
from captum_ssm.graph.points import Point, closed, gradients
from captum_ssm.graph.reachability import KEEPING, edges_before, nodes_before
from captum_ssm.graph.relevance_rules import ruled

# What is off by less was rounded.
_ROUNDING = 1e-3


def before_casts(point: Point) -> Point:
    """The tensor that a point is, in another dtype or on another device."""
    edge = point.edge
    while edge.node.name().startswith("ToCopy"):
        ((node, output),) = edge.node.next_functions
        assert node is not None
        edge = GradientEdge(node, output)
    form = edge.node._input_metadata[edge.output_nr]
    return replace(point, edge=edge, dtype=form.dtype, device=form.device)


def is_kept(root: Point, leaf: Point) -> bool:
    """Whether a leaf is in a root as it is, in a sum: by a way that passes sums and views alone."""

    def keeps(edge: GradientEdge) -> bool:
        name = edge.node.name()
        return name.startswith(KEEPING) and getattr(edge.node, "_saved_alpha", 1) == 1

    at = leaf.edge.node, leaf.edge.output_nr
    if (root.edge.node, root.edge.output_nr) == at:
        return True
    before = edges_before(root.edge.node, (), keeps) if keeps(root.edge) else ()
    return any((edge.node, edge.output_nr) == at for _, edge in before)


# The order of one example's tokens, (L,), in each leaf: which of the root's each is; None for its.
TokenOrders = Sequence[Tensor | None]


def factors(
    root: Point, leaves: Sequence[Point], orders: TokenOrders | None = None
) -> list[Tensor | None]:
    """What earlier tensors of its shape are multiplied by in a root, entry by entry.

    Ways through a matrix do not count, as those of an MLP, and the rest obeys the rules: norms and
    gates are constants. The graph is kept.

    Args:
        root (Point): the later tensor.
        leaves (sequence of Point): earlier ones.
        orders (sequence of Tensor, optional): by leaf, ``(L,)``: token t is this one of the root's
            example; None for the same. Default: None, the same for all

    Returns:
        list of Tensor: by leaf; ``(E,)`` where it is the same for all tokens. None where it is no
        factor, as by a matrix or a layer norm, or the root does not depend on the leaf.
    """
    nodes = [leaf.edge.node for leaf in leaves]
    between = nodes_before([root.edge.node], nodes).difference(nodes)
    matrices = [GradientEdge(node, 0) for node in between if kind_of(node) in MATRICES]
    ones, noise = torch.ones_like(root.noise()), root.noise()
    with torch.inference_mode(False), torch.enable_grad(), ruled([root.edge.node], nodes):
        whole = _gradients(root, noise, leaves, orders)
        with closed(matrices):
            by_seed = [_gradients(root, seed, leaves, orders) for seed in (ones, noise)]
    sides = zip(whole, *by_seed, strict=True)
    return [_factor(root, noise, *sides_of) for sides_of in sides]


def _factor(
    root: Point, noise: Tensor, whole: Tensor | None, g: Tensor | None, moved: Tensor | None
) -> Tensor | None:
    if whole is None or g is None or moved is None or g.shape != noise.shape:
        return None
    rounding = _rounding(g.dtype, noise.dtype)
    is_closed = not bool(moved.any()) and bool(whole.any())
    if is_closed or not bool((moved - g * noise).norm() <= rounding * moved.norm()):
        return None
    is_same = bool((g - g[:1]).norm() <= rounding * g.norm())
    return g[0] if is_same else root.unflat(g)


def projections(
    root: Point, leaves: Sequence[Point], orders: TokenOrders | None = None
) -> list[Tensor | None]:
    """The matrix by which each token of earlier tensors enters the one in its place in a root.

    All ways count, and obey the rules: norms and gates are constants. The graph is kept. The
    arguments are those of :func:`factors`.

    Returns:
        list of Tensor: by leaf, ``(E_root, E_leaf)``. None where it is not the same for all tokens,
        or tokens read others.
    """
    nodes, noise = [leaf.edge.node for leaf in leaves], root.noise()
    T, E = noise.shape
    matrices = [noise.new_zeros(E, leaf.width) for leaf in leaves]
    with torch.inference_mode(False), torch.enable_grad(), ruled([root.edge.node], nodes):
        # A channel per token: one pass for as many channels as there are tokens.
        for channels in torch.arange(E, device=noise.device).split(T):
            seed = torch.zeros_like(noise)
            tokens = torch.arange(len(channels), device=noise.device)
            seed[tokens, channels] = 1
            pulled = _gradients(root, seed, leaves, orders)
            for matrix, g in zip(matrices, pulled, strict=True):
                if g is not None and len(g) == T:
                    matrix[channels] = g[tokens]
        whole = _gradients(root, noise, leaves, orders)
    sides = zip(matrices, whole, strict=True)
    return [matrix if _is_product(noise, matrix, g) else None for matrix, g in sides]


def _gradients(
    root: Point, seed: Tensor, leaves: Sequence[Point], orders: TokenOrders | None
) -> list[Tensor | None]:
    # The gradients at the leaves, (T, E) each, with the tokens in the root's order.
    pulled = gradients([root], [seed], leaves)
    for k, (g, order) in enumerate(zip(pulled, orders or [None] * len(pulled), strict=True)):
        if g is not None and order is not None:
            back = torch.argsort(order).to(g.device)
            pulled[k] = g.unflatten(0, (-1, len(order)))[:, back].flatten(0, 1)
    return pulled


def _is_product(noise: Tensor, matrix: Tensor, g: Tensor | None) -> bool:
    if g is None or len(g) != len(noise):
        return False
    off = (g - noise @ matrix).norm()
    return bool(off <= _rounding(g.dtype, noise.dtype) * g.norm())


def _rounding(*dtypes: torch.dtype) -> float:
    return max(_ROUNDING, *(2 * torch.finfo(dtype).eps for dtype in dtypes))
