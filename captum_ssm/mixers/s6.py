"""The S6 mixer of Mamba and its relatives (Gu & Dao, 2023; Ali et al., eq. 7-13).

In transformers: Mamba, FalconMamba (normalised B, C, dt), Jamba (layer norms on them) and Zamba
(several mamba heads, each with its own projections); in mamba-ssm: ``Mamba``. All of them are

    u, z = in_proj(x);  psi = conv(u);  v = SiLU(psi);  dt, B, C = x_proj(v)
    y = out_proj((scan(v; softplus(dt), A, B, C) + D v) SiLU(z))

with padding zeroed at the input and behind the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers._base import (
    FrozenMixer,
    MixerCall,
    ShortConv,
    activation_factor,
    adapts,
    masked_tokens,
    short_conv,
)
from captum_ssm.operators import DiagonalOperator


def _freeze(
    call: MixerCall,
    z: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    conv: ShortConv,
    activation: Tensor,
    values: Tensor,
    mask: Tensor | None,
) -> FrozenMixer:
    module = call.module
    A = call.decay_rate(module.A_log)
    A = A.reshape(-1, A.shape[-1])  # (D, N)
    right = dt if mask is None else dt * mask[..., None]
    return FrozenMixer(
        recurrence=DiagonalOperator(dt, right, A, B, C),
        inputs=conv.inputs,
        out_proj=lambda y: call.linear(module.out_proj, y),
        out_weight=call.weight(module.out_proj),
        skip=call.parameter(module.D).reshape(-1),
        conv=conv.taps,
        conv_bias=conv.bias,
        activation=activation,
        gate=F.silu(z),
        gate_argument=z,
    ).with_values(values)


def _values(call: MixerCall, u: Tensor, mask: Tensor | None) -> tuple[ShortConv, Tensor, Tensor]:
    """The convolution, the activation factor and the values the recurrence acts on."""
    conv = short_conv(call, call.module.conv1d, u)
    activation = activation_factor(call.module.act, conv.output)
    if mask is not None:
        activation = activation * mask[..., None]
    return conv, activation, activation * conv.output


@adapts("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
def freeze_s6(call: MixerCall) -> FrozenMixer:
    """Mamba, FalconMamba, Jamba and mamba-ssm's ``Mamba``."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).chunk(2, dim=-1)
    conv, activation, values = _values(call, u, mask)

    N, rank = module.A_log.shape[-1], module.dt_proj.in_features
    step, B, C = call.linear(module.x_proj, values).split([rank, N, N], dim=-1)
    step, B, C = (
        _normalise(call, name, part)
        for name, part in (("dt_layernorm", step), ("b_layernorm", B), ("c_layernorm", C))
    )
    dt = F.softplus(call.linear(module.dt_proj, step))
    return _freeze(call, z, dt, B[:, :, None], C[:, :, None], conv, activation, values, mask)


@adapts("ZambaMambaMixer")
def freeze_zamba(call: MixerCall) -> FrozenMixer:
    """Zamba: the channels form heads, each with its own projections to dt, B and C."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).unflatten(-1, (-1, 2)).unbind(-1)
    conv, activation, values = _values(call, u, mask)

    N, rank = module.A_log.shape[-1], module.dt_proj_weight.shape[-1]
    heads = values.unflatten(-1, (module.n_mamba_heads, -1))  # (B, L, G, P)
    projected = torch.einsum("blgp,grp->blgr", heads, call.parameter(module.x_proj_weight))
    step, B, C = projected.split([rank, N, N], dim=-1)
    step = torch.einsum("blgr,gpr->blgp", step, call.parameter(module.dt_proj_weight))
    dt = F.softplus(step + call.parameter(module.dt_proj_bias)).flatten(2)
    return _freeze(call, z, dt, B, C, conv, activation, values, mask)


def _normalise(call: MixerCall, name: str, part: Tensor) -> Tensor:
    norm: nn.Module | None = getattr(call.module, name, None)
    if norm is not None:
        return norm(part).to(call.dtype)
    # transformers before 5 kept FalconMamba's norms as a bare epsilon, without weights.
    if type(call.module).__name__ == "FalconMambaMixer":
        return part * torch.rsqrt(part.square().mean(-1, keepdim=True) + call.module.rms_eps)
    return part
