"""The SSD mixer of Mamba-2 and its relatives (Dao & Gu, 2024; Zimerman et al., eq. 10-11).

In transformers: Mamba2, Zamba2, Bamba, Falcon-H1 (its multipliers, a norm before or after the
gate, or none), Nemotron-H and GraniteMoeHybrid; in mamba-ssm: ``Mamba2`` and ``Mamba2Simple``.
One decay per head, B and C shared by the heads of a group:

    z, (u, B, C), dt = in_proj(x);  v, B, C = SiLU(conv(u, B, C))
    y = out_proj(norm((scan(v; softplus(dt), A, B, C) + D v) SiLU(z)))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import (
    activation_factor,
    masked_tokens,
    projection,
    rms_scale,
    short_conv,
)
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LinearAttentionOperator


def freeze_scan(
    call: MixerCall,
    *,
    projected: tuple[Tensor, Tensor, Tensor],
    width: int,
    groups: int,
    limit: tuple[float, float],
    norm_before_gate: bool | None,
    out: dict[str, Any],
    mask: Tensor | None = None,
    act: Callable[[Tensor], Tensor] | None = None,
) -> FrozenMixer:
    """What all share: ``projected`` is z, (u, B, C) and dt; ``norm_before_gate`` None: no norm.

    ``out`` is the output projection, as from :func:`~captum_ssm.mixers.parts.projection`.
    """
    module = call.module
    z, mixed, step = projected
    H = step.shape[-1]
    D = H * width
    N = (mixed.shape[-1] - D) // (2 * groups)
    conv = short_conv(call, module.conv1d, mixed)
    factor = activation_factor(act or module.act, conv.output)
    if mask is not None:
        factor = factor * mask[..., None]
    activation = factor[..., :D]
    values, B, C = (factor * conv.output).split([D, groups * N, groups * N], -1)
    dt = F.softplus(step + call.parameter(module.dt_bias)).clamp(*limit)  # (B, L, H)
    A = call.decay_rate(module.A_log)
    write = dt if mask is None else dt * mask[..., None]
    recurrence = LinearAttentionOperator(
        query=_per_head(C, groups, H),
        key=_per_head(B, groups, H) * write[..., None],
        log_decay=(A * dt)[..., None],
        width=width,
    )
    skip = call.parameter(module.D)
    skip = skip.repeat_interleave(width) if skip.numel() == H else skip.reshape(-1)
    gate = F.silu(z)
    mixer = FrozenMixer(
        recurrence=recurrence,
        **conv.channels(slice(0, D)).arguments,
        **out,
        skip=skip,
        activation=activation,
        gate=gate,
        gate_argument=z,
        state=call.state(),
    ).with_values(values)
    if norm_before_gate is None:
        return mixer
    norm = module.norm
    # One group if the norm has no groups (transformers 4, whatever the mixer's groups).
    size = getattr(norm, "group_size", None) or D // getattr(norm, "n_groups", 1)
    scale_of = rms_scale(call, norm, D // size)
    return mixer.normed(lambda y: scale_of(y if norm_before_gate else y * gate))


@adapts(
    "Mamba2Mixer",
    "Zamba2MambaMixer",
    "BambaMixer",
    "FalconH1Mixer",
    "NemotronHMamba2Mixer",
    "GraniteMoeHybridMambaLayer",
)
def freeze_ssd(call: MixerCall) -> FrozenMixer:
    """The SSD mixers of transformers."""
    module = call.module
    x, mask = masked_tokens(call)
    # Falcon-H1 scales the input, and each part of the projection.
    x = x * getattr(module, "ssm_in_multiplier", 1.0)
    projected = call.linear(module.in_proj, x)
    if hasattr(module, "mup_vector"):
        projected = projected * call.parameter(module.mup_vector)
    D, H = module.intermediate_size, module.num_heads
    before: bool | None = None
    if getattr(module, "mamba_rms_norm", True):
        before = getattr(module.norm, "norm_before_gate", False)
    return freeze_scan(
        call,
        projected=projected.split([D, projected.shape[-1] - D - H, H], -1),
        width=module.head_dim,
        groups=module.n_groups,
        # None in Zamba2 of transformers 4, which has a lower bound only.
        limit=tuple(module.time_step_limit or (module.time_step_min, torch.inf)),
        norm_before_gate=before,
        out=projection(call, module.out_proj),
        mask=mask,
    )


@adapts("mamba_ssm.modules.mamba2.Mamba2", "mamba_ssm.modules.mamba2_simple.Mamba2Simple")
def freeze_mamba_ssm(call: MixerCall) -> FrozenMixer:
    """mamba-ssm's ``Mamba2``, also with an MLP next to a narrower SSM, and ``Mamba2Simple``."""
    module = call.module
    projected = call.linear(module.in_proj, call.tokens("u"))
    D = getattr(module, "d_ssm", module.d_inner)
    mixed = D + 2 * module.ngroups * module.d_state
    mlp = projected.shape[-1] - D - mixed - module.nheads
    side, z, u, step = projected.split([mlp, D, mixed, module.nheads], -1)
    has_norm = getattr(module, "rmsnorm", True)

    def out_proj(y: Tensor) -> Tensor:
        if mlp:
            gate, up = side.chunk(2, -1)
            y = torch.cat([F.silu(gate) * up, y], -1)
        return call.linear(module.out_proj, y)

    return freeze_scan(
        call,
        projected=(z, u, step),
        width=module.headdim,
        groups=module.ngroups,
        limit=tuple(module.dt_limit),
        norm_before_gate=getattr(module.norm, "norm_before_gate", False) if has_norm else None,
        out={"out_proj": out_proj, "out_weight": call.weight(module.out_proj)[:, -D:]},
    )


def _per_head(x: Tensor, groups: int, heads: int) -> Tensor:
    # (B, L, groups N) to (B, L, heads, N): consecutive heads share a group. One group stays a view.
    parts = x.unflatten(-1, (groups, 1, -1))
    return parts.expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)
