"""Scans of channels that lie next to one another, such as heads that are modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.measure.directions import Direction
from captum_ssm.discovery.measure.rerun import Rerun
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import JoinedOperator


def whole_sets(rerun: Rerun, directions: Sequence[Direction]) -> list[list[Direction]]:
    """The directions in sets of one order, each of which has all channels of the mixer.

    Raises:
        NotMeasured: for orders that do not have the same channels.
    """
    first = directions[0].channels
    if all(torch.equal(direction.channels, first) for direction in directions):
        return [[direction] for direction in directions]
    sets: list[list[Direction]] = []
    for direction in sorted(directions, key=lambda direction: int(direction.channels[0])):
        for of_order in sets:
            if torch.equal(of_order[0].order, direction.order):
                of_order.append(direction)
                break
        else:
            sets.append([direction])
    channels = [torch.cat([direction.channels for direction in of_order]) for of_order in sets]
    are_whole = all(torch.equal(some, channels[0]) for some in channels)
    are_apart = len(channels[0].unique()) == len(channels[0])
    if not (are_whole and are_apart and all(d.lands is None for d in directions)):
        raise rerun.refused(
            "its scans go to different channels of the output projection, in different orders or "
            "to some of them twice"
        )
    return sets


def side_by_side(rerun: Rerun, scans: Sequence[FrozenMixer]) -> FrozenMixer:
    """Scans in one order, each of channels of its own, as one.

    Raises:
        NotMeasured: where some are convolved.
    """
    first = scans[0]
    if len(scans) == 1:
        return first
    if any(scan.conv is not None or scan.image_conv is not None for scan in scans):
        raise rerun.refused("scans of different channels read convolutions of their own")

    def joined(name: str, empty: float) -> Tensor | None:
        tensors = [getattr(scan, name) for scan in scans]
        if all(x is None for x in tensors):
            return None
        pairs = zip(tensors, scans, strict=True)
        parts = (s.values.new_full((), empty) if x is None else x for x, s in pairs)
        return torch.cat([x.expand_as(s.values) for x, s in zip(parts, scans, strict=True)], -1)

    factors: dict[str, Any] = {name: joined(name, 1) for name in ("activation", "gate", "norm")}
    whole = replace(
        first,
        recurrence=JoinedOperator(tuple(scan.recurrence for scan in scans)),
        inputs=torch.cat([scan.inputs for scan in scans], -1),
        skip=joined("skip", 0),
        **factors,
    )
    return whole.with_values(torch.cat([scan.values for scan in scans], -1))
