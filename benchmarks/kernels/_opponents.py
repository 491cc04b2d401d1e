"""Channel-mean matrices in plain PyTorch: what the kernels are measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels import DiagonalCoefficients


def recursive_halving(c: DiagonalCoefficients) -> Tensor:
    """The fastest plain form known: halve the sequence down to single tokens, each level being one
    batched matrix product over channels times states. One sequence, L a power of two.
    """
    dt, right, A, B, C = c.dt[0], c.right[0], c.A, c.B[0, :, 0], c.C[0, :, 0]
    length, channels = dt.shape
    states = A.shape[1]
    sums = dt.double().cumsum(0)
    halves = [length >> k for k in range(1, length.bit_length())]
    levels = {h: torch.zeros(length // (2 * h), h, h) for h in halves}
    together = max(1, 1024 // states)
    for d in range(0, channels, together):
        own = slice(d, d + together)
        rate = A[own]
        width = rate.shape[0]
        for h in halves:
            s = sums[:, own].view(-1, 2, h, width)
            middle = s[:, 0, -1:]
            p = ((s[:, 1] - middle).float().unsqueeze(-1) * rate).clamp_(min=-60).exp_()
            p *= C.view(-1, 2, h, 1, states)[:, 1]
            q = ((middle - s[:, 0]).float().unsqueeze(-1) * rate).clamp_(min=-60).exp_()
            q *= B.view(-1, 2, h, 1, states)[:, 0]
            q *= right[:, own].reshape(-1, 2, h, width, 1)[:, 0]
            levels[h].baddbmm_(p.flatten(2), q.flatten(2).transpose(1, 2))
    out = torch.zeros(length, length)
    for h in halves:
        view = out.as_strided(levels[h].shape, (2 * h * (length + 1), length, 1), h * length)
        view.copy_(levels[h])
    out /= channels
    out.diagonal().copy_((C * B).sum(1) * right.mean(1))
    return out[None]


def row_recurrence(c: DiagonalCoefficients) -> Tensor:
    """The obvious vectorized form: keep every column's decayed state, one row after the other."""
    dt, right, A, B, C = c.dt[0], c.right[0], c.A, c.B[0, :, 0], c.C[0, :, 0]
    length, channels = dt.shape
    states = A.shape[1]
    out = torch.zeros(length, length)
    together = max(1, 1024 // states)
    for d in range(0, channels, together):
        own = slice(d, d + together)
        decay = (dt[:, own, None] * A[own]).clamp_(min=-60).exp_().flatten(1)
        h = (right[:, own, None] * B[:, None]).flatten(1)
        read = C[:, None].expand(-1, min(together, channels - d), -1).flatten(1)
        for i in range(length):
            h[:i] *= decay[i]
            out[i, : i + 1].addmv_(h[: i + 1], read[i])
    return (out / channels)[None]


def published_loop(c: DiagonalCoefficients) -> Tensor:
    """The shape of the papers' own code: each entry of each channel's matrix in Python loops,
    the decays multiplied up from column to row.
    """
    dt, right, A, B, C = c.dt[0], c.right[0], c.A, c.B[0, :, 0], c.C[0, :, 0]
    length, channels = dt.shape
    decay = torch.exp(dt.unsqueeze(-1) * A)
    enter = right.unsqueeze(-1) * B.unsqueeze(1)
    out = torch.zeros(channels, length, length)
    for r in range(length):
        for j in range(r + 1):
            product = enter[j]
            for k in range(j + 1, r + 1):
                product = product * decay[k]
            out[:, r, j] = product @ C[r]
    return out.mean(0)[None]
