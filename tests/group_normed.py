"""Mixers with their channels in the batch of a scan, before a group norm."""

import torch
from torch import Tensor, nn


def gated_sum(x: Tensor, a: Tensor) -> Tensor:
    """Token by token, (B, L, D)."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


class ChannelsInBatch(nn.Module):
    """A gated sum of one channel after another, all of them in the batch; then a group norm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.into = nn.Linear(width, 3 * width)
        self.norm = nn.GroupNorm(2, width)
        self.out = nn.Linear(width, width)

    def scanned(self, v: Tensor, a: Tensor) -> Tensor:
        B, L, D = v.shape
        v, a = (t.mT.reshape(B * D, L, 1) for t in (v, a))
        return gated_sum(v, a).view(B, D, L).mT

    def forward(self, x: Tensor) -> Tensor:
        q, v, a = self.into(x).chunk(3, -1)
        return self.out(q * self.scanned(v, a.sigmoid()))


class GroupNormed(ChannelsInBatch):
    def forward(self, x: Tensor) -> Tensor:
        q, v, a = self.into(x).chunk(3, -1)
        y = self.scanned(v, a.sigmoid())
        return self.out(q * self.norm(y.flatten(0, 1)).view_as(y))
