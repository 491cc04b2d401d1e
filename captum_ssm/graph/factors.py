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


def is_kept(later: Point, earlier: Point) -> bool:
    """Whether a tensor holds an earlier one as it is, by a way that passes sums and views alone."""

    def keeps(edge: GradientEdge) -> bool:
        name = edge.node.name()
        return name.startswith(KEEPING) and getattr(edge.node, "_saved_alpha", 1) == 1

    at = earlier.edge.node, earlier.edge.output_nr
    if (later.edge.node, later.edge.output_nr) == at:
        return True
    before = edges_before(later.edge.node, (), keeps) if keeps(later.edge) else ()
    return any((edge.node, edge.output_nr) == at for _, edge in before)


# The order of one example's tokens, (L,), in each earlier tensor: which of the later one's each is;
# None for the order of the later one.
TokenOrders = Sequence[Tensor | None]


def factors(
    later: Point, earlier: Sequence[Point], orders: TokenOrders | None = None
) -> list[Tensor | None]:
    """What earlier tensors of its shape are multiplied by in a later one, entry by entry.

    Ways through a matrix do not count, as those of an MLP, and the rest obeys the rules: norms and
    gates are constants. The graph is kept.

    Args:
        later (Point): the later tensor.
        earlier (sequence of Point): earlier ones.
        orders (sequence of Tensor, optional): by earlier tensor, ``(L,)``: token t is this one of
            the later one's example; None for the same. Default: None, the same for all

    Returns:
        list of Tensor: by earlier tensor; ``(E,)`` where it is the same for all tokens. None where
        it is not a factor, as by a matrix or a layer norm, or nothing depends on the tensor.
    """
    nodes = [point.edge.node for point in earlier]
    between = nodes_before([later.edge.node], nodes).difference(nodes)
    matrices = [GradientEdge(node, 0) for node in between if kind_of(node) in MATRICES]
    ones, noise = torch.ones_like(later.noise()), later.noise()
    with torch.inference_mode(False), torch.enable_grad(), ruled([later.edge.node], nodes):
        whole = _gradients(later, noise, earlier, orders)
        with closed(matrices):
            by_seed = [_gradients(later, seed, earlier, orders) for seed in (ones, noise)]
    sides = zip(whole, *by_seed, strict=True)
    return [_factor(later, noise, *sides_of) for sides_of in sides]


def _factor(
    later: Point, noise: Tensor, whole: Tensor | None, g: Tensor | None, moved: Tensor | None
) -> Tensor | None:
    if whole is None or g is None or moved is None or g.shape != noise.shape:
        return None
    rounding = _rounding(g.dtype, noise.dtype)
    is_closed = not bool(moved.any()) and bool(whole.any())
    if is_closed or not bool((moved - g * noise).norm() <= rounding * moved.norm()):
        return None
    is_same = bool((g - g[:1]).norm() <= rounding * g.norm())
    return g[0] if is_same else later.unflat(g)


def projections(
    later: Point, earlier: Sequence[Point], orders: TokenOrders | None = None
) -> list[Tensor | None]:
    """The matrix by which each token of earlier tensors enters the same token of a later one.

    All ways count, and obey the rules: norms and gates are constants. The graph is kept. The
    arguments are those of :func:`factors`.

    Returns:
        list of Tensor: by earlier tensor, ``(E_later, E_earlier)``. None where it is not the same
        for all tokens, or tokens read others.
    """
    nodes, noise = [point.edge.node for point in earlier], later.noise()
    T, E = noise.shape
    matrices = [noise.new_zeros(E, point.width) for point in earlier]
    with torch.inference_mode(False), torch.enable_grad(), ruled([later.edge.node], nodes):
        # A channel per token: one pass for as many channels as there are tokens.
        for channels in torch.arange(E, device=noise.device).split(T):
            seed = torch.zeros_like(noise)
            tokens = torch.arange(len(channels), device=noise.device)
            seed[tokens, channels] = 1
            pulled = _gradients(later, seed, earlier, orders)
            for matrix, g in zip(matrices, pulled, strict=True):
                if g is not None and len(g) == T:
                    matrix[channels] = g[tokens]
        whole = _gradients(later, noise, earlier, orders)
    sides = zip(matrices, whole, strict=True)
    return [matrix if _is_product(noise, matrix, g) else None for matrix, g in sides]


def _gradients(
    later: Point, seed: Tensor, earlier: Sequence[Point], orders: TokenOrders | None
) -> list[Tensor | None]:
    # The gradients at the earlier tensors, (T, E) each, with the tokens in the later one's order,
    # and on its device.
    pulled = [
        None if g is None else g.to(later.device) for g in gradients([later], [seed], earlier)
    ]
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
