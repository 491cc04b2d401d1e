"""Lightning attention: linear attention with a fixed decay per head (Qin et al., 2024).

In transformers: MiniMax. ``q, k, v = act(qkv_proj(x))``, a norm over all heads, a sigmoid gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import activation_factor, projection, rms_scale
from captum_ssm.mixers.past import by_key
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LinearAttentionOperator


@adapts("MiniMaxLightningAttention")
def freeze_lightning(call: MixerCall) -> FrozenMixer:
    """MiniMax's lightning attention."""
    module = call.module
    x, mask = call.tokens(), call.token_mask()
    psi = call.linear(module.qkv_proj, x)
    factor = activation_factor(module.act_fn, psi)
    if mask is not None:
        factor = factor * mask[..., None]
    H, P = module.num_attention_heads, module.head_dim

    def heads(t: Tensor) -> tuple[Tensor, ...]:
        return t.unflatten(-1, (H, 3 * P)).split(P, -1)

    q, k, v = heads(factor * psi)
    log_decay = -call.parameter(module.slope_rate).reshape(1, 1, H, 1)
    recurrence = LinearAttentionOperator(
        query=q, key=k, log_decay=log_decay.expand(*x.shape[:2], H, 1), width=P
    )
    mixer = FrozenMixer(
        recurrence=recurrence,
        inputs=heads(psi)[2].flatten(2),
        activation=heads(factor)[2].flatten(2),
        **projection(call, module.out_proj),
        gate=torch.sigmoid(call.linear(module.output_gate, x)),
        state=call.state(by_key),
    )
    return mixer.with_values(v.flatten(2)).normed(rms_scale(call, module.norm))
