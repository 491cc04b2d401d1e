r"""Layers of flash-linear-attention, registered by name: the library is never imported here.

RetNet (Sun et al., 2023; Zimerman et al., eq. 22-24), HGRN (Qin et al., 2023; eq. 25-29), HGRN2,
GLA, RWKV-6 and RWKV-7, DeltaNet, Gated DeltaNet, and Mamba-2. All are

    y = out_proj(norm(alpha v) gate),

v being the projected tokens, after a short convolution if the layer has one. The layers remove
padding and pack the other tokens. That gives the same result as a recurrence that starts from zero
after padding on the left and never reads padding on the right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.families.delta import delta_rule
from captum_ssm.mixers.families.ssd import freeze_scan
from captum_ssm.mixers.frozen_mixer import FrozenMixer, mean_of_groups
from captum_ssm.mixers.parts import (
    ShortConv,
    masked_tokens,
    previous,
    projection,
    rms_factor,
    rotated,
    short_conv,
    unit,
)
from captum_ssm.mixers.past import by_key
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LinearAttentionOperator, TokenOperator, one_state

_SILU = ("silu", "swish")


def _project(call: MixerCall, name: str, x: Tensor) -> tuple[ShortConv, bool]:
    """A projection with the short convolution after it, and whether SiLU follows."""
    u = call.linear(getattr(call.module, f"{name}_proj"), x)
    conv = getattr(call.module, f"{name}_conv1d", None)
    if conv is None:
        return ShortConv(u), False
    return short_conv(call, conv, u), conv.activation in _SILU


def _projected(call: MixerCall, name: str, x: Tensor, always_silu: bool = False) -> Tensor:
    """A projection after its convolution and activation, ``(B, L, D)``."""
    conv, silu = _project(call, name, x)
    return F.silu(conv.output) if silu or always_silu else conv.output


def _values(
    call: MixerCall, x: Tensor, mask: Tensor | None, name: str = "v", always_silu: bool = False
) -> tuple[ShortConv, Tensor | None]:
    """The values' convolution and their activation factor."""
    conv, silu = _project(call, name, x)
    factor = torch.sigmoid(conv.output) if silu or always_silu else None
    if mask is not None and conv.taps is not None:
        # After a convolution padding is no longer zero.
        ones = torch.ones_like(conv.output)
        factor = (ones if factor is None else factor) * mask[..., None]
    return conv, factor


