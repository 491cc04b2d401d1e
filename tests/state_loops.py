"""First mixers of small models as plain loops over tokens: the states, and what the mixer returns.

``const`` is given what relevance holds constant, and ``change`` each state before it is read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Const = Callable[[Tensor], Tensor]
Change = Callable[[int, Tensor], Tensor]
Result = tuple[Tensor, Tensor]


def itself(x: Tensor) -> Tensor:
    return x


def unchanged(t: int, h: Tensor) -> Tensor:
    return h


def normed(norm: nn.Module, x: Tensor, const: Const, after: Tensor | None = None) -> Tensor:
    """A norm whose scale may be held constant; that of a layer norm after the mean.

    ``after`` is what the norm returns, where it takes more than ``x``.
    """
    centered = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    bias = getattr(norm, "bias", None)
    bias = 0 if bias is None else bias
    return centered * const(((norm(x) if after is None else after) - bias) / centered) + bias


def silu(x: Tensor, const: Const) -> Tensor:
    return x * const(torch.sigmoid(x))


def times(x: Tensor, gate: Tensor, const: Const) -> Tensor:
    """A product that gives half of its relevance to each."""
    return (x * const(gate) + const(x) * gate) / 2


def convolved(conv: nn.Conv1d, x: Tensor, const: Const) -> Tensor:
    return silu(conv(x.mT)[..., : x.shape[1]].mT, const)


def mamba(model: nn.Module, x: Tensor, const: Const = itself, change: Change = unchanged) -> Result:
    block = model.backbone.layers[0]
    m, x = block.mixer, normed(block.norm, x, const)
    u, z = m.in_proj(x).chunk(2, -1)
    v = convolved(m.conv1d, u, const)
    N = m.ssm_state_size
    dt, B, C = m.x_proj(v).split([m.time_step_rank, N, N], -1)
    dt, B, C, A = const(F.softplus(m.dt_proj(dt))), const(B), const(C), -m.A_log.float().exp()
    h, found, read = 0, [], []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        h = decay * h + dt[:, t, :, None] * B[:, t, None] * v[:, t, :, None]
        h = change(t, h)
        found.append(h)
        read.append((h * C[:, t, None]).sum(-1))
    y = torch.stack(read, 1) + m.D * v
    return torch.stack(found, 1), m.out_proj(times(y, silu(z, const), const))  # (B, L, D, N)


def mamba2(
    model: nn.Module, x: Tensor, const: Const = itself, change: Change = unchanged
) -> Result:
    block = model.backbone.layers[0]
    m, x = block.mixer, normed(block.norm, x, const)
    sizes = [m.intermediate_size, m.conv_dim, m.num_heads]
    z, mixed, dt = m.in_proj(x).split(sizes, -1)
    groups, N = m.n_groups, m.ssm_state_size
    mixed = convolved(m.conv1d, mixed, const)
    v, B, C = mixed.split([m.intermediate_size, groups * N, groups * N], -1)
    dt, A = const(F.softplus(dt + m.dt_bias)), -m.A_log.float().exp()
    v = v.unflatten(-1, (m.num_heads, -1))
    B, C = (
        const(x).unflatten(-1, (groups, N)).repeat_interleave(m.num_heads // groups, 2)
        for x in (B, C)
    )
    h, found, read = 0, [], []
    for t in range(x.shape[1]):
        write = (dt[:, t, :, None] * B[:, t])[..., None] * v[:, t, :, None]
        h = change(t, torch.exp(dt[:, t] * A)[..., None, None] * h + write)
        found.append(h)
        read.append((h * C[:, t, ..., None]).sum(-2))
    y = (torch.stack(read, 1) + m.D[:, None] * v).flatten(2)
    gated = times(y, silu(z, const), const)
    return torch.stack(found, 1), m.out_proj(normed(m.norm, gated, const))  # (B, L, H, N, P)


def rwkv(model: nn.Module, x: Tensor, const: Const = itself, change: Change = unchanged) -> Result:
    block = model.rwkv.blocks[0]
    m, x = block.attention, normed(block.ln1, normed(block.pre_ln, x, const), const)
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    key, v, gate = (
        layer(x * mix + before * (1 - mix))
        for layer, mix in (
            (m.key, m.time_mix_key),
            (m.value, m.time_mix_value),
            (m.receptance, m.time_mix_receptance),
        )
    )
    key, decay = const(key), -m.time_decay.exp()
    h, total, largest = 0, 0, torch.full_like(key[:, 0], -1e38)
    found, read = [], []
    for t in range(x.shape[1]):
        top = torch.maximum(largest, key[:, t] + m.time_first)
        kept, own = torch.exp(largest - top), torch.exp(key[:, t] + m.time_first - top)
        read.append((kept * h + own * v[:, t]) / (kept * total + own))
        next_ = torch.maximum(largest + decay, key[:, t])
        kept, own = torch.exp(largest + decay - next_), torch.exp(key[:, t] - next_)
        h = change(t, (kept * h + own * v[:, t])[..., None])[..., 0]
        total, largest = kept * total + own, next_
        found.append(h)
    y = const(torch.sigmoid(gate)) * torch.stack(read, 1)
    return torch.stack(found, 1)[..., None], m.output(y)  # (B, L, D, 1)


def qwen3_next(
    model: nn.Module, x: Tensor, const: Const = itself, change: Change = unchanged
) -> Result:
    block = model.model.layers[0]
    m, x = block.linear_attn, normed(block.input_layernorm, x, const)
    q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(x), m.in_proj_ba(x))
    sizes = [m.key_dim, m.key_dim, m.value_dim]
    mixed = convolved(m.conv1d, torch.cat([t.flatten(2) for t in (q, k, v)], -1), const)
    q, k, v = mixed.split(sizes, -1)
    q, k = (
        t.unflatten(-1, (-1, m.head_k_dim)).repeat_interleave(m.num_v_heads // m.num_k_heads, 2)
        for t in (q, k)
    )
    q, k = (const(t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)) for t in (q, k))
    v = v.unflatten(-1, (-1, m.head_v_dim))
    beta = const(b.sigmoid())
    decay = const(torch.exp(-m.A_log.exp() * F.softplus(a + m.dt_bias)))
    h, found, read = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=x.dtype), [], []
    for t in range(x.shape[1]):
        h = h * decay[:, t, :, None, None]
        known = (h * k[:, t, ..., None]).sum(-2)
        h = h + k[:, t, ..., None] * ((v[:, t] - known) * beta[:, t, :, None])[:, :, None]
        h = change(t, h)
        found.append(h)
        read.append((h * q[:, t, ..., None]).sum(-2) * m.head_k_dim**-0.5)
    y, z = torch.stack(read, 1), z.unflatten(2, (-1, m.head_v_dim)) if z.dim() == 3 else z
    after = (
        m.norm.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + m.norm.variance_epsilon)
    )
    y = times(normed(m.norm, y, const, after), silu(z, const), const)
    return torch.stack(found, 1), m.out_proj(y.flatten(2))  # (B, L, H, K, P)


LOOPS = {loop.__name__: loop for loop in (mamba, mamba2, rwkv, qwen3_next)}
