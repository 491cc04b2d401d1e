"""Tasks of numbers: series, images and a video."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from captum_ssm.examples import digits, signals

from . import models
from .task import ANY_OTHER, Examples, Task
from .texts import REDRAWS

PATCH = 4  # steps of a series or pixels of an image, along each side
EMPTY = -0.5  # of an image's pixels
COVERED = 0.25  # of a patch is ink of the digit, which makes the patch a cause


def _examples(
    inputs: Tensor,
    target: Tensor,
    cause: Tensor,
    swapped: Tensor,
    redrawn: Tensor,
    answer: Tensor,
    other: Tensor,
    skipped: Tensor | None = None,
) -> list[Examples]:
    skipped = torch.zeros_like(cause) if skipped is None else skipped
    return [Examples(inputs, target, cause, swapped, redrawn, answer, other, skipped)]


def _alike(kinds: Tensor, wanted: Tensor, skipped: Tensor | None = None) -> Tensor:
    # For each wanted kind, REDRAWS members of it, no one twice for the same: (REDRAWS, B).
    found = []
    for row, kind in enumerate(wanted.tolist()):
        is_alike = kinds == kind if skipped is None else (kinds == kind) & ~skipped[row]
        members = is_alike.nonzero()[:, 0]
        found.append(members.roll(-row)[:REDRAWS])
    return torch.stack(found, 1)


def _forecasts(count: int, generator: torch.Generator) -> list[Examples]:
    """One entry of each series' future, of a value above 0.5, which another value decides."""
    drawn = signals.make_forecasts(4 * count, generator)
    future = drawn.future.flatten(1)
    entry = torch.randint(future.shape[1], (len(drawn),), generator=generator)
    value = future.gather(1, entry[:, None])[:, 0]
    rows = (value > 0.5).nonzero()[:count, 0]
    series, entry, value = drawn.series[rows], entry[rows], value[rows]
    step, feature = (t.flatten(1)[rows, entry] for t in (drawn.steps, drawn.features))
    at = torch.arange(len(rows)), step, feature
    cause = torch.zeros_like(series, dtype=torch.bool)
    cause[at] = True
    fresh = torch.randn(REDRAWS, *series.shape, generator=generator)
    fresh[..., signals.SIGNALS :] = series[..., signals.SIGNALS :]  # the marks stay
    redrawn = torch.where(cause, series, fresh)
    swapped = torch.where(cause, -series, series)
    return _examples(series, entry, cause.flatten(1), swapped, redrawn, value, -value)


def _bursts(count: int, generator: torch.Generator) -> list[Examples]:
    """The class of each series, by a pattern in one of six features."""
    drawn, rows = signals.make_bursts(count, generator), torch.arange(count)[:, None]
    labels, features = drawn.labels, drawn.features
    other = (labels + 1) % len(signals.CLASSES)
    shapes = 2 * signals.patterns()
    at = drawn.starts[:, None] + torch.arange(signals.PATTERN)
    swapped = drawn.series.clone()
    swapped[rows, features[:, None], at] += shapes[other] - shapes[labels]
    # The other features are taken from series whose pattern is in the same feature.
    donors = signals.make_bursts(40 * signals.CHANNELS, generator)
    own = torch.arange(signals.CHANNELS)[:, None] == features[:, None, None]
    redrawn = torch.where(own, drawn.series, donors.series[_alike(donors.features, features)])
    cause = drawn.masks.unflatten(-1, (-1, PATCH)).any(-1).flatten(1)
    return _examples(drawn.series, labels, cause, swapped, redrawn, labels, other)


def _digits(count: int, generator: torch.Generator) -> list[Examples]:
    """The digit of each image among pieces of others, which are taken from other images."""
    glyphs, labels = digits.glyphs("test")
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    drawn = digits.compose(glyphs[chosen], labels[chosen], generator)
    images, ink = drawn.images, drawn.masks[:, None]
    clutter = images.masked_fill(ink, EMPTY)
    redrawn = torch.stack(
        [torch.where(ink, images, clutter.roll(k + 1, 0)) for k in range(REDRAWS)]
    )
    share = torch.nn.functional.avg_pool2d(ink.float(), PATCH).flatten(1)
    answer = drawn.labels
    other = torch.full_like(answer, ANY_OTHER)
    cause, touched = share >= COVERED, share > 0  # a patch with little ink is neither
    return _examples(images, answer, cause, clutter, redrawn, answer, other, touched & ~cause)


def _clips(count: int, generator: torch.Generator) -> list[Examples]:
    """The class of each clip, by a shape in one of its frames."""
    clips = models.video_clips()
    drawn = clips.make_clips(count, generator)
    donors = clips.make_clips(40 * clips.FRAMES, generator)
    frame = torch.arange(clips.FRAMES) == drawn.frames[:, None]
    own = frame[:, None, :, None, None]
    # Other frames hold no shape in a clip whose deciding frame is at the same place.
    redrawn = torch.where(own, drawn.clips, donors.clips[_alike(donors.frames, drawn.frames)])
    same = donors.labels == drawn.labels[:, None]
    other = _alike(donors.frames, drawn.frames, same)[0]
    swapped = torch.where(own, donors.clips[other], drawn.clips)
    labels = drawn.labels
    return _examples(drawn.clips, labels, frame, swapped, redrawn, labels, donors.labels[other])


def _patches(side: int) -> Tensor:
    line = torch.arange(side) // PATCH
    return (side // PATCH * line[:, None] + line).expand(3, side, side)


def float_tasks() -> list[Task]:
    """The tasks whose inputs are numbers."""
    steps, features = signals.STEPS, len(signals.FEATURES)
    bursts = torch.arange(signals.CHANNELS * signals.LENGTH // PATCH)
    frames = torch.arange(16)[None, :, None, None].expand(1, 16, 16, 16)
    return [
        Task(
            "series-forecaster",
            "series",
            "the value of one signal at the step that a mark points at",
            partial(models.series, "forecaster"),
            _forecasts,
            torch.arange(steps * features).view(steps, features),
            trained_as="series-forecaster",
            is_forecast=True,
        ),
        Task(
            "series-classifier",
            "series",
            "a pattern of 8 steps in one of six features; the others have bursts of the same size",
            partial(models.series, "classifier"),
            _bursts,
            bursts.repeat_interleave(PATCH).view(signals.CHANNELS, signals.LENGTH),
            trained_as="series-classifier",
        ),
        Task(
            "digits-vim",
            "images",
            "the patches of the digit, among pieces of other digits",
            models.digits_vim,
            _digits,
            _patches(digits.CANVAS),
            EMPTY,
            trained_as="digits-vim",
        ),
        Task(
            "moving-video",
            "video",
            "the frame with a shape; all other frames flash as many pixels in no shape",
            models.moving_video,
            _clips,
            frames,
            trained_as="moving-video",
        ),
    ]
