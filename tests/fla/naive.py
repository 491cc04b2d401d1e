"""Every Triton op that the layers call, replaced by plain torch: fla's own naive recurrences.

Packed batches (``cu_seqlens``), which the layers make of padded ones, are taken apart again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import fla.layers
import fla.modules
import torch
import torch.nn.functional as F
from fla.models.rwkv6 import modeling_rwkv6 as rwkv6_model
from fla.modules.activations import ACT2FN
from fla.modules.layernorm import group_norm_ref, rms_norm_ref
from fla.modules.layernorm_gated import RMSNormGated
from fla.modules.layernorm_gated import rms_norm_ref as gated_rms_norm_ref
from fla.modules.rotary import RotaryEmbedding
from fla.modules.rotary.ops import rotary_embedding_ref
from fla.modules.token_shift import token_shift_ref
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.retention.naive import naive_retention
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
from fla.ops.rwkv7.fused_k_update import k_update_ref
from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
from torch import Tensor


def per_sequence(function: Callable) -> Callable:
    """Runs a function of packed tensors ``(1, T, ...)`` on each sequence by itself."""

    def wrapped(*args, cu_seqlens=None, **kwargs):
        if cu_seqlens is None:
            return function(*args, **kwargs)
        total = int(cu_seqlens[-1])

        def part(value, at: slice):
            packed = torch.is_tensor(value) and value.dim() > 1 and value.shape[1] == total
            return value[:, at] if packed else value

        outs = []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            at = slice(start, stop)
            named = {k: part(v, at) for k, v in kwargs.items()}
            outs.append(function(*(part(a, at) for a in args), **named))
        if isinstance(outs[0], tuple):
            return torch.cat([o[0] for o in outs], 1), None
        return torch.cat(outs, 1)

    return wrapped


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps).to(x)


@per_sequence
def conv(x, weight=None, bias=None, residual=None, activation=None, **_):
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=x.shape[-1]).transpose(1, 2)
    y = F.silu(y) if activation else y
    return (y if residual is None else y + residual), None


@per_sequence
def gla(q, k, v, gk=None, g=None, **_):
    return naive_recurrent_gla(q, k, v, g if gk is None else gk)


@per_sequence
def retention(q, k, v, **_):
    return naive_retention(*heads_first(q, k, v)).transpose(1, 2), None


@per_sequence
def hgrn(x, g, **_):
    return naive_recurrent_hgrn(x, g)


@per_sequence
def delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=False, **_):
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    return delta_rule_recurrence(*heads_first(q, k, v, beta))[0].transpose(1, 2), None


@per_sequence
def gated_delta_rule(q, k, v, g, beta, A_log=None, dt_bias=None, allow_neg_eigval=False, **_):
    g = -A_log.float().exp() * F.softplus(g.float() + dt_bias)
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    q, k = (unit(x).repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g)


@per_sequence
def rwkv6(r, k, v, w, u, scale=1.0, **_):
    out = naive_recurrent_rwkv6(*heads_first(r, k, v, w), u, scale=scale)
    return out[0].transpose(1, 2), None


@per_sequence
def rwkv7(r, w, k, v, a, b, scale=1.0, **_):
    # The naive form always multiplies by its own scale.
    q = r * r.shape[-1] ** 0.5 * scale
    return dplr_recurrence(*heads_first(q, k, v, a, b, w))[0].transpose(1, 2), None


def rwkv7_fused(r, w, k, v, kk, a, scale=1.0, **kwargs):
    return rwkv7(r, w, k, v, -kk, kk * a, scale, **kwargs)


@per_sequence
def shift(x, cache=None, output_cache=False, **_):
    y = token_shift_ref(x)
    return (y, x[:, -1:]) if output_cache else y


def shift_positional(x, cu_seqlens=None, **kwargs):
    return shift(x, cu_seqlens=cu_seqlens, **kwargs)


def norm(self, x, *_, **__):
    return rms_norm_ref(x, self.weight, self.bias, eps=self.eps)


def gated_norm(self, x, g, *_, **__):
    return norm(self, x) * (torch.sigmoid(g) if self.activation == "sigmoid" else F.silu(g))


def group_norm(self, x, **_):
    return group_norm_ref(
        x, self.weight, self.bias, self.num_groups, eps=self.eps, is_rms_norm=self.is_rms_norm
    )


def grouped_gated_norm(self, x, z=None):
    return gated_rms_norm_ref(
        x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate
    )


def norm_linear(x, norm_weight, norm_bias, weight, bias, eps=1e-5, **_):
    return F.linear(rms_norm_ref(x, norm_weight, norm_bias, eps=eps), weight, bias)


def rotary(self, q, k, cu_seqlens=None, **_):
    self._update_cos_sin_cache(q.shape[1], device=q.device, dtype=q.dtype)

    @per_sequence
    def rotated(x):
        L = x.shape[1]
        cos, sin = self._cos_cached[:L], self._sin_cached[:L]
        return rotary_embedding_ref(x, cos, sin, self.interleaved)

    return rotated(q, cu_seqlens=cu_seqlens), rotated(k, cu_seqlens=cu_seqlens)


def swiglu(x, y):
    return F.silu(x) * y


GLA = dict(chunk_gla=gla, fused_chunk_gla=gla, fused_recurrent_gla=gla)
LAYERS = {
    "multiscale_retention": dict.fromkeys(
        [f"{form}_retention" for form in ("chunk", "fused_chunk", "fused_recurrent", "parallel")],
        retention,
    ),
    "hgrn": dict(chunk_hgrn=hgrn, fused_recurrent_hgrn=hgrn, swiglu=swiglu),
    "hgrn2": dict(GLA, swish=F.silu, rms_norm_linear=norm_linear),
    "gla": GLA,
    "delta_net": dict(chunk_delta_rule=delta_rule, fused_recurrent_delta_rule=delta_rule),
    "gated_deltanet": dict(
        chunk_gated_delta_rule=gated_delta_rule,
        fused_recurrent_gated_delta_rule=gated_delta_rule,
        causal_conv1d=conv,
    ),
    "rwkv6": dict(chunk_rwkv6=rwkv6, fused_recurrent_rwkv6=rwkv6, token_shift=shift_positional),
    "rwkv7": dict(
        chunk_rwkv7=rwkv7,
        fused_mul_recurrent_rwkv7=rwkv7_fused,
        token_shift=shift_positional,
        l2_norm=unit,
        fused_addcmul_rwkv7=torch_addcmul_rwkv7,
        fused_k_rwkv7=lambda k, a, ka, **_: k_update_ref(k, a, ka),
        gate_output_correction=gate_output_correction_ref,
    ),
}


def enable(setattr=setattr) -> None:
    """Replace the ops, by pytest's ``monkeypatch.setattr`` for the time of a test.

    Layers read their activations when they are built: build them after this.
    """
    for name, functions in LAYERS.items():
        module = importlib.import_module(f"fla.layers.{name}")
        for key, function in functions.items():
            getattr(module, key)  # fails where a later fla has renamed it
            setattr(module, key, function)
    # The token shift of the feed-forward layer.
    setattr(rwkv6_model, "token_shift", shift_positional)
    # ShortConvolution, and Mamba-2's own convolution.
    setattr(importlib.import_module("fla.modules.causal_conv1d.ops"), "causal_conv1d", conv)
    setattr(importlib.import_module("fla.modules.convolution"), "causal_conv1d", conv)
    setattr(fla.modules.RMSNorm, "forward", norm)
    setattr(fla.modules.FusedRMSNormGated, "forward", gated_norm)
    setattr(fla.modules.GroupNorm, "forward", group_norm)
    setattr(RotaryEmbedding, "forward", rotary)
    setattr(RMSNormGated, "forward", grouped_gated_norm)
    for key, function in (("silu", F.silu), ("swish", F.silu), ("sigmoid", torch.sigmoid)):
        ACT2FN[key] = function
