"""Models of convolutions as long as the input, with the channels before the tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, L = 4, 9


def response(width: int = D, length: int = L) -> Tensor:
    """The impulse response of a diagonal model with a few states, (D, L)."""
    step = torch.arange(length)
    decay = (0.5 + 0.5 * torch.rand(width, 3, 1)) ** step
    return (torch.randn(width, 3, 1) * decay).sum(1)


class S4D(nn.Module):
    """Channels first, as S4D's own code; a GLU after the output projection."""

    def __init__(self, glu: bool = True, way: str = "past", width: int = 6) -> None:
        super().__init__()
        self.kernel = nn.Parameter(response(width, 2 * L if way == "both" else L))
        self.D = nn.Parameter(torch.randn(width))
        layers = [nn.Conv1d(width, 2 * width if glu else width, 1)]
        self.output = nn.Sequential(*layers, *([nn.GLU(dim=-2)] if glu else []))
        self.way = way

    def product(self, u: Tensor, k: Tensor) -> Tensor:
        return u * k

    def convolved(self, u: Tensor) -> Tensor:
        length, n = u.shape[-1], 2 * u.shape[-1]
        k = torch.fft.rfft(self.kernel, n=n)
        return torch.fft.irfft(self.product(torch.fft.rfft(u, n=n), k), n=n)[..., :length]

    def forward(self, u: Tensor) -> Tensor:
        return self.output(F.gelu(self.convolved(u) + u * self.D[:, None]))


class TokensLast(nn.Module):
    """A residual stream whose channels stand before its tokens."""

    def __init__(self, *layers: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in layers)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x).mT).mT
        return self.head(x)
