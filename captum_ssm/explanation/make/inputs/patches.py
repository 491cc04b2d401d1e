"""Where in an image its tokens lie: the grid of its patches, and the picture behind them.

Processors tell the patches of an image, ``image_grid_thw`` or ``spatial_shapes``, and models merge
some of them into a token: neighbors, as many in each direction. How many is not assumed. The
number of tokens falls with it, so one number of merged patches fits, or none does.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.explanation.make.inputs.media import Media, placeholders
from captum_ssm.explanation.make.inputs.pictures import as_picture, norms, shown
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.pictures import Picture

# The pixels of each kind, and the patches that they are divided into.
PIXELS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
# What some processors write before each part of a large image.
TILE = re.compile(r"row_(\d+)_col_(\d+)")
THUMBNAIL = "thumbnail"
NOT_KNOWN = "Where in the {} its tokens lie is not known, so they are shown in a row."
DERIVED = "The grid follows from the number of tokens and the shape of the picture."


@dataclass(frozen=True)
class PatchGrid:
    """What one stretch of tokens stands for: an image, a part of one, or a frame of a video.

    Args:
        size (tuple of int): how many patches, or pixels, it has down and across.
        name (str): such as ``"image 1"``.
        pixels (Tensor, optional): ``(C, H, W)`` as the model takes them. Default: None
        tokens (numpy.ndarray, optional): by their places, ``(rows, columns)``. Default: None
        note (str): how the places were found. Default: ``""``
    """

    size: tuple[int, int]
    name: str
    pixels: Tensor | None = None
    tokens: Any = None
    note: str = ""


def pictured(text: TokenizedText, media: Media, model: nn.Module, processor: Any) -> TokenizedText:
    """A text with its media, whose pictures say which of its tokens they are."""
    kinds = placeholders(model, processor)
    pictures: list[Picture] = []
    for sign, kind in kinds.items():
        positions = [k for k, token_id in enumerate(text.ids) if token_id == sign]
        if positions:
            pictures += _of_kind(kind, positions, text, media, model, processor)
    if not pictures:
        warnings.warn(
            f"the model reads {', '.join(media.arguments)} with a text of which no token is known "
            "as an image's or a sound's, so the page shows no image; expected the id of their "
            "placeholder as image_token_id (audio_token_id) of the model's config or processor.",
            UserWarning,
            stacklevel=2,
        )
    pictures.sort(key=lambda picture: picture.tokens[0])
    end = 1 + max((max(picture.tokens) for picture in pictures), default=len(text.ids) - 1)
    return replace(text, media=replace(media, pictures=tuple(pictures), end=end))


def _of_kind(
    kind: str,
    positions: Sequence[int],
    text: TokenizedText,
    media: Media,
    model: nn.Module,
    processor: Any,
) -> list[Picture]:
    entries = _entries(kind, media.arguments)
    division = _divided(entries, len(positions))
    if division is None:
        return _in_rows(kind, positions)
    merged, grids = division
    entries = _with_pixels(kind, entries, media.arguments, merged, _patch(model, processor))
    with_tokens, at = [], 0
    for entry, grid in zip(entries, grids, strict=True):
        tokens = np.array(positions[at : at + prod(grid)]).reshape(grid)
        with_tokens.append(replace(entry, tokens=tokens))
        at += prod(grid)
    if kind == "image":
        with_tokens = _joined(with_tokens, text)
    images = [] if any(entry.note for entry in with_tokens) else list(media.images)
    of_images = [k for k, entry in enumerate(with_tokens) if THUMBNAIL not in entry.name]
    originals: dict[int, Any] = {}
    if kind == "image" and len(images) == len(of_images):
        owner = (sum(i <= k for i in of_images) - 1 for k in range(len(with_tokens)))
        originals = {k: as_picture(images[i]) for k, i in enumerate(owner)}
    mean, std = norms(processor, None, None)
    return [
        Picture(
            entry.name,
            tuple(entry.tokens.flatten().tolist()),
            entry.tokens.shape,
            originals.get(
                k, None if entry.pixels is None else shown(entry.pixels.cpu(), mean, std)
            ),
            entry.note,
        )
        for k, entry in enumerate(with_tokens)
    ]


def _entries(kind: str, arguments: Any) -> list[PatchGrid]:
    # What the processor says of the patches of each image, or else its pixels.
    pixels, grid = (arguments.get(name) for name in PIXELS.get(kind, ("", "")))
    if grid is not None:
        sizes = [(int(h), int(w)) for t, h, w in grid.tolist() for _ in range(int(t))]
        frames = [(k, f) for k, (t, _, _) in enumerate(grid.tolist()) for f in range(int(t))]
        named = [f"{kind} {k + 1}" + f", frame {f + 1}" * (kind == "video") for k, f in frames]
        return [PatchGrid(size, name) for size, name in zip(sizes, named, strict=True)]
    sizes = arguments.get("spatial_shapes")
    if sizes is not None and kind == "image":
        return [
            PatchGrid((int(h), int(w)), f"image {k + 1}") for k, (h, w) in enumerate(sizes.tolist())
        ]
    if kind == "image" and torch.is_tensor(pixels) and pixels.dim() in (4, 5):
        each = pixels.flatten(0, pixels.dim() - 4)  # (n, C, H, W)
        return [
            PatchGrid((image.shape[1], image.shape[2]), f"image {k + 1}", image, note=DERIVED)
            for k, image in enumerate(each)
        ]
    return []


def _divided(entries: Sequence[PatchGrid], count: int) -> tuple[int, list[tuple[int, int]]] | None:
    # How many patches make one token in each direction, and the grid of tokens of each entry.
    for merged in range(1, max((max(entry.size) for entry in entries), default=0) + 1):
        grids = [(-(-entry.size[0] // merged), -(-entry.size[1] // merged)) for entry in entries]
        total = sum(map(prod, grids))
        is_exact = all(side % merged == 0 for entry in entries if entry.note for side in entry.size)
        if total == count and is_exact:
            return merged, grids
        if total < count:
            break
    return None


def _with_pixels(
    kind: str, entries: Sequence[PatchGrid], arguments: Any, merged: int, patch: int | None
) -> list[PatchGrid]:
    # The pictures (C, H, W) behind the patches, where their order is known.
    pixels = arguments.get(PIXELS[kind][0])
    if patch is None or not torch.is_tensor(pixels) or any(entry.note for entry in entries):
        return list(entries)
    of_one, counts = 3 * patch * patch, [prod(entry.size) for entry in entries]
    each: Sequence[Tensor] = ()
    if pixels.dim() == 3 and len(pixels) == len(entries):  # each image is padded
        each = [patches[:count] for patches, count in zip(pixels, counts, strict=True)]
    elif pixels.dim() == 2 and len(pixels) == sum(counts):
        each = pixels.split(counts)
    if not each or pixels.shape[-1] % of_one:
        return list(entries)
    arrange = _row_by_row if pixels.dim() == 3 else _block_by_block
    pairs = zip(entries, each, strict=True)
    return [
        replace(entry, pixels=arrange(values, entry.size, merged, patch)) for entry, values in pairs
    ]


def _row_by_row(values: Tensor, size: tuple[int, int], merged: int, patch: int) -> Tensor | None:
    # As of SigLIP 2: patches line by line, channels last.
    h, w = size
    pixels = values.reshape(h, w, patch, patch, -1)[..., :3]
    return pixels.permute(4, 0, 2, 1, 3).reshape(3, h * patch, w * patch)


def _block_by_block(
    values: Tensor, size: tuple[int, int], merged: int, patch: int
) -> Tensor | None:
    # As of Qwen: those of one token together, channels first, then neighboring frames.
    h, w = size
    if h % merged or w % merged:
        return None
    pixels = values.reshape(h // merged, w // merged, merged, merged, 3, -1, patch, patch)
    pixels = pixels[:, :, :, :, :, 0].permute(4, 0, 2, 5, 1, 3, 6)
    return pixels.reshape(3, h * patch, w * patch)


def _patch(model: nn.Module, processor: Any) -> int | None:
    # The pixels along one side of a patch.
    config = getattr(getattr(model, "config", None), "vision_config", None)
    image_processor = getattr(processor, "image_processor", processor)
    names = (
        (config, "patch_size"),
        (image_processor, "patch_size"),
        (image_processor, "encoder_patch_size"),
    )
    sides = (getattr(owner, name, None) for owner, name in names)
    return next((side for side in sides if isinstance(side, int)), None)


def _joined(entries: Sequence[PatchGrid], text: TokenizedText) -> list[PatchGrid]:
    # Parts of one large image, put together, and its thumbnail.
    images: list[PatchGrid] = []
    tiles: dict[tuple[int, int], PatchGrid] = {}
    number = 0
    for k, entry in enumerate(entries):
        first = int(entry.tokens.flat[0])
        before = text.tokens[first - 1].text if first else ""
        match = TILE.search(before)
        if match:
            tiles[int(match[1]), int(match[2])] = entry
            after = entries[k + 1 : k + 2]
            following = text.tokens[int(after[0].tokens.flat[0]) - 1].text if after else ""
            again = TILE.search(following)
            if again is None or (int(again[1]), int(again[2])) in tiles:
                number += 1
                images += _whole(tiles, number)
                tiles = {}
        elif THUMBNAIL in before and number:
            images.append(replace(entry, name=f"image {number}, {THUMBNAIL}"))
        else:
            number += 1
            images.append(replace(entry, name=f"image {number}"))
    return images


def _whole(tiles: dict[tuple[int, int], PatchGrid], number: int) -> list[PatchGrid]:
    rows, columns = (max(tile[axis] for tile in tiles) for axis in (0, 1))
    shapes = {tile.tokens.shape for tile in tiles.values()}
    if len(tiles) != rows * columns or len(shapes) > 1:
        return [
            replace(tile, name=f"image {number}, part {k + 1}")
            for k, tile in enumerate(tiles.values())
        ]
    lines = [[tiles[r + 1, c + 1] for c in range(columns)] for r in range(rows)]
    first = lines[0][0]
    tokens = np.block([[tile.tokens for tile in line] for line in lines])
    values = [[tile.pixels for tile in line if tile.pixels is not None] for line in lines]
    pixels = None
    if sum(map(len, values)) == len(tiles):
        pixels = torch.cat([torch.cat(line, 2) for line in values], 1)
    size = first.size[0] * rows, first.size[1] * columns
    return [replace(first, size=size, name=f"image {number}", pixels=pixels, tokens=tokens)]


def _in_rows(kind: str, positions: Sequence[int]) -> list[Picture]:
    # Neighbors are one image or sound.
    runs: list[list[int]] = []
    for k in positions:
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    note = "" if kind == "sound" else NOT_KNOWN.format(kind)
    return [Picture(f"{kind} {n + 1}", tuple(run), note=note) for n, run in enumerate(runs)]
