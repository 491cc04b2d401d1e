"""Scenes: one to three digits in clutter, with the class of every pixel.

The digits are scikit-learn's handwritten ones at twice their size on a 48 x 48 canvas, apart from
each other, among pieces of other digits, tinted and with noise. Every pixel is of one of 11
classes: the digit whose ink it is, or :data:`BACKGROUND`, which is everything else, pieces too.
The digits are split as in :mod:`digits`, so held-out scenes are of digits that were not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.examples.digits import glyphs

__all__ = ["BACKGROUND", "CLASSES", "Scenes", "held_out_scenes", "make_scenes", "scores"]

HELD_OUT_SEED = 20_002

CANVAS = 48
SCALE = 2
SIDE = 8 * SCALE
BACKGROUND = 10
CLASSES = (*map(str, range(10)), "background")
MOST = 3
PIECES = 5
PIECE = 3 * SCALE
INK = 0.3


@dataclass(frozen=True)
class Scenes:
    """Images of several digits, and the class of every pixel.

    Args:
        images (Tensor): ``(B, 3, 48, 48)``, from -0.5 (empty) to 1.5 (full ink).
        labels (Tensor): The class of every pixel, an index of :data:`CLASSES`, ``(B, 48, 48)``.
        objects (Tensor): Numbers the digits of a scene 1, 2, 3 where their ink is, and is 0
            elsewhere, so that two digits of one class can be told apart, ``(B, 48, 48)``.

    Examples::

        >>> found = scenes.held_out_scenes(2)
        >>> bool(((found.objects == 0) == (found.labels == scenes.BACKGROUND)).all())
        True
    """

    images: Tensor
    labels: Tensor
    objects: Tensor

    def __len__(self) -> int:
        return len(self.images)


def make_scenes(
    count: int,
    generator: torch.Generator,
    split: str = "train",
    jitter: float = 0.0,
    size: int = CANVAS,
) -> Scenes:
    """Fresh scenes.

    Args:
        count (int): How many.
        generator (torch.Generator): The source of all randomness.
        split (str, optional): The side of the digits' split: ``"train"`` or ``"test"``.
            Default: "train"
        jitter (float, optional): Digits are turned (in radians) and scaled by so much at most.
            Default: 0
        size (int, optional): The side of the canvas. On a smaller one there is one digit, among
            fewer pieces. Default: 48

    Returns:
        The scenes.

    Examples::

        >>> scenes.make_scenes(2, torch.Generator().manual_seed(0)).images.shape
        torch.Size([2, 3, 48, 48])
    """
    shapes, named = _glyphs(split)
    most, pieces = (MOST, PIECES) if size == CANVAS else (1, PIECES // 2)
    chosen = torch.randint(len(shapes), (count, most + pieces), generator=generator)
    ink = _enlarge(shapes[chosen.flatten()], generator, jitter).unflatten(0, chosen.shape)
    tints = 0.6 + 0.4 * torch.rand(count, most + pieces, 3, 1, 1, generator=generator)
    corners = torch.randint(3, 8 * SCALE - PIECE - 2, (count, pieces, 2), generator=generator)
    spots = torch.randint(size - PIECE + 1, (count, pieces, 2), generator=generator)
    present = torch.randint(1, most + 1, (count,), generator=generator)

    canvas = torch.zeros(count, 3, size, size)
    labels = torch.full((count, size, size), BACKGROUND)
    objects = torch.zeros(count, size, size, dtype=torch.long)
    for b in range(count):
        for k in range(pieces):
            (r, c), (y, x) = corners[b, k].tolist(), spots[b, k].tolist()
            stroke = ink[b, most + k, r : r + PIECE, c : c + PIECE] * tints[b, most + k]
            spot = canvas[b, :, y : y + PIECE, x : x + PIECE]
            torch.maximum(spot, stroke, out=spot)
        for k, (y, x) in enumerate(_apart(int(present[b]), size, generator)):
            inside = ink[b, k] > INK
            at = slice(y, y + SIDE), slice(x, x + SIDE)
            spot = canvas[b, :, y : y + SIDE, x : x + SIDE]
            spot.copy_(torch.where(inside, ink[b, k] * tints[b, k], spot))
            labels[b][at][inside] = named[chosen[b, k]]
            objects[b][at][inside] = k + 1
    canvas += 0.05 * torch.randn(canvas.shape, generator=generator)
    return Scenes(canvas * 2 - 0.5, labels, objects)


# Reading them takes as long as drawing a batch of scenes.
_glyphs = cache(glyphs)


def _apart(count: int, size: int, generator: torch.Generator) -> list[tuple[int, int]]:
    # Corners of squares that do not meet; drawn anew together where they do.
    while True:
        places = torch.randint(size - SIDE + 1, (count, 2), generator=generator)
        gaps = (places[:, None] - places).abs().amax(-1) + SIDE * torch.eye(count)
        if (gaps >= SIDE).all():
            return [(y, x) for y, x in places.tolist()]


def _enlarge(glyphs: Tensor, generator: torch.Generator, jitter: float) -> Tensor:
    # ``(n, 8, 8)`` to ``(n, 16, 16)``, turned by up to ``jitter`` radians and scaled as much.
    angle, height, width = jitter * (2 * torch.rand(3, len(glyphs), generator=generator) - 1)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    turn = turn / (1 + torch.stack([height, width], -1))[:, None]
    still = torch.zeros(len(glyphs), 2, 1)
    shape = [len(glyphs), 1, SIDE, SIDE]
    grid = F.affine_grid(torch.cat([turn, still], -1), shape, align_corners=False)
    return F.grid_sample(glyphs[:, None], grid, align_corners=False)[:, 0]


def held_out_scenes(count: int = 200) -> Scenes:
    """Scenes of held-out digits, the same at every call.

    Args:
        count (int, optional): How many. Default: 200

    Returns:
        The scenes.

    Examples::

        >>> len(scenes.held_out_scenes(3))
        3
    """
    return make_scenes(count, torch.Generator().manual_seed(HELD_OUT_SEED), "test")


@torch.no_grad()
def scores(model: nn.Module, scenes: Scenes) -> dict[str, float]:
    """Intersection over union of each class over all pixels, averaged over the 11 classes.

    Args:
        model (nn.Module): Images ``(B, 3, 48, 48)`` to logits ``(B, 11, 48, 48)``.
        scenes (Scenes): What it is asked.

    Returns:
        ``miou``, the mean over the classes; ``lowest_iou``, the smallest of them; ``digits``, the
        share of digits most of whose ink is given the right class.

    Examples::

        >>> asked = scenes.held_out_scenes(20)
        >>> right = lambda images: nn.functional.one_hot(asked.labels).permute(0, 3, 1, 2)
        >>> scenes.scores(right, asked)["digits"]
        1.0
    """
    predicted = torch.cat([model(images).argmax(1) for images in scenes.images.split(50)])
    pairs = scenes.labels.flatten() * len(CLASSES) + predicted.flatten()
    table = torch.bincount(pairs, minlength=len(CLASSES) ** 2).view(len(CLASSES), -1).double()
    hits = table.diagonal()
    ious = hits / (table.sum(0) + table.sum(1) - hits)
    right = (predicted == scenes.labels).double()
    inks = [scenes.objects == k for k in range(1, MOST + 1)]
    shares = torch.stack([(right * ink).sum((1, 2)) / ink.sum((1, 2)) for ink in inks])
    shares = shares[~shares.isnan()]
    return {
        "miou": float(ious.mean()),
        "lowest_iou": float(ious.min()),
        "digits": float((shares > 0.5).double().mean()),
    }
