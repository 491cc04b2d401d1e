"""Pictures as people have them, as pixels: from files, from PIL, and arrays of bytes."""

from __future__ import annotations

import inspect
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.errors import InputError

# What a processor returns is channels first.
PROCESSED = {
    4: (("image", "bchw->bchw"),),
    5: (("video", "bcthw->bcthw"), ("video", "btchw->bcthw")),
}
LARGEST = 1024  # pixels along a side of a picture that is kept
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def is_picture(inputs: Any) -> bool:
    """Whether inputs are a picture for people: a path, a PIL image, or an array of bytes."""
    if isinstance(inputs, (str, PathLike)) or _is_pil(inputs):
        return True
    return inputs.dtype in (np.uint8, torch.uint8) if hasattr(inputs, "dtype") else False


def is_array(inputs: Any) -> bool:
    """Whether numpy has its values: a PIL image tells them by the older of two protocols."""
    return hasattr(inputs, "__array__") or hasattr(inputs, "__array_interface__")


def is_path(inputs: Any) -> bool:
    """Whether a text is the path of an image, by its ending."""
    return isinstance(inputs, PathLike) or (
        isinstance(inputs, str) and inputs.lower().endswith(ENDINGS)
    )


def file_name(inputs: Any) -> str:
    """The name of a file; ``""`` for what is not one."""
    return Path(inputs).name if isinstance(inputs, (str, PathLike)) else ""


def pictures(inputs: Any) -> tuple[str, list[Tensor]]:
    """The name of a picture's file, or ``""``, and its bytes: in color, and gray if it is gray.

    Raises:
        InputError: for a file that is not an image.
    """
    image = opened(inputs)
    return file_name(inputs), [torch.as_tensor(form).float() for form in _forms(image)]


def processed(inputs: Any, processor: Any) -> tuple[list[Tensor], dict[int, Any]]:
    """What a processor makes of pictures: one of transformers', or a function of one picture.

    Raises:
        TypeError: where it returns no pixels.
    """
    is_list = isinstance(inputs, (list, tuple))
    images = [_colored(opened(picture), processor) for picture in (inputs if is_list else [inputs])]
    if _is_of_transformers(processor):
        made = _of_images(processor)(images if is_list else images[0], return_tensors="pt")
        pixels = made.get("pixel_values", made.get("pixel_values_videos"))
    else:
        made = [processor(image) for image in images]
        are_pixels = all(torch.is_tensor(output) and output.dim() > 2 for output in made)
        pixels = torch.cat([_batch(output) for output in made]) if are_pixels else None
    if not torch.is_tensor(pixels):
        raise TypeError(
            f"processor is a {type(processor).__name__}, which returns no pixels; expected an "
            "image processor of transformers, or a function from a picture to a tensor (C, H, W)."
        )
    return [pixels], PROCESSED


def as_picture(image: Any) -> np.ndarray | None:
    """A picture as bytes ``(H, W, 3)``, of at most :data:`LARGEST` pixels a side, for people.

    None for what is not one, such as an array of other axes.
    """
    array = np.asarray(image.convert("RGB") if _is_pil(image) else image)
    if array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3) or array.dtype.kind not in "fiu":
        return None
    if array.dtype.kind == "f":
        low, high = min(0.0, float(array.min())), max(1.0, float(array.max()))
        array = np.rint((array - low) / (high - low) * 255)
    step = -(-max(array.shape[:2]) // LARGEST)
    array = array[::step, ::step].clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def norms(processor: Any, mean: Any, std: Any) -> tuple[Any, Any]:
    """How a processor, if there is one, normalizes pixels where nothing else was given."""
    of_images = _of_images(processor)
    mean = getattr(of_images, "image_mean", None) if mean is None else mean
    return mean, getattr(of_images, "image_std", None) if std is None else std


def normalized(pixels: Tensor, mean: Any, std: Any, axis: int) -> Tensor:
    """Pixels minus the mean of their channel, over its standard deviation.

    Raises:
        InputError: for another number of them than there are channels.
    """
    count = pixels.shape[axis]
    shape = [count if k == axis else 1 for k in range(pixels.dim())]
    stats = []
    for name, values in (("mean", mean), ("std", std)):
        numbers = torch.as_tensor(values, dtype=pixels.dtype).flatten()
        if len(numbers) not in (1, count):
            raise InputError(
                f"{name} holds {len(numbers)} numbers, and the picture has {count} channel(s); "
                "expected one number per channel."
            )
        stats.append(numbers.expand(count).view(shape))
    return (pixels - stats[0]) / stats[1]


def shown(pixels: Tensor, mean: Any, std: Any) -> np.ndarray:
    """Pixels ``(C, ...)`` as bytes ``(..., 3)``: as they were before they were normalized.

    Without ``mean`` and ``std``, the least of them is black, and the largest white.
    """
    pixels = pixels.float()
    if mean is not None and std is not None:
        shape = -1, *[1] * (pixels.dim() - 1)
        m, s = (torch.as_tensor(stat, dtype=torch.float32).view(shape) for stat in (mean, std))
        pixels = pixels * s + m
    else:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    # One channel is gray; of more than three the first are shown.
    pixels = pixels[[0, 0, 0]] if len(pixels) < 3 else pixels[:3]
    return (pixels.clamp(0, 1) * 255).round().byte().movedim(0, -1).contiguous().numpy()


def _batch(pixels: Tensor) -> Tensor:
    # What a function makes of one picture may be a batch of one already.
    return pixels if pixels.dim() > 3 and len(pixels) == 1 else pixels[None]


def _is_of_transformers(processor: Any) -> bool:
    # A processor of transformers takes return_tensors; a function or a module takes a picture.
    if hasattr(_of_images(processor), "preprocess"):
        return True
    if isinstance(processor, nn.Module):
        return False
    return "return_tensors" in inspect.signature(processor).parameters


def _of_images(processor: Any) -> Any:
    return getattr(processor, "image_processor", processor)


def _is_pil(inputs: Any) -> bool:
    return hasattr(inputs, "convert") and hasattr(inputs, "getbands")


def opened(inputs: Any) -> Any:
    """A picture; of a path what the file holds.

    Raises:
        InputError: for a file that is not an image.
    """
    if not isinstance(inputs, (str, PathLike)):
        return inputs
    path = Path(inputs)
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}; expected the path of an image.")
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, Image.DecompressionBombError) as error:  # the first one also of a cut file
        raise InputError(f"{str(path)!r} is not an image that PIL can open: {error}.") from error


def _colored(image: Any, processor: Any) -> Any:
    # Processors expect as many channels as they have means, and not all convert other pictures.
    means = getattr(_of_images(processor), "image_mean", None)
    mode = {1: "L", 3: "RGB"}.get(len(means)) if isinstance(means, (list, tuple)) else None
    return image.convert(mode) if mode and _is_pil(image) else image


def _forms(image: Any) -> list[Any]:
    # A gray picture may also be what a model of color takes.
    if not _is_pil(image):
        return [image]
    color = np.array(image.convert("RGB"))
    is_gray = image.mode in ("1", "L", "LA", "I", "F", "I;16")
    return [np.array(image.convert("L")), color] if is_gray else [color]
