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
from captum_ssm.mixers.measured._convolution import Convolution
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
    """``mixer`` with the convolutions that are added to its scans, except those of their values."""
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
    if link is None or not bool((link.token >= 0).any()):
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
    position = position.view(rerun.B, rerun.L)
    factor = link.factor.to(conv.leaf.dtype)[position][..., channels]
    try:
        one = Convolution.at(rerun, conv, position, channels, factor)
    except NotMeasured:
        return None
    order = one.order
    branch = FrozenMixer(
        recurrence=SkipOperator(torch.zeros_like(factor)),
        inputs=(one.inputs if one.looks_back else one.psi)[:, order],
        out_proj=projection.apply,
        out_weight=projection.weight,
        out_gate=projection.gate,
        skip=torch.ones_like(factor),
        gate=factor[:, order],
    )
    if one.looks_back:
        return replace(branch, conv=one.causal_taps, conv_bias=one.bias), order
    return replace(branch, image_conv=one.over_the_tokens), order
