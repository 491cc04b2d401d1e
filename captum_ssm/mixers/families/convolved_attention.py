"""Softmax attention whose values were convolved before: Inkling, Inkling 2 and Zaya.

Keys and queries may be convolved too, but are coefficients; what is read at a token is made of the
values of a few tokens before it, and the map includes that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.families.attention import freeze_attention
from captum_ssm.mixers.families.short_convolution import residual_scale
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import ShortConv, rms_factor
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import SumOperator
from captum_ssm.operators.factors import lagged


@adapts("InklingAttention", "Inkling2SlidingAttention", "Inkling2LoopSlidingAttention")
def freeze_inkling(call: MixerCall) -> FrozenMixer:
    """Inkling: v = norm(conv(u) + u), with a norm of each head in Inkling 2 only."""
    linear, short, norm = _value_layers(call.module)
    of_values = call.arguments.get("value_hidden_states")
    x = call.tokens() if of_values is None else of_values.to(call.dtype)
    u = _masked(call, call.linear(linear, x), "conv_mask")
    taps = call.parameter(short.conv1d.weight)[:, 0].clone()
    taps[:, -1] += 1
    conv = ShortConv(u, taps * residual_scale(short))
    return _with_values(call, conv, _norm(call.module, norm, conv.output))


@adapts("Inkling2FullAttention", "Inkling2LoopFullAttention")
def freeze_inkling2(call: MixerCall) -> FrozenMixer:
    """Inkling 2's full attention: the taps of its convolution are made of each token."""
    module = call.module
    linear, conv, norm = _value_layers(module)
    x = call.arguments["value_hidden_states"].to(call.dtype)
    u = _masked(call, call.linear(linear, x), "conv_mask")
    H, K = conv.num_heads, conv.conv_kernel_size
    static = call.parameter(conv.static_weight).mT.unflatten(0, (H, -1))  # (H, P, K), by lag
    made = call.linear(conv.weight_proj, x).unflatten(-1, (H, 1, K))
    taps = (static + made).flatten(2, 3).clone()  # (B, L, D, K)
    taps[..., 0] += 1
    taps = taps / math.sqrt(2 * K + 1)
    v = sum(taps[..., lag] * lagged(u, lag) for lag in range(K))
    scale = _norm(module, norm, v)
    assert scale is not None
    attention = freeze_attention(call)
    each = torch.eye(K, dtype=u.dtype, device=u.device).flip(0)[:, None]  # one tap, by lag
    width = attention.inputs.shape[-1]
    parts = (
        attention.recurrence.scaled(
            None, _per_query_head(module, scale * taps[..., lag])
        ).convolved(each[lag].expand(width, K))
        for lag in range(K)
    )
    return replace(
        attention, recurrence=SumOperator(tuple(parts)), inputs=_per_query_head(module, u)
    )


@adapts("ZayaAttention")
def freeze_zaya(call: MixerCall) -> FrozenMixer:
    """Zaya: half of the values are those of the token before."""
    module, mask = call.module.qkv_proj, (call.arguments.get("attention_mask") or {}).get("conv")
    x = call.tokens()
    x = x if mask is None else x * mask[..., None].to(x)
    layers = (module.v_proj_current, module.v_proj_delayed)
    u = torch.cat([F.linear(x, call.weight(layer)) for layer in layers], -1)
    taps = torch.zeros(u.shape[-1], 2).to(u)
    taps[: u.shape[-1] // 2, 1] = taps[u.shape[-1] // 2 :, 0] = 1
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat([call.parameter(b) for b in biases]) if biases else None
    return _with_values(call, ShortConv(u, taps, bias))


def _with_values(call: MixerCall, conv: ShortConv, norm: Tensor | None = None) -> FrozenMixer:
    module = call.module
    assert conv.taps is not None
    return replace(
        freeze_attention(call),
        inputs=_per_query_head(module, conv.inputs),
        conv=_per_query_head(module, conv.taps.mT).mT,
        conv_bias=None if conv.bias is None else _per_query_head(module, conv.bias),
        activation=None if norm is None else _per_query_head(module, norm),
    )


def _masked(call: MixerCall, u: Tensor, name: str) -> Tensor:
    mask = call.token_mask(name)
    return u if mask is None else u * mask[..., None]


def _value_layers(module: Any) -> tuple[Any, Any, Any]:
    # The projection of the values, their convolution and their norm; since transformers 5.24 they
    # are one module in Inkling 2.
    values = module.v_proj
    if hasattr(values, "sconv"):
        return values.linear, values.sconv, values.norm
    return values, module.v_sconv, getattr(module, "v_norm", None)


def _norm(module: Any, norm: Any, v: Tensor) -> Tensor | None:
    return None if norm is None else rms_factor(v, None, norm.eps, module.num_key_value_heads)


def _per_query_head(module: Any, x: Tensor) -> Tensor:
    # (..., key heads P) to (..., heads P): several query heads read the values of one key head.
    parts = x.unflatten(-1, (-1, module.head_dim))
    return parts.repeat_interleave(module.num_key_value_groups, -2).flatten(-2)
