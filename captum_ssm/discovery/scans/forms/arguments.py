"""What functions call their arguments, and in which forms they give them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QKV: dict[str, tuple[str, ...]] = {
    "q": ("query", "queries", "r", "receptance"),
    "k": ("key", "keys"),
    "v": ("value", "values"),
}
SCALE: dict[str, tuple[str, ...]] = {"scale": ("scaling", "softmax_scale")}


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where a tensor is, else float32."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def per_channel(D: Tensor | None, channels: int) -> Tensor | None:
    """A factor for each channel, ``(D,)``, of one for each head or channel; None for another."""
    if D is None:
        return None
    D = D.reshape(-1)
    return None if channels % len(D) else D.repeat_interleave(channels // len(D))


def log_decays(decay: Tensor | None, query: Tensor) -> Iterator[Tensor]:
    """Logarithms of the decay that a function may mean; zeros where it has none.

    It gives the logarithm, the decay itself, or, as RWKV does, the logarithm of the rate.

    Args:
        decay (Tensor, optional): per head, or per key dimension: ``(B, L, H)``, ``(B, L, H, N)``,
            or the same for all tokens.
        query (Tensor): ``(B, L, H, N)``.

    Returns:
        iterator of Tensor: ``(B, L, H, 1)`` or ``(B, L, H, N)`` each.
    """
    H, N = query.shape[2:]
    if decay is None:
        yield torch.zeros_like(query[..., :1])
        return
    if decay.dim() < 3 and decay.numel() in (H, H * N):
        decay = decay.reshape(H, -1).expand(*query.shape[:2], -1, -1)
    decay = (decay if decay.dim() == 4 else decay[..., None]).to(query.dtype)
    if decay.shape not in (query.shape, (*query.shape[:3], 1)):
        return
    if bool((decay <= 0).all()):
        yield decay
    if bool(((decay >= 0) & (decay <= 1)).all()):
        yield decay.log()
    yield -decay.exp()
