"""A causal depthwise convolution of tokens, and its adjoint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, taps: Tensor | None) -> Tensor:
    """The causal depthwise convolution ``(..., L, D)`` of ``x (..., L, D)``.

    x has a batch dimension. ``taps (D, K)`` are as in :class:`torch.nn.Conv1d`: the last is that
    of the current token.
    """
    if taps is None:
        return x
    K = taps.shape[1]
    if K > 8:
        padded = F.pad(x.mT.flatten(0, -3), (K - 1, 0))
        return F.conv1d(padded, taps[:, None], groups=len(taps)).mT.reshape(x.shape)
    # Tap by tap: torch's convolution wants time last, and for few taps the two copies cost more
    # than the work. Each tap is read along the channels, so the channels come last.
    by_tap = taps.t().contiguous()
    out = x * by_tap[-1]
    for lag in range(1, min(K, x.shape[-2])):
        out[..., lag:, :].addcmul_(x[..., :-lag, :], by_tap[-1 - lag])
    return out


def causal_conv_transpose(x: Tensor, taps: Tensor | None) -> Tensor:
    """The adjoint of :func:`causal_conv`: ``(..., L, D)`` to ``(..., L, D)``."""
    return x if taps is None else causal_conv(x.flip(-2), taps).flip(-2)


def causal_conv_taps(x: Tensor, grad: Tensor, taps: int) -> Tensor:
    """The gradient ``(D, K)`` of the taps, from that of the convolution of ``x (B, L, D)``."""
    length = x.shape[1]
    lags = [(grad[:, lag:] * x[:, : max(0, length - lag)]).sum((0, 1)) for lag in range(taps)]
    return torch.stack(lags[::-1], 1)
