"""Residual layers of mixers, and what else happens to their tokens."""

from __future__ import annotations

import torch
from inputs import noise
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.models import BidirectionalMamba

E = 16


def mixer() -> nn.Module:
    return BidirectionalMamba(E, state=4, bimamba_type="none")


def tokens(batch: int = 2, length: int = 7, seed: int = 3) -> Tensor:
    return noise(batch, length, E, seed=seed)


class Stack(nn.Module):
    """Residual layers; ``update`` says how a layer's mixers are called, and a head follows."""

    def __init__(self, update, layers: int = 2, mixers: int = 2, head: int = 5) -> None:
        super().__init__()
        self.update = update
        self.mixers = nn.ModuleList(
            nn.ModuleList(mixer() for _ in range(mixers)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(layers))
        self.norm_f, self.head = nn.LayerNorm(E), nn.Linear(E, head)

    def forward(self, x: Tensor) -> Tensor:
        for norm, own in zip(self.norms, self.mixers, strict=True):
            x = x + self.update(norm(x), *own)
        return self.head(self.norm_f(x))


def in_order(order: Tensor):
    return lambda x, one, two: one(x) + two(x[:, order])[:, torch.argsort(order)]


FLIP, SHUFFLE = torch.arange(7).flip(0), torch.tensor([3, 0, 6, 1, 5, 2, 4])


class Merging(nn.Module):
    """Two stages of tokens with a strided convolution between them, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mixer(), mixer()
        self.merge = nn.Conv1d(E, E, 3, stride=2, padding=1)
        self.head = nn.Linear(E, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = self.merge(x.mT).mT
        return self.head((x + self.second(x)).mean(1))


def shift(x, one, two):
    return one(x) + two(x) + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def attention(x, one, two):
    return one(x) + (x @ x.mT).softmax(-1) @ two(x)
