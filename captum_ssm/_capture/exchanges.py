"""Tokens that are exchanged between two mixers of one grid, as by a convolution of its image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm._capture.ways import shares
from captum_ssm._graph import Point, joints, meetings, readers, shape_of
from captum_ssm._transport import Transport, pulling


@dataclass(frozen=True)
class Exchange:
    """How tokens read the residual stream behind an earlier mixer, where others are mixed in.

    Args:
        way (Transport): to the last tokens of the stream that are still in their places.
        share (Tensor, optional): ``(B, T)``, the part of each token that comes this way; None for
            all of it. Default: None
        past (GradientEdge, optional): the earlier tokens that the rest comes from, each in its
            place: a stream leaves there that goes around the mixers and the exchange.
            Default: None
    """

    way: Transport
    share: Tensor | None = None
    past: GradientEdge | None = None


def exchange(root: Point, leaf: Point, leaves: Sequence[Point], batch: int) -> Exchange | None:
    """How ``root`` reads ``leaf``, of as many tokens; None where several streams go past that.

    Args:
        root (Point): the tokens that a mixer is given.
        leaf (Point): those that an earlier one returned.
        leaves (sequence of Point): of all mixers and inputs.
        batch (int): B.
    """
    stream = _last_in_place(root, leaf)
    if stream is None:
        return None
    found, way = joints(root, stream, leaves), Transport(root, stream, batch)
    if found.leaves or len(found.stream) != 1 or len(found.past) > 1:
        return None
    if not found.past:
        return Exchange(way)
    (edge,) = found.past
    for point in _points(edge, root):
        past = Transport(root, point, batch, (stream.edge,))
        with pulling(past):
            place = readers(root, point)
        if _is_identity(place):
            share, _ = shares([way, past])
            return Exchange(way, share, edge)
    return None


def _last_in_place(root: Point, leaf: Point) -> Point | None:
    # The last tensor between them that all ways pass, and whose tokens are those of the leaf.
    last = None
    for edge in meetings([root], [leaf]):
        here = [p for p in _points(edge, root) if _is_identity(readers(p, leaf))]
        if not here and last is not None:
            break
        last = next(iter(here), last)
    return last


def _points(edge: GradientEdge, like: Point) -> list[Point]:
    # A tensor as tokens, its channels last or second, where these are as many as those of a point.
    shape = shape_of(edge)
    axes = [a for a in (-1, 1) if len(shape) > 2 and math.prod(shape) // shape[a] == like.tokens]
    return [replace(like, edge=edge, shape=shape, channels=axis) for axis in axes]


def _is_identity(place: Tensor | None) -> bool:
    return place is not None and torch.equal(place.cpu(), torch.arange(len(place)))
