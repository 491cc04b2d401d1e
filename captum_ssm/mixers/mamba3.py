r"""Mamba-3 (mamba-ssm's ``Mamba3``): the trapezoidal rule and rotated B and C.

    h_t = exp(A_t dt_t) (h_{t-1} + (1 - s_t) dt_t B_{t-1} x_{t-1}) + s_t dt_t B_t x_t
    y_t = C_t h_t

with s the sigmoid of a projection. What a token adds to the state is written in two halves, one of
them a step later. After that both decay alike, so that one key per token holds them; only the
token itself reads the first half alone. B and C are normalized, biased and rotated by angles that
add up with the steps, a phase that depends on the data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._errors import UnsupportedModelError
from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers._parts import rms_factor
from captum_ssm.mixers._registry import adapts
from captum_ssm.operators import LinearAttentionOperator


@adapts("mamba_ssm.modules.mamba3.Mamba3")
def freeze_mamba3(call: MixerCall) -> FrozenMixer:
    """mamba-ssm's ``Mamba3`` with one input and one output per head."""
    module = call.module
    if module.is_mimo:
        raise UnsupportedModelError(
            f"{call.path} is a Mamba3 with is_mimo=True, whose kernel has no reference that could "
            "be checked against; expected is_mimo=False. Register an adapter with "
            "captum_ssm.register_mixer."
        )
    H, P, D = module.nheads, module.headdim, module.d_inner
    width = module.d_state * module.num_bc_heads
    sizes = [D, D, width, width, H, H, H, module.num_rope_angles]
    projected = call.linear(module.in_proj, call.tokens("u"))
    z, x, B, C, step, rate, trap, angles = projected.split(sizes, -1)
    dt = F.softplus(step + call.parameter(module.dt_bias))
    log_decay = dt * (-F.softplus(rate)).clamp(max=-module.A_floor)
    share = torch.sigmoid(trap)
    now, later = dt * share, dt * (1 - share)
    phase = torch.cumsum(math.pi * torch.tanh(angles)[:, :, None] * dt[..., None], 1)

    def rotated(t: Tensor, norm: Any, bias: Tensor) -> Tensor:
        scale = rms_factor(t, call.parameter(norm.weight), norm.eps, module.num_bc_heads)
        heads = (t * scale).unflatten(-1, (module.num_bc_heads, -1))
        heads = heads.repeat_interleave(H // module.num_bc_heads, 2)
        return _rotate(heads + call.parameter(bias)[:, 0], phase)

    key = rotated(B, module.B_norm, module.B_bias)
    query = rotated(C, module.C_norm, module.C_bias)
    recurrence = LinearAttentionOperator(
        query=query * log_decay.exp()[..., None],
        # The second half is written a step later, with the next token's step.
        key=key * (now + F.pad(later, (0, 0, 0, 1))[:, 1:])[..., None],
        log_decay=log_decay[..., None],
        bonus=now * (query * key).sum(-1),
        width=P,
    )
    skip = call.parameter(module.D).repeat_interleave(P)
    scale = None
    if module.is_outproj_norm:
        weight = call.parameter(module.norm.weight)
        scale = rms_factor(recurrence.matvec(x) + skip * x, weight, module.norm.eps, H)
    return FrozenMixer(
        recurrence=recurrence,
        inputs=x,
        skip=skip,
        gate=F.silu(z),
        gate_argument=z,
        norm=scale,
        out_proj=lambda y: call.linear(module.out_proj, y),
        out_weight=call.weight(module.out_proj),
    )


def _rotate(t: Tensor, phase: Tensor) -> Tensor:
    # Pairs of neighbors; those without an angle stay as they are.
    pairs = t.unflatten(-1, (-1, 2))
    phase = F.pad(phase, (0, pairs.shape[-2] - phase.shape[-1]))
    cos, sin = phase.cos(), phase.sin()
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
