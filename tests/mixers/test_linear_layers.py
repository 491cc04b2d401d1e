"""Output projections of a class of their own, whose matrix is read off what they return."""

from __future__ import annotations

import pytest
import torch
from families import build
from models import ids
from torch import Tensor, nn

from captum_ssm import MambaLRP, RawAttention, ReconstructionError, UnsupportedModelError
from captum_ssm.attr import TokenAttribution


class OfTokens(nn.Linear):
    """A linear layer with a factor for each token of a text of 9, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.linspace(0, 1, 9)[:, None]


class InFloat32(nn.Linear):
    """A linear layer that returns float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def with_projections(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    model = build("mamba").to(dtype)
    for name, module in model.named_modules():
        if name.endswith("out_proj"):
            module.__class__ = kind
    return model


@pytest.mark.parametrize("method", [RawAttention, MambaLRP])
def test_a_layer_that_takes_no_unit_vectors_is_refused(method: type[TokenAttribution]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"OfTokens in .* any tokens, each by"):
        method(with_projections(OfTokens, torch.float32)).attribute(ids(2, 9), target=3)


def test_a_layer_that_returns_a_finer_dtype_than_it_computes_in_is_refused() -> None:
    with pytest.raises(ReconstructionError, match="does not reproduce"):
        RawAttention(with_projections(InFloat32, torch.bfloat16)).attribute(ids(2, 9))


class Wrapped(nn.Module):
    """A linear layer, and a layer over time or over channels before it."""

    def __init__(self, layer: nn.Linear, *, over_time: bool) -> None:
        super().__init__()
        self.layer, self.over_time = layer, over_time
        width = 9 if over_time else layer.in_features
        self.added = nn.Parameter(0.1 * torch.randn(width, width))

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + (self.added @ x if self.over_time else x @ self.added))


@pytest.mark.parametrize("method", [RawAttention, MambaLRP])
@pytest.mark.parametrize("over_time", [False, True])
def test_an_input_projection_may_not_mix_tokens(
    method: type[TokenAttribution], over_time: bool
) -> None:
    model = build("mamba").float()
    for layer in model.backbone.layers:
        layer.mixer.in_proj = Wrapped(layer.mixer.in_proj, over_time=over_time)
    if not over_time:
        assert method(model).attribute(ids(2, 9), target=3).isfinite().all()
        return
    with pytest.raises(
        UnsupportedModelError, match=r"Wrapped in .* makes each token of others too"
    ):
        method(model).attribute(ids(2, 9), target=3)
