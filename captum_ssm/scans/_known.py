"""The forms of scans that the library knows.

S6 (Mamba), SSD (Mamba-2), the trapezoid rule (Mamba-3), a gated sum per channel (minGRU, RG-LRU),
linear attention with decay and the delta rule (with a state transition of its own in RWKV-7), the
mLSTM, and softmax attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators import (
    ConvolvedOperator,
    DiagonalOperator,
    LinearAttentionOperator,
    PermutedOperator,
    SoftmaxOperator,
    SumOperator,
    TokenOperator,
    mlstm_operator,
)
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan

_SSM: dict[str, tuple[str, ...]] = {
    "x": ("u", "xs", "v", "X", "hidden_states"),
    "dt": ("delta", "dts", "DT", "deltas", "time_step", "discrete_time_step"),
    "A": ("As", "ADT"),
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
    """Mamba: x and dt ``(B, L, D)`` or ``(B, D, L)``, A ``(D, N)``."""
    if A.dim() != 2 or A.is_complex() or x.dim() != 3 or dt.shape != x.shape:
        return
    channels, N = A.shape
    for last in (False, True):
        v, step = (x.mT, dt.mT) if last else (x, dt)
        groups = [_grouped(t, v.shape[1], channels, N, last) for t in (B, C)]
        if v.shape[-1] != channels or groups[0] is None or groups[1] is None:
            continue
        for working in _steps(step, bias, softplus, _dtype(x, dt, A, B, C)):
            yield Candidate(
                operator=DiagonalOperator(
                    working, working, A.to(working), groups[0].to(working), groups[1].to(working)
                ),
                values=v,
                layouts=("BDL", "BLD") if last else ("BLD", "BDL"),
                skip=_per_channel(D, channels),
                gates=_gates(z.mT if last and z is not None else z),
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
    for working in _steps(dt, bias, softplus, _dtype(x, dt, A, B, C)):
        if limit is not None:
            working = working.clamp(*limit)
        key, query = (_per_head(t.to(working), H) for t in (B, C))
        operator = LinearAttentionOperator(
            query=query,
            key=key * working[..., None],
            log_decay=(A.to(working) * working)[..., None],
            width=P,
        )
        yield _in_heads(operator, x, D, z)


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
    dtype = _dtype(x, dt, A, B, C)
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
        "x": ("values", "log_values", "kv", "tokens"),
        "decay": ("a", "log_a", "coeffs", "log_coeffs", "gates", "forget"),
        "gate": ("q",),
    }
)
def gated_sum(x: Tensor, decay: Tensor, gate: Tensor | None = None) -> Iterator[Candidate]:
    """``h_t = a_t h_(t-1) + x_t``: x and a ``(B, L, D)`` or ``(B, D, L)``, or their logarithms."""
    if x.dim() != 3 or x.shape != decay.shape or x.is_complex() or decay.is_complex():
        return
    gate = gate if torch.is_tensor(gate) and gate.shape == x.shape else None
    for last in (False, True):
        v, a, *z = (t.mT if last else t for t in (x, decay, gate) if torch.is_tensor(t))
        for log_decay in _logs(a.unsqueeze(-1), a.to(_dtype(x, decay)).unsqueeze(-1)):
            step = -log_decay[..., 0]
            one = torch.ones_like(step)
            state = one[..., :1, None]
            for values in (v, v.exp()):
                yield Candidate(
                    operator=DiagonalOperator(step, one, -one[0, 0, :, None], state, state),
                    values=values,
                    layouts=("BDL",) if last else ("BLD",),
                    gates=tuple(z),
                )


_QKV: dict[str, tuple[str, ...]] = {
    "q": ("query", "queries", "r", "receptance"),
    "k": ("key", "keys"),
    "v": ("value", "values"),
}
_SCALE: dict[str, tuple[str, ...]] = {"scale": ("scaling", "softmax_scale")}


@register_scan(
    names=_QKV | _SCALE | {"mask": ("attn_mask", "attention_mask"), "causal": ("is_causal",)}
)
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool | None = None,
    scale: float | None = None,
) -> Iterator[Candidate]:
    """q, k and v ``(B, H, L, N)``, as in ``torch.nn.functional.scaled_dot_product_attention``."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[2] == k.shape[2] == v.shape[2]):
        return
    if q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3]:
        return
    query, key = q.to(_dtype(q, k, v)), k.to(_dtype(q, k, v))
    key, value = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (key, v))
    bias: Tensor | None = query.new_zeros(1, 1, 1, 1)
    if mask is not None and mask.dim() <= 4:
        if not _broadcasts(mask, (*q.shape[:3], k.shape[2])):
            return
        bias = (
            query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
            if (mask.dtype == torch.bool)
            else mask.to(query)
        )
        bias = bias.reshape(*[1] * (4 - bias.dim()), *bias.shape)
    elif causal:
        bias = None
    yield Candidate(
        operator=SoftmaxOperator(
            query=query,
            key=key,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            width=v.shape[-1],
            bias=bias,
        ),
        values=value.transpose(1, 2).flatten(2),
        layouts=("BHLP", "BLHP"),
    )


