"""The S6 mixer of Mamba and its relatives (Gu & Dao, 2023; Ali et al., eq. 7-13).

In transformers: Mamba, FalconMamba (normalized B, C, dt), Jamba (layer norms on them) and Zamba
(several mamba heads, each with its own projections); in mamba-ssm: ``Mamba``. All of them are

    u, z = in_proj(x);  psi = conv(u);  v = SiLU(psi);  dt, B, C = x_proj(v)
    y = out_proj((scan(v; softplus(dt), A, B, C) + D v) SiLU(z))

with padding set to zero at the input and after the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers._parts import (
    ShortConv,
    activation_factor,
    masked_tokens,
    short_conv,
)
from captum_ssm.mixers._registry import adapts
from captum_ssm.operators import DiagonalOperator

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class S6Scan:
    """The parts of one S6 scan of ``D`` channels and ``N`` states, and how it uses them.

    Args:
        x_proj (nn.Module): from the values to the low-rank step, B and C.
        dt_proj (nn.Module): from the low-rank step to one per channel.
        A (Tensor): ``(D, N)``, negative.
        D (Tensor): the skip, ``(D,)``.
        norms (tuple of Callable, optional): of the low-rank step, B and C; None for no norm.
            Default: (None, None, None)
        act (Callable, optional): the activation of the values. Default: SiLU
    """

    x_proj: nn.Module
    dt_proj: Any  # an nn.Linear, or one that is quantized
    A: Tensor
    D: Tensor
    norms: tuple[Function | None, ...] = (None, None, None)
    act: Function = F.silu

    def operator(self, call: MixerCall, values: Tensor, mask: Tensor | None) -> DiagonalOperator:
        """The recurrence, from its values ``(B, L, D)``."""
        N = self.A.shape[-1]
        found = call.linear(self.x_proj, values)
        parts = found.split([found.shape[-1] - 2 * N, N, N], dim=-1)
        step, B, C = (
            part if norm is None else norm(part).to(call.dtype)
            for norm, part in zip(self.norms, parts, strict=True)
        )
        step = F.softplus(call.linear(self.dt_proj, step))
        return _operator(step, self.A, B[:, :, None], C[:, :, None], mask)

    def freeze(
        self,
        call: MixerCall,
        conv: ShortConv,
        z: Tensor,
        out_proj: Function,
        out_weight: Tensor,
        mask: Tensor | None = None,
    ) -> FrozenMixer:
        """The frozen scan of what ``conv`` returns, gated by ``z (B, L, D)``."""
        activation, values = _values(self.act, conv, mask)
        return FrozenMixer(
            recurrence=self.operator(call, values, mask),
            inputs=conv.inputs,
            out_proj=out_proj,
            out_weight=out_weight,
            skip=call.parameter(self.D).reshape(-1),
            conv=conv.taps,
            conv_bias=conv.bias,
            activation=activation,
            gate=F.silu(z),
            gate_argument=z,
        ).with_values(values, convolved=conv.output)


@adapts("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "fla.layers.mamba.Mamba")
def freeze_s6(call: MixerCall) -> FrozenMixer:
    """Mamba, FalconMamba, Jamba, and the ``Mamba`` of mamba-ssm and of flash-linear-attention."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).chunk(2, dim=-1)
    scan = S6Scan(
        x_proj=module.x_proj,
        dt_proj=module.dt_proj,
        A=call.decay_rate(module.A_log),
        D=module.D,
        norms=tuple(_norm(call, name) for name in ("dt_layernorm", "b_layernorm", "c_layernorm")),
        act=getattr(module, "act", F.silu),
    )
    conv = short_conv(call, module.conv1d, u)
    return scan.freeze(
        call, conv, z, lambda y: call.linear(module.out_proj, y), call.weight(module.out_proj), mask
    )


@adapts("ZambaMambaMixer")
def freeze_zamba(call: MixerCall) -> FrozenMixer:
    """Zamba: the channels form heads, each with its own projections to dt, B and C."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).unflatten(-1, (-1, 2)).unbind(-1)
    conv = short_conv(call, module.conv1d, u)
    activation, values = _values(module.act, conv, mask)

    N, rank = module.A_log.shape[-1], module.dt_proj_weight.shape[-1]
    heads = values.unflatten(-1, (module.n_mamba_heads, -1))  # (B, L, G, P)
    projected = torch.einsum("blgp,grp->blgr", heads, call.parameter(module.x_proj_weight))
    step, B, C = projected.split([rank, N, N], dim=-1)
    step = torch.einsum("blgr,gpr->blgp", step, call.parameter(module.dt_proj_weight))
    dt = F.softplus(step + call.parameter(module.dt_proj_bias)).flatten(2)
    A = call.decay_rate(module.A_log).reshape(-1, N)
    return FrozenMixer(
        recurrence=_operator(dt, A, B, C, mask),
        inputs=conv.inputs,
        out_proj=lambda y: call.linear(module.out_proj, y),
        out_weight=call.weight(module.out_proj),
        skip=call.parameter(module.D).reshape(-1),
        conv=conv.taps,
        conv_bias=conv.bias,
        activation=activation,
        gate=F.silu(z),
        gate_argument=z,
    ).with_values(values, convolved=conv.output)


def _operator(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: Tensor | None) -> DiagonalOperator:
    right = dt if mask is None else dt * mask[..., None]
    return DiagonalOperator(dt, right, A, B, C)


def _values(act: Function, conv: ShortConv, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The activation factor, a constant, and the input of the recurrence."""
    psi = conv.output
    activation, values = activation_factor(act, psi.detach()), act(psi)
    if mask is not None:
        activation, values = (x * mask[..., None] for x in (activation, values))
    return activation, values


def _norm(call: MixerCall, name: str) -> Function | None:
    norm: nn.Module | None = getattr(call.module, name, None)
    if norm is not None:
        return norm
    # transformers before 5 kept FalconMamba's norms as a bare epsilon, without weights.
    if type(call.module).__name__ == "FalconMambaMixer":
        eps = call.module.rms_eps
        return lambda part: part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
    return None
