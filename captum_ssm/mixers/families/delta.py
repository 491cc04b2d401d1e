"""The delta rule: Gated DeltaNet (Yang et al., 2025) and Kimi Delta Attention.

In transformers: Qwen3-Next, Qwen3.5 and their mixture-of-experts variants, Qwen4, OLMo-hybrid; and
with a decay per key dimension Kimi-Linear, Ling 3 and GLM-5. Before a value is written, the state
is read at the key, and what is found there is subtracted:

    q, k, v = SiLU(conv(proj(x)));  q, k normalized;  S = diag(a) S
    S = S - beta k (k^T S) + beta k v^T;  y = out_proj(norm(q^T S / sqrt(N)) gate)
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
    unit,
)
from captum_ssm.mixers.past import by_key
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LinearAttentionOperator

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def delta_rule(
    q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor, width: int
) -> LinearAttentionOperator:
    """The recurrence of queries and keys ``(B, L, H, N)`` and steps ``(B, L, H)``."""
    write = k * beta[..., None]
    return LinearAttentionOperator(
        query=q * q.shape[-1] ** -0.5,
        key=write,
        log_decay=log_decay,
        width=width,
        erase=write,
        probe=k,
    )


def _freeze_delta(
    call: MixerCall,
    *,
    mixed: Tensor,
    key_width: int,
    log_decay: Tensor,
    beta: Tensor,
    gate: Tensor,
) -> FrozenMixer:
    """What all share: ``mixed`` holds q, k and v before the convolution, ``gate`` its argument."""
    module = call.module
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    out_proj = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    D, H = gate.shape[-1], beta.shape[-1]
    keys = (mixed.shape[-1] - D) // 2
    conv = short_conv(call, module.conv1d, mixed)
    factor = activation_factor(F.silu, conv.output)
    q, k, values = (factor * conv.output).split([keys, keys, D], -1)
    # Each key head serves consecutive value heads.
    repeat = H // (keys // key_width)
    q, k = (unit(t.unflatten(-1, (-1, key_width))).repeat_interleave(repeat, 2) for t in (q, k))
    recurrence = delta_rule(q, k, beta, log_decay, D // H)
    act = _ACTIVATIONS[getattr(norm, "activation", "silu")]
    mixer = FrozenMixer(
        rounding=2.0,
        recurrence=recurrence,
        **conv.channels(slice(2 * keys, None)).arguments,
        **projection(call, out_proj),
        activation=factor[..., -D:],
        gate=act(gate),
        gate_argument=gate if act is F.silu else None,
        state=call.state(by_key),
    )
    return mixer.with_values(values).normed(rms_scale(call, norm, H))


def _head_decay(call: MixerCall, a: Tensor) -> Tensor:
    module, rate = call.module, call.decay_rate(call.module.A_log)
    return (rate * F.softplus(a + call.parameter(module.dt_bias)))[..., None]


@adapts("Qwen3NextGatedDeltaNet")
def freeze_qwen3_next(call: MixerCall) -> FrozenMixer:
    """Qwen3-Next, whose projections are interleaved by key head."""
    module = call.module
    x, _ = masked_tokens(call)
    parts = module.fix_query_key_value_ordering(
        call.linear(module.in_proj_qkvz, x), call.linear(module.in_proj_ba, x)
    )
    q, k, v, z = (t.flatten(2) for t in parts[:4])
    b, a = parts[4:]
    return _freeze_delta(
        call,
        mixed=torch.cat([q, k, v], -1),
        key_width=module.head_k_dim,
        log_decay=_head_decay(call, a),
        beta=torch.sigmoid(b),
        gate=z,
    )


@adapts(
    "LaraMiniGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Qwen4ExpTextGatedDeltaNet",
)
def freeze_qwen3_5(call: MixerCall) -> FrozenMixer:
    """Qwen3.5, Qwen4 and Lara mini, with separate projections."""
    module = call.module
    x, _ = masked_tokens(call)
    return _freeze_delta(
        call,
        mixed=call.linear(module.in_proj_qkv, x),
        key_width=module.head_k_dim,
        log_decay=_head_decay(call, call.linear(module.in_proj_a, x)),
        beta=torch.sigmoid(call.linear(module.in_proj_b, x)),
        gate=call.linear(module.in_proj_z, x),
    )


@adapts("OlmoHybridGatedDeltaNet")
def freeze_olmo_hybrid(call: MixerCall) -> FrozenMixer:
    """OLMo-hybrid, whose beta may be as large as two (negative eigenvalues)."""
    module = call.module
    x, _ = masked_tokens(call)
    beta = torch.sigmoid(call.linear(module.b_proj, x))
    return _freeze_delta(
        call,
        mixed=_projections(call, x),
        key_width=module.head_k_dim,
        log_decay=_head_decay(call, call.linear(module.a_proj, x)),
        beta=beta * 2.0 if module.allow_neg_eigval else beta,
        gate=call.linear(module.g_proj, x),
    )


@adapts("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Glm5NextTextLinearAttention")
def freeze_kimi(call: MixerCall) -> FrozenMixer:
    """Kimi Delta Attention: a decay per key dimension, in Ling 3 and GLM-5 with a lower bound."""
    module = call.module
    x, _ = masked_tokens(call)
    gate = module.forget_gate
    step = _low_rank(call, gate, "f", x) + call.parameter(gate.dt_bias)
    step = step.unflatten(-1, (-1, module.head_dim))
    rate, lowest = call.decay_rate(gate.A_log).reshape(-1, 1), _lowest_decay(gate)
    softplus = rate * F.softplus(step)
    log_decay = softplus if lowest is None else lowest * torch.sigmoid(-rate * step)
    return _freeze_delta(
        call,
        mixed=_projections(call, x),
        key_width=module.head_dim,
        log_decay=log_decay,
        beta=torch.sigmoid(call.linear(module.b_proj, x)),
        gate=_low_rank(call, module, "g", x),
    )


def _lowest_decay(gate: Any) -> float | None:
    # The logarithm of the strongest decay, if the gate has one.
    if getattr(gate, "safe_gate", False):
        return gate.lower_bound
    return getattr(gate, "safe_gate_lower_bound", None)


def _low_rank(call: MixerCall, parent: Any, name: str, x: Tensor) -> Tensor:
    # One projection, or two through fewer channels.
    if hasattr(parent, f"{name}_proj"):
        return call.linear(getattr(parent, f"{name}_proj"), x)
    down, up = (getattr(parent, f"{name}_{part}_proj") for part in "ab")
    return call.linear(up, call.linear(down, x))


def _projections(call: MixerCall, x: Tensor) -> Tensor:
    layers = (call.module.q_proj, call.module.k_proj, call.module.v_proj)
    return torch.cat([call.linear(layer, x) for layer in layers], -1)
