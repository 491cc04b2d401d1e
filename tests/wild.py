"""Mixers as the field writes them: no adapter knows any, and each calls a scan of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def tokens(batch: int = 2, length: int = 7, width: int = 6) -> Tensor:
    """Random tokens, by default as wide as the mixers here."""
    return torch.randn(batch, length, width)


def scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """S6, token by token: x and delta ``(B, L, D)``, B and C ``(B, L, N)``."""
    h, out = x.new_zeros(len(x), *A.shape), []
    for t in range(x.shape[1]):
        h = torch.exp(delta[:, t, :, None] * A) * h
        h = h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        out.append((h * C[:, t, None]).sum(-1))
    return torch.stack(out, 1) + D * x


def last_scan(u: Tensor, dts: Tensor, As: Tensor, Bs: Tensor, Cs: Tensor, Ds: Tensor) -> Tensor:
    """S6 with the tokens last and grouped B and C: u ``(B, D, L)``, Bs ``(B, G, N, L)``."""
    B, C = (t.repeat_interleave(u.shape[1] // t.shape[1], 1) for t in (Bs, Cs))
    h, out = u.new_zeros(len(u), *As.shape), []
    for t in range(u.shape[2]):
        h = torch.exp(dts[:, :, t, None] * As) * h
        h = h + (dts[..., t] * u[..., t])[..., None] * B[..., t]
        out.append((h * C[..., t]).sum(-1))
    return torch.stack(out, 2) + Ds[:, None] * u


class Mixer(nn.Module):
    """Mamba's S6 mixer, one method per part, so that a look-alike changes one of them."""

    def __init__(self, width: int = 6, inner: int = 8, state: int = 3) -> None:
        super().__init__()
        self.state = state
        self.in_proj = nn.Linear(width, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj = nn.Linear(inner, inner + 2 * state)
        self.rates = nn.Parameter(torch.randn(inner, state))
        self.D = nn.Parameter(torch.randn(inner))
        self.out_proj = nn.Linear(inner, width)

    def convolved(self, u: Tensor) -> Tensor:
        return F.silu(self.conv(u.mT)[..., : u.shape[1]].mT)

    def scanned(self, v: Tensor) -> Tensor:
        step, B, C = self.x_proj(v).split([v.shape[-1], self.state, self.state], -1)
        return scan(v, F.softplus(step), -self.rates.exp(), B, C, self.D)

    def mixed(self, u: Tensor) -> Tensor:
        return self.scanned(self.convolved(u))

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        return self.out_proj(self.mixed(u) * F.silu(z))


class Backward(Mixer):
    """Over reversed tokens."""

    def mixed(self, u: Tensor) -> Tensor:
        return super().mixed(u.flip(1)).flip(1)


class LooksAhead(Mixer):
    """The convolution is centered, and padded by hand."""

    def convolved(self, u: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(u.mT, (1, 1)), self.conv.weight, self.conv.bias, groups=8).mT)


class BothWays(LooksAhead):
    """Two directions after a centered convolution."""

    def mixed(self, u: Tensor) -> Tensor:
        v = self.convolved(u)
        return self.scanned(v) + self.scanned(v.flip(1)).flip(1)


class InBatch(Mixer):
    """Two directions, stacked in the batch."""

    def mixed(self, u: Tensor) -> Tensor:
        there, back = super().mixed(torch.cat([u, u.flip(1)])).chunk(2)
        return there + back.flip(1)


class HalfScanned(Mixer):
    """The other half of the channels goes to the output projection without a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        return self.out_proj(torch.cat([self.mixed(u), F.silu(z)], -1))


class Normed(Mixer):
    """A layer norm between the scan and its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def mixed(self, u: Tensor) -> Tensor:
        return self.norm(super().mixed(u))


class TwoBranches(Mixer):
    """Attention next to the scan, each with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(2))

    def mixed(self, u: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(u).chunk(3, -1))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        one, other = self.norms
        return (one(read) + other(super().mixed(u))) / 2


class FourWays(nn.Module):
    """Four directions over an image ``(B, H, W, E)``, stacked in the channels of one scan."""

    def __init__(self, width: int = 6, inner: int = 8, state: int = 3) -> None:
        super().__init__()
        self.state, self.inner = state, inner
        self.in_proj = nn.Linear(width, 2 * inner)
        self.conv = nn.Conv2d(inner, inner, 3, groups=inner, padding=1)
        self.projections = nn.Parameter(0.5 * torch.randn(4, inner + 2 * state, inner))
        self.rates = nn.Parameter(torch.randn(4 * inner, state))
        self.D = nn.Parameter(torch.randn(4 * inner))
        self.norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, width)

    def ways(self, v: Tensor) -> Tensor:
        """``v (B, D, H, W)`` in four orders: ``(B, 4, D, L)``."""
        rows, columns = v.flatten(2), v.mT.flatten(2)
        return torch.stack([rows, columns, rows.flip(2), columns.flip(2)], 1)

    def scans(self, ways: Tensor) -> Tensor:
        """``ways (B, 4, D, L)``, each mixed in its own order."""
        found = torch.einsum("bkdl,kcd->bkcl", ways, self.projections)
        step, Bs, Cs = found.split([self.inner, self.state, self.state], 2)
        rates = -self.rates.exp()
        y = last_scan(ways.flatten(1, 2), F.softplus(step).flatten(1, 2), rates, Bs, Cs, self.D)
        return y.view(ways.shape)

    def scanned(self, v: Tensor) -> Tensor:
        """``v (B, D, H, W)`` mixed in all four directions: ``(B, D, L)``."""
        B, _, H, W = v.shape
        y = self.scans(self.ways(v))
        rows = y[:, 0] + y[:, 2].flip(2)
        return rows + (y[:, 1] + y[:, 3].flip(2)).view(B, -1, W, H).mT.flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, _ = x.shape
        u, z = self.in_proj(x).chunk(2, -1)
        y = self.scanned(F.silu(self.conv(u.permute(0, 3, 1, 2))))
        return self.out_proj(self.norm(y.mT.view(B, H, W, -1)) * F.silu(z))


class Stack(nn.Module):
    """Mixers one after the other in a residual stream, with a head."""

    def __init__(self, *mixers: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in mixers)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class ConstantNorm(nn.Module):
    """A layer norm whose deviation is a constant."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        size = (x.var(-1, unbiased=False, keepdim=True) + self.norm.eps).sqrt().detach()
        return (x - x.mean(-1, keepdim=True)) / size * self.norm.weight + self.norm.bias


# One of each kind over tokens ``(B, L, 6)``.
KINDS = (Mixer, Backward, LooksAhead, BothWays, InBatch, HalfScanned, Normed, TwoBranches)


class Kernel(torch.autograd.Function):
    """Stands for a fused kernel: no Python function is called with the arguments of a scan."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.run(x), x, gradient)[0], None
