"""One image: which class the model sees in it, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError, TargetError
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.questions import Questions, Setup, per_example
from captum_ssm.inspection.implicit_attention import token_grids
from captum_ssm.utils.integers import as_index


@dataclass(frozen=True)
class ImageQuestion:
    """What is asked about one image, ``pixels (1, C, H, W)``: as ``explain`` takes it."""

    pixels: Tensor
    name: str
    target: int | str | None
    against: int | str | None
    labels: Sequence[str] | Mapping[int, str] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None

    def answer(self, setup: Setup) -> Example:
        """The image, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        pixels = self.pixels.to(next(setup.model.parameters()).device)
        with torch.no_grad():
            logits = extract_logits(setup.model(pixels)).float()
        if logits.dim() != 2 or logits.shape[0] != 1:
            raise ValueError(
                f"the model returns an output of shape {tuple(logits.shape)} for one image; "
                "expected one score per class, (1, classes). Other outputs are explained by the "
                "methods' own attribute, with a target that selects one number."
            )
        names = _labels(self.labels, setup.model, logits.shape[1])
        target = _class("target", self.target, names)
        against = _class("against", self.against, names)
        chosen = int(logits[0].argmax()) if target is None else target
        if against == chosen:
            raise TargetError(
                f"against is {self.against!r}, the class that is explained; expected another class."
            )
        questions = Questions(setup, lambda index: names[index])
        questions.add(logits[0], None, chosen, against)
        H, W = pixels.shape[-2:]
        questions.require_memory(H * W)
        relevance, deltas = questions.explained(pixels, lambda rows: rows.sum(1))
        return Example(
            self.name,
            tuple(questions.outputs),
            relevance,
            deltas,
            image=_shown(pixels[0].cpu(), self.mean, self.std),
            grid=_grid(setup.model, pixels),
            validation=questions.validation,
        )


def image_questions(
    image: Any, processor: Any, target: Any, against: Any, shown: Mapping[str, Any]
) -> list[ImageQuestion]:
    """What is asked about each image.

    Args:
        image (Any): one or several as the model takes them, or as ``processor`` does.
        processor (Callable, optional): of images.
        target, against (int, str or list of str, optional): classes.
        shown (dict): ``labels``, ``mean`` and ``std``; for a ``mean`` or ``std`` of None that of
            the processor is taken.

    Raises:
        ValueError, TypeError: as for ``explain``.
    """
    pixels = _as_pixels(image, processor)
    for name in ("mean", "std"):
        if shown[name] is None:
            shown = {**shown, name: getattr(processor, f"image_{name}", None)}
    B = len(pixels)
    names = ["image"] if B == 1 else [f"image {k + 1}" for k in range(B)]
    targets, others = per_example("target", target, B), per_example("against", against, B)
    return [
        ImageQuestion(one[None], name, a, b, **shown)
        for one, name, a, b in zip(pixels, names, targets, others, strict=True)
    ]


def _as_pixels(image: Any, processor: Any) -> Tensor:
    # Images as the model takes them, (B, C, H, W): a tensor, or what a processor makes.
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


def _labels(labels: Any, model: Any, count: int) -> list[str]:
    if labels is None:
        labels = getattr(getattr(model, "config", None), "id2label", None)
    if labels is None:
        return [str(k) for k in range(count)]
    if len(labels) != count:
        raise ValueError(
            f"labels holds {len(labels)} names; the model has {count} classes: expected one name "
            "per class."
        )
    return [str(labels[k]) for k in range(count)]


def _class(name: str, wanted: Any, labels: list[str]) -> int | None:
    if wanted is None:
        return None
    index = labels.index(wanted) if wanted in labels else as_index(wanted)
    if index is None or not 0 <= index < len(labels):
        shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
        raise TargetError(
            f"{name} is {wanted!r}; expected a class 0 .. {len(labels) - 1}, or its name: {shown}."
        )
    return index


def _shown(pixels: Tensor, mean: Any, std: Any) -> np.ndarray:
    # (H, W, 3) in 8 bits: as it was before it was normalized, or from its least to its largest.
    pixels = pixels.float()
    if mean is not None and std is not None:
        m, s = (torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 1) for x in (mean, std))
        pixels = pixels * s + m
    else:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    # One channel is gray; of more than three the first are shown.
    pixels = pixels[:1].expand(3, -1, -1) if len(pixels) < 3 else pixels[:3]
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()


def _grid(model: Any, pixels: Tensor) -> tuple[int, int] | None:
    shapes = [tuple(grid.shape) for grid in token_grids(model, pixels).values() if grid is not None]
    return shapes[0] if shapes and len(shapes[0]) == 2 else None
