"""Published Vision Mamba checkpoints, and images as Chefer et al. (2021) prepare them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import required
from torch import Tensor

from captum_ssm.models import VisionMamba

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
BLACK = -MEAN / DEVIATION  # what a black pixel is once normalized


def vision_mamba(name: str) -> VisionMamba:
    """A checkpoint, by the path of a ``.pth`` or ``.safetensors``, or as ``owner/name/file``."""
    path = Path(name)
    if not path.is_file():
        parts = name.split("/")
        if len(parts) != 3 or path.parent.is_dir():
            raise SystemExit(f"--checkpoint {name}: neither a file nor owner/name/file on the hub.")
        download = required("huggingface_hub").hf_hub_download
        path = Path(download("/".join(parts[:2]), parts[2]))
    if path.suffix == ".safetensors":
        return VisionMamba.from_state_dict(required("safetensors.torch").load_file(path))
    # The published files hold the options of their training in addition to the weights.
    with torch.serialization.safe_globals([argparse.Namespace]):
        return VisionMamba.from_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def prepared(image: Any, size: tuple[int, int]) -> Tensor:
    """A PIL image, resized to (height, width) and normalized, ``(3, H, W)``."""
    bilinear = required("PIL.Image").Resampling.BILINEAR
    pixels = np.array(image.convert("RGB").resize(size[::-1], bilinear))
    return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - MEAN) / DEVIATION