@register_scan(
    names=_QKV
    | {
        "decay": ("g", "gk", "log_decay", "w", "alpha", "log_alpha"),
        "unit": ("use_qk_l2norm_in_kernel",),
    },
    enlarge=("q", "k"),
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    unit: bool = False,
    returned: Tensor | None = None,
) -> Iterator[Candidate]:
    """q, k ``(B, L, H, N)`` and v ``(B, L, H, P)``, or heads first; with beta the delta rule.

    The decay, if any, is one per head or per key dimension, given as it is or as its logarithm.
    Without one, the function may have a decay per head of its own, or look at all tokens.
    """
    if not (q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:3] == v.shape[:3]):
        return
    dtype, steps = _dtype(q, k, v), [t for t in (decay, beta) if torch.is_tensor(t)]
    for heads_first in (False, True):
        query, key, value, *rest = (
            t.transpose(1, 2) if heads_first and t.dim() > 2 else t for t in (q, k, v, *steps)
        )
        if any(t.shape[:3] != query.shape[:3] or t.dim() > 4 for t in rest):
            continue
        query, key = query.to(dtype), key.to(dtype)
        if unit:
            query, key = (F.normalize(t, dim=-1, eps=1e-6) for t in (query, key))
        write = key
        if beta is not None:
            b = rest[-1].to(dtype)
            write = key * (b[..., None] if b.dim() == 3 else b)
        erased = {} if beta is None else {"erase": write, "probe": key}
        scales = (q.shape[-1] ** -0.5, 1.0) if scale is None else (scale,)
        logs = _logs(rest[0] if torch.is_tensor(decay) else None, query)
        operators: list[TokenOperator] = [
            LinearAttentionOperator(
                query=query * factor,
                key=write,
                log_decay=log_decay,
                width=v.shape[-1],
                **erased,
            )
            for factor, log_decay in product(scales, logs)
        ]
        if not steps and returned is not None and returned.shape == v.shape:
            y = returned.transpose(1, 2) if heads_first else returned
            operators += _built_in(query, key, value.detach().to(dtype), y.to(dtype))
        for operator in operators:
            yield Candidate(
                operator=operator,
                values=value.flatten(2),
                layouts=("BHLP", "BLHP") if heads_first else ("BLHP", "BHLP"),
            )


@register_scan(
    names=_QKV | {"decay": ("w",), "read": ("a",), "write": ("b",)},
    enlarge=("q",),
)
def transition(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, read: Tensor, write: Tensor
) -> Iterator[Candidate]:
    r"""RWKV-7: :math:`S_t = S_{t-1} (\mathrm{diag}(w_t) + a_t b_t^\top) + v_t k_t^\top`."""
    if any(t.dim() != 4 or t.shape != q.shape for t in (k, decay, read, write)):
        return
    if v.shape[:3] != q.shape[:3]:
        return
    dtype = _dtype(q, k, v)
    for heads_first in (False, True):
        given = (q, k, v, decay, read, write)
        query, key, value, w, a, b = (t.transpose(1, 2) if heads_first else t for t in given)
        for log_decay in _logs(w, query.to(dtype)):
            yield Candidate(
                operator=LinearAttentionOperator(
                    query=query.to(dtype),
                    key=key.to(dtype),
                    log_decay=log_decay,
                    width=v.shape[-1],
                    # The operator reads the state after the decay, the function before.
                    probe=a.to(dtype) * torch.exp(-log_decay),
                    erase=-b.to(dtype),
                ),
                values=value.flatten(2),
                layouts=("BHLP",) if heads_first else ("BLHP",),
            )


@register_scan(
    names=_QKV
    | {"i": ("igate_preact", "i_preact", "igate"), "f": ("fgate_preact", "f_preact", "fgate")}
)
def mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, eps: float = 1e-6
) -> Iterator[Candidate]:
    """xLSTM's mLSTM: q, k, v ``(B, H, L, N)``, or heads last; i and f before their activations."""
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        return
    if i.shape != f.shape or i.reshape(-1).shape != q[..., 0].reshape(-1).shape:
        return
    dtype = _dtype(q, k, v)
    for heads_first in (True, False):
        given = (q, k, v, i.reshape(q.shape[:3]), f.reshape(q.shape[:3]))
        query, key, value, *gates = (t.transpose(1, 2) if heads_first else t for t in given)
        yield Candidate(
            operator=mlstm_operator(
                *(t.to(dtype) for t in (query, key, *gates)), width=v.shape[-1], eps=eps
            ),
            values=value.flatten(2),
            layouts=("BHLP",) if heads_first else ("BLHP",),
        )


