"""One image: which class the model sees in it, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm._capture.model import extract_logits
from captum_ssm._errors import InputError, TargetError
from captum_ssm._explain.asked import Asked, Setup
from captum_ssm._hidden_attention import token_grids
from captum_ssm._integers import as_index
from captum_ssm.explanation import Example


@dataclass(frozen=True)
class ImageRequest:
    """What is asked about one image, ``pixels (1, C, H, W)``: as ``explain`` takes it."""

    pixels: Tensor
    name: str
    target: int | str | None
    against: int | str | None
    labels: Sequence[str] | Mapping[int, str] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None


def explain_image(setup: Setup, asked: ImageRequest) -> Example:
    """One image explained.

    Raises:
        ValueError, TypeError: as for ``explain``.
    """
    pixels = asked.pixels.to(next(setup.model.parameters()).device)
    with torch.no_grad():
        logits = extract_logits(setup.model(pixels)).float()
    if logits.dim() != 2 or logits.shape[0] != 1:
        raise ValueError(
            f"the model returns an output of shape {tuple(logits.shape)} for one image; expected "
            "one score per class, (1, classes). Other outputs are explained by the methods' own "
            "attribute, with a target that selects one number."
        )
    names = _labels(asked.labels, setup.model, logits.shape[1])
    target = _class("target", asked.target, names)
    against = _class("against", asked.against, names)
    chosen = int(logits[0].argmax()) if target is None else target
    if against == chosen:
        raise TargetError(
            f"against is {asked.against!r}, the class that is explained; expected another class."
        )
    found = Asked(setup, lambda one: names[one])
    found.add(logits[0], None, chosen, against)
    H, W = pixels.shape[-2:]
    found.require_memory(H * W)
    relevance, deltas = found.explained(pixels, lambda rows: rows.sum(1))
    return Example(
        asked.name,
        tuple(found.outputs),
        relevance,
        deltas,
        image=_shown(pixels[0].cpu(), asked.mean, asked.std),
        grid=_grid(setup.model, pixels),
    )


def as_pixels(image: Any, processor: Any, device: torch.device) -> Tensor:
    """Images as the model takes them, ``(B, C, H, W)``: a tensor, or what a processor makes.

    Raises:
        InputError: for a tensor of another shape.
        TypeError: for a picture without a processor.
    """
    if torch.is_tensor(image):
        pixels = image[None] if image.dim() == 3 else image
        if pixels.dim() != 4 or not pixels.is_floating_point() or pixels.numel() == 0:
            raise InputError(
                f"the input has shape {tuple(image.shape)} and dtype {image.dtype}; expected an "
                "image, (C, H, W) or (B, C, H, W) of a floating dtype, as the model takes it. "
                "Series, tables and volumes are explained by the methods' own attribute."
            )
        return pixels
    if processor is None:
        raise TypeError(
            f"the input is a {type(image).__name__}, and there is no processor; expected an image "
            "(C, H, W) as the model takes it, a tensor, or processor=, the model's image processor."
        )
    return processor(image, return_tensors="pt")["pixel_values"]


def _labels(given: Any, model: Any, count: int) -> list[str]:
    found = given
    if found is None:
        found = getattr(getattr(model, "config", None), "id2label", None)
    if found is None:
        return [str(k) for k in range(count)]
    if len(found) != count:
        raise ValueError(
            f"labels holds {len(found)} names; the model has {count} classes: expected one name "
            "per class."
        )
    return [str(found[k]) for k in range(count)]


def _class(name: str, given: Any, labels: list[str]) -> int | None:
    if given is None:
        return None
    index = labels.index(given) if given in labels else as_index(given)
    if index is None or not 0 <= index < len(labels):
        shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
        raise TargetError(
            f"{name} is {given!r}; expected a class 0 .. {len(labels) - 1}, or its name: {shown}."
        )
    return index


def _shown(pixels: Tensor, mean: Any, std: Any) -> np.ndarray:
    # (H, W, 3) in 8 bits: as it was before it was normalized, or from its least to its largest.
    pixels = pixels.float()
    if mean is not None and std is not None:
        m, s = (torch.as_tensor(one, dtype=torch.float32).view(-1, 1, 1) for one in (mean, std))
        pixels = pixels * s + m
    else:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    # One channel is gray; of more than three the first are shown.
    pixels = pixels[:1].expand(3, -1, -1) if len(pixels) < 3 else pixels[:3]
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()


def _grid(model: Any, pixels: Tensor) -> tuple[int, int] | None:
    found = [tuple(grid.shape) for grid in token_grids(model, pixels).values() if grid is not None]
    return found[0] if found and len(found[0]) == 2 else None
