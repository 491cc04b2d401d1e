"""Softmax attention, with the heads before the tokens (PyTorch) or after them (flash-attn, fla)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import QKV, SCALE, working_dtype
from captum_ssm.operators import SoftmaxOperator


@register_scan(
    names=SCALE
    | {
        "q": ("query",),
        "k": ("key",),
        "v": ("value",),
        "decay": ("g",),
        "causal": ("is_causal",),
        "window": ("window_size",),
        "sinks": ("sink_bias",),
    }
)
def attention_of_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Iterator[Candidate]:
    """q ``(B, L, H, N)`` or ``(L, H, N)``; scores decay by g ``(B, L, H)``, if any (forgetting).

    A window is the number of tokens that are seen, or how many before and after the token itself.
    """
    layout = "LHP" if q.dim() == 3 else "BLHP"
    q, k, v = (t[None] if t.dim() == 3 else t for t in (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        return
    if decay is not None and decay.shape != q.shape[:3]:
        return
    # Values of fewer channels than their keys are padded for flash-attn.
    used = v.detach().flatten(0, -2).any(0).nonzero()[:, 0]
    v = v[..., : int(used[-1]) + 1] if len(used) else v
    wide = torch.promote_types(q.dtype, torch.float32)
    query, key, values = (t.transpose(1, 2) for t in (q, k, v))
    yield from _candidates(
        query,
        key,
        values,
        (layout,),
        scale,
        bias=_bias(q.to(wide), causal, window, decay),
        softcap=softcap or None,
        sinks=None if sinks is None else sinks.to(wide),
    )


@register_scan(
    names=QKV | SCALE | {"mask": ("attn_mask", "attention_mask"), "causal": ("is_causal",)}
)
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool | None = None,
    scale: float | None = None,
) -> Iterator[Candidate]:
    """q, k and v ``(B, H, L, N)``, as in ``torch.nn.functional.scaled_dot_product_attention``.

    Or ``(B, L, N)``, of one head.
    """
    layouts: tuple[str, ...] = ("BHLP", "BLHP")
    if q.dim() == k.dim() == v.dim() == 3:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        layouts = ("BLD",)
    if q.dim() != 4 or k.dim() != 4:
        return
    zero = q.new_zeros(1, 1, 1, 1, dtype=working_dtype(q, k, v))
    bias: Tensor | None = None if causal else zero
    if mask is not None and mask.dim() <= 4:
        if not _broadcasts(mask, (*q.shape[:-1], k.shape[-2])):
            return
        is_seen = mask.dtype == torch.bool
        bias = zero.masked_fill(~mask, -torch.inf) if is_seen else zero + mask.to(zero)
    yield from _candidates(q, k, v, layouts, scale, bias=bias)


def _bias(
    query: Tensor, causal: bool, window: tuple[int, int] | int | None, decay: Tensor | None
) -> Tensor | None:
    before, after = window if isinstance(window, (tuple, list)) else ((window or 0) - 1, -1)
    after = 0 if causal else after
    if (before, after) == (-1, 0) and decay is None:
        return None
    at = torch.arange(query.shape[1], device=query.device)
    distance = at[:, None] - at
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if before >= 0:
        hidden |= distance > before
    if after >= 0:
        hidden |= distance < -after
    bias = query.new_zeros(1, 1, *hidden.shape)
    if decay is not None:
        total = decay.to(query).cumsum(1).transpose(1, 2)
        bias = total[..., None] - total[..., None, :]
    return bias.masked_fill(hidden, -torch.inf)


def _candidates(
    q: Tensor, k: Tensor, v: Tensor, layouts: tuple[str, ...], scale: float | None, **others: Any
) -> Iterator[Candidate]:
    # Softmax attention, if these are heads (B, H, L, N) of the same tokens; queries may share keys.
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3]:
        return
    if q.shape[2] != k.shape[2] or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        return
    query, key = q.to(working_dtype(q, k, v)), k.to(working_dtype(q, k, v))
    key, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (key, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operator = SoftmaxOperator(query, key, scale, v.shape[-1], **others)
    values = values.transpose(1, 2).flatten(2)
    yield Candidate(operator=operator, values=values, layouts=layouts)


def _broadcasts(t: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(t.shape), reversed(shape), strict=False)
    return all(size in (1, full) for size, full in sizes)
