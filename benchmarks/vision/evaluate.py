"""Which explanation of the digits model to trust: perturbation and segmentation, measured.

    python benchmarks/vision/evaluate.py
    torchrun --nproc_per_node 2 benchmarks/vision/evaluate.py    # the same numbers, sooner

Every method explains the predicted class of the held-out images. Perturbation removes whole
patches (the model's tokens), so that methods that resolve pixels and methods that resolve tokens
are asked the same question; segmentation compares with the known mask of the digit. Intervals are
95 percent bootstrap intervals over images. Writes ``results/<name>.json`` and ``.md``; rows of an
earlier run on as many images that this one does not score again are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import captum
import torch
from safetensors.torch import load_file
from torch import Tensor

import captum_ssm
from captum_ssm import (
    FrozenMixer,
    LaTIM,
    MambaRollout,
    MixerCall,
    RawAttention,
    UnifiedImplicitAttention,
    register_mixer,
)
from captum_ssm.examples.digits import Samples, held_out_digits
from captum_ssm.metrics import (
    Interval,
    bootstrap,
    cls_influence,
    delta_af,
    evaluate,
    layer_knockout,
    oversmoothing,
    perturbation,
    position_bias,
    segmentation,
)
from captum_ssm.mixers.families.vision import freeze_bidirectional
from captum_ssm.models import BidirectionalMamba, VisionMamba
from captum_ssm.operators import SkipOperator

# Last, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "papers"))
from _evaluating import versions, write
from explanations import chosen, of_images
from harness import processes

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "tutorials" / "models" / "digits-vim"
PATCH = 4
BLACK = -0.5  # what the canvas has where there is nothing
ROWS = (
    "Raw attention, hidden",
    "Raw attention, hidden, absolute",
    "Raw attention, unified",
    "Rollout, hidden",
    "Rollout, hidden, absolute",
    "Rollout, unified",
    "Attribution, hidden",
    "Attribution, unified",
    "Attribution, without activation",
    "Attribution, without convolution",
    "Attribution, without gate",
    "Attribution, without S6",
    "Attribution, only S6",
    "LaTIM, ALTI-Logit",
    "LaTIM, l2 of the last layer",
    "MambaLRP",
    "Integrated gradients",
    "Input x gradient",
    "Saliency",
    "Brightness",
    "Random maps",
)
SCORES = ("positive", "negative", "delta_af", "pixel_accuracy", "map", "miou")

# Ali et al. (2025), tables 1 and 2 ("hidden"); Zimerman et al. (2025), tables 1, 3 and 4
# ("unified"): Vision Mamba small, ImageNet validation and ImageNet-Segmentation, in percent.
PAPER = {
    "Raw attention, hidden": (17.27, 34.03, None, 67.64, 74.88, 45.09),
    "Raw attention, unified": (13.26, 47.71, None, 67.66, 80.00, 47.28),
    "Rollout, hidden": (18.81, 41.87, None, 71.01, 80.78, 51.51),
    "Rollout, unified": (12.83, 50.04, None, 76.40, 83.90, 58.48),
    "Attribution, hidden": (16.62, 39.63, None, 74.72, 81.70, 54.24),
    "Attribution, unified": (11.35, 51.31, None, 79.60, 86.40, 62.51),
    "Attribution, without activation": (None, None, None, 79.32, 86.22, 62.41),
    "Attribution, without convolution": (None, None, None, 70.01, 78.87, 50.64),
    "Attribution, without gate": (None, None, None, 75.11, 80.12, 55.78),
    "Attribution, without S6": (None, None, None, 42.99, 64.13, 26.01),
    "Attribution, only S6": (None, None, None, 72.39, 80.09, 53.19),
    "MambaLRP": (None, None, None, 71.19, 77.04, 49.98),
}


def without_s6(call: MixerCall) -> FrozenMixer:
    """The mixer with its recurrence replaced by the identity (Zimerman et al., table 4)."""
    mixer: Any = freeze_bidirectional(call)
    scans = tuple(
        dataclasses.replace(scan, recurrence=SkipOperator(torch.ones_like(scan.inputs)))
        for scan in mixer.scans
    )
    return dataclasses.replace(mixer, scans=scans)


@contextmanager
def adapter(freeze: Callable[[MixerCall], FrozenMixer]) -> Iterator[None]:
    """For a while, another reading of the model's mixers."""
    register_mixer(BidirectionalMamba, freeze)
    try:
        yield
    finally:
        register_mixer(BidirectionalMamba, freeze_bidirectional)


