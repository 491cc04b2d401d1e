"""Which method finds the step and the feature that decide: two models whose answers are known.

    python benchmarks/series/evaluate_series.py

One question about each held-out series: the forecaster is asked for one entry of the future, the
classifier for the class that it predicts. Every method is scored by the size of its relevance: how
often the largest entry is the decisive one, and the largest step and feature (summed over the
other axis). Intervals are 95 percent bootstrap intervals over series; differences to input x
gradient are paired. Writes ``results/<model>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import captum
import torch
import transformers
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import captum_ssm
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.examples.signals import (
    FEATURES,
    HORIZON,
    SIGNALS,
    held_out_bursts,
    held_out_forecasts,
)
from captum_ssm.metrics import Interval, bootstrap, evaluate

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _evaluating import versions, write
from _scan import fast_scan
from trained_models import load

HERE = Path(__file__).resolve().parent
BASELINE = "Input x gradient"
CONVOLUTION = 4  # the hidden attention relates tokens that hold the three before them too
HEADS = {
    "entry": "entry",
    "entry_or_mark": "entry or its mark",
    "entry_of_signals": "entry, of the signals",
    "step": "step",
    "feature": "feature",
    "feature_of_signals": "feature, of the signals",
    "precision": "average precision",
    "share": "share",
    "share_with_mark": "share, with the mark",
    "delayed": "decisive step, or up to 3 later",
    "either": "either mark's step, or up to 3 later",
    "last": "last 4 steps",
}
WHERE = ("delayed", "either", "last")

Method = Callable[[Tensor, Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Questions:
    """One question about each series, ``(B, L, F)`` or ``(B, F, L)``.

    ``decisive`` is what decides the answer; ``marks`` is the mark that says so, and
    ``other_marks`` one of another answer, where the task has marks.
    """

    series: Tensor
    targets: list[Any]
    decisive: Tensor
    features: int
    marks: Tensor | None = None
    other_marks: Tensor | None = None


def about_forecasts(count: int) -> Questions:
    """One entry of the future of each series, drawn at random."""
    forecasts = held_out_forecasts(count)
    generator = torch.Generator().manual_seed(0)
    at = torch.randint(HORIZON, (count,), generator=generator)
    of = torch.randint(len(FEATURES), (count,), generator=generator)
    rows = torch.arange(count)
    decisive, marks, other = torch.zeros(3, *forecasts.series.shape, dtype=torch.bool)
    decisive[rows, forecasts.steps[rows, at, of], forecasts.features[rows, at, of]] = True
    marks[rows, forecasts.steps[rows, at, of], forecasts.marks[at]] = True
    late = HORIZON - 1 - at  # of the other half of the future
    other[rows, forecasts.steps[rows, late, of], forecasts.marks[late]] = True
    targets = list(zip(at.tolist(), of.tolist(), strict=True))
    return Questions(forecasts.series, targets, decisive, 2, marks, other)


def about_bursts(count: int, model: nn.Module) -> Questions:
    """The predicted class of each series."""
    bursts = held_out_bursts(count)
    with torch.no_grad():
        targets = model(bursts.series).argmax(1).tolist()
    return Questions(bursts.series, targets, bursts.masks, 1)


def methods(model: nn.Module) -> dict[str, Method]:
    """Relevance in the shape of the series, by name."""

    def of_captum(method: Any) -> Method:
        def relevance(x: Tensor, target: Any) -> Tensor:
            with fast_scan():
                return method(model).attribute(x.clone().requires_grad_(), target=target)

        return relevance

    latim = {
        "LaTIM": LaTIM(model),
        "LaTIM, features even": LaTIM(model, feature_share="even"),
    }
    return {
        "RawAttention": lambda x, t: RawAttention(model).attribute(x),
        "MambaRollout": lambda x, t: MambaRollout(model).attribute(x),
        "MambaAttribution": lambda x, t: MambaAttribution(model).attribute(x, t),
        "UnifiedImplicitAttention": lambda x, t: UnifiedImplicitAttention(model).attribute(x, t),
        "UnifiedImplicitAttention, raw": lambda x, t: UnifiedImplicitAttention(model).attribute(
            x, t, aggregation="raw"
        ),
        "LaTIM": lambda x, t: latim["LaTIM"].attribute(x, t, activation="silu"),
        "LaTIM, gate": lambda x, t: latim["LaTIM"].attribute(x, t, activation="gate"),
        "LaTIM, gate, features even": lambda x, t: latim["LaTIM, features even"].attribute(
            x, t, activation="gate"
        ),
        "MambaLRP": lambda x, t: MambaLRP(model).attribute(x, t),
        BASELINE: of_captum(InputXGradient),
        "Integrated gradients": of_captum(IntegratedGradients),
        "Saliency": of_captum(Saliency),
        "Random": lambda x, t: torch.randn_like(x),
    }


def scores(size: Tensor, asked: Questions) -> dict[str, Tensor]:
    """The scores of each example's relevance, by its ``size``, of the shape of the series."""
    truth, features = asked.decisive, asked.features
    steps = 3 - features

    def largest(values: Tensor, right: Tensor) -> Tensor:
        best = values.flatten(1).argmax(1, keepdim=True)
        return right.flatten(1).gather(1, best)[:, 0].double()

    def share(right: Tensor) -> Tensor:
        return (size * right).flatten(1).sum(1) / size.flatten(1).sum(1).clamp(min=1e-300)

    by_step, right_step = size.sum(features), truth.any(features)
    by_feature, right_feature = size.sum(steps), truth.any(steps)
    precision = [
        average_precision_score(t, s)
        for t, s in zip(truth.flatten(1).numpy(), size.flatten(1).numpy(), strict=True)
    ]
    found = {"entry": largest(size, truth), "step": largest(by_step, right_step)}
    if asked.marks is None or asked.other_marks is None:
        found["feature"] = largest(by_feature, right_feature)
    else:
        found["entry_or_mark"] = largest(size, truth | asked.marks)
        signals = size[..., :SIGNALS]
        found["entry_of_signals"] = largest(signals, truth[..., :SIGNALS])
        found["feature_of_signals"] = largest(signals.sum(steps), right_feature[..., :SIGNALS])
        found["share_with_mark"] = share(truth | asked.marks)
        delayed, other = _and_later(right_step), _and_later(asked.other_marks.any(features))
        last = torch.arange(size.shape[steps]) >= size.shape[steps] - CONVOLUTION
        found["delayed"] = largest(by_step, delayed)
        found["either"] = largest(by_step, delayed | other)
        found["last"] = largest(by_step, last.expand_as(right_step))
    found["precision"] = torch.tensor(precision)
    found["share"] = share(truth)
    return {key: found[key] for key in HEADS if key in found}


