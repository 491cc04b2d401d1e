"""xLSTM's layers as their own code writes them: convolved tokens are added to the scan."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, SIDE = 2, 8, 4


L = SIDE * SIDE


def mlstm(q, k, v, igate_preact, fgate_preact):
    """Heads first, (B, H, L, N); gates (B, H, L, 1)."""
    forget = F.logsigmoid(fgate_preact[..., 0]).cumsum(-1)
    weights = (forget[..., None] - forget[..., None, :] + igate_preact.mT).exp().tril()
    scores = weights * (q @ k.mT) * q.shape[-1] ** -0.5
    return scores @ v / scores.sum(-1, keepdim=True).abs().clamp(min=1)


class GroupNorm(nn.GroupNorm):
    """A norm of heads side by side, token by token."""

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y.flatten(0, 1)).view_as(y)


class HeadwiseLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, y: Tensor) -> Tensor:
        return self.norm(y.unflatten(-1, (HEADS, -1))).flatten(-2)


class WrittenOutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, (HEADS, -1))
        centered = heads - heads.mean(-1, keepdim=True)
        scale = torch.rsqrt(heads.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return (centered * scale).flatten(-2) * self.weight


NORMS = {
    "group": lambda: GroupNorm(HEADS, WIDTH),
    "heads": HeadwiseLayerNorm,
    "written out": WrittenOutNorm,
    "all": lambda: nn.LayerNorm(WIDTH),
}


class Layer(nn.Module):
    """The mLSTM layer of xLSTM and, turned around or with an image's convolution, Vision-LSTM."""

    def __init__(self, norm: str = "group", image: bool = False, back: bool = False) -> None:
        super().__init__()
        self.back, self.image = back, image
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            if image
            else nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        )
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.norm = NORMS[norm]()
        self.skip = nn.Parameter(torch.randn(WIDTH))

    def convolved(self, x: Tensor) -> Tensor:
        if self.image:
            return self.conv(x.mT.unflatten(-1, (SIDE, SIDE))).flatten(2).mT
        return self.conv(x.mT)[..., : x.shape[1]].mT

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        x, z = self.up(x).chunk(2, -1)
        return x, F.silu(z), self.convolved(x)

    def scan(self, *args: Tensor) -> Tensor:
        return mlstm(*args)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(1) if self.back else x
        u, gate, psi = self.parts(x)
        c = F.silu(psi)
        given = (self.q(c), self.k(c), self.v(u), *self.gates(c).chunk(2, -1))
        q, k, v, i, f = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in given)
        y = self.norm(self.scan(q, k, v, i, f).transpose(1, 2).flatten(2))
        y = self.down((y + self.skip * c) * gate)
        return y.flip(1) if self.back else y
