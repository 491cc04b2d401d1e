"""Is the relevance of an object on the object? ``python benchmarks/vision/evaluate_segmenter.py``.

The segmentation model (``tutorials/models/digits-segmenter``) is asked, of each digit in held-out
scenes, for the logit of the digit's class summed over the mask that the model predicts for it, and
for that logit at one pixel of the mask. Maps are summed over colors. Intervals are 95 percent
bootstrap intervals over objects. Writes ``results/segmenter.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from captum.attr import (
    InputXGradient,
    IntegratedGradients,
    LayerAttribution,
    LayerGradCam,
    Saliency,
)
from torch import Tensor, nn

from captum_ssm import (
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.examples.scenes import CANVAS, MOST, Scenes, held_out_scenes
from captum_ssm.metrics import bootstrap
from captum_ssm.metrics.segmentation import average_precision

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _record import save
from trained_models import load

RESULTS = Path(__file__).resolve().parent / "results"
EMPTY = -0.5  # what the canvas has where there is nothing
GRADIENT, RANDOM = "Saliency (Captum)", "Random maps"
SCORES = {
    "share": "share on the object",
    "ap": "average precision",
    "pointing": "largest on the object",
}
Method = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Object:
    """One digit: its scene ``(1, 3, 48, 48)``, the pixels of its ink, and what is asked.

    ``found (48, 48)`` are the pixels of it that the model gives its class, ``pixel`` one of them.
    """

    image: Tensor
    ink: Tensor
    label: int
    found: Tensor
    pixel: tuple[int, int]


def objects(model: nn.Module, scenes: Scenes) -> Iterator[Object]:
    """The digits most of whose ink the model gives the right class."""
    with torch.no_grad():
        predicted = model(scenes.images).argmax(1)
    for image, labels, numbers, classes in zip(
        scenes.images, scenes.labels, scenes.objects, predicted, strict=True
    ):
        for k in range(1, MOST + 1):
            ink = numbers == k
            if not ink.any():
                continue
            label = int(labels[ink][0])
            found = ink & (classes == label)
            if found.sum() > 0.5 * ink.sum():
                places = found.nonzero()
                y, x = places[len(places) // 2].tolist()
                yield Object(image[None], ink, label, found, (y, x))


def scores_of(model: nn.Module, thing: Object) -> dict[str, Callable[[Tensor], Tensor]]:
    """The two questions about an object: images to a score each."""
    y, x = thing.pixel
    return {
        "mask": lambda images: (model(images)[:, thing.label] * thing.found).sum((1, 2)),
        "pixel": lambda images: model(images)[:, thing.label, y, x],
    }


def methods(model: Any) -> dict[str, Method]:
    """Explanations by name, of a score of images."""

    def ours(method: Any, options: dict[str, Any] | None = None, **more: Any) -> Method:
        return lambda score, x: method(score, model, **(options or {})).attribute(x, **more)

    def grad_cam(layer: nn.Module) -> Method:
        def attribute(score: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            cam = LayerGradCam(score, layer).attribute(x, relu_attributions=True)
            return LayerAttribution.interpolate(cam, (CANVAS, CANVAS), "bilinear")

        return attribute

    nearest = {"interpolate_mode": "nearest"}
    integrated = {"baselines": EMPTY, "n_steps": 20, "internal_batch_size": 20}
    generator = torch.Generator().manual_seed(0)
    return {
        "MambaLRP": ours(MambaLRP),
        "MambaAttribution": ours(MambaAttribution),
        "MambaAttribution, last stage": ours(MambaAttribution, grid=-1),
        "MambaAttribution, last stage, nearest": ours(MambaAttribution, nearest, grid=-1),
        "UnifiedImplicitAttention": ours(UnifiedImplicitAttention),
        "UnifiedImplicitAttention, last stage": ours(UnifiedImplicitAttention, grid=-1),
        "MambaRollout": ours(MambaRollout),
        "MambaRollout, last stage": ours(MambaRollout, grid=-1),
        "RawAttention": ours(RawAttention),
        "RawAttention, last stage": ours(RawAttention, grid=-1),
        "IntegratedGradients (Captum)": lambda score, x: IntegratedGradients(score).attribute(
            x, **integrated
        ),
        "InputXGradient (Captum)": lambda score, x: InputXGradient(score).attribute(x),
        GRADIENT: lambda score, x: Saliency(score).attribute(x),
        "LayerGradCam (Captum), last 24 x 24": grad_cam(model.halves),
        "LayerGradCam (Captum), last 12 x 12": grad_cam(model.up),
        "Brightness": lambda score, x: x - EMPTY,
        RANDOM: lambda score, x: torch.rand(x.shape, generator=generator),
    }


def scored(relevance: Tensor, ink: Tensor) -> list[float]:
    """Share of positive relevance on the object, average precision, and the pointing game."""
    values = relevance.detach().sum(1)
    positive = values.clamp(min=0)
    share = (positive * ink).sum() / positive.sum().clamp(min=1e-30)
    ap = average_precision(values.flatten(), ink.flatten())
    return [float(share), float(ap), float(ink.flatten()[values.argmax()])]


def table(results: dict[str, Tensor], names: Sequence[str]) -> list[str]:
    """A Markdown table of scores ``(objects, 3)`` in percent, with differences of the shares."""
    head = ["method", *SCORES.values(), "share less the gradient's", "AP less the gradient's"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        found = results[name]
        paired = found - results[GRADIENT]
        columns = [*found.T, paired[:, 0], paired[:, 1]]
        cells = [bootstrap(100 * column) for column in columns]
        text = [f"{e.value:.1f} [{e.low:.1f}, {e.high:.1f}]" for e in cells]
        lines.append(f"| {name} | " + " | ".join(text) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    model = load("digits-segmenter")
    things = list(objects(model, held_out_scenes(args.scenes)))
    rows: list[dict[str, Any]] = []
    text = [
        "# Explanations of the segmentation model",
        "",
        f"{len(things)} digits in {args.scenes} held-out scenes; their ink is "
        f"{100 * sum(float(t.ink.float().mean()) for t in things) / len(things):.1f}% of the "
        "canvas on average. In percent, 95% bootstrap intervals over digits; the last two columns "
        "are differences on the same digits.",
    ]
    for question, title in (("mask", "Over the predicted mask"), ("pixel", "One pixel")):
        results = {}
        for name, method in methods(model).items():
            found = [
                scored(method(scores_of(model, thing)[question], thing.image), thing.ink)
                for thing in things
            ]
            results[name] = torch.tensor(found)
            print(question, name, (100 * results[name].mean(0)).tolist(), flush=True)
            for k, key in enumerate(SCORES):
                row = {"question": question, "method": name, "score": key}
                rows.append(row | asdict(bootstrap(results[name][:, k])))
        for row in rows:
            if row["question"] == question:
                k = list(SCORES).index(row["score"])
                for other in (GRADIENT, RANDOM):
                    paired = results[row["method"]][:, k] - results[other][:, k]
                    row[f"less {other}"] = asdict(bootstrap(paired))
        text += ["", f"## {title}", "", *table(results, list(results))]
    save(args.output / "segmenter.json", "segmenter", rows, digits=len(things), scenes=args.scenes)
    text += ["", f"`python benchmarks/vision/evaluate_segmenter.py --scenes {args.scenes}`", ""]
    (args.output / "segmenter.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
