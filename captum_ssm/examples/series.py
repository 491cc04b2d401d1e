"""Two models of series, as people write them: nothing is made for being explained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from captum_ssm.models import BidirectionalMamba


class Residual(nn.Module):
    """A mixer after its norm, added to what it reads: ``x + mixer(norm(x))``."""

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class SeriesForecaster(nn.Module):
    """Mamba over the steps of a series: ``(B, 64, 5)`` to the next steps, ``(B, 12, 5)``."""

    def __init__(
        self, features: int = 5, horizon: int = 12, width: int = 32, depth: int = 2, state: int = 8
    ) -> None:
        super().__init__()
        self.horizon, self.features = horizon, features
        config = MambaConfig(hidden_size=width, state_size=state, num_hidden_layers=depth)
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            Residual(width, MambaMixer(config, layer_idx=i)) for i in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, horizon * features)

    def forward(self, series: Tensor) -> Tensor:
        x = self.embed(series)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1])).unflatten(-1, (self.horizon, self.features))


class SeriesClassifier(nn.Module):
    """Patches of four steps, channels first: ``(B, 6, 96)`` to logits ``(B, 4)``."""

    def __init__(
        self,
        features: int = 6,
        length: int = 96,
        classes: int = 4,
        patch: int = 4,
        width: int = 48,
        depth: int = 2,
        state: int = 8,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv1d(features, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length // patch, width))
        self.blocks = nn.ModuleList(
            Residual(width, BidirectionalMamba(width, state=state)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, series: Tensor) -> Tensor:
        x = self.stem(series).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
