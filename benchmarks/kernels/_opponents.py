"""Channel-mean matrices in plain PyTorch: what the kernels are measured against."""

from __future__ import annotations

import torch
from torch import Tensor


def recursive_halving(dt: Tensor, right: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor) -> Tensor:
    """The fastest plain form known: halve the sequence until nothing is left, each level being
    one batched matrix product over channels times states. One sequence, L a power of two.
    """
    dt, right, Bm, Cm = dt[0], right[0], Bm[0, :, 0], Cm[0, :, 0]
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
            p *= Cm.view(-1, 2, h, 1, states)[:, 1]
            q = ((middle - s[:, 0]).float().unsqueeze(-1) * rate).clamp_(min=-60).exp_()
            q *= Bm.view(-1, 2, h, 1, states)[:, 0]
            q *= right[:, own].reshape(-1, 2, h, width, 1)[:, 0]
            levels[h].baddbmm_(p.flatten(2), q.flatten(2).transpose(1, 2))
    out = torch.zeros(length, length)
    for h in halves:
        view = out.as_strided(levels[h].shape, (2 * h * (length + 1), length, 1), h * length)
        view.copy_(levels[h])
    out /= channels
    out.diagonal().copy_((Cm * Bm).sum(1) * right.mean(1))
    return out[None]


def row_recurrence(dt: Tensor, right: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor) -> Tensor:
    """The obvious vectorised form: keep every column's decayed state, one row after the other."""
    dt, right, Bm, Cm = dt[0], right[0], Bm[0, :, 0], Cm[0, :, 0]
    length, channels = dt.shape
    states = A.shape[1]
    out = torch.zeros(length, length)
    together = max(1, 1024 // states)
    for d in range(0, channels, together):
        own = slice(d, d + together)
        decay = (dt[:, own, None] * A[own]).clamp_(min=-60).exp_().flatten(1)
        h = (right[:, own, None] * Bm[:, None]).flatten(1)
        c = Cm[:, None].expand(-1, min(together, channels - d), -1).flatten(1)
        for i in range(length):
            h[:i] *= decay[i]
            out[i, : i + 1].addmv_(h[: i + 1], c[i])
    return (out / channels)[None]


def published_loop(dt: Tensor, right: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor) -> Tensor:
    """The shape of the papers' own code: each entry of each channel's matrix in Python loops,
    the decays multiplied up from column to row.
    """
    dt, right, Bm, Cm = dt[0], right[0], Bm[0, :, 0], Cm[0, :, 0]
    length, channels = dt.shape
    decay = torch.exp(dt.unsqueeze(-1) * A)
    enter = right.unsqueeze(-1) * Bm.unsqueeze(1)
    out = torch.zeros(channels, length, length)
    for r in range(length):
        for c in range(r + 1):
            product = enter[c]
            for k in range(c + 1, r + 1):
                product = product * decay[k]
            out[:, r, c] = product @ Cm[r]
    return out.mean(0)[None]
