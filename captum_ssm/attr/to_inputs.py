"""Relevance of tokens as relevance of the entries of the model's inputs, in their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from captum_ssm.capture import FrozenModel
from captum_ssm.utils.captum_api import format_output

# How a token's relevance is shared among its features, where they are those of no embedding.
FEATURE_SHARES = ("linear", "even")


def of_inputs(
    relevance: Sequence[Tensor], frozen: FrozenModel, feature_share: str, mode: str | None
) -> Any:
    """Relevance in the shape of each input, zero on padding.

    The sum over an input is that over its tokens, except where it is interpolated, or where tokens
    are no patch of the image and are dropped.
    It is given as ``(B, S)`` for each input, of its places: tokens, steps, pixels; or as
    ``(B, L)`` of the model's tokens, where it tells which is which patch, to be interpolated in a
    mode, or in that of the grid.
    """
    shaped = []
    for k, row in enumerate(relevance):
        tensor = frozen.request.inputs[k]
        if frozen.mask is not None and row.shape == frozen.mask.shape:
            row = row * frozen.mask
        shaped.append(_of_input(k, row, frozen, feature_share, mode).to(tensor.device).detach())
    return format_output(frozen.request.packed, tuple(shaped))


def _of_input(
    k: int, row: Tensor, frozen: FrozenModel, feature_share: str, mode: str | None
) -> Tensor:
    request, input_maps, grid = frozen.request, frozen.wiring.inputs, frozen.grid
    tensor = request.inputs[k]
    if not tensor.is_floating_point():
        return row.view(tensor.shape)
    if grid is not None:
        grid = grid if mode is None else replace(grid, mode=mode)
        row = grid.pixels(row, tuple(tensor.shape[2:])).flatten(1)
    if not input_maps:  # a run on a server, or of 32 tokens: embeddings
        return (row[..., None] / tensor.shape[-1]).expand(tensor.shape).contiguous()
    input_map = input_maps[k]
    if row.shape[1] * input_map.leaf.width != tensor[0].numel():
        raise ValueError(
            f"inputs has shape {tuple(tensor.shape)}: which token is which patch is not known of "
            "this model; give it a method token_grid(height, width) that returns a "
            "captum_ssm.models.TokenGrid."
        )
    if feature_share == "linear" and not request.is_embedded(k):
        share = input_map.features().to(row)
    else:
        share = row.new_ones(1, 1, input_map.leaf.width) / input_map.leaf.width
    return input_map.shaped(row[..., None] * share)
