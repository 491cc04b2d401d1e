"""What the weights of a published Vision Mamba tell about its images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

PUBLISHED_SIZE = 224


def plain_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict in a checkpoint, with names as published.

    Raises:
        ValueError: the weights are not those of a Vision Mamba.
    """
    wrapped = (state.get(name) for name in ("model", "state_dict", "model_ema"))
    state = next((inner for inner in wrapped if isinstance(inner, Mapping)), state)
    sd = {name.removeprefix("module."): value for name, value in state.items()}
    if "patch_embed.proj.weight" not in sd or "layers.0.mixer.A_log" not in sd:
        raise ValueError(
            f"these are not the weights of a VisionMamba: {sorted(sd)[:5]}, ...; expected "
            "patch_embed.proj.weight and layers.0.mixer.A_log among them."
        )
    return sd


def size_and_stride(
    pos: Tensor | None,
    tokens: int,
    patch: tuple[int, int],
    image_size: int | tuple[int, int] | None,
    stride: int | tuple[int, int] | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """An image size and a stride that give as many patches as there are positions.

    ``tokens`` of the L are CLS tokens; sizes and strides are as for
    ``VisionMamba.from_state_dict``.

    Raises:
        ValueError: no size fits the number of positions.
    """
    step = patch if stride is None else pair(stride)
    if pos is None:
        return pair(PUBLISHED_SIZE if image_size is None else image_size), step
    patches = pos.shape[1] - tokens
    if image_size is None:
        side = math.isqrt(patches)
        if side * side != patches:
            raise ValueError(
                f"pos_embed has {patches} patches, which do not form a square; pass image_size."
            )
        # The published models with overlapping patches have a stride of half the patch size.
        half = (patch[0] // 2, patch[1] // 2)
        for each in [step, half] if stride is None else [step]:
            size = ((side - 1) * each[0] + patch[0], (side - 1) * each[1] + patch[1])
            if size == pair(PUBLISHED_SIZE):
                return size, each
        return ((side - 1) * step[0] + patch[0], (side - 1) * step[1] + patch[1]), step
    size = pair(image_size)
    steps = [step] if stride is not None else [patch, *((s, s) for s in range(1, patch[0]))]
    for s in steps:
        if math.prod(grid_shape_of(size, patch, s)) == patches:
            return size, s
    raise ValueError(
        f"images of {size} in patches of {patch} do not give the {patches} patches of pos_embed; "
        "pass the image_size and stride the weights were trained with."
    )


def grid_shape_of(
    size: tuple[int, ...], patch: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, int]:
    """Rows and columns of patches in an image."""
    rows, columns = ((n - p) // s + 1 for n, p, s in zip(size, patch, stride, strict=True))
    return rows, columns


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width, from one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
