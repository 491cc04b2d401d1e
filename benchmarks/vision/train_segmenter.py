"""Train the U-shaped segmentation model on scenes: ``python benchmarks/vision/train_segmenter.py``.

The model is in ``tutorials/trained_models.py``. Training is reproducible from ``--seed`` on one
machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_ssm.examples.scenes import (
    BACKGROUND,
    CANVAS,
    CLASSES,
    held_out_scenes,
    make_scenes,
    scores,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _training import about_run, fit, options, table, train_module
from trained_models import DigitsSegmenter

PROGRESS_SEED = 10_001
JITTER = 0.15


@dataclass(frozen=True)
class Lesson:
    """Training on fresh canvases of one size, with the weight of the background in the loss."""

    size: int
    steps: int
    batch: int
    background: float


# First one digit on canvases of half the size: it is learned sooner where there is little else, and
# no weight of the model depends on the size. Nine of ten pixels are background, so it counts less
# until the digits are known, and fully at the end: else too many pixels become digits.
LESSONS = (
    Lesson(CANVAS // 2, steps=800, batch=64, background=0.3),
    Lesson(CANVAS, steps=400, batch=16, background=0.3),
    Lesson(CANVAS, steps=250, batch=24, background=1.0),
)


def train(args: argparse.Namespace) -> DigitsSegmenter:
    """The model after all lessons."""
    state = DigitsSegmenter().state_dict()
    for lesson in LESSONS:
        model = DigitsSegmenter(lesson.size)
        model.load_state_dict(state)
        run(lesson, model, args)
        state = model.state_dict()
    return model


def evaluate(model: nn.Module) -> dict[str, Any]:
    """The held-out scores that the card shows."""
    scenes = held_out_scenes()
    return {**scores(model, scenes), "held_out": len(scenes)}


def run(lesson: Lesson, model: nn.Module, args: argparse.Namespace) -> None:
    """Train in place, with a fresh optimizer.

    The training digits are turned and scaled a little: there are only 1,437.
    """
    generator = torch.Generator().manual_seed(args.seed + lesson.size)
    watched = torch.Generator().manual_seed(PROGRESS_SEED)
    watched = make_scenes(100, watched, "test", size=lesson.size)
    weight = torch.ones(len(CLASSES))
    weight[BACKGROUND] = lesson.background

    def loss_of(step: int) -> Tensor:
        scenes = make_scenes(lesson.batch, generator, jitter=JITTER, size=lesson.size)
        return functional.cross_entropy(model(scenes.images), scenes.labels, weight)

    settings = argparse.Namespace(**vars(args), steps=lesson.steps)
    fit(model, settings, f"{lesson.size} pixels", loss_of, lambda: scores(model, watched))


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float) -> str:
    """The README.md saved next to the weights."""
    lessons = ", then ".join(
        f"{lesson.steps} steps of {lesson.batch} canvases of {lesson.size} x {lesson.size}"
        for lesson in LESSONS
    )
    rows = {
        "task": "`captum_ssm.examples.scenes`: one to three of scikit-learn's 8 x 8 digits at "
        "twice their size on a 48 x 48 canvas, among pieces of other digits and noise, tinted",
        "input and output": "`(B, 3, 48, 48)` to logits `(B, 11, 48, 48)`: the ten digits, then "
        "background; an empty canvas is -0.5, full ink 1.5",
        "model": "stages of `captum_ssm.models.SS2D` on 12 x 12 (2 blocks, width 32), 6 x 6 (2, "
        "64) and again 12 x 12 (1, 32) patches; strided convolutions down, transposed ones up, "
        f"skip connections added at every size; {metrics['parameters']:,} parameters, float32",
    } | about_run(
        "benchmarks/vision/train_segmenter.py",
        args,
        f"{lessons}, all fresh, the training digits turned and scaled by up to "
        f"{JITTER:.0%}; {seconds / 60:.0f} minutes of processor time, 1 thread",
    )
    found = {
        "mIoU over the 11 classes": f"{metrics['miou']:.1%}",
        "IoU of the class where it is lowest": f"{metrics['lowest_iou']:.1%}",
        "digits most of whose ink is of the right class": f"{metrics['digits']:.1%}",
    }
    return f"""# {args.output.name}

A small U-shaped Mamba that says of every pixel which digit it is ink of. It was trained from
scratch for this repository, to be explained rather than used: which pixels are the object is
known, so an explanation of this model can be checked.

{table(rows)}

On {metrics["held_out"]} held-out scenes, of digits that were not trained on:

{table(found)}

```python
import sys

sys.path.append("tutorials")
from captum_ssm.examples.scenes import held_out_scenes
from trained_models import load

model, scenes = load("{args.output.name}"), held_out_scenes()
```

`scenes.labels (B, 48, 48)` is the class of every pixel; `scenes.objects` numbers the digits of a
scene from 1, so that `scenes.objects[b] == 1` is the ink of one digit. The digits are those of
scikit-learn's `load_digits` (UCI, Alpaydin and Kaynak, 1998).
"""


def main() -> None:
    args = options(__doc__, "digits-segmenter", report_every=50).parse_args()
    train_module(args, lambda: train(args), evaluate, model_card)


if __name__ == "__main__":
    main()
