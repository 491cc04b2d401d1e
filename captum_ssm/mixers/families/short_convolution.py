"""Short gated convolutions (LFM2): a depthwise convolution is the only thing that mixes tokens.

In transformers: LFM2, its mixture of experts and LFM3. The map is a band matrix, one per channel:

    b, c, x = in_proj(tokens);  y = out_proj(c conv(b x))

Inkling puts a convolution with a residual after each attention and each MLP: y = conv(x) + x.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import ShortConv, masked_tokens, projection, short_conv
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LatterOperator, SkipOperator, TokenOperator


@adapts("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")
def freeze_short_conv(call: MixerCall) -> FrozenMixer:
    """LFM's gated convolution."""
    module = call.module
    x, _ = masked_tokens(call)
    b, c, u = call.linear(module.in_proj, x).chunk(3, -1)
    conv = short_conv(replace(call, past=None), module.conv, b * u)
    assert conv.taps is not None
    before = call.before(conv.inputs, conv.taps.shape[1] - 1)
    return FrozenMixer(
        recurrence=_band(conv, before),
        state=before,
        inputs=u,
        activation=b,
        gate=c,
        gate_argument=c,
        offset=None if conv.bias is None else c * conv.bias,
        **projection(call, module.out_proj),
    )


@adapts("InklingShortConvolution", "Inkling2ShortConvolution", "Inkling2LoopShortConvolution")
def freeze_residual_conv(call: MixerCall) -> FrozenMixer:
    """Inkling's convolution, whose residual sees padding and whose taps do not."""
    x, mask = call.tokens(), call.token_mask("conv_mask")
    conv = short_conv(call, call.module.conv1d, x)
    scale = residual_scale(call.module)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    band = _band(conv)
    return FrozenMixer(
        recurrence=band if mask is None else band.scaled(None, mask[..., None].expand_as(x)),
        inputs=x,
        skip=torch.ones_like(x),
        out_proj=lambda y: scale * y,
        out_weight=scale * eye,
        adds_input=True,
    )


def residual_scale(module: Any) -> float:
    """What Inkling's convolution with a residual multiplies their sum by."""
    size = module.conv_kernel_size
    return 1 / math.sqrt(size + 1) if type(module).__name__.startswith("Inkling2") else 1.0


def _band(conv: ShortConv, before: Tensor | None = None) -> TokenOperator:
    assert conv.taps is not None
    ones = torch.ones_like(conv.inputs)
    if before is None:
        return SkipOperator(ones).convolved(conv.taps)
    whole = SkipOperator(torch.cat([torch.ones_like(before), ones], 1)).convolved(conv.taps)
    return LatterOperator(whole, before.shape[1])
