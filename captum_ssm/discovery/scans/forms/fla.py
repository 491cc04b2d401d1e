"""Forms of scans as flash-linear-attention calls them, with gates and feature maps of their own.

What the functions compute of their arguments before the recurrence is repeated here, and is only
right if the operator returns what the function returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.heads import Heads, register_heads
from captum_ssm.mixers.parts import unit as unit_length
from captum_ssm.operators import LinearAttentionOperator, SubstepOperator


@register_heads(
    {
        "rate": ("A_log",),
        "bias": ("dt_bias",),
        "sigmoid": ("use_beta_sigmoid_in_kernel",),
        "double": ("allow_neg_eigval",),
    },
)
def kimi_delta(
    heads: Heads,
    g: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor | None = None,
    lower_bound: float | None = None,
    sigmoid: bool = False,
    double: bool = False,
) -> Iterator[Candidate]:
    """The delta rule whose decay per key dimension, g, and beta are given before activations."""
    if g.dim() != 4 or g.shape[:3] != heads.v.shape[:3]:
        return
    step = g if bias is None else g + bias.view(g.shape[-2:])
    speed = rate.exp().view(-1, 1)
    if lower_bound is None:
        log_decay = -speed * F.softplus(step)
    else:
        log_decay = lower_bound * torch.sigmoid(speed * step)
    b = torch.sigmoid(beta) if sigmoid else beta
    b = b * 2 if double else b
    yield heads.delta(log_decay, write=heads.k * b[..., None], probe=heads.k)


@register_heads()
def closed_loop_delta(heads: Heads, p: Tensor, g: Tensor, beta: Tensor) -> Iterator[Candidate]:
    """Comba: the state is read with p, a key of its own, before a value is written."""
    H = heads.v.shape[2]
    if p.dim() != 4 or not g.shape == beta.shape == heads.v.shape[:3] or H % p.shape[2]:
        return
    p = (unit_length(p.float()) if heads.unit else p.float()).repeat_interleave(H // p.shape[2], 2)
    # The kernels read the state before it decays, the naive form after.
    for probe in (p * torch.exp(-g.float())[..., None], p):
        yield heads.delta(g, write=heads.k * beta[..., None], probe=probe)


@register_scan(names={"steps": ("num_householder",), "unit": ("use_qk_l2norm_in_kernel",)})
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    steps: int | None = None,
    scale: float | None = None,
    unit: bool = False,
) -> Iterator[Candidate]:
    """The gated delta product: several steps of the delta rule per token, and one decay."""
    if steps is None or q.dim() != 4 or k.shape != (len(q), q.shape[1] * steps, *q.shape[2:]):
        return
    if v.shape[:3] != k.shape[:3] or beta.shape != k.shape[:3]:
        return
    q, k = (unit_length(t.float()) if unit else t.float() for t in (q, k))
    # The token decays at its first step, and is read at its last.
    query, log_decay = torch.zeros_like(k), torch.zeros_like(k[..., :1])
    query[:, steps - 1 :: steps] = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g is not None:
        log_decay[:, ::steps, :, 0] = g.float()
    write = k * beta[..., None].float()
    inner = LinearAttentionOperator(
        query=query, key=write, log_decay=log_decay, width=v.shape[-1], erase=write, probe=k
    )
    values = v.unflatten(1, (-1, steps)).flatten(2)
    yield Candidate(operator=SubstepOperator(inner, steps), values=values, layouts=("BLSHP",))


@register_heads({"erase": ("b",), "write": ("w",)})
def two_gate_delta(heads: Heads, g: Tensor, erase: Tensor, write: Tensor) -> Iterator[Candidate]:
    """Gated DeltaNet 2: a gate for what is erased, per key dimension, and one for each value."""
    if not g.shape == erase.shape == heads.k.shape or write.shape != heads.v.shape:
        return
    ungated = heads.delta(g, write=heads.k, probe=heads.k * erase)
    yield replace(ungated, operator=ungated.operator.scaled(None, write.flatten(2).to(heads.k)))


@register_heads(
    {"slow_decay": ("g_atk",), "slow_beta": ("beta_atk",), "center": ("log_atk_scale",)}
)
def preconditioned_delta(
    heads: Heads,
    g: Tensor,
    beta: Tensor,
    slow_decay: Tensor,
    slow_beta: Tensor,
    center: Tensor,
    x: float = 1.5,
    eps: float = 1e-6,
) -> Iterator[Candidate]:
    """The delta rule that writes keys divided by how often their dimensions were written."""
    k = heads.k
    if slow_decay.shape != k.shape[:3]:
        return
    ones = torch.ones_like(k[..., :1])
    seen = LinearAttentionOperator(
        ones, slow_beta[..., None], slow_decay[..., None], width=k.shape[-1]
    ).matvec(k.square().flatten(2))
    rest = torch.log(seen.view_as(k) + eps) - center.view(-1, 1)
    factor = torch.as_tensor(x).pow(-rest / (1 + rest.abs())).to(k)
    yield heads.delta(g, write=k * factor * beta[..., None], probe=k)


@register_heads({"ridge": ("lamb",), "iterations": ("max_CG_iteration",)})
def mesa(
    heads: Heads, g: Tensor, beta: Tensor, ridge: Tensor, iterations: int | None = None
) -> Iterator[Candidate]:
    """MesaNet: linear attention whose query solves ``(H + diag(ridge)) x = q``, H that of keys.

    H of a token is the decayed sum of ``beta k k^T``: H x is itself linear attention, of the values
    k read with x, so that the solve needs no matrix per token.
    """
    q, k = heads.q, heads.k
    if not g.shape == beta.shape == heads.v.shape[:3]:
        return
    key, decay = k * beta[..., None].to(k), g[..., None].to(k)

    def of_keys(x: Tensor) -> Tensor:
        held = LinearAttentionOperator(x, key, decay, width=k.shape[-1]).matvec(k.flatten(2))
        return held.view_as(x) + ridge.to(k) * x

    # The kernels stop short of the solution by a number that they add to denominators.
    for steps, eps in ((iterations or 30, 1e-5), (2 * k.shape[-1], 1e-30)):
        yield heads.linear(_conjugate_gradients(of_keys, q, steps, eps), key, decay)


@register_heads({"decay": ("g",)})
def slots(heads: Heads, s: Tensor, decay: Tensor | None = None) -> Iterator[Candidate]:
    """Gated slot attention: queries read slots of keys, a softmax of that reads slots of values.

    Without a decay (ABC) each slot holds a mean, weighted by the exponentials of s.
    """
    H = heads.q.shape[2]
    if s.dim() != 4 or s.shape[:2] != heads.k.shape[:2] or H % s.shape[2]:
        return
    if decay is None:
        total = s.float().logcumsumexp(1)
        decay = torch.cat([total[:, :1], total[:, :-1]], 1) - total
        s = torch.exp(s.float() - total)
    if s.shape != decay.shape:
        return
    s, decay = (t.repeat_interleave(H // t.shape[2], 2).to(heads.q) for t in (s, decay))
    M = s.shape[-1]
    # A head per slot of keys: each slot has a decay of its own.
    first = LinearAttentionOperator(
        heads.query.repeat_interleave(M, 2),
        heads.k.repeat_interleave(M, 2),
        decay.flatten(2)[..., None],
        width=1,
    )
    query = first.matvec(s.flatten(2)).view(s.shape).softmax(-1)
    yield heads.linear(query, s, decay)


@register_heads({"normed": ("normalize",)})
def normalized_linear(heads: Heads, normed: bool | None = None) -> Iterator[Candidate]:
    """Linear attention without decay, perhaps divided by the sum of its weights."""
    if normed is not None:
        yield _without_decay(heads, heads.query, heads.k, 1e-10 if normed else None)


@register_heads({"normed": ("use_norm", "use_normalize"), "scaled": ("use_scale",)})
def squared(
    heads: Heads, normed: bool | None = None, scaled: bool | None = None, eps: float = 1e-6
) -> Iterator[Candidate]:
    """Based, whose weights are ``1 + s + s^2 / 2`` of the products s, and ReBased: ``s^2``."""
    if normed is None:
        return
    q, k = heads.q if scaled is False and heads.scale is None else heads.query, heads.k

    def outer(t: Tensor) -> Tensor:
        return (t[..., :, None] * t[..., None, :]).flatten(-2)

    query, key = outer(q), outer(k)
    if scaled is None:  # Based
        ones = torch.ones_like(q[..., :1])
        query, key = torch.cat([ones, q, query / 2], -1), torch.cat([ones, k, key], -1)
    yield _without_decay(heads, query, key, eps if normed else None)


def _without_decay(heads: Heads, query: Tensor, key: Tensor, eps: float | None) -> Candidate:
    # Divided by the sum of its weights, and by eps, if that is heads.
    if eps is not None:
        query = query / ((query * key.cumsum(1)).sum(-1, keepdim=True) + eps)
    return heads.linear(query, key, torch.zeros_like(query[..., 0]))


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor], q: Tensor, steps: int, eps: float
) -> Tensor:
    # The x of matrix(x) = q, one system per token and head.
    x, residual, direction = torch.zeros_like(q), q, q
    size = residual.square().sum(-1, keepdim=True)
    for _ in range(steps):
        image = matrix(direction)
        step = size / ((direction * image).sum(-1, keepdim=True) + eps)
        x, residual = x + step * direction, residual - step * image
        before, size = size, residual.square().sum(-1, keepdim=True)
        direction = residual + size / (before + eps) * direction
    return x
