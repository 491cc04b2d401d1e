"""Softmax attention with the tokens before the heads, as flash-attn and fla call it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import softmax_candidates


@register_scan(
    names={
        "q": ("query",),
        "k": ("key",),
        "v": ("value",),
        "decay": ("g",),
        "causal": ("is_causal",),
        "scale": ("softmax_scale", "scaling"),
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
    yield from softmax_candidates(
        query,
        key,
        values,
        (layout,),
        scale,
        bias=_bias(q.to(wide), causal, window, decay),
        softcap=softcap or None,
        sinks=None if sinks is None else sinks.to(wide),
    )


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
