"""Models of one and two grids of tokens, with and without MLPs."""

from __future__ import annotations

from torch import Tensor, nn

from captum_ssm.models import BidirectionalMamba

E = 16


class Layer(nn.Module):
    def __init__(self, mlp: bool) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(E), BidirectionalMamba(E, state=4)
        self.norm2, self.up, self.down = nn.LayerNorm(E), nn.Linear(E, 24), nn.Linear(24, E)
        self.mlp = mlp

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.mixer(self.norm(h))
        return h + self.down(nn.functional.gelu(self.up(self.norm2(h)))) if self.mlp else h


class TwoGrids(nn.Module):
    """8 tokens, then every second of them, so that the transport between is known exactly."""

    def __init__(self, mlp: bool = False) -> None:
        super().__init__()
        self.inp, self.merge = nn.Linear(3, E), nn.Conv1d(E, E, 1, stride=2)
        self.fine, self.coarse = Layer(mlp), Layer(mlp)
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fine(self.inp(x))
        h = self.coarse(self.merge(h.mT).mT)
        return self.head(self.norm(h).mean(1))


class Bare(nn.Module):
    """One grid, and the last stream is the output."""

    def __init__(self, mlp: bool = False) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(3, E), nn.ModuleList([Layer(mlp), Layer(mlp)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return h
