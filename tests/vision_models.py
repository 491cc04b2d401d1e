"""Small vision models, and images for them."""

from functools import partial

import torch
from inputs import noise
from models import made
from torch import Tensor, nn

from captum_ssm.models import SS2D, VisionMamba, vision_mamba


def small(size=(12, 20), **changes) -> VisionMamba:
    """A random model of 15 patches, 3 x 5, in float64."""
    torch.manual_seed(0)
    options = {"classes": 5, "width": 8, "depth": 2, "state": 4, "dt_rank": 2} | changes
    return made(VisionMamba(size, 4, **options))


def images(count: int = 2, size=(12, 20), colours: int = 3) -> Tensor:
    return noise(count, colours, *size, seed=1)


class Isotropic(nn.Module):
    """A vision model of SS2D mixers, pooled by mean."""

    def __init__(self, grid=(3, 5), **options) -> None:
        super().__init__()
        self.patch_embed = vision_mamba.PatchEmbed(3, 8, (4, 4), (4, 4))
        self.mixers = nn.ModuleList(SS2D(8, grid, state=4, **options) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels)
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            x = x + mixer(norm(x))
        return self.head(x.mean(1))


def isotropic(**options) -> Isotropic:
    torch.manual_seed(0)
    return made(Isotropic(**options))


def vim():
    torch.manual_seed(0)
    return VisionMamba(image_size=16, patch_size=8, classes=3, width=16, depth=2).eval()


VISION = {
    "both ways": small,
    "one way": partial(small, bimamba_type="none"),
    "layer norm": partial(small, norm="layer", layer_scale=0.3),
    "four ways": isotropic,
    "four ways, no gate": partial(isotropic, gated=False),
}
