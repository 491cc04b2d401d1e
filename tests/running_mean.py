"""A mixer that nobody registered, and the adapter that its author would write."""

import torch
from torch import nn

from captum_ssm import FrozenMixer
from captum_ssm.operators import DiagonalOperator


class RunningMean(nn.Module):
    """A toy mixer: y_i = W (mean of the tokens up to i), scaled by a decay."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.out_proj = nn.Linear(width, width)
        self.rate = nn.Parameter(torch.linspace(0.1, 1, width))

    def decay(self, token: torch.Tensor) -> torch.Tensor:
        return torch.exp(-self.rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            h = self.decay(token) * h + token
            out.append(h)
        return self.out_proj(torch.stack(out, 1))


def freeze_running_mean(call, error: float = 0.0) -> FrozenMixer:
    """The adapter of :class:`RunningMean`."""
    x, rate = call.tokens("x"), call.parameter(call.module.rate)
    one = torch.ones_like(x)
    state = torch.ones(*x.shape[:2], 1, 1, dtype=x.dtype)
    return FrozenMixer(
        recurrence=DiagonalOperator(one, one * (1 + error), -rate[:, None], state, state),
        inputs=x,
        out_proj=lambda y: call.linear(call.module.out_proj, y),
        out_weight=call.parameter(call.module.out_proj.weight),
    )
