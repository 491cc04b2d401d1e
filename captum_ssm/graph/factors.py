"""How a stream of tokens holds an earlier one: as it is, or times a factor of each entry."""

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


def factors(root: Point, leaves: Sequence[Point]) -> list[Tensor | None]:
    """What earlier tensors of its shape are multiplied by in a root, entry by entry.

    Ways through a matrix do not count, as those of an MLP, and the rest obeys the rules: norms and
    gates are constants. The graph is kept.

    Returns:
        list of Tensor: by leaf; ``(E,)`` where it is the same for all tokens. None where it is no
        factor, as by a matrix or a layer norm, or the root does not depend on the leaf.
    """
    nodes = [leaf.edge.node for leaf in leaves]
    between = nodes_before([root.edge.node], nodes)
    matrices = [GradientEdge(node, 0) for node in between if kind_of(node) in MATRICES]
    ones, noise = torch.ones_like(root.noise()), root.noise()
    with torch.inference_mode(False), torch.enable_grad(), ruled([root.edge.node], nodes):
        whole = gradients([root], [noise], leaves)
        with closed(matrices):
            found = [gradients([root], [seed], leaves) for seed in (ones, noise)]
    sides = zip(whole, *found, strict=True)
    return [_factor(leaf, noise, *sides_of) for leaf, sides_of in zip(leaves, sides, strict=True)]


def _factor(
    leaf: Point, noise: Tensor, whole: Tensor | None, g: Tensor | None, moved: Tensor | None
) -> Tensor | None:
    if whole is None or g is None or moved is None:
        return None
    rounding = max(_ROUNDING, 2 * torch.finfo(leaf.dtype).eps, 2 * torch.finfo(noise.dtype).eps)
    is_closed = not bool(moved.any()) and bool(whole.any())
    if is_closed or not bool((moved - g * noise).norm() <= rounding * moved.norm()):
        return None
    is_same = bool((g - g[:1]).norm() <= rounding * g.norm())
    return g[0] if is_same else g.view(*leaf.shape[:-1], -1)