def _and_later(steps: Tensor) -> Tensor:
    later = [nn.functional.pad(steps, (n, -n)) for n in range(CONVOLUTION)]
    return torch.stack(later).any(0)


def scored(method: Method, asked: Questions, batch_size: int) -> dict[str, Tensor]:
    """All scores of one method, one row per series."""

    def one_batch(index: Tensor) -> dict[str, Tensor]:
        rows = index.tolist()
        part = Questions(
            asked.series[rows],
            [asked.targets[k] for k in rows],
            asked.decisive[rows],
            asked.features,
            None if asked.marks is None else asked.marks[rows],
            None if asked.other_marks is None else asked.other_marks[rows],
        )
        relevance = method(part.series, part.targets).detach()
        return scores(relevance.abs().double(), part)

    found: dict[str, Tensor] = evaluate(
        one_batch, torch.arange(len(asked.series)), batch_size=batch_size
    )
    return found


def table(rows: dict[str, dict[str, Interval]], keys: list[str]) -> str:
    """Scores as a Markdown table, in percent."""
    lines = ["| | " + " | ".join(HEADS[key] for key in keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, row in rows.items():
        cells = [
            f"{100 * row[key].value:.1f} [{100 * row[key].low:.1f}, {100 * row[key].high:.1f}]"
            for key in keys
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(name: str, count: int, levels: dict[str, Any], differences: dict[str, Any]) -> str:
    """The Markdown file next to the JSON."""
    keys = [key for key in levels[BASELINE] if key not in WHERE]
    where = [key for key in levels[BASELINE] if key in WHERE]
    parts = [
        f"# {name}",
        f"{count} held-out series, one question about each; percent, with 95% bootstrap intervals "
        "over series. How often the largest relevance (by size) is at the decisive entry, step or "
        "feature; average precision over entries; share of relevance on the decisive entries.",
    ]
    if where:
        parts.append(
            "One value decides each answer. The mark at its step, a pulse of three standard "
            'deviations, says that it does: "or its mark" counts it as right; "of the signals" '
            "leaves the marks out of the comparison."
        )
    parts += [table(levels, keys), f"Less {BASELINE.lower()}, paired:", table(differences, keys)]
    if where:
        parts += ["Where the step of largest relevance is:", table(levels, where)]
    return "\n\n".join(
        [*parts, f"`python benchmarks/series/evaluate_series.py --limit {count}`", ""]
    )


def results(model: nn.Module, asked: Questions, batch_size: int) -> Iterator[tuple[str, Any]]:
    """The scores of each method by name, one row per series."""
    for name, method in methods(model).items():
        found = scored(method, asked, batch_size)
        shown = ", ".join(f"{key} {row.mean():.3f}" for key, row in found.items())
        print(f"{name}: {shown}", flush=True)
        yield name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=300, help="this many held-out series")
    parser.add_argument("--models", nargs="*", default=["series-forecaster", "series-classifier"])
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    for name in args.models:
        model = load(name)
        is_forecast = name == "series-forecaster"
        asked = about_forecasts(args.limit) if is_forecast else about_bursts(args.limit, model)
        found = dict(results(model, asked, args.batch_size))
        levels = {
            method: {key: bootstrap(row) for key, row in rows.items()}
            for method, rows in found.items()
        }
        differences = {
            method: {key: bootstrap(row - found[BASELINE][key]) for key, row in rows.items()}
            for method, rows in found.items()
            if method != BASELINE
        }
        record = {
            "model": name,
            "series": args.limit,
            "versions": versions(captum_ssm, captum, torch, transformers)
            | {"python": platform.python_version()},
            "scores": _plain(levels),
            f"less {BASELINE.lower()}": _plain(differences),
        }
        write(args.output, name, record, report(name, args.limit, levels, differences))


def _plain(rows: dict[str, dict[str, Interval]]) -> dict[str, Any]:
    return {
        name: {key: dataclasses.asdict(one) for key, one in row.items()}
        for name, row in rows.items()
    }


if __name__ == "__main__":
    main()
