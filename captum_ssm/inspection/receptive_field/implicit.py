"""The receptive field by implicit maps: a row of the product of I + A over layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from captum_ssm.attr.maps.maps import GridMaps, MapOptions, rollout_row
from captum_ssm.attr.to_inputs import of_inputs
from captum_ssm.capture import Request, exact_arithmetic, freeze
from captum_ssm.inspection.receptive_field.unit import (
    Unit,
    features_axis,
    places_of,
    tokens_are_places,
    unit_of_tokens,
)
from captum_ssm.mixers import check_components
from captum_ssm.utils.captum_api import is_tuple


def implicit_maps(request: Request, position: Any, check: bool) -> tuple[Tensor, Unit]:
    """Maps ``(B, *places)`` by implicit maps, and the unit that was asked."""
    frozen = freeze(request, query=False, check=check)
    tensor, ways = request.inputs[0], frozen.wiring.inputs
    axis = features_axis(tensor, None)
    if ways and tensor.is_floating_point() and ways[0].leaf.channels is not None:
        axis = ways[0].leaf.channels % tensor.dim()
    size = places_of(tensor, axis)
    unit = unit_of_tokens(frozen, position, size)
    assert unit.place is not None
    folded = check_components("unified", None)
    options = MapOptions(formulation="unified", components=folded, sign="absolute")
    asked = frozen.at(unit.place[0])
    with exact_arithmetic():
        rows = rollout_row(GridMaps(asked, asked.layers, options), are_means=True)
        if tokens_are_places(frozen, size):
            row, mask = rows[0], frozen.mask
            return (row if mask is None or mask.shape != row.shape else row * mask), unit
        relevance = of_inputs(rows, asked, "even", "nearest")
    relevance = relevance[0] if is_tuple(relevance) else relevance
    return (relevance if axis is None else relevance.sum(axis)), unit