def methods(model: VisionMamba) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Explanations by name: images and the class to explain, to relevance in the images' shape."""
    unified = UnifiedImplicitAttention(model)
    found = of_images(model, BLACK) | {
        "Raw attention, hidden, absolute": lambda x, t: RawAttention(model).attribute(
            x, sign="absolute"
        ),
        "Rollout, hidden, absolute": lambda x, t: MambaRollout(model).attribute(x, sign="absolute"),
        "Attribution, only S6": lambda x, t: unified.attribute(x, t, components=[]),
        "LaTIM, l2 of the last layer": lambda x, t: LaTIM(model).attribute(
            x, t, layer=-1, aggregation="l2", activation="gate"
        ),
        "Brightness": lambda x, t: x - BLACK,
    }
    parts = ("conv", "activation", "gate")
    for name, left_out in (("activation", "activation"), ("convolution", "conv"), ("gate", "gate")):
        kept = [part for part in parts if part != left_out]
        found[f"Attribution, without {name}"] = lambda x, t, kept=kept: unified.attribute(
            x, t, components=kept
        )

    def identity(x: Tensor, t: Tensor) -> Tensor:
        with adapter(without_s6):
            return UnifiedImplicitAttention(model, check=False).attribute(x, t)

    found["Attribution, without S6"] = identity
    return {name: found[name] for name in ROWS}


def score(
    model: VisionMamba,
    samples: Samples,
    target: Tensor,
    method: Callable[[Tensor, Tensor], Tensor],
    removal: Any,
    **harness: Any,
) -> dict[str, Interval]:
    """All scores of one method."""
    options = {"removal": removal, "patch": PATCH}

    def scores(images: Tensor, masks: Tensor, target: Tensor) -> dict[str, Any]:
        relevance = method(images, target).detach()
        return {
            "positive": perturbation(model, images, relevance, target, **options),
            "negative": perturbation(model, images, relevance, target, order="negative", **options),
            "delta_af": delta_af(model, images, relevance, target, **options),
            "objects": segmentation(relevance, masks),
        }

    found = evaluate(scores, samples.images, samples.masks.long(), target, **harness)
    objects = found.pop("objects")
    return {name: curve.estimate() for name, curve in found.items()} | {
        "pixel_accuracy": objects.pixel_accuracy(),
        "map": objects.map(),
        "miou": objects.miou(),
    }


def inside(
    model: VisionMamba, samples: Samples, target: Tensor, **harness: Any
) -> dict[str, dict[str, Any]]:
    """What the layers do: their weight in the prediction, likeness of tokens, bias to CLS."""
    (cls,) = model.cls_tokens()

    def look(images: Tensor, target: Tensor) -> dict[str, dict[str, Tensor]]:
        return {
            "drops": layer_knockout(model, images, target),
            "alike": oversmoothing(model, images, leave_out=[cls]),
            "near": cls_influence(model, images, cls),
        }

    found = evaluate(look, samples.images, target, **harness)
    near = {path: position_bias(rows.mean(0), cls) for path, rows in found["near"].items()}
    return {
        "knockout": {p: dataclasses.asdict(bootstrap(d)) for p, d in found["drops"].items()},
        "token similarity": {
            p: dataclasses.asdict(bootstrap(s)) for p, s in found["alike"].items()
        },
        "CLS position bias": {path: float(bias) for path, bias in near.items()},
    }


