"""Convolved tokens that are added to what the scans of a module return, as in xLSTM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F

from captum_ssm._graph import Point, entries
from captum_ssm._rules import ruled
from captum_ssm.mixers._cut import CutConv
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers.measured._convolution import Convolution, geometry, input_places
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

    Each is one more scan, whose recurrence is zero and whose skip holds the convolved tokens, so
    that the hidden attention stays that of the scans.

    Args:
        rerun (Rerun): the module's.
        projection (Projection): of the channels that scans reach.
        mixer (FrozenMixer): the scans, with their own skips.
        found (sequence of Convolution): those of the scans' values.
    """
    known = [one.conv for one in found if one is not None]
    others = [conv for conv in rerun.run.convs if not any(conv is one for one in known)]
    branches = [branch for c in others if (branch := _branch(rerun, projection, c)) is not None]
    if not branches:
        return mixer
    here = torch.arange(rerun.L, device=mixer.inputs.device)
    if isinstance(mixer, FrozenScans):
        orders = (*mixer.orders, *[here] * len(branches))
        return replace(mixer, scans=(*mixer.scans, *branches), orders=orders)
    return FrozenScans(
        recurrence=mixer.recurrence,
        inputs=mixer.inputs,
        out_proj=mixer.out_proj,
        out_weight=mixer.out_weight,
        scans=(mixer, *branches),
        orders=(here,) * (1 + len(branches)),
    )


def _branch(rerun: Rerun, projection: Projection, conv: CutConv) -> FrozenMixer | None:
    root, leaf = projection.root, Point.of(conv.leaf, 1)
    with ruled([root.edge.node], [leaf.edge.node], centered=False) as carries:
        link = entries(root, leaf) if carries[root.edge.node] else None
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
    places = position.view(rerun.B, rerun.L)
    try:
        enters = input_places(rerun, conv.point, places // conv.leaf.shape[2:].numel())
        order, center, grid = geometry(rerun, conv, enters, places)
    except NotMeasured:
        return None
    taps = conv.weight[channels]
    in_place = bool((order.diff() == 1).all()) and grid is None
    if not in_place or center[0] < taps.shape[1] - 1:
        return None
    inputs = conv.point.flat(conv.inputs)[enters][..., channels]
    return FrozenMixer(
        recurrence=SkipOperator(torch.zeros_like(inputs)),
        inputs=inputs,
        out_proj=projection.apply,
        out_weight=projection.weight,
        skip=torch.ones_like(inputs),
        conv=F.pad(taps, (0, center[0] - taps.shape[1] + 1)),
        conv_bias=None if conv.bias is None else conv.bias[channels],
        gate=link.factor.to(inputs)[places][..., channels],
    )
