r"""The mLSTM cell of xLSTM (Beck et al., 2024).

In transformers: xLSTM. The cell (:mod:`captum_ssm.operators.mlstm`) is followed by a layer norm per
head and a sigmoid gate. The layer norm subtracts each head's mean
over channels. All channels of a head share one map, so the map can act on the centered values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import projection, rms_scale
from captum_ssm.mixers.past import by_key
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import TokenOperator, mlstm_operator


@adapts("xLSTMLayer")
def freeze_mlstm(call: MixerCall) -> FrozenMixer:
    """transformers' xLSTM layer, with single or fused weights."""
    module = call.module
    config = module.config
    x, H = call.tokens("x"), config.num_heads
    if config.weight_mode == "fused":
        qk, vd = module.qk_dim, module.v_dim
        q, k, v, o = call.linear(module.qkv_opreact, x).split([qk, qk, vd, vd], -1)
        gates = _soft_cap(call.linear(module.ifgate_preact, x), config.gate_soft_cap)
        i, f = gates.split([H, H], -1)
    else:
        q, k, v, o = (
            call.linear(layer, x) for layer in (module.q, module.k, module.v, module.ogate_preact)
        )
        i, f = (
            _soft_cap(call.linear(layer, x), config.gate_soft_cap)
            for layer in (module.igate_preact, module.fgate_preact)
        )
    q, k = (t.unflatten(-1, (H, -1)) for t in (q, k))  # (B, L, H, N)
    recurrence = _recurrence(call, q, k, i, f, v.shape[-1] // H)
    norm = module.multihead_norm
    heads = v.unflatten(-1, (H, -1))
    gate = torch.sigmoid(o)
    mixer = FrozenMixer(
        recurrence=recurrence,
        memory=lambda: recurrence,  # in units of its own largest exponent
        inputs=(heads - heads.mean(-1, keepdim=True)).flatten(2),
        **projection(call, module.out_proj),
        gate=gate,
        state=call.state(by_key),
        offset=None if norm.bias is None else call.parameter(norm.bias) * gate,
    )
    return mixer.normed(rms_scale(call, norm, H))


def _recurrence(
    call: MixerCall, q: Tensor, k: Tensor, i: Tensor, f: Tensor, width: int
) -> TokenOperator:
    past, begun = call.past, None
    if past is not None:
        begun = past.recall(i, 1), past.recall(i, q.shape[-1], ahead=1)
    eps = call.module.config.eps
    operator, left = mlstm_operator(q, k, i, f, width=width, eps=eps, begun=begun)
    if past is not None:
        for x in left or ():
            past.keep(x)
    return operator


def _soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
