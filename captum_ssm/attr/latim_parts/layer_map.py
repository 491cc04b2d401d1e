"""The map of one layer: scores of its contribution vectors (Pitorro & Treviso, 2025, table 1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from captum_ssm.attr.latim_parts.alti import Alti, of_tiles
from captum_ssm.attr.latim_parts.chain import output_of
from captum_ssm.attr.latim_parts.contributions import Contributions
from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.errors import brief

LOGIT: Literal["alti_logit"] = "alti_logit"
FLOW: Literal["flow_logit"] = "flow_logit"


def norm_order(aggregation: str | float, layer: int | str | None) -> str | float | None:
    """The order of a norm, ``"alti"``, or None for a decomposition of the logit.

    Raises:
        ValueError: for an aggregation that does not exist, or one that needs a layer or none.
    """
    orders: dict[Any, str | float | None] = {"l1": 1.0, "l2": 2.0, "alti": "alti"}
    orders |= {LOGIT: None, FLOW: None}
    is_number = isinstance(aggregation, (int, float)) and not isinstance(aggregation, bool)
    if not (isinstance(aggregation, str) and aggregation in orders):
        if not (is_number and float(aggregation) > 0):
            raise ValueError(
                f"aggregation is {brief(aggregation)}; expected one of {tuple(orders)}, or a "
                "number p > 0."
            )
        orders[aggregation] = float(aggregation)
    if layer is None and orders[aggregation] is not None:
        raise ValueError(
            f"aggregation is {brief(aggregation)}, which makes a map of one layer, and layer is "
            "None; pass layer=, an index or a module path."
        )
    if layer is not None and aggregation == FLOW:
        raise ValueError(
            f"aggregation is {FLOW!r}, which goes through all layers, and layer is {brief(layer)}; "
            f"pass layer=None, or aggregation={LOGIT!r} for what one layer adds."
        )
    return orders[aggregation]


def check_score_options(
    aggregation: str | float,
    layer: int | str | None,
    grid: int | None,
    tolerance: float,
    return_error_bound: bool,
) -> None:
    """Raise a ValueError for options that the aggregation or the layer leaves no room for."""
    whole = aggregation == LOGIT and layer is None
    of_choices = f"for aggregation {brief(aggregation)} and layer {brief(layer)}; expected"
    if grid is not None and not whole:
        raise ValueError(
            f"grid is {brief(grid)}, {of_choices} grid only for aggregation='alti_logit' with "
            "layer=None. A layer's own map is returned by interactions()."
        )
    if not 0 <= tolerance < 1 or ((tolerance or return_error_bound) and not whole):
        raise ValueError(
            f"tolerance is {brief(tolerance)} and return_error_bound is "
            f"{brief(return_error_bound)}, {of_choices} a share of at least 0 and less than 1, and "
            "either of them only for aggregation='alti_logit' with layer=None."
        )


def layer_map(
    frozen: FrozenModel, layer: FrozenCall, activation: str, order: str | float
) -> Tensor:
    """The scores of every pair of a layer's tokens, ``(B, L, L)``."""
    rows = torch.arange(layer.shape[1], device=layer.call.output.device)
    return of_tiles(_tiles(frozen, layer, activation, order, rows), len(rows))


def query_row(
    frozen: FrozenModel, layer: FrozenCall, activation: str, order: str | float
) -> Tensor:
    """The query's row of a layer's map, ``(B, L)``."""
    frozen.require_chain("LaTIM")
    (query,) = frozen.require_query()
    row = torch.zeros_like(query)
    rows = (query != 0).any(0).nonzero()[:, 0]
    for chosen, tile in _tiles(frozen, layer, activation, order, rows):
        row[:, : tile.shape[2]] += torch.einsum("bi,bij->bj", query[:, chosen], tile)
    return row


def _tiles(
    frozen: FrozenModel, layer: FrozenCall, activation: str, order: str | float, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    # Ascending rows (R,) of a layer's map: tiles of them, each with (B, r, C).
    parts = Contributions.of(frozen, [layer], activation)
    if order == "alti":
        yield from Alti(parts).tiles(rows)
        return

    def norm(vectors: Tensor, rows: slice, columns: slice) -> Tensor:
        return torch.linalg.vector_norm(vectors, ord=order, dim=1)

    for chosen in parts.tiles(rows):
        index = chosen.expand(parts.batch, -1)
        yield chosen, parts.reduced(index, parts.columns(chosen), norm)


def layer_error(frozen: FrozenModel, layer: FrozenCall, activation: str) -> Tensor:
    """The norm of what the contributions miss of a layer's output, over the output's, ``(B,)``."""
    parts = Contributions.of(frozen, [layer], activation)
    output = output_of([layer]) - parts.bias()
    error, mask = parts.total() - output, frozen.mask_of(layer)
    if mask is not None:
        error, output = error * mask[..., None], output * mask[..., None]
    return error.flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1).clamp(min=1e-30)
