"""Perturbation of ImageNet's validation images (Ali et al., table 1; Zimerman et al., table 1).

    python benchmarks/papers/imagenet_perturbation.py --data imagenet/val \\
        --checkpoint hustvl/Vim-small-midclstok/vim_s_midclstok_80p5acc.pth

As in the code of Chefer et al. (2021), which both papers follow: images are resized to the model's
size, the predicted class is explained, pixels turn black, 10 to 90 percent of them, the most
relevant first (positive) or the least (negative), and the score is the area under the model's
top-1 accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from explanations import chosen, of_images
from harness import options, processes, report, required
from imagenet import BLACK, prepared, vision_mamba

from captum_ssm.metrics import evaluate, perturbation

COLUMNS = {"positive": ("Positive ↓", 100), "negative": ("Negative ↑", 100)}
PAPER = {
    "Raw attention, hidden": {"positive": 17.268, "negative": 34.025},
    "Raw attention, unified": {"positive": 13.264, "negative": 47.705},
    "Rollout, hidden": {"positive": 18.806, "negative": 41.864},
    "Rollout, unified": {"positive": 12.830, "negative": 50.035},
    "Attribution, hidden": {"positive": 16.619, "negative": 39.632},
    "Attribution, unified": {"positive": 11.350, "negative": 51.310},
}
NOTES = (
    "Area under the top-1 accuracy over the shares removed, divided by their span, in percent, "
    "with 95% bootstrap intervals over images; in round brackets Zimerman et al. (2025), table 1, "
    'Vision Mamba small on the whole validation set ("hidden" is Ali et al., 2025, table 1).'
)
SUFFIXES = (".jpeg", ".jpg", ".png")


def labelled_files(folder: Path, classes: int) -> list[tuple[Path, int]]:
    """The images in a folder of folders, one per class, with their classes.

    The classes are numbered by the folders' names, as WordNet ids number those of ImageNet. The
    images are sorted by their own names, so the first ones are of many classes.
    """
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    if len(folders) != classes:
        raise SystemExit(
            f"--data {folder}: {len(folders)} folders in it, and the model has {classes} classes; "
            "expected one folder per class, as in val/n01440764/ILSVRC2012_val_00000293.JPEG."
        )
    found = [
        (path, label)
        for label, each in enumerate(folders)
        for path in each.iterdir()
        if path.suffix.lower() in SUFFIXES
    ]
    return sorted(found, key=lambda pair: pair[0].name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of folders")
    parser.add_argument("--checkpoint", required=True, help="a file, or owner/name/file on the hub")
    parser.add_argument("--removal", default="black", choices=["black", "mean", "blur"])
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)
    model = vision_mamba(args.checkpoint).to(accelerator.device)
    black = BLACK.to(accelerator.device)
    files = labelled_files(args.data, model.head.out_features)[: args.limit]
    removal = black if args.removal == "black" else args.removal
    scores = {}
    for name, method in chosen(of_images(model, black), args.methods).items():

        def score(batch: list[tuple[Path, int]], method: Any = method) -> dict[str, Any]:
            load = required("PIL.Image").open
            x = torch.stack([prepared(load(path), model.image_size) for path, _ in batch])
            x, labels = x.to(accelerator.device), torch.tensor([label for _, label in batch])
            with torch.no_grad():
                predicted = model(x).argmax(1)
            relevance = method(x, predicted)
            return {
                order: perturbation(model, x, relevance, labels, order=order, removal=removal)
                for order in COLUMNS
            }

        found = evaluate(score, files, batch_size=args.batch_size, accelerator=accelerator)
        scores[name] = {order: curve.estimate() for order, curve in found.items()}
    about = {"checkpoint": args.checkpoint, "images": len(files), "removed pixels": args.removal}
    report(accelerator, args.output, "imagenet_perturbation", about, scores, PAPER, COLUMNS, NOTES)


if __name__ == "__main__":
    main()
