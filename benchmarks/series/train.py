"""Train the forecaster or the classifier of series, measure it on held-out series and save it.

Run from the repository root::

    python benchmarks/series/train.py forecaster
    python benchmarks/series/train.py classifier

The models are in ``tutorials/trained_models.py``. Training is reproducible from ``--seed`` on one
machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from captum_ssm.examples.signals import (
    CLASSES,
    STEPS,
    burst_scores,
    forecast_scores,
    held_out_bursts,
    held_out_forecasts,
    make_bursts,
    make_forecasts,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _scan import fast_scan
from _training import about_run, fit, options, parsed, slow_rates, table, train_module
from trained_models import KINDS

PROGRESS_SEED = 10_001
SHORTEST_LESSON = 8


def build(task: str) -> nn.Module:
    """An untrained model whose state remembers for longer than the stock rates let it."""
    model = KINDS[f"series-{task}"]()
    slow_rates(model, 0.1)
    return model


def lesson_length(step: int, steps: int) -> int:
    """Length of the series at ``step``: a mark is found soon in a short series, late in a long one.

    It grows to the task's own over the first two fifths of training.
    """
    progress = min(1.0, step / (0.4 * steps))
    return round(SHORTEST_LESSON + (STEPS - SHORTEST_LESSON) * progress)


def train(args: argparse.Namespace) -> nn.Module:
    """The model after training on fresh series at every step."""
    model = build(args.task)
    generator = torch.Generator().manual_seed(args.seed)
    watched = torch.Generator().manual_seed(PROGRESS_SEED)
    if args.task == "forecaster":
        forecasts = make_forecasts(256, watched)

        def loss_of(step: int) -> Tensor:
            length = lesson_length(step, args.steps)
            drawn = make_forecasts(args.batch, generator, length)
            return functional.mse_loss(model(drawn.series), drawn.future)

        def scores() -> dict[str, float]:
            return forecast_scores(model, forecasts)
    else:
        bursts = make_bursts(512, watched)

        def loss_of(step: int) -> Tensor:
            drawn = make_bursts(args.batch, generator)
            return functional.cross_entropy(model(drawn.series), drawn.labels)

        def scores() -> dict[str, float]:
            return burst_scores(model, bursts)

    with fast_scan():
        fit(model, args, args.task, loss_of, scores)
    return model


def evaluate(model: nn.Module, task: str) -> dict[str, Any]:
    """The held-out scores that the card shows."""
    if task == "forecaster":
        forecasts = held_out_forecasts()
        return {**forecast_scores(model, forecasts), "held_out": len(forecasts)}
    bursts = held_out_bursts()
    return {**burst_scores(model, bursts), "held_out": len(bursts)}


ABOUT = {
    "forecaster": (
        "A small Mamba that forecasts a series: twelve steps of five features from 64.",
        "two marks say at which steps the values are that decide the forecast, and which of the "
        "three signals decides each feature is fixed; all other values decide nothing",
        "float `(B, 64, 5)` to `(B, 12, 5)`",
        "`nn.Linear(5, 32)` per step, 2 blocks of transformers' `MambaMixer`, `hidden_size=32`, "
        "`state_size=8`; the last step's token to all of the forecast",
        "held_out_forecasts()",
        "`forecasts.steps[b, h, f]` and `forecasts.features[b, h, f]` are the step and the feature "
        "that decide\n`forecasts.future[b, h, f]`; `forecasts.decisive(h, f)` is the same as a "
        "mask `(B, 64, 5)`",
    ),
    "classifier": (
        "A small bidirectional Mamba that names the pattern in one of six features of a series.",
        f"one of four patterns ({', '.join(CLASSES)}) of 8 steps, in any feature at any step; "
        "every other feature has a burst of the same size without a class",
        "float `(B, 6, 96)`, channels first, to logits `(B, 4)`",
        "patches of 4 steps (`nn.Conv1d(6, 48, 4, stride=4)`, 24 tokens), positions, 2 blocks of "
        "`captum_ssm.models.BidirectionalMamba`, width 48, state 8; the tokens' mean",
        "held_out_bursts()",
        "`bursts.features[b]` and `bursts.starts[b]` are the feature and the first of the 8 steps "
        "of the\npattern; `bursts.masks` is the same as `(B, 6, 96)`",
    ),
}
SCORES = {
    "r2": "R², the mean over the 60 entries",
    "r2_decisive_redrawn": "R² with the decisive values redrawn",
    "r2_others_redrawn": "R² with all values of the signals except the decisive ones redrawn",
    "accuracy": "accuracy",
    "accuracy_without_pattern": "accuracy with the pattern blanked; a guess is 0.25",
}


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float) -> str:
    """The README.md saved next to the weights."""
    what, task, shapes, architecture, drawn, answer = ABOUT[args.task]
    rows = {
        "task": f"`captum_ssm.examples.signals`: {task}",
        "input and output": shapes,
        "model": f"{architecture}; {metrics['parameters']:,} parameters, float32",
    } | about_run(
        "benchmarks/series/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} fresh series; "
        f"{seconds / 60:.0f} minutes of processor time, 1 thread",
        (torch, transformers),
    )
    scores = {says: f"{metrics[key]:.3f}" for key, says in SCORES.items() if key in metrics}
    samples = "forecasts" if args.task == "forecaster" else "bursts"
    return f"""# {args.output.name}

{what}
It was trained from scratch for this repository, to be explained rather than used: the step and the
feature that decide every answer are known, so an explanation of this model can be checked.

{table(rows)}

On {metrics["held_out"]} held-out series:

{table(scores)}

```python
import sys

sys.path.append("tutorials")
from captum_ssm.examples.signals import {drawn.removesuffix("()")}
from trained_models import load

model, {samples} = load("{args.output.name}"), {drawn}
```

{answer}.
"""


def main() -> None:
    parser = options(__doc__, "series-", report_every=250, steps=1500, batch=64)
    parser.add_argument("task", choices=ABOUT)
    args = parsed(parser, "series-", "task")
    train_module(args, lambda: train(args), lambda model: evaluate(model, args.task), model_card)


if __name__ == "__main__":
    main()
