"""The S6 mixer of Mamba and its relatives (Gu & Dao, 2023; Ali et al., eq. 7-13).

In transformers: Mamba, FalconMamba (normalized B, C, dt), Jamba (layer norms on them) and Zamba
(several mamba heads, each with its own projections); in mamba-ssm: ``Mamba``. All of them are

    u, z = in_proj(x);  psi = conv(u);  v = SiLU(psi);  dt, B, C = x_proj(v)
    y = out_proj((scan(v; softplus(dt), A, B, C) + D v) SiLU(z))

with padding set to zero at the input and after the convolution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import ShortConv, activation_factor, masked_tokens, short_conv
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import DiagonalOperator

Function = Callable[[Tensor], Tensor]


def freeze_scan(
    call: MixerCall,
    u: Tensor,
    z: Tensor,
    A: Tensor,
    projection: tuple[Function, Tensor],
    *,
    suffix: str = "",
    mask: Tensor | None = None,
) -> FrozenMixer:
    """The scan of ``u (B, L, D)``, gated by ``z (B, L, D)``, with parts of the call's module.

    Args:
        call (MixerCall): of a module with ``conv1d``, ``x_proj``, ``dt_proj`` and ``D``.
        u (Tensor): what is convolved.
        z (Tensor): what the gate is SiLU of.
        A (Tensor): ``(D, N)``, negative.
        projection (tuple): the output projection and its weight.
        suffix (str, optional): of the names of the parts. Default: ""
        mask (Tensor, optional): of padding, ``(B, L)``. Default: None
    """
    conv = short_conv(call, getattr(call.module, f"conv1d{suffix}"), u)
    activation, values = _values(getattr(call.module, "act", F.silu), conv, mask)
    recurrence = coefficients(call, values, A, suffix=suffix, mask=mask)
    D = getattr(call.module, f"D{suffix}")
    return _frozen(call, recurrence, conv, activation, values, z, D, projection)


def coefficients(
    call: MixerCall, values: Tensor, A: Tensor, *, suffix: str = "", mask: Tensor | None = None
) -> DiagonalOperator:
    """The recurrence, from its values ``(B, L, D)``, as in :func:`freeze_scan`."""
    x_proj, dt_proj = (getattr(call.module, f"{name}{suffix}") for name in ("x_proj", "dt_proj"))
    N = A.shape[-1]
    found = call.linear(x_proj, values)
    parts = found.split([found.shape[-1] - 2 * N, N, N], dim=-1)
    norms = (_norm(call, name) for name in ("dt_layernorm", "b_layernorm", "c_layernorm"))
    step, B, C = (
        part if norm is None else norm(part).to(call.dtype)
        for norm, part in zip(norms, parts, strict=True)
    )
    dt = F.softplus(call.linear(dt_proj, step))
    return _operator(dt, A, B[:, :, None], C[:, :, None], mask)


def _frozen(
    call: MixerCall,
    recurrence: DiagonalOperator,
    conv: ShortConv,
    activation: Tensor,
    values: Tensor,
    z: Tensor,
    D: Tensor,
    projection: tuple[Function, Tensor],
) -> FrozenMixer:
    out_proj, out_weight = projection
    return FrozenMixer(
        recurrence=recurrence,
        inputs=conv.inputs,
        out_proj=out_proj,
        out_weight=out_weight,
        skip=call.parameter(D).reshape(-1),
        conv=conv.taps,
        conv_bias=conv.bias,
        activation=activation,
        gate=F.silu(z),
        gate_argument=z,
    ).with_values(values, convolved=conv.output)


def plain_projection(call: MixerCall) -> tuple[Function, Tensor]:
    """A module's output projection and its weight."""
    layer = call.module.out_proj
    return lambda y: call.linear(layer, y), call.weight(layer)


@adapts("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "fla.layers.mamba.Mamba")
def freeze_s6(call: MixerCall) -> FrozenMixer:
    """Mamba, FalconMamba, Jamba, and the ``Mamba`` of mamba-ssm and of flash-linear-attention."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).chunk(2, dim=-1)
    A = call.decay_rate(module.A_log)
    return freeze_scan(call, u, z, A, plain_projection(call), mask=mask)


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
    recurrence = _operator(dt, A, B, C, mask)
    return _frozen(call, recurrence, conv, activation, values, z, module.D, plain_projection(call))


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
