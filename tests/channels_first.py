"""Models whose tokens have their channels first, and their twins that have them last."""

import torch
import wild
from models import randomize
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


class Norm(nn.LayerNorm):
    """Over the channels on axis 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class OneTap(nn.Linear):
    """A linear layer of the channels on axis 1, as a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        run = F.conv2d if x.dim() == 4 else F.conv1d
        return run(x, self.weight.view(*self.weight.shape, *[1] * (x.dim() - 2)), self.bias)


class CrossScanF(torch.autograd.Function):
    """An image in four orders, as VMamba's own function: linear, with a gradient of its own."""

    @staticmethod
    def forward(ctx, v: Tensor) -> Tensor:
        ctx.shape = v.shape
        rows, columns = v.flatten(2), v.mT.flatten(2)
        return torch.stack([rows, columns, rows.flip(2), columns.flip(2)], 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        B, D, H, W = ctx.shape
        rows, columns = (gradient[:, k] + gradient[:, k + 2].flip(2) for k in (0, 1))
        return rows.reshape(B, D, H, W) + columns.reshape(B, D, W, H).mT


class Images(wild.FourWays):
    """Four directions over an image ``(B, E, H, W)``."""

    ways = staticmethod(CrossScanF.apply)

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.in_proj = OneTap(width, 16)
        self.norm, self.out_proj = Norm(8), OneTap(8, width)

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape
        u, z = self.in_proj(x).chunk(2, 1)
        y = self.scanned(F.silu(self.conv(u)))
        return self.out_proj(self.norm(y.view(B, -1, H, W)) * F.silu(z))


class Series(wild.Mixer):
    """One direction over a series ``(B, E, L)``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.in_proj, self.out_proj = OneTap(width, 16), OneTap(8, width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, 1)
        return self.out_proj(self.mixed(u.mT).mT * F.silu(z))


class Model(nn.Module):
    """Patches, a stage of mixers in a residual stream, a mean and a head."""

    def __init__(self, patches: nn.Module, mixer: type, norm: type, axis: int) -> None:
        super().__init__()
        self.patches, self.axis = patches, axis
        self.mixers = nn.ModuleList(mixer(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).movedim(1, self.axis)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(self.norm(x.movedim(self.axis, -1).flatten(1, -2).mean(1)))


def twins(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "series":
        first = Model(nn.Conv1d(3, WIDTH, 2, 2), Series, Norm, 1)
        last = Model(nn.Conv1d(3, WIDTH, 2, 2), wild.Mixer, nn.LayerNorm, -1)
        x = torch.randn(2, 3, 14)
    else:
        first = Model(nn.Conv2d(3, WIDTH, 2, 2), Images, Norm, 1)
        last = Model(nn.Conv2d(3, WIDTH, 2, 2), wild.FourWays, nn.LayerNorm, -1)
        # A square has as many rows and columns as there are channels.
        x = torch.randn(2, 3, *((12, 12) if kind == "square" else (8, 12)))
    randomize(first)
    last.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(x), last(x))
    return first.eval(), last.eval(), x
