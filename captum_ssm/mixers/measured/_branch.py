"""Convolved tokens that are added to what the scans of a module return, as in xLSTM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm._graph import Point
from captum_ssm._rules import ruled
from captum_ssm.mixers._cut import CutConv
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers.measured._convolution import (
    Convolution,
    ending_at,
    geometry,
    image_conv,
    input_positions,
)
from captum_ssm.mixers.measured._projection import Projection
from captum_ssm.mixers.measured._rerun import NotMeasured, Rerun
from captum_ssm.mixers.vision import FrozenScans
from captum_ssm.operators import SkipOperator


def with_branches(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    found: Sequence[Convolution | None],
) -> FrozenMixer:
    """``mixer`` with the convolutions that are added to its scans and are not those of its values.

    Args:
        rerun (Rerun): the module's.
        projection (Projection): of the channels that its scans go to.
        mixer (FrozenMixer): the scans, with their own skips.
        found (sequence of Convolution): those of the scans' values.
    """
    known = [one.conv for one in found if one is not None]
    others = [conv for conv in rerun.run.convs if not any(conv is one for one in known)]
    ordered = [one for conv in others if (one := _branch(rerun, projection, conv)) is not None]
    if not ordered:
        return mixer
    branches, orders = zip(*ordered, strict=True)
    if isinstance(mixer, FrozenScans):
        return replace(mixer, scans=(*mixer.scans, *branches), orders=(*mixer.orders, *orders))
    here = torch.arange(rerun.L, device=mixer.inputs.device)
    whole = FrozenScans.of((mixer, *branches), (here, *orders))
    return replace(whole, recurrence=mixer.recurrence)


def _branch(
    rerun: Rerun, projection: Projection, conv: CutConv
) -> tuple[FrozenMixer, Tensor] | None:
    # Convolved tokens times a gate, as a scan whose recurrence is zero and whose skip holds them:
    # part of a map where the skip is asked for, while hidden attention stays that of the scans. And
    # the order of its tokens.
    root, leaf = projection.root, Point.of(conv.leaf, 1)
    with ruled([root.edge.node], [leaf.edge.node], centered=False) as carries:
        link = projection.entries(leaf) if carries[root.edge.node] else None
    if link is None or conv.point is None or not bool((link.token >= 0).any()):
        return None
    D = projection.weight.shape[1]
    at = torch.arange(D, device=conv.leaf.device)
    at = at if projection.channels is None else projection.channels
    # By token and channel of the root, the position and channel in the convolution.
    place, channel = (link.token >= 0).nonzero().unbind(1)
    index = torch.full((rerun.T, root.width), -1, device=conv.leaf.device)
    index[link.token[place, channel], link.channel[place, channel]] = place * leaf.width + channel
    index = index[:, at]
    position, channels = index[:, 0] // leaf.width, index[0] % leaf.width
    expected = position[:, None] * leaf.width + channels
    if bool((index < 0).any()) or not torch.equal(index, expected):
        return None
    positions = position.view(rerun.B, rerun.L)
    try:
        enters = input_positions(rerun, conv.point, positions // conv.leaf.shape[2:].numel())
        order, center, grid = _geometry(rerun, conv, enters, positions)
    except NotMeasured:
        return None
    taps, bias = conv.weight[channels], None if conv.bias is None else conv.bias[channels]
    gate = link.factor.to(conv.leaf.dtype)[positions][..., channels][:, order]
    inputs = conv.point.flat(conv.inputs)[enters][..., channels][:, order]
    branch = FrozenMixer(
        recurrence=SkipOperator(torch.zeros_like(gate)),
        inputs=inputs,
        out_proj=projection.apply,
        out_weight=projection.weight,
        out_gate=projection.gate,
        skip=torch.ones_like(gate),
        gate=gate,
    )
    if grid is None and center[0] >= taps.shape[1] - 1:
        return replace(branch, conv=ending_at(taps, center[0]), conv_bias=bias), order
    over_tokens = image_conv(inputs, taps, center, grid, bias, order)
    convolved = leaf.flat(conv.leaf.detach())[positions][..., channels][:, order]
    return replace(branch, inputs=convolved, image_conv=over_tokens), order


def _geometry(
    rerun: Rerun, conv: CutConv, enters: Tensor, positions: Tensor
) -> tuple[Tensor, tuple[int, ...], tuple[int, int] | None]:
    # Of an image that is turned around too.
    try:
        return geometry(rerun, conv, enters, positions)
    except NotMeasured:
        order, center, grid = geometry(rerun, conv, enters.flip(1), positions.flip(1))
        return rerun.L - 1 - order, center, grid
