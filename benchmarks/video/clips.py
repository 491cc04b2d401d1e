"""Clips whose class one frame decides, and that frame is known.

A clip is 16 frames of 16 x 16. A ball moves through all of them. Every frame flashes 4 x 4
pixels somewhere, a new place each time: in one frame they are one of four shapes, the class; in
the other frames they are the pixels of a shape in random order, which is no class. So no frame is
brighter than another, and neither the ball nor the place nor the time tells the class. Places are
even rows and columns, so a shape may lie across patches of 4 x 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

HELD_OUT_SEED = 20_002

FRAMES = 16
SIDE = 16
SHAPE = 4
CLASSES = ("box", "plus", "cross", "bars")
_DRAWN = {
    "box": ("####", "#..#", "#..#", "####"),
    "plus": (".##.", "####", "####", ".##."),
    "cross": ("#..#", ".##.", ".##.", "#..#"),
    "bars": ("####", "....", "####", "...."),
}


@dataclass(frozen=True)
class Clips:
    """Clips ``(B, 1, 16, 16, 16)`` of (channel, frame, row, column), and their classes ``(B,)``.

    ``frames (B,)`` is the frame that decides; ``masks (B, 16, 16, 16)`` are its shape's pixels.
    """

    clips: Tensor
    labels: Tensor
    frames: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.clips)


def shapes() -> Tensor:
    """The shapes ``(4, 4, 4)`` of the classes, of 0 and 1."""
    rows = [[[pixel == "#" for pixel in row] for row in _DRAWN[name]] for name in CLASSES]
    return torch.tensor(rows).float()


def make_clips(count: int, generator: torch.Generator, length: int = FRAMES) -> Clips:
    """Fresh clips of ``length`` frames."""

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    labels, frames = draw(len(CLASSES), count), draw(length, count)
    rows = torch.arange(count)
    order = torch.rand(count, length, SHAPE**2, generator=generator).argsort(-1)
    order[rows, frames] = torch.arange(SHAPE**2)
    kinds = draw(len(CLASSES), count, length)
    kinds[rows, frames] = labels
    flashed = shapes().flatten(1)[kinds].gather(-1, order)  # (B, T, 16)

    corner = 2 * draw((SIDE - SHAPE) // 2 + 1, count, length, 2, 1)
    offset = torch.arange(SHAPE)
    y, x = corner[..., 0, :] + offset, corner[..., 1, :] + offset  # (B, T, 4)
    at = (y[..., None] * SIDE + x[..., None, :]).flatten(2)
    clips = _ball(count, length, generator).flatten(2)
    clips = clips.scatter_reduce(-1, at, flashed, "amax")
    clips = clips + 0.1 * torch.randn(clips.shape, generator=generator)

    masks = torch.zeros_like(clips).scatter(-1, at, flashed)
    masks[torch.arange(length) != frames[:, None]] = 0
    video = (count, length, SIDE, SIDE)
    return Clips(clips.view(video)[:, None], labels, frames, masks.view(video) > 0)


def _ball(count: int, length: int, generator: torch.Generator) -> Tensor:
    # A dim disk that bounces off the borders, ``(B, T, H, W)``.
    start = (SIDE - 1) * torch.rand(count, 2, generator=generator)
    speed = 3 * torch.rand(count, 2, generator=generator) - 1.5
    path = start[:, None] + speed[:, None] * torch.arange(length)[:, None]
    path = (SIDE - 1) - (path % (2 * (SIDE - 1)) - (SIDE - 1)).abs()
    pixel = torch.arange(SIDE)
    dy = pixel[:, None] - path[..., 0, None, None]
    dx = pixel - path[..., 1, None, None]
    return 0.5 * (dy**2 + dx**2 < 2.5**2).float()


def held_out_clips(count: int = 500) -> Clips:
    """Clips that the model was not trained on, the same at every call."""
    return make_clips(count, torch.Generator().manual_seed(HELD_OUT_SEED))


@torch.no_grad()
def scores(model: nn.Module, clips: Clips) -> dict[str, float]:
    """The share of classes named right, with all frames and with one frame emptied.

    Without the deciding frame a guess is left, 0.25. Without another one, drawn at random, what
    is named should stay.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(clips))
    others = torch.randint(1, FRAMES, (len(clips),), generator=generator)

    def accuracy(emptied: Tensor | None = None) -> float:
        video = clips.clips.clone()
        if emptied is not None:
            video[rows, :, emptied] = 0
        return float((model(video).argmax(1) == clips.labels).float().mean())

    return {
        "accuracy": accuracy(),
        "accuracy_without_frame": accuracy(clips.frames),
        "accuracy_without_another": accuracy((clips.frames + others) % FRAMES),
    }
