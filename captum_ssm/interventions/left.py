"""What a mixer returns with some of its edges only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.interventions.edges import EdgesElsewhere, EdgeSet, EdgeSum
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.operators import TokenOperator


def sums_of(opened: OpenMixer, operator: TokenOperator | None) -> list[EdgeSum]:
    """The sums over edges that a mixer computes: one for each scan, or one of the whole mixer.

    Their coefficients are those of the run without the intervention, where that is known.

    With ``operator``, that of the mixer from its inputs up to the output projection, its edges are
    meant; else those of the scans.
    """
    unedited = opened.unedited
    if operator is not None:
        v, whole = opened.mixer.inputs, opened.gated
        if unedited is not None:
            whole = unedited.gated + operator.matvec(v - unedited.mixer.inputs)
        return [EdgeSum(operator, v, whole, whole - operator.matvec(v))]
    values = [scan.values for scan, _, _ in opened.mixer.scans_in_order()]
    mixer = opened.mixer if unedited is None else unedited.mixer
    sums = []
    for k, ((scan, _, _), v) in enumerate(zip(mixer.scans_in_order(), values, strict=True)):
        mixed = opened.mixed[k] if unedited is None else scan.mix(v)
        rest = torch.zeros_like(v) if scan.skip is None else scan.skip * v
        sums.append(EdgeSum(scan.recurrence, v, mixed, rest))
    return sums


def with_edges(
    opened: OpenMixer,
    edges: EdgeSet,
    operator: TokenOperator | None,
    elsewhere: Sequence[EdgesElsewhere] | None = None,
) -> Tensor:
    """What a mixer returns with some of its edges.

    ``operator`` is as for :func:`sums_of`. ``elsewhere`` is, for each sum, what its other edges
    carry; None for nothing.
    """
    left = left_of(opened, edges, operator, elsewhere)
    return opened.returning(gated_by(opened, left) if operator is None else left[0])


def left_of(
    opened: OpenMixer,
    edges: EdgeSet,
    operator: TokenOperator | None,
    elsewhere: Sequence[EdgesElsewhere] | None = None,
) -> list[Tensor]:
    """What is left of each sum over edges, ``(B, L, D)``; arguments as for :func:`with_edges`."""
    sums = sums_of(opened, operator)
    if elsewhere is not None:
        pairs = zip(sums, elsewhere, strict=True)
        sums = [replace(edge_sum, reference=reference) for edge_sum, reference in pairs]
    if operator is not None:
        return [edges.left(sums[0])]
    orders = [order for _, order, _ in opened.mixer.scans_in_order()]
    return [
        (edges if order is None else edges.ordered(order)).left(edge_sum)
        for edge_sum, order in zip(sums, orders, strict=True)
    ]


def gated_by(opened: OpenMixer, mixed: Sequence[Tensor]) -> Tensor:
    """What the output projection is given if the scans returned ``mixed``, ``(B, L, D)``."""
    if opened.unedited is None:
        return opened.mixer.gated_output_of(mixed)
    return opened.unedited.mixer.gated_output(mixed)