def _built_in(query: Tensor, key: Tensor, v: Tensor, y: Tensor) -> Iterator[TokenOperator]:
    """Linear attention whose scale and decay per head no argument says, fitted to its result.

    Args:
        query, key (Tensor): ``(B, L, H, N)``.
        v (Tensor): values, ``(B, L, H, P)``.
        y (Tensor): the result, ``(B, L, H, P)``.

    Returns:
        iterator of TokenOperator: one that looks back, if a decay fits; one that looks at all
        tokens.
    """
    width, flat = v.shape[-1], v.flatten(2)

    def attention(scale: Tensor, log_decay: Tensor) -> LinearAttentionOperator:
        decays = log_decay[:, None].expand(*query.shape[:3], 1)
        return LinearAttentionOperator(query * scale[:, None], key, decays, width=width)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((0, 1, 3))  # (H,)

    # The first token gives the scale, the second one the decay, and Newton's method the rest.
    here = (query * key).sum(-1, keepdim=True) * v
    scale = dot(here[:, :1], y[:, :1]) / dot(here[:, :1], here[:, :1])
    before = (query[:, 1:2] * key[:, :1]).sum(-1, keepdim=True) * v[:, :1]
    rest = y[:, 1:2] / scale[:, None] - here[:, 1:2]
    log_decay = (dot(before, rest) / dot(before, before)).clamp(1e-4, 1.0).log()
    time = torch.arange(v.shape[1], device=v.device, dtype=v.dtype)[None, :, None, None]
    for _ in range(4):
        operator = attention(scale, log_decay)
        found = operator.matvec(flat).view_as(v)
        slope = time * found - operator.matvec((time * v).flatten(2)).view_as(v)
        # Least squares in (d log scale, d log decay) per head.
        aa, ab, bb = dot(found, found), dot(found, slope), dot(slope, slope)
        left = y - found
        ra, rb = dot(found, left), dot(slope, left)
        determinant = aa * bb - ab * ab
        scale = scale * (1 + (bb * ra - ab * rb) / determinant)
        log_decay = (log_decay + (aa * rb - ab * ra) / determinant).clamp(-9.0, 0.0)
    if bool(scale.isfinite().all() & log_decay.isfinite().all()):
        yield attention(scale, log_decay)
    # All tokens: up to this one, and those after it.
    backward = torch.arange(v.shape[1], device=v.device).flip(0)

    def everywhere(scale: Tensor) -> SumOperator:
        flipped = LinearAttentionOperator(
            query=(query * scale[:, None]).flip(1),
            key=key.flip(1),
            log_decay=query.new_zeros(*query.shape[:3], 1),
            bonus=query.new_zeros(query.shape[:3]),  # of the token itself
            width=width,
        )
        one = attention(scale, torch.zeros_like(scale))
        return SumOperator((one, PermutedOperator(flipped, backward)))

    found = everywhere(torch.ones_like(scale)).matvec(flat).view_as(v)
    yield everywhere(dot(found, y) / dot(found, found))


def _broadcasts(t: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(t.shape), reversed(shape), strict=False)
    return all(size in (1, full) for size, full in sizes)


def _dtype(*tensors: Tensor) -> torch.dtype:
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


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


def _steps(
    step: Tensor, bias: Tensor | None, softplus: bool | None, dtype: torch.dtype
) -> Iterator[Tensor]:
    # Steps as they are used. A function without such an argument may take the softplus all the
    # same.
    if bias is not None:
        step = step + bias
    for raised in (False, True) if softplus is None else (softplus,):
        yield (F.softplus(step) if raised else step).to(dtype)


def _in_heads(operator: TokenOperator, x: Tensor, D: Tensor | None, z: Tensor | None) -> Candidate:
    # Of x and z (B, L, H, P).
    return Candidate(
        operator=operator,
        values=x.flatten(2),
        layouts=("BLHP",),
        skip=_per_channel(D, x.shape[2:].numel()),
        gates=_gates(None if z is None else z.flatten(2)),
    )


def _per_channel(D: Tensor | None, channels: int) -> Tensor | None:
    # One per head, or one per channel.
    if D is None:
        return None
    D = D.reshape(-1)
    return None if channels % len(D) else D.repeat_interleave(channels // len(D))


def _gates(z: Tensor | None) -> tuple[Tensor, ...]:
    return () if z is None else (F.silu(z), z)


def _logs(decay: Tensor | None, query: Tensor) -> Iterator[Tensor]:
    if decay is None:
        yield torch.zeros_like(query[..., :1])
        return
    decay = (decay if decay.dim() == 4 else decay[..., None]).to(query.dtype)
    if decay.shape[-1] not in (1, query.shape[-1]):
        return
    if bool((decay <= 0).all()):
        yield decay
    if bool(((decay >= 0) & (decay <= 1)).all()):
        yield decay.log()
