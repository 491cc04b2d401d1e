"""fla's naive forms in the place of what no CPU runs: flash-attn, kernels that fail interpreted.

Each stand-in takes the arguments of what it replaces. The layers are fla's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from fla.ops.abc.naive import naive_recurrent_abc
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.cyfa.naive import naive_recurrent_cyfa
from fla.ops.deltaformer.naive import naive_deltaformer_attn
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.mesa_net.naive import naive_mesa_net_CG
from fla.ops.nsa.naive import naive_nsa
from fla.ops.parallax.naive import naive_parallax
from torch import Tensor


def per_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of packed tensors ``(1, T, ...)`` on each sequence by itself."""

    @wraps(function)
    def wrapped(*args, cu_seqlens=None, **kwargs):
        if cu_seqlens is None:
            return function(*args, **kwargs)
        cu_seqlens = cu_seqlens[0] if isinstance(cu_seqlens, tuple) else cu_seqlens
        ends, found = cu_seqlens.tolist(), []
        for start, stop in pairwise(ends):

            def part(x, start=start, stop=stop):
                packed = torch.is_tensor(x) and x.dim() > 1 and x.shape[1] == ends[-1]
                return x[:, start:stop] if packed else x

            found.append(function(*map(part, args), **{k: part(x) for k, x in kwargs.items()}))
        if torch.is_tensor(found[0]):
            return torch.cat(found, 1)
        columns = zip(*found, strict=True)
        return tuple(torch.cat(one, 1) if torch.is_tensor(one[0]) else None for one in columns)

    return wrapped


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
) -> Tensor:
    window = None if window_size[0] < 0 else window_size[0] + 1
    return naive_parallel_attn(q, k, v, softmax_scale, window, causal)[0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    given = (t[None] for t in (q, k, v))
    options = (0.0, softmax_scale, causal, window_size)
    return per_sequence(flash_attn_func)(*given, *options, cu_seqlens=cu_seqlens_q)[0]


FLASH = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
}


def chunk_gated_delta_product(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, num_householder=1,
):  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return naive_recurrent_gated_delta_product(
        q, k, v, g, beta, scale, cu_seqlens, num_householder=num_householder
    )


@per_sequence
def chunk_mesa_net(
    q, k, v, g, beta, lamb, h_kk_init=None, h_kv_init=None, output_final_state=False,
    max_CG_iteration=30, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    return naive_mesa_net_CG(q, k, v, g, lamb, beta, 1, max_CG_iteration)  # chunks of one token


def chunk_abc(q, k, v, s, initial_state=None, output_final_state=False):
    y, _ = naive_recurrent_abc(*(t.transpose(1, 2) for t in (q, k, v, s)))
    return y.transpose(1, 2), None


@per_sequence
def fused_additive_gate(x, initial_state=None, cu_seqlens=None, output_dtype=None, gate_dtype=None):
    z = x.float().logcumsumexp(1)
    before = torch.cat([torch.full_like(z[:, :1], -torch.inf), z[:, :-1]], 1)
    g = torch.where(before.isinf(), torch.zeros_like(z), before - z)
    return torch.exp(x - z), g, z[:, -1:]


def deltaformer_attn(q, k, v, beta=None, attention_mask=None, cu_seqlens=None, C=None):
    return naive_deltaformer_attn(q, k, v, beta)


@per_sequence
def parallel_parallax(q, r, k, v, scale=None, window_size=None, cu_seqlens=None):
    return naive_parallax(q, r, k, v, scale, window_size)


@per_sequence
def parallel_nsa(
    q, k, v, g_cmp=None, g_slc=None, g_swa=None, block_indices=None, block_counts=16,
    block_size=64, window_size=0, scale=None, cu_seqlens=None,
):  # fmt: skip
    return naive_nsa(
        q, k, v, g_cmp, g_slc, g_swa, block_indices, block_counts, block_size, window_size, scale
    )


@per_sequence
def fused_recurrent_cyfa(
    q, k, v, g, delta, beta, readout, q_norm_weight, k_norm_weight, q_norm_eps, k_norm_eps,
    scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    checkpoint_level=None,
):  # fmt: skip
    norms = (q_norm_weight, k_norm_weight, q_norm_eps, k_norm_eps)
    return naive_recurrent_cyfa(q, k, v, g, delta, beta, readout, *norms, scale)


STANDINS: dict[str, dict[str, Callable[..., Any]]] = {
    **{name: FLASH for name in ("layers.attn", "layers.bitattn", "layers.mla")},
    # Which casts what flash-attn is given to half precision.
    "layers.rodimus": FLASH | {"autocast_to_fp16": lambda x: x},
    "ops.nsa.naive": {"flash_attn_func": flash_attn_func},
    "layers.gated_deltaproduct": {"chunk_gated_delta_product": chunk_gated_delta_product},
    "layers.mesa_net": {"chunk_mesa_net": chunk_mesa_net},
    "layers.abc": {"chunk_abc": chunk_abc},
    "layers.deltaformer": {"deltaformer_attn": deltaformer_attn},
    "layers.parallax": {"parallel_parallax": parallel_parallax},
    "layers.nsa": {"parallel_nsa": parallel_nsa},
    "layers.cyfa": dict.fromkeys(("chunk_cyfa", "fused_recurrent_cyfa"), fused_recurrent_cyfa),
    "ops.lightnet.fused_recurrent": {"fused_additive_gate": fused_additive_gate},
    "ops.lightnet.chunk": {"fused_additive_gate": fused_additive_gate},
}

# The files of the layers that run on them.
LAYERS = {path.split(".")[1] for path in STANDINS}


def install(setattr=setattr) -> None:
    """Put them in, by pytest's ``monkeypatch.setattr`` for the time of a test."""
    for path, functions in STANDINS.items():
        module = importlib.import_module(f"fla.{path}")
        for name, function in functions.items():
            if name not in FLASH:  # which cannot be imported
                getattr(module, name)  # fails where a later fla has renamed it
            setattr(module, name, function)
