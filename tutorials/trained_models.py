"""Four small models that are not of language, trained for the tutorials and the benchmarks.

They are modules as people write them for series, images and video; nothing in them is made for
being explained. The models of series are those of :mod:`captum_ssm.examples`.
``load("series-forecaster")`` returns one with its weights of ``models/``, which the scripts of
``benchmarks/series``, ``benchmarks/vision`` and ``benchmarks/video`` trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from captum_ssm.examples.series import Residual, SeriesClassifier, SeriesForecaster
from captum_ssm.models import SS2D, BidirectionalMamba

MODELS = Path(__file__).resolve().parent / "models"


class Step(nn.Module):
    """VMamba blocks on one grid, channels first: ``(B, E, H, W)`` to the same."""

    def __init__(self, width: int, grid: tuple[int, int], depth: int, state: int) -> None:
        super().__init__()
        self.grid = grid
        self.blocks = nn.ModuleList(
            Residual(width, SS2D(width, grid, state=state, expand=1)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.transpose(1, 2).unflatten(2, self.grid)


class ConvBlock(nn.Sequential):
    """A convolution of 3 x 3, its batch norm and ReLU."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )


class DigitsSegmenter(nn.Module):
    """A U of Mamba stages on 12 x 12 and 6 x 6 patches: ``(B, 3, 48, 48)`` to ``(B, 11, 48, 48)``.

    The stem's strided convolutions lead to the first grid, and a strided convolution to the second;
    transposed convolutions lead back. Each step back adds what the way down had at its size.
    """

    def __init__(
        self, size: int = 48, classes: int = 11, width: int = 32, depth: int = 2, state: int = 4
    ) -> None:
        super().__init__()
        half = width // 2
        grid, coarse = (size // 4, size // 4), (size // 8, size // 8)
        self.pixels = ConvBlock(3, half)
        self.stem = ConvBlock(half, width, stride=2)
        self.patches = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down = Step(width, grid, depth, state)
        self.merge = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.bottom = Step(2 * width, coarse, depth, state)
        self.split = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = Step(width, grid, 1, state)
        self.to_halves = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.halves = ConvBlock(width, width)
        self.to_pixels = nn.ConvTranspose2d(width, half, 2, stride=2)
        self.head = nn.Sequential(ConvBlock(half, half), nn.Conv2d(half, classes, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.pixels(images)  # (B, 16, 48, 48)
        halves = self.stem(pixels)  # (B, 32, 24, 24)
        patches = self.down(self.patches(halves))  # (B, 32, 12, 12)
        x = self.bottom(self.merge(patches))  # (B, 64, 6, 6)
        x = self.up(self.split(x) + patches)
        x = self.halves(self.to_halves(x) + halves)
        return self.head(self.to_pixels(x) + pixels)


class VideoClassifier(nn.Module):
    """Tubelets of two frames, 4 x 4 each: ``(B, 1, 16, 16, 16)`` to logits ``(B, 4)``.

    Positions in space and in time are apart, so that shorter clips fit too.
    """

    def __init__(
        self,
        size: tuple[int, int, int] = (16, 16, 16),
        classes: int = 4,
        tubelet: tuple[int, int, int] = (2, 4, 4),
        width: int = 48,
        depth: int = 2,
        state: int = 8,
    ) -> None:
        super().__init__()
        times, rows, columns = (s // t for s, t in zip(size, tubelet, strict=True))
        self.stem = nn.Conv3d(1, width, tubelet, stride=tubelet)
        self.space = nn.Parameter(0.02 * torch.randn(1, width, 1, rows, columns))
        self.time = nn.Parameter(0.02 * torch.randn(1, width, times, 1, 1))
        self.blocks = nn.ModuleList(
            Residual(width, BidirectionalMamba(width, state=state)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.stem(clips)  # (B, 48, 8, 4, 4)
        x = x + self.space + self.time[:, :, : x.shape[2]]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


KINDS: dict[str, type[nn.Module]] = {
    "series-forecaster": SeriesForecaster,
    "series-classifier": SeriesClassifier,
    "digits-segmenter": DigitsSegmenter,
    "moving-video": VideoClassifier,
}


def load(name: str) -> nn.Module:
    """The model of ``models/<name>``, in eval mode."""
    model = KINDS[name]()
    model.load_state_dict(load_file(MODELS / name / "model.safetensors"))
    return model.eval()