def table(results: dict[str, dict[str, Interval]]) -> str:
    """The scores as a Markdown table, in percent, the papers' numbers beneath ours in brackets."""
    head = ["Method", "Positive ↓", "Negative ↑", "ΔA^F ↑", "Pixel accuracy ↑", "mAP ↑", "mIoU ↑"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, scores in results.items():
        cells = [name]
        for key, paper in zip(SCORES, PAPER.get(name, (None,) * len(SCORES)), strict=True):
            e = scores[key]
            unit = 1 if key == "delta_af" else 100
            digits = 2 if key == "delta_af" else 1
            value, low, high = (f"{unit * v:.{digits}f}" for v in (e.value, e.low, e.high))
            cells.append(f"{value} [{low}, {high}]" + ("" if paper is None else f" ({paper})"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def layer_table(found: dict[str, Any]) -> str:
    """The layers' numbers as a Markdown table."""
    lines = ["| Layer | Logit lost without it | Token similarity | CLS position bias |",
             "|---|---:|---:|---:|"]  # fmt: skip
    rows = zip(*(found[k].items() for k in ("knockout", "token similarity", "CLS position bias")),
               strict=True)  # fmt: skip
    for (path, drop), (_, alike), (_, near) in rows:
        lines.append(
            f"| {path} | {drop['value']:.2f} [{drop['low']:.2f}, {drop['high']:.2f}] | "
            f"{alike['value']:.3f} | {near:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--limit", type=int, help="this many held-out images; default: all of them")
    parser.add_argument("--removal", default="black", choices=["black", "mean", "blur"])
    parser.add_argument("--methods", nargs="*", help="those whose names hold one of these")
    parser.add_argument("--batch-size", type=int, default=90)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    model = VisionMamba.from_state_dict(load_file(args.model / "model.safetensors"))
    samples = held_out_digits(args.limit)
    with torch.no_grad():
        logits = torch.cat([model(s.images) for s in samples.batches(args.batch_size)])
    target = logits.argmax(1)
    removal = BLACK if args.removal == "black" else args.removal
    accelerator = processes(cpu=True)
    harness = {"batch_size": args.batch_size, "accelerator": accelerator}
    results = {}
    for name, method in chosen(methods(model), args.methods).items():
        results[name] = score(model, samples, target, method, removal, **harness)
        accelerator.print(f"{name}: " + ", ".join(f"{k} {e}" for k, e in results[name].items()))
    found = inside(model, samples, target, **harness)
    if not accelerator.is_main_process:
        return
    about = {
        "images": len(samples),
        "accuracy": float((target == samples.labels).double().mean()),
        "removal": args.removal,
        "patch": PATCH,
        "target": "predicted class",
        "versions": versions(captum_ssm, captum, torch) | {"python": platform.python_version()},
    }
    name = f"digits-{args.removal}"
    path = args.output / f"{name}.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier["about"]["images"] == about["images"]:
            kept = {
                method: {key: Interval(**e) for key, e in row.items()}
                for method, row in earlier["scores"].items()
            }
            results = kept | results
    results = {method: results[method] for method in ROWS if method in results}
    scores = {
        method: {key: dataclasses.asdict(e) for key, e in row.items()}
        for method, row in results.items()
    }
    record = {"about": about, "scores": scores, "layers": found}
    text = [
        f"# Explanations of the digits model, removed patches {args.removal}",
        "",
        f"{about['images']} held-out images, accuracy {about['accuracy']:.3f}; 95% bootstrap "
        "intervals over images. Perturbation: area under the top-1 agreement with the whole "
        "image's prediction while 10 to 90% of the patches are removed, in percent. In round "
        "brackets the papers' numbers for Vision Mamba small on ImageNet, another model and "
        "other data: their order can be compared, not their size.",
        "",
        table(results),
        "",
        "Two things to know. The digit is the brightest thing on a canvas, so brightness itself "
        "segments well: that row is what an explanation of a better-hidden object would have to "
        "be compared with. Integrated gradients start from an empty canvas, which is what "
        "removed patches become under `--removal black`.",
        "",
        "What the layers do:",
        "",
        layer_table(found),
        "",
        f"`python benchmarks/vision/evaluate.py --removal {args.removal}"
        + (f" --limit {args.limit}`" if args.limit else "`"),
        "",
    ]
    write(args.output, name, record, "\n".join(text))


if __name__ == "__main__":
    main()
