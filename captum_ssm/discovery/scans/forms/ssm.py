"""Forms of scans of which every library has its own function.

S6 (Mamba), SSD (Mamba-2), the trapezoid rule (Mamba-3), Longhorn's online rule, a gated sum per
channel (minGRU, RG-LRU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import log_decays, per_channel, working_dtype
from captum_ssm.operators import (
    ConvolvedOperator,
    DiagonalOperator,
    LinearAttentionOperator,
    SumOperator,
    TokenOperator,
)

_SSM: dict[str, tuple[str, ...]] = {
    "x": ("u", "xs", "v", "X", "hidden_states"),
    "dt": ("delta", "dts", "DT", "deltas", "time_step", "discrete_time_step"),
    "A": ("As", "ADT", "A_log", "A_logs"),
    "B": ("Bs", "B_proj"),
    "C": ("Cs", "C_proj"),
    "D": ("Ds",),
    "z": ("gate",),
}
_STEP: dict[str, tuple[str, ...]] = {
    "bias": ("delta_bias", "dt_bias"),
    "softplus": ("delta_softplus", "dt_softplus"),
}


@register_scan(names=_SSM | _STEP, enlarge=("B", "C"))
def s6(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool | None = None,
) -> Iterator[Candidate]:
    """Mamba: x and dt ``(B, L, D)`` or ``(B, D, L)``, A ``(D, N)``, or ``(1, N)`` for all channels.

    D is one per channel, or per token and channel.
    """
    if A.dim() != 2 or A.is_complex() or x.dim() != 3 or dt.shape != x.shape:
        return
    for last, (v, step, d, gate) in _channels_last(x, dt, D, z):
        channels, N = v.shape[-1] if len(A) == 1 else len(A), A.shape[1]
        groups = [_grouped(t, v.shape[1], channels, N, last) for t in (B, C)]
        if v.shape[-1] != channels or groups[0] is None or groups[1] is None:
            continue
        dtype = working_dtype(x, dt, A, B, C)
        for working, rate in _steps_and_rates(step, bias, softplus, A, dtype):
            yield Candidate(
                operator=DiagonalOperator(
                    working,
                    working,
                    rate.expand(channels, N),
                    groups[0].to(working),
                    groups[1].to(working),
                ),
                values=v,
                layouts=("BDL", "BLD") if last else ("BLD", "BDL"),
                skip=_skip(d, v),
                gates=_gates(gate),
            )


@register_scan(
    names={role: _SSM[role] for role in ("x", "D", "z")}
    | {"q": ("Q",), "k": ("K",), "dt": (*_SSM["dt"], "T"), "bias": ("t_bias", *_STEP["bias"])},
    enlarge=("q",),
)
def online(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
) -> Iterator[Candidate]:
    """Longhorn: x and dt as for Mamba, q and k as C and B; the keys say what is forgotten.

    ``h_t = (1 - s_t k_t^2) h_(t-1) + s_t k_t x_t`` per channel and state, where the step s is dt,
    or its sigmoid, and may be divided by ``1 + s |k|^2``.
    """
    if x.dim() != 3 or dt.shape != x.shape:
        return
    for last, (v, step, d, gate) in _channels_last(x, dt, D, z):
        N = k.numel() // max(1, len(x) * v.shape[1])
        groups = [_grouped(t, v.shape[1], v.shape[-1], N, last) for t in (q, k)]
        if groups[0] is None or groups[1] is None:
            continue
        dtype = working_dtype(x, dt, q, k)
        query, key = (_per_head(t.to(dtype), v.shape[-1]) for t in (groups[0], groups[1]))
        steps = step.to(dtype) if bias is None else step.to(dtype) + bias.to(dtype)
        for rate, divided in product((steps, torch.sigmoid(steps)), (True, False)):
            rate = rate[..., None]
            rate = rate / (1 + rate * key.square().sum(-1, True)) if divided else rate
            yield Candidate(
                operator=LinearAttentionOperator(
                    query, rate * key, torch.log1p(-rate * key.square()), width=1
                ),
                values=v,
                layouts=("BDL",) if last else ("BLD",),
                skip=_skip(d, v),
                gates=_gates(gate),
            )


@register_scan(names=_SSM | _STEP | {"limit": ("dt_limit",)}, enlarge=("B", "C"))
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool | None = None,
    limit: tuple[float, float] | None = None,
) -> Iterator[Candidate]:
    """Mamba-2: x ``(B, L, H, P)``, dt ``(B, L, H)``, A ``(H,)``, B and C ``(B, L, G, N)``."""
    if x.dim() != 4 or B.dim() != 4 or A.shape != x.shape[2:3] or dt.shape != x.shape[:3]:
        return
    H, P = x.shape[2:]
    if B.shape != C.shape or B.shape[:2] != x.shape[:2] or H % B.shape[2]:
        return
    dtype = working_dtype(x, dt, A, B, C)
    for working, rate in _steps_and_rates(dt, bias, softplus, A, dtype):
        if limit is not None:
            working = working.clamp(*limit)
        key, query = (_per_head(t.to(working), H) for t in (B, C))
        operator = LinearAttentionOperator(
            query=query,
            key=key * working[..., None],
            log_decay=(rate * working)[..., None],
            width=P,
        )
        yield _in_heads(operator, x, D, z)


@register_scan(names={role: _SSM[role] for role in "xABC"}, enlarge=("B", "C"))
def ssd_of_steps(x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Iterator[Candidate]:
    """Mamba-2 as its paper's listing: x and A, the log decay ``(B, L, H)``, times dt before."""
    if x.dim() != 4 or B.dim() != 4 or A.shape != x.shape[:3] or A.is_complex():
        return
    H, P = x.shape[2:]
    if B.shape != C.shape or B.shape[:2] != x.shape[:2] or H % B.shape[2]:
        return
    dtype = working_dtype(x, A, B, C)
    key, query = (_per_head(t.to(dtype), H) for t in (B, C))
    operator = LinearAttentionOperator(
        query=query, key=key, log_decay=A.to(dtype)[..., None], width=P
    )
    yield _in_heads(operator, x, None, None)


