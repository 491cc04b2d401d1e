"""RWKV's mixers as its own training code writes them: flat kernels, token shifts, a bonus."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8  # of a head


def apart(t: Tensor) -> Tensor:
    return t.unflatten(-1, (-1, WIDTH))


def run_rwkv7(q, w, k, v, a, b):
    """All (B, L, H N); the state is (values, keys)."""
    q, k, v, a, b = (apart(t) for t in (q, k, v, a, b))
    decay = torch.exp(-torch.exp(apart(w)))
    state, out = torch.zeros(*q.shape[:1], *q.shape[2:], WIDTH), []
    for t in range(q.shape[1]):
        read = (state * a[:, t, :, None]).sum(-1, keepdim=True)
        state = state * decay[:, t, :, None] + read * b[:, t, :, None]
        state = state + v[:, t, ..., None] * k[:, t, :, None]
        out.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(out, 1).flatten(2)


def run_rwkv6(r, k, v, w, u):
    """r, k, v and w (B, L, H N), or w the same for all tokens; u (H, N)."""
    heads = apart(r).shape[2:]
    decay = torch.exp(-torch.exp(apart(w) if w.dim() == 3 else w.view(heads).expand_as(apart(r))))
    r, k, v = (apart(t) for t in (r, k, v))
    state, out = torch.zeros(*r.shape[:1], *heads, WIDTH), []
    for t in range(r.shape[1]):
        new = k[:, t, ..., None] * v[:, t, :, None]
        out.append((r[:, t, ..., None] * (state + u.view(heads)[..., None] * new)).sum(-2))
        state = decay[:, t, ..., None] * state + new
    return torch.stack(out, 1).flatten(2)


def run_rwkv5(B, T, C, H, r, k, v, w, u):
    return run_rwkv6(r, k, v, w, u)


def run_wkv(w, u, k, v):
    """Two ways, as in Vision-RWKV."""
    return averaged(w, u, k, v, torch.ones(k.shape[1], k.shape[1], dtype=torch.bool))


def run_wkv_causal(B, T, C, w, u, k, v):
    return averaged(torch.exp(w), u, k, v, torch.ones(T, T, dtype=torch.bool).tril())


def averaged(w, u, k, v, seen):
    t = torch.arange(k.shape[1])
    apart = (t[:, None] - t).abs()[..., None]
    logits = torch.where(apart == 0, k[:, None] + u, k[:, None] - (apart - 1) * w)
    weights = logits.masked_fill(~seen[..., None], -torch.inf).softmax(2)
    return (weights * v[:, None]).sum(2)


def previous(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


class TimeMix(nn.Module):
    """RWKV-7: tokens shifted before each projection, a norm per head, a bonus after it, a gate."""

    def __init__(self, width: int = 2 * WIDTH, shares: float = 1.0) -> None:
        super().__init__()
        self.mix = nn.Parameter(shares * torch.rand(6, width))
        self.r, self.w, self.k, self.v, self.a, self.g = (
            nn.Linear(width, width, bias=False) for _ in range(6)
        )
        self.r_k = nn.Parameter(torch.randn(width // WIDTH, WIDTH))
        self.norm = nn.GroupNorm(width // WIDTH, width)
        self.out = nn.Linear(width, width, bias=False)

    def shifted(self, x: Tensor) -> Tensor:
        return previous(x)

    def normed(self, y: Tensor) -> Tensor:
        return self.norm(y)

    def scan(self, r, w, k, v, a, b):
        return run_rwkv7(r, w, k, v, a, b)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.r, self.w, self.k, self.v, self.a, self.g)
        change = self.shifted(x) - x
        r, w, k, v, a, g = (f(x + change * m) for f, m in zip(layers, self.mix, strict=True))
        a = torch.sigmoid(a)
        removed = F.normalize(apart(k), dim=-1).flatten(2)
        y = self.scan(r, -F.softplus(-w) - 0.5, k, v, -removed, removed * a)
        y = self.normed(y.flatten(0, 1)).view_as(x)
        bonus = (apart(r) * apart(k) * self.r_k).sum(-1, keepdim=True) * apart(v)
        return self.out((y + bonus.flatten(2)) * torch.sigmoid(g))


class NormedByFunction(TimeMix):
    """RWKV-7 whose norm is a module that is never called: its weights are given to a function."""

    def normed(self, y: Tensor) -> Tensor:
        norm = self.norm
        return F.group_norm(y, norm.num_groups, norm.weight, norm.bias, norm.eps)


class ReadFromItsSteps(TimeMix):
    """RWKV-7 whose loop has no names that are known, and which adds its normed input up itself."""

    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__(width)
        self.before = nn.LayerNorm(width)

    def scan(self, *parts):
        out, columns = torch.empty_like(parts[0]), [apart(x)[..., None] for x in parts]
        memory = torch.zeros(len(out), out.shape[2] // WIDTH, WIDTH, WIDTH)
        for t in range(out.shape[1]):
            reads, slow, key, value, lost, added = (x[:, t] for x in columns)
            kept = torch.exp(-torch.exp(slow))
            memory = memory * kept.mT + memory @ lost @ added.mT + value @ key.mT
            out[:, t] = (memory @ reads).flatten(1)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.before(x))


class SpatialMix(nn.Module):
    """Vision-RWKV: a quarter of the channels comes from each neighbor of a patch."""

    def __init__(self, side: int, width: int = 8) -> None:
        super().__init__()
        self.side = side
        self.decay, self.first = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(width))
        self.mix = nn.Parameter(torch.rand(3, width))
        self.k, self.v, self.r, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def shifted(self, x: Tensor) -> Tensor:
        image = x.mT.unflatten(-1, (self.side, self.side))
        moves = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))
        parts = [F.pad(p, m) for p, m in zip(image.chunk(4, 1), moves, strict=True)]
        return torch.cat(parts, 1).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        change = self.shifted(x) - x
        k, v, r = (
            f(x + change * m) for f, m in zip((self.k, self.v, self.r), self.mix, strict=True)
        )
        return self.out(torch.sigmoid(r) * run_wkv(self.decay / x.shape[1], self.first, k, v))
