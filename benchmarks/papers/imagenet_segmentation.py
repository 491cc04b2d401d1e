"""Segmentation of ImageNet's objects by explanations (Ali et al., table 2; Zimerman et al., 3).

    python benchmarks/papers/imagenet_segmentation.py --data gtsegs_ijcv.mat \\
        --checkpoint hustvl/Vim-small-midclstok/vim_s_midclstok_80p5acc.pth

The data is Guillaumin et al.'s (2014), 4,276 images with the mask of their object, in one file,
http://calvin-vision.net/bigstuff/proj-imagenet/data/gtsegs_ijcv.mat. As in the code of Chefer et
al. (2021), which both papers follow: images are resized to the model's size, masks to the nearest
pixel, and the predicted class is explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from explanations import chosen, of_images
from harness import options, processes, report, required
from imagenet import BLACK, prepared, vision_mamba
from torch import Tensor

from captum_ssm.metrics import evaluate, segmentation

COLUMNS = {
    "pixel_accuracy": ("Pixel accuracy ↑", 100),
    "map": ("mAP ↑", 100),
    "miou": ("mIoU ↑", 100),
}
PAPER = {
    "Raw attention, hidden": {"pixel_accuracy": 67.64, "map": 74.88, "miou": 45.09},
    "Raw attention, unified": {"pixel_accuracy": 67.66, "map": 80.00, "miou": 47.28},
    "Rollout, hidden": {"pixel_accuracy": 71.01, "map": 80.78, "miou": 51.51},
    "Rollout, unified": {"pixel_accuracy": 76.40, "map": 83.90, "miou": 58.48},
    "Attribution, hidden": {"pixel_accuracy": 74.72, "map": 81.70, "miou": 54.24},
    "Attribution, unified": {"pixel_accuracy": 79.60, "map": 86.40, "miou": 62.51},
    "MambaLRP": {"pixel_accuracy": 71.19, "map": 77.04, "miou": 49.98},
}
NOTES = (
    "In percent, with 95% bootstrap intervals over images; in round brackets Zimerman et al. "
    "(2025), table 3, Vision Mamba small on all images (their rows of Ali et al. are that paper's "
    "table 2)."
)


class SegmentedImages:
    """Images and masks of ``gtsegs_ijcv.mat``, read one at a time.

    The file is HDF5: ``value/img`` refers to images, stored as (colors, columns, rows), and
    ``value/gt`` to a reference to each mask, stored as (columns, rows), 1 on the object.
    """

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        self.file = required("h5py").File(path, "r")
        self.size = size

    def __len__(self) -> int:
        return len(self.file["value/img"])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image ``(3, H, W)`` and its mask ``(H, W)``."""
        pillow = required("PIL.Image")
        pixels = np.asarray(self.file[self.file["value/img"][index, 0]]).transpose(2, 1, 0)
        mask = self.file[self.file[self.file["value/gt"][index, 0]][0, 0]]
        whole = pillow.fromarray(np.asarray(mask).T.astype(np.uint8))
        resized = whole.resize(self.size[::-1], pillow.Resampling.NEAREST)
        found = torch.from_numpy(np.array(resized)).long()
        return prepared(pillow.fromarray(np.ascontiguousarray(pixels)), self.size), found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="gtsegs_ijcv.mat")
    parser.add_argument("--checkpoint", required=True, help="a file, or owner/name/file on the hub")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)
    model = vision_mamba(args.checkpoint).to(accelerator.device)
    images = SegmentedImages(args.data, model.image_size)
    count = len(images) if args.limit is None else min(args.limit, len(images))
    scores = {}
    for name, method in chosen(
        of_images(model, BLACK.to(accelerator.device)), args.methods
    ).items():

        def score(numbers: list[int], method: Any = method) -> Any:
            samples = [images[n] for n in numbers]
            x, masks = (torch.stack(part) for part in zip(*samples, strict=True))
            x = x.to(accelerator.device)
            with torch.no_grad():
                predicted = model(x).argmax(1)
            return segmentation(method(x, predicted), masks)

        found = evaluate(score, range(count), batch_size=args.batch_size, accelerator=accelerator)
        scores[name] = {
            "pixel_accuracy": found.pixel_accuracy(), "map": found.map(), "miou": found.miou(),
        }  # fmt: skip
    about = {"checkpoint": args.checkpoint, "data": args.data.name, "images": count}
    report(accelerator, args.output, "imagenet_segmentation", about, scores, PAPER, COLUMNS, NOTES)


if __name__ == "__main__":
    main()
