"""Residual streams that run side by side and join: how much each adds to what reads them all.

Each goes around mixers of its own, as in two towers whose tokens are added. What is added to one
stream, by mixers or by branches of them, counts as the stream does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.points import Point
from captum_ssm.graph.token_weights import TokenWeights, orthogonal, pushed
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.wiring import Source, Step

# Directions in which tokens are moved; streams of as many channels are measured exactly.
_DIRECTIONS = 16


def in_parts(
    graph: MixerGraph, i: int, reads: tuple[Source, ...], steps: Sequence[Step]
) -> tuple[Source, ...]:
    """The reads of i, a mixer or the output, for the parts of its tokens that they make up."""
    parts = joined(graph, graph.entries[i], reads, steps)
    if parts is None:
        return reads
    pairs = zip(reads, parts, strict=True)
    return tuple((s, link.of(graph.in_order(i, part))) for (s, link), part in pairs)


def joined(
    graph: MixerGraph, root: Point | None, reads: Sequence[Source], steps: Sequence[Step]
) -> list[Tensor] | None:
    r"""The part of the tokens of ``root`` that each read adds: ``(T,)`` each.

    The norms of the Jacobians through the streams, of the last that all are made of, which add up
    to one over the streams; negative for a stream that is subtracted from the first. None unless
    several streams of their own are read.

    Args:
        graph (MixerGraph): the run.
        root (Point, optional): what reads: the tokens given to a mixer, an output or a score.
        reads (sequence of Source): its reads.
        steps (sequence of Step): all, with what goes around them.
    """
    if root is None or any(s < 0 or link.share is not None for s, link in reads):
        return None
    streams = [k for k, (s, _) in enumerate(reads) if steps[s].around]
    if len(streams) < 2 or len({steps[s].tokens for s, _ in reads}) > 1:
        return None
    sums = [graph.cut.around(root, steps[s].calls).first_sums for s, _ in reads]
    made_of = [frozenset[int]().union(*map(graph.cut.read_by, edges)) for edges in sums]
    common = frozenset.intersection(*(made_of[k] for k in streams))
    leaves = [max(common or read) for read in made_of]
    parts = [_parts(graph, root, leaf, edges) for leaf, edges in zip(leaves, sums, strict=True)]
    sizes = [
        torch.stack([part.square().sum(-1) for part in changes]).sum(0).sqrt() for changes in parts
    ]
    whole = reduce(torch.add, [sizes[k] for k in streams])
    if not bool((whole > 0).all()):
        return None
    first = streams[0]
    return [
        torch.where(_is_opposite(parts[k], parts[first]), -size, size) / whole
        for k, size in enumerate(sizes)
    ]


def _parts(graph: MixerGraph, root: Point, k: int, through: Sequence[GradientEdge]) -> list[Tensor]:
    # What steps of the tokens of a leaf change of the root through some tensors, (T, E) each.
    leaf = graph.leaf(k)
    way = TokenWeights(root, leaf, graph.batch)
    directions = [
        leaf.unflat(seed)
        for seed in orthogonal(leaf, graph.batch, min(leaf.width, _DIRECTIONS), seed=1)
    ]
    both = zip(
        pushed(way, *directions),
        pushed(replace(way, around=tuple(through)), *directions),
        strict=True,
    )
    return [(whole - rest).cpu().double() for whole, rest in both]


def _is_opposite(parts: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    # Whether each token moves the other way, (T,): the cosine is below -1/2.
    mine, theirs = (torch.cat(list(changes), -1) for changes in (parts, others))
    if mine.shape != theirs.shape:
        return torch.zeros(len(mine), dtype=torch.bool)
    return torch.cosine_similarity(mine, theirs, dim=-1, eps=1e-300) < -0.5
