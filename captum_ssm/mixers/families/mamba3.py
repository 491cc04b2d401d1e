r"""Mamba-3 (mamba-ssm's ``Mamba3``): the trapezoidal rule and rotated B and C.

    h_t = exp(A_t dt_t) (h_{t-1} + (1 - s_t) dt_t B_{t-1} x_{t-1}) + s_t dt_t B_t x_t
    y_t = C_t h_t

with s the sigmoid of a projection. What a token adds to the state is written in two halves, one of
them a step later. After that both decay alike, so that one key per token holds them; only the
token itself reads the first half alone. B and C are normalized, biased and rotated by angles that
add up with the steps, a phase that depends on the data.

With several inputs and outputs per head (MIMO) of rank R there are R keys and R queries. Each query
has an output with a gate of its own, and reads all keys' values, which are x times a weight.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import rms_factor
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LinearAttentionOperator, SumOperator, TokenOperator


@adapts("mamba_ssm.modules.mamba3.Mamba3")
def freeze_mamba3(call: MixerCall) -> FrozenMixer:
    """mamba-ssm's ``Mamba3``."""
    module = call.module
    H, P, D, R = module.nheads, module.headdim, module.d_inner, module.mimo_rank
    width = module.d_state * module.num_bc_heads * R
    sizes = [D, D, width, width, H, H, H, module.num_rope_angles]
    projected = call.linear(module.in_proj, call.tokens("u"))
    z, x, B, C, step, rate, trap, angles = projected.split(sizes, -1)
    dt = F.softplus(step + call.parameter(module.dt_bias))
    log_decay = dt * (-F.softplus(rate)).clamp(max=-module.A_floor)
    share = torch.sigmoid(trap)
    now, later = dt * share, dt * (1 - share)
    phase = torch.cumsum(math.pi * torch.tanh(angles)[:, :, None] * dt[..., None], 1)
    query = _rotated(call, C, module.C_norm, module.C_bias, phase)  # (B, L, R, H, N)
    keys = _rotated(call, B, module.B_norm, module.B_bias, phase)
    # The second half is written a step later, with the next token's step.
    written = now + F.pad(later, (0, 0, 0, 1))[:, 1:]

    read = partial(_recurrence, query, log_decay=log_decay, now=now, written=written, width=P)
    recurrence: TokenOperator = read(keys[:, :, 0])
    skip = call.parameter(module.D).repeat_interleave(P).repeat(R)
    down = None
    x, z = x.repeat(1, 1, R), z.repeat(1, 1, R)
    if module.is_mimo:
        up, gates, down = (
            call.parameter(getattr(module, f"mimo_{name}")).transpose(0, 1).flatten(1)  # (R, D)
            for name in "xzo"
        )
        pairs = zip(keys.unbind(2), up, strict=True)
        recurrence = SumOperator(
            tuple(read(key).scaled(None, factor.repeat(R).expand_as(x)) for key, factor in pairs)
        )
        skip, z = skip * up.flatten(), z * gates.flatten()
    out_weight = call.weight(module.out_proj).repeat(1, R)

    def out_proj(y: Tensor) -> Tensor:
        y = y if down is None else y * down.flatten()
        return call.linear(module.out_proj, y.unflatten(-1, (R, D)).sum(-2))

    mixer = FrozenMixer(
        recurrence=recurrence,
        inputs=x,
        skip=skip,
        gate=F.silu(z),
        gate_argument=z,
        out_proj=out_proj,
        out_weight=out_weight if down is None else out_weight * down.flatten(),
    )
    if not module.is_outproj_norm:
        return mixer
    weight = call.parameter(module.norm.weight).repeat(R)
    return mixer.normed(lambda y: rms_factor(y, weight, module.norm.eps, R * H))


def _recurrence(
    query: Tensor, key: Tensor, *, log_decay: Tensor, now: Tensor, written: Tensor, width: int
) -> LinearAttentionOperator:
    # All queries (B, L, R, H, N) that read what one key (B, L, H, N) wrote.
    return LinearAttentionOperator(
        query=(query * log_decay.exp()[:, :, None, :, None]).flatten(2, 3),
        key=(key * written[..., None])[:, :, None].expand_as(query).flatten(2, 3),
        log_decay=log_decay.repeat(1, 1, query.shape[2])[..., None],
        bonus=(now[:, :, None] * (query * key[:, :, None]).sum(-1)).flatten(2),
        width=width,
    )


def _rotated(call: MixerCall, t: Tensor, norm: Any, bias: Tensor, phase: Tensor) -> Tensor:
    # B or C, normalized, biased and rotated, (B, L, R, H, N).
    module = call.module
    R, G, H = module.mimo_rank, module.num_bc_heads, module.nheads
    scaled = t * rms_factor(t, call.parameter(norm.weight), norm.eps, R * G)
    heads = scaled.unflatten(-1, (R, G, -1)).repeat_interleave(H // G, 3)
    heads = heads + call.parameter(bias).transpose(0, 1)
    phase = F.pad(phase, (0, heads.shape[-1] // 2 - phase.shape[-1]))[:, :, None]
    cos, sin = phase.cos(), phase.sin()
    # Pairs of neighbors, or of the two halves; those without an angle stay as they are.
    shape, axis = ((2, -1), -2) if module.is_mimo else ((-1, 2), -1)
    a, b = heads.unflatten(-1, shape).unbind(axis)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], axis).flatten(-2)
