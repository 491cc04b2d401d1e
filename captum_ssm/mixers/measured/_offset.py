"""What a module adds to its scans: a skip from a convolution, a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm._graph import Point, before_view, entries
from captum_ssm._rules import ruled
from captum_ssm.mixers._cut import CutConv
from captum_ssm.mixers._frozen_mixer import FrozenMixer, mean_of_groups
from captum_ssm.mixers.measured._branch import with_branches
from captum_ssm.mixers.measured._convolution import Convolution
from captum_ssm.mixers.measured._directions import Direction
from captum_ssm.mixers.measured._projection import Projection
from captum_ssm.mixers.measured._rerun import Rerun, is_close, is_small
from captum_ssm.mixers.vision import FrozenScans
from captum_ssm.operators.composed import sum_of


def with_offset(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    directions: Sequence[Direction],
    found: Sequence[Convolution | None],
    after: Tensor,
) -> FrozenMixer:
    """``mixer`` with all that the output projection is given.

    Args:
        rerun (Rerun): the module's.
        projection (Projection): of the channels that scans reach.
        mixer (FrozenMixer): the scans alone.
        directions, found: what it is made of.
        after (Tensor): ``(B, L, D)``, the factor of what follows the norm: the gate.

    Raises:
        NotMeasured: something is added that depends on the tokens.
    """
    want = projection.gated
    if is_small(_rest(projection, mixer), want):
        return mixer
    skips = _skips(projection.root, directions, found)
    mixer = _with_skips(mixer, skips)
    # They are added before the norm or after it.
    offsets = (None, _past_norm(mixer, skips))
    for whole in (mixer, with_branches(rerun, projection, mixer, found)):
        for offset in offsets:
            with_it = replace(whole, offset=offset)
            rest = _rest(projection, with_it)
            if is_small(rest, want):
                return with_it
            # A bias as it is, or times the gate.
            for factor in (torch.ones_like(rest), after.to(rest)):
                bias = (rest * factor).sum((0, 1)) / factor.square().sum((0, 1))
                if rerun.T > 1 and not projection.repeats and is_close(bias * factor, rest):
                    added = bias * factor
                    return replace(whole, offset=added if offset is None else offset + added)
    raise rerun.refused(
        "it adds something to its scans that depends on its tokens (a residual, a branch next to "
        "the scan)"
    )


def _rest(projection: Projection, mixer: FrozenMixer) -> Tensor:
    # What the output projection is given, (B, L, D), and not by this mixer.
    return projection.gated - projection.added_up(mixer.gated_output().to(projection.gated))


def _skips(
    root: Point, directions: Sequence[Direction], found: Sequence[Convolution | None]
) -> list[Tensor | None]:
    # The factor of each direction's values that is added after its scan, (B, L, D) in the scan's
    # order. Directions of one convolution have one sum of them, given to the first.
    skips: list[Tensor | None] = []
    seen: list[CutConv] = []
    for direction, one in zip(directions, found, strict=True):
        skip = None
        if one is not None and one.conv not in seen:
            seen.append(one.conv)
            psi = Point.of(one.conv.leaf, 1)
            with ruled([root.edge.node], [psi.edge.node], centered=False):
                link = entries(root, psi)
            if link is not None:
                at = link.factor.to(one.factor)[one.position][..., one.channels]
                skip = _over(at, one.factor * direction.factor)
        elif one is None:
            skip = _of_values(root, direction)
        skips.append(skip)
    return skips


def _of_values(root: Point, direction: Direction) -> Tensor | None:
    # The same of values that no convolution returned: RWKV-7's bonus, of what the scan is given.
    values = direction.cut.values
    while values is not None:
        with ruled([root.edge.node], [values.edge.node], centered=False) as carries:
            is_read = carries[root.edge.node]
            link = entries(root, values) if is_read else None
        if is_read:
            break
        values = before_view(values)
    given = direction.cut.values
    assert given is not None
    own = None if values is None or link is None else entries(given, values)
    if link is None or own is None:
        return None
    factor = torch.zeros(direction.cut.leaf.shape, dtype=torch.float64, device=given.device)
    read = (link.token >= 0) & (own.token >= 0)
    factor.flatten(0, 1)[own.token[read], own.channel[read]] = (link.factor / own.factor)[read]
    return _over(direction.of(factor.to(direction.factor)), direction.factor)


def _over(a: Tensor, b: Tensor) -> Tensor:
    # Zero where both are, behind an activation that is zero.
    return torch.where(a == 0, 0, a / torch.where(b == 0, 1, b))


def _past_norm(mixer: FrozenMixer, skips: Sequence[Tensor | None]) -> Tensor | None:
    # What a norm would subtract of skips that are added after it, (B, L, D).
    parts = []
    for (scan, order, _), skip in zip(mixer.scans_in_order(), skips, strict=True):
        if skip is not None and scan.centered:
            mean = mean_of_groups(skip * scan.values, scan.centered)
            mean = mean if scan.left is None else mean * scan.left
            parts.append(mean if order is None else mean[:, torch.argsort(order)])
    return sum_of(parts) if parts else None


def _with_skips(mixer: FrozenMixer, skips: Sequence[Tensor | None]) -> FrozenMixer:
    if isinstance(mixer, FrozenScans):
        scans = zip(mixer.scans, skips, strict=True)
        return replace(mixer, scans=tuple(_with_skips(scan, [skip]) for scan, skip in scans))
    (skip,) = skips
    if skip is None:
        return mixer
    total = skip if mixer.skip is None else mixer.skip + skip
    return replace(mixer, skip=total).with_values(mixer.values)
