"""Weakly supervised segmentation: a network trained on masks that explanations made.

    python benchmarks/vision/pseudo_masks.py

As Zimerman et al. (2025, appendix B) use Mamba-Attribution: a classifier knows labels of images
only, its explanations of the labels become masks, and a segmentation network learns from those.
Here the classifier is the digits model, maps become masks by Otsu's threshold (1979), and the
network is four small convolutions. It is scored on held-out images against the digits' true
masks, and compared with the same network trained on true masks and on masks of random maps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from evaluate import MODEL, methods
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.examples.digits import Samples, compose, glyphs, held_out_digits
from captum_ssm.metrics import Interval, evaluate, segmentation
from captum_ssm.models import VisionMamba

HERE = Path(__file__).resolve().parent
CHOSEN = (
    "Attribution, hidden",
    "Attribution, unified",
    "LaTIM, ALTI-Logit",
    "MambaLRP",
    "Saliency",
    "Brightness",
    "Random maps",
)
TRUE = "True masks"


def otsu(maps: Tensor) -> Tensor:
    """The threshold of each map ``(B, H, W)`` that parts it best into two classes, ``(B,)``.

    Best is the largest variance between the classes' means (Otsu, 1979); what is above the
    threshold is one class.
    """
    ranked = maps.flatten(1).double().sort(1).values
    count = ranked.shape[1]
    below = torch.arange(1, count) / count  # share of the lower class, were it cut after each
    mean, lower = ranked.mean(1, keepdim=True), ranked.cumsum(1)[:, :-1] / count
    between = (below * mean - lower).square() / (below * (1 - below))
    # Equal values belong to one class.
    between = between.masked_fill(ranked[:, 1:] == ranked[:, :-1], -1)
    return ranked.gather(1, between.argmax(1, keepdim=True))[:, 0]


def masks_of(relevance: Tensor) -> Tensor:
    """Relevance ``(B, 3, H, W)`` as masks ``(B, H, W)`` of 0 and 1."""
    maps = relevance.sum(1).double()
    return (maps > otsu(maps)[:, None, None]).float()


def network() -> nn.Module:
    """Images ``(B, 3, H, W)`` to logits of the object ``(B, 1, H, W)``; sees 19 pixels across."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=4, dilation=4), nn.ReLU(),
        nn.Conv2d(16, 1, 5, padding=2),
    )  # fmt: skip


def learnt(images: Tensor, masks: Tensor, unseen: Tensor, epochs: int, seed: int = 0) -> Tensor:
    """Masks ``(b, H, W)`` that a network fitted to ``masks (B, H, W)`` finds in unseen images.

    The same start and the same batches whatever the masks. A pixel is object where its logit
    exceeds the cut by which as many pixels of the images learnt from are object as in their
    masks: of masks that are often wrong a network is never sure.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            for at in torch.randperm(len(images)).split(32):
                loss = F.binary_cross_entropy_with_logits(model(images[at])[:, 0], masks[at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with torch.no_grad():
        known = model(images).flatten()
        outside = int((1 - masks.mean()) * known.numel())
        cut = known.kthvalue(max(1, outside)).values
        return (model(unseen)[:, 0] > cut).float()


def agreement(found: Tensor, truth: Tensor) -> dict[str, Interval]:
    """Pixel accuracy and mIoU of masks ``(B, H, W)`` of 0 and 1."""
    scores = segmentation(found, truth.long(), threshold=0.5)
    return {"pixel_accuracy": scores.pixel_accuracy(), "miou": scores.miou()}


def table(results: dict[str, dict[str, dict[str, Interval]]]) -> str:
    """The scores as a Markdown table, in percent."""
    lines = [
        "| Masks by | mIoU of the masks | mIoU of the network | Pixel accuracy of the network |",
        "|---|---:|---:|---:|",
    ]
    for name, row in results.items():
        cells = [row["masks"]["miou"], row["network"]["miou"], row["network"]["pixel_accuracy"]]
        shown = (f"{100 * e.value:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]" for e in cells)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=300, help="to learn from")
    parser.add_argument("--limit", type=int, help="this many held-out images; default: all")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--methods", nargs="*", help="those whose names hold one of these")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    classifier = VisionMamba.from_state_dict(load_file(MODEL / "model.safetensors"))
    shapes, labels = (part[: args.images] for part in glyphs("train"))
    learning: Samples = compose(shapes, labels, torch.Generator().manual_seed(3))
    unseen = held_out_digits(args.limit)
    explanations = methods(classifier)
    results: dict[str, Any] = {}
    for name in (TRUE, *CHOSEN):
        if args.methods and not any(m.lower() in name.lower() for m in args.methods):
            continue
        masks = learning.masks.float()
        if name != TRUE:
            masks = masks_of(
                evaluate(explanations[name], learning.images, learning.labels, batch_size=100)
            )
        found = learnt(learning.images, masks, unseen.images, args.epochs)
        results[name] = {
            "masks": agreement(masks, learning.masks),
            "network": agreement(found, unseen.masks),
        }
        print(name, *(f"{key} {row['miou']}" for key, row in results[name].items()), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    scores = {
        name: {
            part: {key: dataclasses.asdict(e) for key, e in estimates.items()}
            for part, estimates in row.items()
        }
        for name, row in results.items()
    }
    about = {"learning": len(learning), "held out": len(unseen), "epochs": args.epochs}
    (args.output / "pseudo_masks.json").write_text(
        json.dumps({"about": about, "scores": scores}, indent=1) + "\n"
    )
    text = (
        "# Segmentation learnt from explanations\n\n"
        f"A small network learns from masks of {len(learning)} images and is scored on "
        f"{len(unseen)} held-out ones; 95% bootstrap intervals over images, in percent. The "
        "masks come from maps by Otsu's threshold; the classifier knows labels only. Brightness "
        "is the yardstick: the digit is the brightest thing on a canvas.\n\n"
        f"{table(results)}\n\n`python benchmarks/vision/pseudo_masks.py`\n"
    )
    (args.output / "pseudo_masks.md").write_text(text)


if __name__ == "__main__":
    main()