@register_scan(names=_SSM, enlarge=("B", "C"))
def trapezoid(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> Iterator[Candidate]:
    """Mamba-3: x ``(B, L, H, P)``, dt, trap and A (the log decay) ``(B, L, H)``.

    ``h_t = exp(A_t) h_(t-1) + dt_t ((1 - s_t / 2) B_t x_t + s_t / 2 B_(t-1) x_(t-1))`` with s the
    sigmoid of trap.
    """
    if x.dim() != 4 or not A.shape == dt.shape == trap.shape == x.shape[:3]:
        return
    if B.shape != C.shape or B.shape[:2] != x.shape[:2] or x.shape[2] % B.shape[2]:
        return
    H, P = x.shape[2:]
    dtype = working_dtype(x, dt, A, B, C)
    query, key = (_per_head(t.to(dtype), H) for t in (C, B))
    half = dt.to(dtype) * torch.sigmoid(trap.to(dtype)) / 2
    before = F.pad(key, (0, 0, 0, 0, 1, 0))[:, :-1]
    now, last = (
        LinearAttentionOperator(query=query, key=k, log_decay=A.to(dtype)[..., None], width=P)
        for k in (key * (dt.to(dtype) - half)[..., None], before * half[..., None])
    )
    one_back = torch.tensor([1.0, 0.0], dtype=dtype, device=x.device).expand(H * P, 2)
    parts: tuple[TokenOperator, ...] = (
        now.scaled(None, None),
        ConvolvedOperator(last.scaled(None, None), one_back),
    )
    yield _in_heads(SumOperator(parts), x, D, z)


@register_scan(
    names={
        "x": ("values", "log_values", "kv", "tokens", "hidden_states", "inputs", "u"),
        "decay": ("a", "log_a", "coeffs", "log_coeffs", "gates", "forget"),
        "gate": ("q",),
    }
)
def gated_sum(x: Tensor, decay: Tensor, gate: Tensor | None = None) -> Iterator[Candidate]:
    """``h_t = a_t h_(t-1) + x_t``: x and a ``(B, L, D)`` or ``(B, D, L)``, or their logarithms."""
    if x.dim() != 3 or decay.shape != x.shape or x.is_complex() or decay.is_complex():
        return
    gate = gate if torch.is_tensor(gate) and gate.shape == x.shape else None
    for last, (v, a, z) in _channels_last(x, decay, gate):
        for log_decay in log_decays(a.unsqueeze(-1), a.to(working_dtype(x, decay)).unsqueeze(-1)):
            step = -log_decay[..., 0]
            ones = torch.ones_like(step)
            state = ones[..., :1, None]
            for values in (v, v.exp()):
                yield Candidate(
                    operator=DiagonalOperator(step, ones, -ones[0, 0, :, None], state, state),
                    values=values,
                    layouts=("BDL",) if last else ("BLD",),
                    gates=() if z is None else (z,),
                )


def _channels_last(*tensors: Any) -> Iterator[tuple[bool, list[Any]]]:
    # Tensors (B, L, D) as they are, then taken for (B, D, L); others stay.
    yield False, [*tensors]
    yield True, [t.mT if t is not None and t.dim() == 3 else t for t in tensors]


def _grouped(t: Tensor, L: int, channels: int, N: int, last: bool) -> Tensor | None:
    # B or C as (B, L, G, N); the tokens stand last where those of x do, or where they have to.
    if t.dim() == 4 and channels % t.shape[1] == 0 and t.shape[2:] == (N, L):
        return t.permute(0, 3, 1, 2)
    if t.dim() == 4 and channels % t.shape[2] == 0 and (t.shape[1], t.shape[3]) == (L, N):
        return t
    if t.dim() != 3:
        return None
    both = (t.mT, t) if last else (t, t.mT)
    return next((y[:, :, None] for y in both if y.shape[1:] == (L, N)), None)


def _per_head(t: Tensor, H: int) -> Tensor:
    return t.repeat_interleave(H // t.shape[2], 2)


def _steps_and_rates(
    step: Tensor,
    bias: Tensor | None,
    softplus: bool | None,
    A: Tensor,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    # A holds the rates of the decay, which are negative, or else the logarithms of their sizes. A
    # function without an argument that says so may take the softplus of steps all the same.
    is_rate = bool((A <= 0).all())
    step = step if bias is None else step + bias
    for raised in (False, True) if softplus is None else (softplus,):
        for as_it_is in (is_rate, not is_rate):
            working = (F.softplus(step) if raised else step).to(dtype)
            yield working, (A if as_it_is else -A.exp()).to(dtype)


def _skip(D: Tensor | None, v: Tensor) -> Tensor | None:
    return D if D is not None and D.shape == v.shape else per_channel(D, v.shape[-1])


def _in_heads(operator: TokenOperator, x: Tensor, D: Tensor | None, z: Tensor | None) -> Candidate:
    # The candidate of x and z (B, L, H, P).
    return Candidate(
        operator=operator,
        values=x.flatten(2),
        layouts=("BLHP",),
        skip=per_channel(D, math.prod(x.shape[2:])),
        gates=_gates(None if z is None else z.flatten(2)),
    )


def _gates(z: Tensor | None) -> tuple[Tensor, ...]:
    return () if z is None else (F.silu(z), z)
