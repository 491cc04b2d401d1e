"""The RG-LRU block of Griffin and Hawk (De et al., 2024; Zimerman et al., eq. 12-17).

In transformers: RecurrentGemma. A diagonal recurrence of state size one, reset at position 0:

    u = linear_x(x);  v = conv(u);  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t v_t
    y = linear_out(h gelu(linear_y(x)))
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import projection, short_conv
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import one_state

# A decay of exp(-1e4) is zero in every floating-point dtype, and its logarithm is finite in sums.
RESET = 1e4


@adapts("RecurrentGemmaRecurrentBlock")
def freeze_rg_lru(call: MixerCall) -> FrozenMixer:
    """RecurrentGemma's recurrent block."""
    module, unit = call.module, call.module.rg_lru
    x = call.tokens("input_states")
    conv = short_conv(call, module.conv_1d, call.linear(module.linear_x, x))
    values = conv.output

    def block(weight: Tensor, bias: Tensor) -> Tensor:
        heads = values.unflatten(-1, (unit.num_attention_heads, -1))
        out = torch.einsum("blhi,hio->blho", heads, call.parameter(weight))
        return torch.sigmoid((out + call.parameter(bias)).flatten(2))

    input_gate = block(unit.input_gate_weight, unit.input_gate_bias)
    recurrent_gate = block(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    dt = 8.0 * recurrent_gate * F.softplus(call.parameter(unit.recurrent_param))
    reset = (call.arguments["position_ids"] == 0)[..., None]
    scale = torch.where(reset, 1.0, torch.sqrt(-torch.expm1(-2 * dt)))
    z = call.linear(module.linear_y, x)
    return FrozenMixer(
        rounding=2.0,
        recurrence=one_state(torch.where(reset, RESET, dt), scale * input_gate),
        **conv.arguments,
        **projection(call, module.linear_out),
        gate=module.act_fn(z),
        gate_argument=z,
        state=call.state(),
    )
