"""What functions call their arguments, and in which forms they give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.scans._candidate import Candidate

QKV: dict[str, tuple[str, ...]] = {
    "q": ("query", "queries", "r", "receptance"),
    "k": ("key", "keys"),
    "v": ("value", "values"),
}
SCALE: dict[str, tuple[str, ...]] = {"scale": ("scaling", "softmax_scale")}
HEADS: dict[str, tuple[str, ...]] = {"heads": ("H", "num_heads", "n_head", "n_heads")}


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


def of_joined_heads(
    form: Callable[..., Iterator[Candidate]],
    v: Tensor,
    returned: Tensor | None,
    heads: int | None,
    **given: Any,
) -> Iterator[Candidate]:
    """Candidates of a call whose heads stand side by side in ``(B, L, H P)``, as in RWKV's kernels.

    Args:
        form (Callable): takes the heads apart, ``(B, L, H, P)``.
        v (Tensor): values, ``(B, L, H P)``.
        returned (Tensor, optional): what the function returned; it says how many heads there are
            where no argument does.
        heads (int, optional): H.
        **given: the other arguments. Those of the shape of v are taken apart too.
    """
    if returned is None or returned.shape != v.shape or (heads and v.shape[-1] % heads):
        return
    width = v.shape[-1] // heads if heads else _head_width(v[:, 0], returned[:, 0])

    def apart(t: Any) -> Any:
        same = torch.is_tensor(t) and t.shape == v.shape
        return t.unflatten(-1, (-1, width)) if same else t

    for candidate in form(**{role: apart(t) for role, t in {"v": v, **given}.items()}):
        if candidate.layouts[0] == "BLHP":
            yield replace(candidate, layouts=("BLD",))


def _head_width(v: Tensor, y: Tensor) -> int:
    # Of the first token (B, D): a recurrence returns its value, by one factor per head.
    def share_left(width: int) -> float:
        value, result = (t.double().unflatten(-1, (-1, width)) for t in (v, y))
        factor = (value * result).sum(-1, True) / value.square().sum(-1, True).clamp(min=1e-300)
        return float((result - factor * value).norm() / result.norm().clamp(min=1e-300))

    D = v.shape[-1]
    widths = (width for width in range(D, 0, -1) if D % width == 0)
    return next(width for width in widths if width == 1 or share_left(width) < 0.05)
