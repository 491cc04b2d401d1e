"""The S6 mixer of Mamba and its relatives (Gu & Dao, 2023; Ali et al., eq. 7-13).

In transformers: Mamba, FalconMamba (normalized B, C, dt), Jamba (layer norms on them) and Zamba
(several mamba heads, each with its own projections); in mamba-ssm: ``Mamba``. All of them are

    u, z = in_proj(x);  psi = conv(u);  v = SiLU(psi);  dt, B, C = x_proj(v)
    y = out_proj((scan(v; softplus(dt), A, B, C) + D v) SiLU(z))

with padding set to zero at the input and after the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import activation_factor, masked_tokens, projection, short_conv
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import DiagonalOperator

Function = Callable[[Tensor], Tensor]


def freeze_scan(
    call: MixerCall,
    u: Tensor,
    z: Tensor,
    A: Tensor,
    out: dict[str, Any],
    *,
    suffix: str = "",
    mask: Tensor | None = None,
    **projections: Function,
) -> FrozenMixer:
    """The scan of ``u (B, L, D)``, gated by ``z (B, L, D)``, with parts of the call's module.

    Args:
        call (MixerCall): of a module with ``conv1d``, ``x_proj``, ``dt_proj`` and ``D``.
        u (Tensor): what is convolved.
        z (Tensor): what the gate is SiLU of.
        A (Tensor): ``(D, N)``, negative.
        out (dict): the output projection, as from :func:`~captum_ssm.mixers.parts.projection`.
        suffix (str, optional): of the names of the parts. Default: ""
        mask (Tensor, optional): of padding, ``(B, L)``. Default: None
        **projections (Callable): ``x_proj`` and ``dt_proj``, where they are not linear layers.
    """
    module = call.module
    conv = short_conv(call, getattr(module, f"conv1d{suffix}"), u)
    act, psi = getattr(module, "act", F.silu), conv.output
    activation, values = activation_factor(act, psi), act(psi)
    if mask is not None:
        activation, values = (x * mask[..., None] for x in (activation, values))
    return FrozenMixer(
        recurrence=coefficients(call, values, A, suffix=suffix, mask=mask, **projections),
        **conv.arguments,
        **out,
        skip=call.parameter(getattr(module, f"D{suffix}")).reshape(-1),
        activation=activation,
        gate=F.silu(z),
        gate_argument=z,
        state=call.state(),
    ).with_values(values, convolved=psi)


def coefficients(
    call: MixerCall,
    values: Tensor,
    A: Tensor,
    *,
    suffix: str = "",
    mask: Tensor | None = None,
    x_proj: Function | None = None,
    dt_proj: Function | None = None,
) -> DiagonalOperator:
    """The recurrence, from its values ``(B, L, D)``, as in :func:`freeze_scan`.

    ``x_proj`` returns the step, B and C, each ``(B, L, ...)`` or ``(B, L, G, ...)`` in groups of
    channels; ``dt_proj`` takes the step to ``(B, L, D)``.
    """
    x_proj = x_proj or partial(call.linear, getattr(call.module, f"x_proj{suffix}"))
    dt_proj = dt_proj or partial(call.linear, getattr(call.module, f"dt_proj{suffix}"))
    N = A.shape[-1]
    projected = x_proj(values)
    parts = projected.split([projected.shape[-1] - 2 * N, N, N], dim=-1)
    norms = (_norm(call, name) for name in ("dt_layernorm", "b_layernorm", "c_layernorm"))
    step, B, C = (
        part if norm is None else norm(part).to(call.dtype)
        for norm, part in zip(norms, parts, strict=True)
    )
    dt = F.softplus(dt_proj(step))
    right = dt if mask is None else dt * mask[..., None]
    B, C = (t if t.dim() == 4 else t[:, :, None] for t in (B, C))
    return DiagonalOperator(dt, right, A, B, C)


@adapts("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "fla.layers.mamba.Mamba")
def freeze_s6(call: MixerCall) -> FrozenMixer:
    """Mamba, FalconMamba, Jamba, and the ``Mamba`` of mamba-ssm and of flash-linear-attention."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).chunk(2, dim=-1)
    A = call.decay_rate(module.A_log)
    return freeze_scan(call, u, z, A, projection(call, module.out_proj), mask=mask)


@adapts("ZambaMambaMixer")
def freeze_zamba(call: MixerCall) -> FrozenMixer:
    """Zamba: the channels form heads, each with its own projections to dt, B and C."""
    module = call.module
    x, mask = masked_tokens(call)
    u, z = call.linear(module.in_proj, x).unflatten(-1, (-1, 2)).unbind(-1)

    def x_proj(values: Tensor) -> Tensor:
        heads = values.unflatten(-1, (module.n_mamba_heads, -1))  # (B, L, G, P)
        return torch.einsum("blgp,grp->blgr", heads, call.parameter(module.x_proj_weight))

    def dt_proj(step: Tensor) -> Tensor:
        step = torch.einsum("blgr,gpr->blgp", step, call.parameter(module.dt_proj_weight))
        return (step + call.parameter(module.dt_proj_bias)).flatten(2)

    A = call.decay_rate(module.A_log).flatten(0, -2)
    out = projection(call, module.out_proj)
    return freeze_scan(call, u, z, A, out, mask=mask, x_proj=x_proj, dt_proj=dt_proj)


def _norm(call: MixerCall, name: str) -> Function | None:
    norm: nn.Module | None = getattr(call.module, name, None)
    if norm is not None:
        return norm
    # transformers before 5 kept FalconMamba's norms as a bare epsilon, without weights.
    if type(call.module).__name__ == "FalconMambaMixer":
        eps = call.module.rms_eps
        return lambda part: part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
    return None
