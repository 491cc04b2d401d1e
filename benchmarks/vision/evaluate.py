"""Which explanation of the digits model to trust: perturbation and segmentation, measured.

    python benchmarks/vision/evaluate.py

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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import captum
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from data import Samples, held_out
from safetensors.torch import load_file
from torch import Tensor

import captum_ssm
from captum_ssm import (
    FrozenMixer,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    MixerCall,
    RawAttention,
    UnifiedImplicitAttention,
    register_mixer,
)
from captum_ssm.metrics import (
    Estimate,
    bootstrap,
    cls_influence,
    delta_af,
    layer_knockout,
    oversmoothing,
    perturbation,
    position_bias,
    segmentation,
)
from captum_ssm.mixers.vision import freeze_bidirectional
from captum_ssm.models import BidirectionalMamba, VisionMamba
from captum_ssm.operators import BandOperator

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "tutorials" / "models" / "digits-vim"
PATCH = 4
BLACK = -0.5  # what the canvas has where there is nothing
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
    """The mixer with the identity in place of its recurrence (Zimerman et al., table 4)."""
    mixer: Any = freeze_bidirectional(call)
    scans = tuple(
        dataclasses.replace(scan, recurrence=BandOperator(torch.ones_like(scan.inputs)))
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
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "Raw attention, hidden": lambda x, t: RawAttention(model).attribute(x),
        "Raw attention, hidden, absolute": lambda x, t: RawAttention(model).attribute(
            x, sign="absolute"
        ),
        "Raw attention, unified": lambda x, t: unified.attribute(x, t, aggregation="raw"),
        "Rollout, hidden": lambda x, t: MambaRollout(model).attribute(x),
        "Rollout, hidden, absolute": lambda x, t: MambaRollout(model).attribute(x, sign="absolute"),
        "Rollout, unified": lambda x, t: unified.attribute(x, t, aggregation="rollout"),
        "Attribution, hidden": lambda x, t: MambaAttribution(model).attribute(x, t),
        "Attribution, unified": lambda x, t: unified.attribute(x, t),
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
    found["Attribution, only S6"] = lambda x, t: unified.attribute(x, t, components=[])
    found |= {
        "LaTIM, ALTI-Logit": lambda x, t: LaTIM(model).attribute(x, t, activation="gate"),
        "LaTIM, l2 of the last layer": lambda x, t: LaTIM(model).attribute(
            x, t, layer=-1, aggregation="l2", activation="gate"
        ),
        "MambaLRP": lambda x, t: MambaLRP(model).attribute(x, t),
        "Integrated gradients": lambda x, t: IntegratedGradients(model).attribute(
            x, torch.full_like(x, BLACK), target=t, n_steps=32, internal_batch_size=256
        ),
        "Input x gradient": lambda x, t: InputXGradient(model).attribute(_leaf(x), target=t),
        "Saliency": lambda x, t: Saliency(model).attribute(_leaf(x), target=t),
        "Brightness": lambda x, t: x - BLACK,
        "Random maps": _random_maps(model),
    }
    return found


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def _random_maps(model: VisionMamba) -> Callable[[Tensor, Tensor], Tensor]:
    # Noise on the same grid of tokens and through the same interpolation as the methods' maps.
    generator = torch.Generator().manual_seed(0)

    def noise(x: Tensor, t: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1])
        grid = model.token_grid(*size)
        tokens = torch.rand(len(x), int(grid.index.max()) + 1, generator=generator)
        return (grid.pixels(tokens, size) / x.shape[1])[:, None].expand_as(x)

    return noise


def explain(
    method: Callable[[Tensor, Tensor], Tensor], samples: Samples, target: Tensor, size: int
) -> Tensor:
    """The method's relevance of all samples, ``(B, 3, H, W)``."""
    parts = [
        method(s.images, t).detach()
        for s, t in zip(samples.batches(size), target.split(size), strict=True)
    ]
    return torch.cat(parts)


def score(
    model: VisionMamba, samples: Samples, target: Tensor, relevance: Tensor, removal: Any, size: int
) -> dict[str, Estimate]:
    """All scores of one method's relevance."""
    options = {"removal": removal, "patch": PATCH, "batch_size": size}
    curves = {
        order: perturbation(model, samples.images, relevance, target, order=order, **options)
        for order in ("positive", "negative")
    }
    between = delta_af(model, samples.images, relevance, target, **options)
    objects = segmentation(relevance, samples.masks.long())
    return {
        "positive": curves["positive"].estimate(),
        "negative": curves["negative"].estimate(),
        "delta_af": between.estimate(),
        "pixel_accuracy": objects.pixel_accuracy(),
        "map": objects.map(),
        "miou": objects.miou(),
    }


def inside(model: VisionMamba, samples: Samples, target: Tensor) -> dict[str, Any]:
    """What the layers do: their weight in the prediction, likeness of tokens, bias to CLS."""
    (cls,) = model.cls_tokens()
    drops = layer_knockout(model, samples.images, target)
    alike = oversmoothing(model, samples.images, leave_out=[cls])
    near = cls_influence(model, samples.images, cls, batch_size=90)
    return {
        "knockout": {path: dataclasses.asdict(bootstrap(drop)) for path, drop in drops.items()},
        "token similarity": {p: dataclasses.asdict(bootstrap(s)) for p, s in alike.items()},
        "CLS position bias": {p: float(position_bias(row, cls)) for p, row in near.items()},
    }


def table(results: dict[str, dict[str, Estimate]]) -> str:
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
    parser.add_argument(
        "--limit", type=int, help="this many held-out images; all of them if left out"
    )
    parser.add_argument("--removal", default="black", choices=["black", "mean", "blur"])
    parser.add_argument("--methods", nargs="*", help="those whose names hold one of these")
    parser.add_argument("--batch-size", type=int, default=90)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    model = VisionMamba.from_state_dict(load_file(args.model / "model.safetensors"))
    samples = held_out(args.limit)
    with torch.no_grad():
        logits = torch.cat([model(s.images) for s in samples.batches(args.batch_size)])
    target = logits.argmax(1)
    removal = BLACK if args.removal == "black" else args.removal
    results, seconds = {}, {}
    for name, method in methods(model).items():
        if args.methods and not any(m.lower() in name.lower() for m in args.methods):
            continue
        start = time.perf_counter()
        relevance = explain(method, samples, target, args.batch_size)
        seconds[name] = time.perf_counter() - start
        results[name] = score(model, samples, target, relevance, removal, args.batch_size)
        print(f"{name}: " + ", ".join(f"{k} {e}" for k, e in results[name].items()), flush=True)
    found = inside(model, samples, target)
    about = {
        "images": len(samples),
        "accuracy": float((target == samples.labels).double().mean()),
        "removal": args.removal,
        "patch": PATCH,
        "target": "predicted class",
        "seconds": seconds,
        "versions": {
            "captum_ssm": captum_ssm.__version__,
            "captum": captum.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    name = f"digits-{args.removal}"
    path = args.output / f"{name}.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier["about"]["images"] == about["images"]:
            kept = {
                method: {key: Estimate(**e) for key, e in row.items()}
                for method, row in earlier["scores"].items()
            }
            results = kept | results
            about["seconds"] = earlier["about"]["seconds"] | seconds
    results = {method: results[method] for method in methods(model) if method in results}
    scores = {
        method: {key: dataclasses.asdict(e) for key, e in row.items()}
        for method, row in results.items()
    }
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "scores": scores, "layers": found}
    path.write_text(json.dumps(record, indent=1) + "\n")
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
    (args.output / f"{name}.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
