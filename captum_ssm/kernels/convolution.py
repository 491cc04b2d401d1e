"""A causal depthwise convolution of tokens, and its adjoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's convolution wants time last. For few taps the two copies cost more than the work.
FEW_TAPS = 8


def causal_conv(x: Tensor, taps: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The causal depthwise convolution ``(..., L, D)`` of ``x (..., L, D)``.

    x has a batch dimension. ``taps (D, K)`` are as in :class:`torch.nn.Conv1d`: the last is that
    of the current token. ``bias`` broadcasts to ``(..., L, D)``.
    """
    if taps is None:
        return x if bias is None else x + bias
    K = taps.shape[1]
    if K <= FEW_TAPS:
        return _FewTaps.apply(x, taps, bias, False)
    padded = F.pad(x.mT.flatten(0, -3), (K - 1, 0))
    y = F.conv1d(padded, taps[:, None], groups=len(taps)).mT.reshape(x.shape)
    return y if bias is None else y + bias


def causal_conv_transpose(x: Tensor, taps: Tensor | None) -> Tensor:
    """The adjoint of :func:`causal_conv`: ``(..., L, D)`` to ``(..., L, D)``."""
    if taps is not None and taps.shape[1] <= FEW_TAPS:
        return _FewTaps.apply(x, taps, None, True)
    return x if taps is None else causal_conv(x.flip(-2), taps).flip(-2)


def causal_conv_taps(x: Tensor, grad: Tensor, taps: int) -> Tensor:
    """The gradient ``(D, K)`` of the taps, from that of the convolution of ``x (..., L, D)``."""
    length, others = x.shape[-2], tuple(range(x.dim() - 1))
    lags = []
    for lag in range(taps):
        first, count = min(lag, length), max(0, length - lag)
        lags.append((grad.narrow(-2, first, count) * x.narrow(-2, 0, count)).sum(others))
    return torch.stack(lags[::-1], 1)


class _FewTaps(torch.autograd.Function):
    # The convolution, or its adjoint, tap by tap. One node of the graph: for each tap that is
    # written in place, autograd would copy the whole.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, taps: Tensor, bias: Tensor | None, adjoint: bool) -> Tensor:
        # Each tap is read along the channels.
        by_lag = taps.t().contiguous().flip(0)
        out = x * by_lag[0] if bias is None else torch.addcmul(bias, x, by_lag[0])
        for lag in range(1, min(len(by_lag), x.shape[-2])):
            early, late = slice(None, -lag), slice(lag, None)
            to, of = (early, late) if adjoint else (late, early)
            out[..., to, :].addcmul_(x[..., of, :], by_lag[lag])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, taps, bias, ctx.adjoint = inputs
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, taps)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        x, taps = ctx.saved_tensors
        of_x, of_taps, of_bias, _ = ctx.needs_input_grad
        inputs, returned = (grad, x) if ctx.adjoint else (x, grad)
        return (
            _FewTaps.apply(grad, taps, None, not ctx.adjoint) if of_x else None,
            causal_conv_taps(inputs, returned, taps.shape[1]) if of_taps else None,
            grad.sum_to_size(ctx.bias_shape) if of_bias else None,
            None,
        )