def _frozen(
    call: MixerCall,
    recurrence: TokenOperator,
    conv: ShortConv,
    activation: Tensor | None,
    *,
    norm: Any,
    groups: int,
    eps: float | None = None,
    gate: Tensor | None = None,
    gate_argument: Tensor | None = None,
    bonus: Tensor | None = None,
) -> FrozenMixer:
    """The mixer around a recurrence, whose values are ``activation`` times the output of ``conv``.

    ``norm`` is an RMS or layer norm of ``groups`` of channels, with its own epsilon or ``eps``.
    ``gate`` may be SiLU of its ``gate_argument``.
    ``bonus (B, L, H)`` is the weight of a token's own values, added after the norm (RWKV-7).
    """
    weight = None if norm.weight is None else call.parameter(norm.weight)
    offset = None if getattr(norm, "bias", None) is None else call.parameter(norm.bias)
    bonus_of_mean = None
    if bonus is not None:
        bonus = bonus.repeat_interleave(conv.output.shape[-1] // bonus.shape[-1], -1)
    if type(norm).__name__ == "GroupNorm" and not getattr(norm, "is_rms_norm", False):
        # All channels of a head share one map, so the map can act on the centered values.
        mean = mean_of_groups(conv.output, groups)
        conv = ShortConv(conv.output - mean)
        if bonus is not None:  # of which the mean is not part of the map
            bonus_of_mean = bonus, mean.expand_as(bonus)
            offset = bonus * mean if offset is None else offset + bonus * mean
    if offset is not None and gate is not None:
        offset = offset * gate
    if bonus_of_mean is not None and gate is not None:
        bonus_of_mean = bonus_of_mean[0] * gate, bonus_of_mean[1]
    mixer = FrozenMixer(
        recurrence=recurrence,
        **conv.arguments,
        **projection(call, call.module.o_proj),
        activation=activation,
        gate=gate,
        gate_argument=gate_argument,
        offset=offset,
        own=bonus_of_mean,
        state=call.state(by_key),
    )
    return mixer.normed(lambda y: rms_factor(y, weight, eps or norm.eps, groups), bonus)


def _heads(x: Tensor, width: int, repeat: int = 1) -> Tensor:
    """``(B, L, H N)`` to ``(B, L, H repeat, N)``, each head repeated in place."""
    heads = x.unflatten(-1, (-1, width))
    return heads.repeat_interleave(repeat, 2) if repeat > 1 else heads


def _repeat_channels(
    conv: ShortConv, factor: Tensor | None, width: int, repeat: int
) -> tuple[ShortConv, Tensor | None]:
    if repeat == 1:
        return conv, factor
    channels = torch.arange(conv.inputs.shape[-1], device=conv.inputs.device)
    index = channels.view(-1, width).repeat_interleave(repeat, 0).flatten()
    return conv.channels(index), None if factor is None else factor[..., index]


def _with_heads(
    call: MixerCall, x: Tensor, mask: Tensor | None, recurrence: TokenOperator
) -> FrozenMixer:
    """RetNet and GLA around their recurrence; the gate may be fused into the norm."""
    module, is_fused, z = call.module, call.module.fuse_norm_and_gate, None
    values = _repeat_channels(*_values(call, x, mask), module.head_v_dim, module.num_kv_groups)
    if module.use_output_gate:
        z = call.linear(module.g_proj, x)
    return _frozen(
        call,
        recurrence,
        *values,
        norm=module.g_norm_swish_gate if is_fused else module.g_norm,
        groups=module.num_heads,
        gate=None if z is None else F.silu(z) if is_fused else module.gate_fn(z),
        gate_argument=z if is_fused else None,
    )


def _mapped(call: MixerCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of RetNet and GLA, ``(B, L, H, N)``, after their feature map."""
    q, k = (_heads(_projected(call, name, x), call.module.head_k_dim) for name in "qk")
    feature_map = call.module.feature_map_fn
    return (q, k) if feature_map is None else (feature_map(q), feature_map(k))


@adapts("fla.layers.multiscale_retention.MultiScaleRetention")
def freeze_retention(call: MixerCall) -> FrozenMixer:
    """RetNet: a fixed decay per head, queries and keys with rotary positions."""
    module = call.module
    x, mask = masked_tokens(call)
    H, N, repeat = module.num_heads, module.head_k_dim, module.num_kv_groups
    q, k = (rotated(module.rotary, t, mask) for t in _mapped(call, x))
    decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(H, dtype=torch.float64, device=x.device))))
    recurrence = LinearAttentionOperator(
        query=q * N**-0.5,
        key=k.repeat_interleave(repeat, 2),
        log_decay=decay.to(call.dtype)[:, None].expand(*x.shape[:2], H, 1),
        width=module.head_v_dim,
    )
    return _with_heads(call, x, mask, recurrence)


@adapts("fla.layers.gla.GatedLinearAttention")
def freeze_gla(call: MixerCall) -> FrozenMixer:
    """Gated linear attention: a decay per key dimension, from a low-rank projection."""
    module = call.module
    x, mask = masked_tokens(call)
    N, repeat = module.head_k_dim, module.num_kv_groups
    q, k = _mapped(call, x)
    step = call.linear(module.gk_proj[1], call.linear(module.gk_proj[0], x))
    log_decay = F.logsigmoid(_heads(step, N, repeat)) / module.gate_logit_normalizer
    if module.clamp_min is not None:
        log_decay = log_decay.clamp(min=module.clamp_min)
    recurrence = LinearAttentionOperator(
        q * N**-0.5, k.repeat_interleave(repeat, 2), log_decay, width=module.head_v_dim
    )
    return _with_heads(call, x, mask, recurrence)


def _forget_gate(call: MixerCall, f: Tensor) -> Tensor:
    # log f, with a lower bound that the model passes to all layers except the first.
    log_f = F.logsigmoid(f)
    bound = call.arguments.get("lower_bound")
    if bound is None or call.module.layer_idx == 0:
        return log_f
    bound = call.parameter(bound)
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)


@adapts("fla.layers.hgrn.HGRNAttention")
def freeze_hgrn(call: MixerCall) -> FrozenMixer:
    """HGRN: one state per channel, written with one minus the forget gate."""
    module = call.module
    x, mask = masked_tokens(call)
    log_f = _forget_gate(call, _projected(call, "f", x))
    conv, activation = _values(call, x, mask, "i", always_silu=True)
    recurrence = one_state(-log_f, -torch.expm1(log_f))
    z, norm = call.linear(module.g_proj, x), module.g_norm
    gates: dict[str, Any] = {"gate": F.silu(z), "gate_argument": z}
    return _frozen(call, recurrence, conv, activation, norm=norm, groups=1, **gates)


@adapts("fla.layers.hgrn2.HGRN2Attention")
def freeze_hgrn2(call: MixerCall) -> FrozenMixer:
    """HGRN2: the forget gate becomes a decay and a key per key dimension."""
    module, N = call.module, call.module.head_f_dim
    x, mask = masked_tokens(call)
    q = F.silu(_projected(call, "q", x))
    log_f = _forget_gate(call, _projected(call, "f", x))
    recurrence = LinearAttentionOperator(
        query=_heads(q, N) * N**-0.5,
        key=_heads(-torch.expm1(log_f), N),
        log_decay=_heads(log_f, N),
        width=module.head_i_dim,
    )
    # The norm is fused into the projection, whose function has its own epsilon.
    return _frozen(
        call, recurrence, *_values(call, x, mask, "i"), norm=module.g_norm, groups=1, eps=1e-5
    )


@adapts("fla.layers.rwkv6.RWKV6Attention")
def freeze_rwkv6(call: MixerCall) -> FrozenMixer:
    """RWKV-6: a decay per key dimension, a read before the write, and a bonus per token."""
    module = call.module
    x, mask = masked_tokens(call)
    delta = previous(x, call.before(x, 1)) - x
    first, act, last = module.x_proj
    low = call.linear(first.linear, x + delta * call.parameter(first.mu))
    low = act(low).unflatten(-1, (5, -1))  # (B, L, 5, rank)
    weight = call.weight(last).unflatten(-1, (5, -1))  # (E, 5, rank)
    mixes = torch.einsum("blnr,enr->blne", low, weight) + call.parameter(module.x_bias)
    layers = (module.r_proj, module.w_proj, module.k_proj, module.v_proj, module.g_proj)
    r, w, k, v, z = (
        _low_rank(call, layer.linear, x + delta * mix)
        for layer, mix in zip(layers, mixes.unbind(-2), strict=True)
    )
    if mask is not None:
        v = v * mask[..., None]
    r, w, k = (_heads(t, module.head_k_dim) for t in (r, w, k))
    recurrence = LinearAttentionOperator(
        query=r,
        key=k,
        log_decay=-torch.exp(w),
        width=module.head_v_dim,
        bonus=(r * k * call.parameter(module.bonus)).sum(-1),
    )
    norm, H, gate = module.g_norm, module.num_heads, module.gate_fn(z)
    return _frozen(call, recurrence, ShortConv(v), None, norm=norm, groups=H, gate=gate)


@adapts("fla.layers.rwkv7.RWKV7Attention")
def freeze_rwkv7(call: MixerCall) -> FrozenMixer:
    """RWKV-7: a delta rule with a decay per key dimension, and a bonus after the norm."""
    module = call.module
    x, mask = masked_tokens(call)
    delta = previous(x, call.before(x, 1)) - x
    mixed = {n: x + delta * call.parameter(getattr(module, f"x_{n}")) for n in "rwkvag"}
    # exp(-1/2), written as in the layer.
    log_decay = -0.6065306597126334 * torch.sigmoid(_low_rank(call, module.w_lora, mixed["w"]))
    r, k, v = (call.linear(getattr(module, f"{n}_proj"), mixed[n]) for n in "rkv")
    if module.layer_idx != 0:
        share = torch.sigmoid(_low_rank(call, module.v_lora, mixed["v"]))
        v = torch.lerp(v, call.arguments["v_first"].to(call.dtype), share)
    if mask is not None:
        v = v * mask[..., None]
    a = torch.sigmoid(_low_rank(call, module.a_lora, mixed["a"]))
    removed = _heads(k * call.parameter(module.k_k), module.head_dim)
    removed = unit(removed) if module.fuse_norm else F.normalize(removed, dim=-1)
    k = k + k * (a - 1) * call.parameter(module.k_a)
    r, k, a, log_decay = (_heads(t, module.head_dim) for t in (r, k, a, log_decay))
    recurrence = LinearAttentionOperator(
        query=r,
        key=k,
        log_decay=log_decay,
        width=module.head_v_dim,
        erase=removed * a,
        # The state is read before the decay, which is never below exp(-0.61).
        probe=removed * torch.exp(-log_decay),
    )
    return _frozen(
        call,
        recurrence,
        ShortConv(v),
        None,
        norm=module.g_norm,
        groups=module.num_heads,
        gate=_low_rank(call, module.g_lora, mixed["g"]),
        bonus=(r * k * call.parameter(module.r_k)).sum(-1),
    )


# Later layers read its values, which it returns beside its output.
freeze_rwkv7.hands_on = lambda module: module.layer_idx == 0  # type: ignore[attr-defined]


@adapts("fla.layers.delta_net.DeltaNet")
def freeze_delta_net(call: MixerCall) -> FrozenMixer:
    """DeltaNet: the delta rule without decay."""
    module = call.module
    x, mask = masked_tokens(call)
    N = module.head_k_dim
    silu = module.qk_activation == "silu" and not module.use_short_conv
    q, k = (_heads(_projected(call, name, x, always_silu=silu), N) for name in "qk")
    if module.qk_activation == "relu":
        q, k = q.relu(), k.relu()
    elif module.qk_activation == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if module.qk_norm == "sum":
        q, k = (F.normalize(t, p=1, dim=-1, eps=1e-6) for t in (q, k))
    else:
        q, k = unit(q), unit(k)
    beta = q.new_ones(q.shape[:3])
    if module.use_beta:
        beta = torch.sigmoid(call.linear(module.b_proj, x))
    if module.allow_neg_eigval:
        beta = 2 * beta
    log_decay = torch.zeros_like(beta)[..., None]
    return _freeze_delta(call, x, mask, delta_rule(q, k, beta, log_decay, module.head_v_dim))


@adapts("fla.layers.gated_deltanet.GatedDeltaNet")
def freeze_gated_delta_net(call: MixerCall) -> FrozenMixer:
    """Gated DeltaNet: the delta rule with a decay per head."""
    module = call.module
    x, mask = masked_tokens(call)
    N, repeat = module.head_k_dim, module.num_v_heads // module.num_heads
    bare = not module.use_short_conv
    q, k = (unit(_heads(_projected(call, name, x, always_silu=bare), N, repeat)) for name in "qk")
    beta = torch.sigmoid(call.linear(module.b_proj, x))
    if module.allow_neg_eigval:
        beta = 2 * beta
    step = call.linear(module.a_proj, x) + call.parameter(module.dt_bias)
    log_decay = (call.decay_rate(module.A_log) * F.softplus(step))[..., None]
    return _freeze_delta(call, x, mask, delta_rule(q, k, beta, log_decay, module.head_v_dim))


def _freeze_delta(
    call: MixerCall, x: Tensor, mask: Tensor | None, recurrence: TokenOperator
) -> FrozenMixer:
    module, norm, gates = call.module, call.module.o_norm, dict[str, Any]()
    if module.use_gate:
        z = call.linear(module.g_proj, x)
        is_silu = norm.activation in _SILU
        gates = {"gate": F.silu(z), "gate_argument": z} if is_silu else {"gate": torch.sigmoid(z)}
    values = _values(call, x, mask, always_silu=not module.use_short_conv)
    return _frozen(call, recurrence, *values, norm=norm, groups=recurrence.maps, **gates)


@adapts("fla.layers.mamba2.Mamba2")
def freeze_mamba2(call: MixerCall) -> FrozenMixer:
    """Mamba-2, which sets padding to zero after the input projection."""
    module = call.module
    x, mask = call.tokens(), call.token_mask()
    D, H = module.intermediate_size, module.num_heads
    projected = call.linear(module.in_proj, x)
    z, mixed, step = projected[..., -(D + module.conv_dim + H) :].split([D, module.conv_dim, H], -1)
    if mask is not None:
        mixed = mixed * mask[..., None]
    return freeze_scan(
        call,
        projected=(z, mixed, step),
        width=module.head_dim,
        groups=module.n_groups,
        limit=tuple(module.dt_limit),
        norm_before_gate=module.norm.norm_before_gate if module.rmsnorm else None,
        out=projection(call, module.out_proj),
        mask=mask,
        act=F.silu if module.activation in _SILU else None,
    )


def _low_rank(call: MixerCall, layer: Any, x: Tensor) -> Tensor:
    """A linear layer, or two through a low rank with an activation between them."""
    if isinstance(layer, nn.Linear):
        return call.linear(layer, x)
    down, act, up = layer.lora
    return call.linear(up, act(call.linear(down, x)))
