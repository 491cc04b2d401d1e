"""Forms of scans as flash-linear-attention calls them, with gates and feature maps of their own.

Queries, keys and values are ``(B, L, H, N)`` or ``(B, L, H, P)``; several heads of values may share
one of the keys. What the functions compute of their arguments before the recurrence is repeated
here, and is only right if the operator returns what the function returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators import LinearAttentionOperator, SubstepOperator, TokenOperator
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan

_UNIT = {"unit": ("use_qk_l2norm_in_kernel",)}


@register_scan(
    names=_UNIT
    | {
        "rate": ("A_log",),
        "bias": ("dt_bias",),
        "sigmoid": ("use_beta_sigmoid_in_kernel",),
        "double": ("allow_neg_eigval",),
    }
)
def kimi_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    unit: bool = False,
    sigmoid: bool = False,
    double: bool = False,
) -> Iterator[Candidate]:
    """The delta rule whose decay per key dimension, g, and beta are given before activations."""
    if not _in_heads(q, k, v) or g.dim() != 4 or g.shape[:3] != v.shape[:3]:
        return
    step = g if bias is None else g + bias.view(g.shape[-2:])
    speed = rate.exp().view(-1, 1)
    if lower_bound is None:
        log_decay = -speed * F.softplus(step)
    else:
        log_decay = lower_bound * torch.sigmoid(speed * step)
    b = torch.sigmoid(beta) if sigmoid else beta
    b = b * 2 if double else b
    q, k = _shared(q, k, v, unit=unit, scale=scale)
    yield _delta(q, k, v, log_decay, write=k * b[..., None], probe=k)


@register_scan(names=_UNIT)
def closed_loop_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    unit: bool = False,
) -> Iterator[Candidate]:
    """Comba: the state is read with p, a key of its own, before a value is written."""
    if not _in_heads(q, k, v) or p.shape != k.shape or not g.shape == beta.shape == v.shape[:3]:
        return
    q, k = _shared(q, k, v, unit=unit, scale=scale)
    p = (_normalized(p) if unit else p.float()).repeat_interleave(v.shape[2] // p.shape[2], 2)
    # The kernels read the state before it decays, the naive form after.
    for probe in (p * torch.exp(-g.float())[..., None], p):
        yield _delta(q, k, v, g[..., None], write=k * beta[..., None], probe=probe)


@register_scan(names=_UNIT | {"steps": ("num_householder",)})
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
    q, k = _shared(q, k, v, unit=unit, scale=scale)
    # The token decays at its first step, and is read at its last.
    query, log_decay = torch.zeros_like(k), torch.zeros_like(k[..., :1])
    query[:, steps - 1 :: steps] = q
    if g is not None:
        log_decay[:, ::steps, :, 0] = g.float()
    inner = LinearAttentionOperator(
        query=query,
        key=k * beta[..., None].float(),
        log_decay=log_decay,
        width=v.shape[-1],
        erase=k * beta[..., None].float(),
        probe=k,
    )
    values = v.unflatten(1, (-1, steps)).flatten(2)
    yield Candidate(operator=SubstepOperator(inner, steps), values=values, layouts=("BLSHP",))


@register_scan(names=_UNIT | {"erase": ("b",), "write": ("w",)})
def two_gate_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    erase: Tensor,
    write: Tensor,
    scale: float | None = None,
    unit: bool = False,
) -> Iterator[Candidate]:
    """Gated DeltaNet 2: a gate for what is erased, per key dimension, and one for each value."""
    if not _in_heads(q, k, v) or erase.shape != g.shape or write.shape != v.shape:
        return
    q, k = _shared(q, k, v, unit=unit, scale=scale)
    if erase.shape == k.shape:
        yield _delta(q, k, v, g, write=k, probe=k * erase, values=write.flatten(2))


@register_scan(
    names=_UNIT
    | {"slow_decay": ("g_atk",), "slow_beta": ("beta_atk",), "center": ("log_atk_scale",)}
)
def preconditioned_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slow_decay: Tensor,
    slow_beta: Tensor,
    center: Tensor,
    x: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    unit: bool = False,
) -> Iterator[Candidate]:
    """The delta rule that writes keys divided by how often their dimensions were written."""
    if not _in_heads(q, k, v) or q.shape[2] != v.shape[2] or slow_decay.shape != k.shape[:3]:
        return
    q, k = _shared(q, k, v, unit=unit, scale=scale)
    ones = torch.ones_like(q[..., :1])
    seen = LinearAttentionOperator(
        ones, slow_beta[..., None], slow_decay[..., None], width=k.shape[-1]
    ).matvec(k.square().flatten(2))
    rest = torch.log(seen.view_as(k) + eps) - center.view(-1, 1)
    factor = torch.as_tensor(x).pow(-rest / (1 + rest.abs())).to(k)
    log_decay = g if g.dim() == 4 else g[..., None]
    yield _delta(q, k, v, log_decay, write=k * factor * beta[..., None], probe=k)


@register_scan(names=_UNIT | {"ridge": ("lamb",), "iterations": ("max_CG_iteration",)})
def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    iterations: int | None = None,
    unit: bool = False,
) -> Iterator[Candidate]:
    """MesaNet: linear attention whose query solves ``(H + diag(ridge)) x = q``, H that of keys.

    H of a token is the decayed sum of ``beta k k^T``: H x is itself linear attention, of the values
    k read with x, so that the solve needs no matrix per token.
    """
    if not _in_heads(q, k, v) or q.shape != k.shape or not g.shape == beta.shape == v.shape[:3]:
        return
    q, k = _shared(q, k, v, unit=unit, scale=1.0)
    key, decay = k * beta[..., None].float(), g[..., None].float()

    def of_keys(x: Tensor) -> Tensor:
        held = LinearAttentionOperator(x, key, decay, width=k.shape[-1]).matvec(k.flatten(2))
        return held.view_as(x) + ridge.float() * x

    # The kernels stop short of the solution by a number that they add to denominators.
    for steps, eps in ((iterations or 30, 1e-5), (2 * k.shape[-1], 1e-30)):
        yield _linear(_conjugate_gradients(of_keys, q, steps, eps), key, v, decay)


@register_scan(names={"decay": ("g",)})
def slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay: Tensor | None = None,
    scale: float | None = None,
) -> Iterator[Candidate]:
    """Gated slot attention: queries read slots of keys, a softmax of that reads slots of values.

    Without a decay (ABC) each slot holds a mean, weighted by the exponentials of s.
    """
    if not _in_heads(q, k, v) or s.dim() != 4 or s.shape[:3] != k.shape[:3]:
        return
    if decay is None:
        total = s.float().logcumsumexp(1)
        decay = torch.cat([total[:, :1], total[:, :-1]], 1) - total
        s = torch.exp(s.float() - total)
    if s.shape != decay.shape:
        return
    repeat, M = q.shape[2] // k.shape[2], s.shape[-1]
    k, v, s, decay = (t.repeat_interleave(repeat, 2) for t in (k, v, s, decay))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    # A head per slot of keys: each slot has a decay of its own.
    first = LinearAttentionOperator(
        (q * factor).float().repeat_interleave(M, 2),
        k.float().repeat_interleave(M, 2),
        decay.float().flatten(2)[..., None],
        width=1,
    )
    query = first.matvec(s.float().flatten(2)).view(s.shape).softmax(-1)
    yield _linear(query, s, v, decay)


@register_scan(names={"normed": ("normalize",)})
def normalized_linear(
    q: Tensor, k: Tensor, v: Tensor, normed: bool | None = None, scale: float | None = None
) -> Iterator[Candidate]:
    """Linear attention without decay, perhaps divided by the sum of its weights."""
    if normed is None or not _in_heads(q, k, v) or q.shape[2] != v.shape[2]:
        return
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if normed:
        q = q / ((q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-10)
    yield _linear(q, k, v, torch.zeros_like(q[..., :1]))


@register_scan(names={"normed": ("use_norm", "use_normalize"), "scaled": ("use_scale",)})
def squared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normed: bool | None = None,
    scale: float | None = None,
    scaled: bool | None = None,
    eps: float = 1e-6,
) -> Iterator[Candidate]:
    """Based, whose weights are ``1 + s + s^2 / 2`` of the products s, and ReBased: ``s^2``."""
    if normed is None or not _in_heads(q, k, v) or q.shape[2] != v.shape[2]:
        return
    size = q.shape[-1] ** -0.5 if scaled is not False else 1.0
    q = q * (size if scale is None else scale)

    def outer(t: Tensor) -> Tensor:
        return (t[..., :, None] * t[..., None, :]).flatten(-2)

    one = torch.ones_like(q[..., :1])
    query, key = outer(q), outer(k)
    if scaled is None:  # Based
        query, key = torch.cat([one, q, query / 2], -1), torch.cat([one, k, key], -1)
    if normed:
        query = query / ((query * key.cumsum(1)).sum(-1, keepdim=True) + eps)
    yield _linear(query, key, v, torch.zeros_like(one))


def _in_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[-1] == k.shape[-1]):
        return False
    return q.shape[:2] == k.shape[:2] == v.shape[:2]


def _normalized(t: Tensor) -> Tensor:
    t = t.float()
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def _shared(
    q: Tensor, k: Tensor, v: Tensor, *, unit: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    # Queries and keys, scaled, for each head of values.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (_normalized(t) if unit else t.float() for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    return q * scale, k


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


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    write: Tensor,
    probe: Tensor,
    values: Tensor | None = None,
) -> Candidate:
    operator: TokenOperator = LinearAttentionOperator(
        query=q,
        key=write.float(),
        log_decay=log_decay.float(),
        width=v.shape[-1],
        erase=write.float(),
        probe=probe.float(),
    )
    if values is not None:
        operator = operator.scaled(None, values.float())
    return Candidate(operator=operator, values=v.flatten(2), layouts=("BLHP",))


def _linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Candidate:
    operator = LinearAttentionOperator(q.float(), k.float(), log_decay.float(), width=v.shape[-1])
    return Candidate(operator=operator, values=v.flatten(2), layouts=("BLHP",))
