"""Train the small video model on clips that one frame decides, and save it with its scores.

Run ``python benchmarks/video/train.py``.

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
from clips import CLASSES, FRAMES, held_out_clips, make_clips, scores
from torch import Tensor, nn
from torch.nn import functional

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _scan import fast_scan
from _training import about_run, fit, options, table, train_module
from trained_models import VideoClassifier

PROGRESS_SEED = 10_001


@dataclass(frozen=True)
class Cycle:
    """Training with a fresh optimizer; over the first ``growth`` of the steps, clips get longer."""

    steps: int
    growth: float


# A shape is found sooner among few flashes, so the first clips are of two frames.
CYCLES = (Cycle(steps=1500, growth=0.5), Cycle(steps=500, growth=0.0))


def length(cycle: Cycle, step: int) -> int:
    """Frames of the clips at ``step``: an even number, at the end the task's own."""
    if step >= cycle.growth * cycle.steps:
        return FRAMES
    return 2 + 2 * int(step / (cycle.growth * cycle.steps) * FRAMES / 2)


def run(number: int, model: nn.Module, args: argparse.Namespace) -> None:
    """Train in place on fresh clips at every step of a cycle."""
    cycle = CYCLES[number]
    generator = torch.Generator().manual_seed(args.seed + number)
    watched = make_clips(200, torch.Generator().manual_seed(PROGRESS_SEED))

    def loss_of(step: int) -> Tensor:
        clips = make_clips(args.batch, generator, length(cycle, step))
        return functional.cross_entropy(model(clips.clips), clips.labels)

    settings = argparse.Namespace(**vars(args), steps=cycle.steps)
    fit(model, settings, "video", loss_of, lambda: scores(model, watched))


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float) -> str:
    """The README.md saved next to the weights."""
    steps = " and ".join(f"{cycle.steps:,}" for cycle in CYCLES)
    rows = {
        "task": "`benchmarks/video/clips.py`: 16 frames of 16 x 16 with a ball that moves and, in "
        f"every frame, a flash of 4 x 4 pixels; in one frame it is a shape, the class "
        f"({', '.join(CLASSES)}), in all others the pixels of a shape in random order",
        "input and output": "`(B, 1, 16, 16, 16)` of (channel, frame, row, column), to logits "
        "`(B, 4)`",
        "model": "tubelets of 2 frames, 4 x 4 each (`nn.Conv3d`, 8 x 4 x 4 = 128 tokens), "
        "positions, 2 blocks of `captum_ssm.models.BidirectionalMamba`, width 48, state 8; the "
        f"tokens' mean; {metrics['parameters']:,} parameters, float32",
    } | about_run(
        "benchmarks/video/train.py",
        args,
        f"{steps} steps of {args.batch} fresh clips, in the first half of the first cycle of 2 to "
        f"16 frames; {seconds / 60:.0f} minutes of processor time, 1 thread",
    )
    found = {
        "accuracy": f"{metrics['accuracy']:.1%}",
        "accuracy without the deciding frame; a guess is 25%": (
            f"{metrics['accuracy_without_frame']:.1%}"
        ),
        "accuracy without another frame": f"{metrics['accuracy_without_another']:.1%}",
    }
    return f"""# {args.output.name}

A small bidirectional Mamba that names the shape that one frame of a clip shows. It was trained from
scratch for this repository, to be explained rather than used: the frame that decides is known, so
an explanation of this model can be checked.

{table(rows)}

On {metrics["held_out"]} held-out clips:

{table(found)}

```python
import sys

sys.path += ["tutorials", "benchmarks/video"]
from clips import held_out_clips
from trained_models import load

model, clips = load("{args.output.name}"), held_out_clips()
```

`clips.frames[b]` is the frame that decides; `clips.masks (B, 16, 16, 16)` are the pixels of the
shape in it.
"""


def train(args: argparse.Namespace) -> nn.Module:
    """The model after all cycles."""
    model = VideoClassifier()
    with fast_scan():
        for number in range(len(CYCLES)):
            run(number, model, args)
    return model


def evaluate(model: nn.Module) -> dict[str, Any]:
    """The held-out scores that the card shows."""
    clips = held_out_clips()
    return {**scores(model, clips), "held_out": len(clips)}


def main() -> None:
    args = options(__doc__, "moving-video", report_every=150, batch=64).parse_args()
    train_module(args, lambda: train(args), evaluate, model_card)


if __name__ == "__main__":
    main()
