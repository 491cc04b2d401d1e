"""Cluttered digits: scikit-learn's handwritten digits on a canvas, with the mask of the object.

Each image is one digit, three times its size, somewhere on a 40 x 40 canvas, among pieces of
other digits and noise, both tinted. What is the object is known to the pixel, so segmentation by
an explanation can be scored without annotations; the pieces are strokes too, so that looking at
ink alone does not find the object. The digits come from scikit-learn, which has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CANVAS", "Samples", "compose", "glyphs", "held_out_digits"]

CANVAS = 40
SCALE = 3
SIDE = 8 * SCALE
PIECE = 3
HELD_OUT = 360


@dataclass(frozen=True)
class Samples:
    """Images of digits, and which pixels are the digit.

    Args:
        images (Tensor): ``(B, 3, 40, 40)``, from -0.5 (empty) to 1.5 (full ink).
        labels (Tensor): The digits, ``(B,)``.
        masks (Tensor): Marks the digit's pixels, ``(B, 40, 40)``, boolean.

    Examples::

        >>> samples = digits.held_out_digits(4)
        >>> len(samples), samples.masks.shape
        (4, torch.Size([4, 40, 40]))
    """

    images: Tensor
    labels: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, size: int) -> Iterator[Samples]:
        """The samples in order.

        Args:
            size (int): How many at a time.

        Yields:
            Samples.
        """
        for start in range(0, len(self), size):
            at = slice(start, start + size)
            yield Samples(self.images[at], self.labels[at], self.masks[at])


def glyphs(split: str) -> tuple[Tensor, Tensor]:
    """The handwritten digits by themselves.

    Args:
        split (str): ``"train"`` or ``"test"``.

    Returns:
        Images ``(n, 8, 8)`` in [0, 1], and the digits ``(n,)``.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed.

    Examples::

        >>> images, labels = digits.glyphs("test")
        >>> images.shape, labels.shape
        (torch.Size([360, 8, 8]), torch.Size([360]))
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    chosen = {"train": order[HELD_OUT:], "test": order[:HELD_OUT]}[split]
    images = torch.from_numpy(bunch.images[chosen] / 16).float()
    return images, torch.from_numpy(bunch.target[chosen]).long()


def compose(
    glyphs: Tensor, labels: Tensor, generator: torch.Generator, pieces: int = 3, noise: float = 0.05
) -> Samples:
    """Each digit on a canvas, among pieces of the others.

    Args:
        glyphs (Tensor): Images ``(B, 8, 8)``, such as :func:`glyphs` returns.
        labels (Tensor): Their digits, ``(B,)``.
        generator (torch.Generator): The source of all randomness.
        pieces (int, optional): How many pieces of other digits there are per canvas. Default: 3
        noise (float, optional): The noise's standard deviation, as a share of full ink.
            Default: 0.05

    Returns:
        The samples.

    Examples::

        >>> images, labels = digits.glyphs("test")
        >>> digits.compose(images[:2], labels[:2], torch.Generator().manual_seed(0)).images.shape
        torch.Size([2, 3, 40, 40])
    """
    B = len(glyphs)
    big = _enlarge(glyphs)
    canvas = torch.zeros(B, 3, CANVAS, CANVAS)
    side = PIECE * SCALE
    for _ in range(pieces):
        donor = torch.randint(B, (B,), generator=generator)
        corner = torch.randint(1, 8 - PIECE, (B, 2), generator=generator)
        place = torch.randint(CANVAS - side + 1, (B, 2), generator=generator)
        tint = _tints(B, generator)
        for b in range(B):
            (r, c), (y, x) = (corner[b] * SCALE).tolist(), place[b].tolist()
            stroke = big[donor[b], r : r + side, c : c + side] * tint[b]
            spot = canvas[b, :, y : y + side, x : x + side]
            torch.maximum(spot, stroke, out=spot)
    masks = torch.zeros(B, CANVAS, CANVAS, dtype=torch.bool)
    place = torch.randint(CANVAS - SIDE + 1, (B, 2), generator=generator)
    tint = _tints(B, generator)
    for b, (y, x) in enumerate(place.tolist()):
        inside = big[b] > 0.3
        spot = canvas[b, :, y : y + SIDE, x : x + SIDE]
        spot.copy_(torch.where(inside, big[b] * tint[b], spot))
        masks[b, y : y + SIDE, x : x + SIDE] = inside
    canvas += noise * torch.randn(canvas.shape, generator=generator)
    return Samples(canvas * 2 - 0.5, labels, masks)


def held_out_digits(limit: int | None = None, seed: int = 1) -> Samples:
    """Digits that no model was trained on, each on one canvas.

    Args:
        limit (int, optional): How many. None is all 360. Default: None
        seed (int, optional): The same seed gives the same canvases. Default: 1

    Returns:
        The samples.

    Examples::

        >>> digits.held_out_digits(8).labels.shape
        torch.Size([8])
    """
    images, labels = glyphs("test")
    samples = compose(images, labels, torch.Generator().manual_seed(seed))
    return samples if limit is None else next(samples.batches(limit))


def _enlarge(glyphs: Tensor) -> Tensor:
    size = (SIDE, SIDE)
    return F.interpolate(glyphs[:, None], size, mode="bilinear", align_corners=False)[:, 0]


def _tints(count: int, generator: torch.Generator) -> Tensor:
    return 0.6 + 0.4 * torch.rand(count, 3, 1, 1, generator=generator)
