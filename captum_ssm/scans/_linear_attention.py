"""Forms of linear attention: with decay, with the delta rule, RWKV's, and xLSTM's mLSTM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators import (
    LinearAttentionOperator,
    PermutedOperator,
    SumOperator,
    TokenOperator,
    mlstm_operator,
)
from captum_ssm.scans._arguments import (
    HEADS,
    QKV,
    log_decays,
    of_joined_heads,
    working_dtype,
)
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan


@register_scan(
    names=QKV
    | HEADS
    | {
        "decay": ("g", "gk", "log_decay", "w", "alpha", "log_alpha"),
        "bonus": ("u",),
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
    bonus: Tensor | None = None,
    scale: float | None = None,
    unit: bool = False,
    heads: int | None = None,
    returned: Tensor | None = None,
) -> Iterator[Candidate]:
    """q, k ``(B, L, H, N)`` and v ``(B, L, H, P)``, or heads first; with beta the delta rule.

    The decay, if any, is one per head or per key dimension. Without one, the function may have a
    decay per head of its own, or look at all tokens. A bonus per key dimension is the weight of
    the token itself, as in RWKV-5 and 6, whose heads may stand side by side.
    """
    if v.dim() == 3:
        given = dict(q=q, k=k, decay=decay, beta=beta, bonus=bonus, scale=scale, unit=unit)
        yield from of_joined_heads(linear_attention, v, returned, heads, **given)
    if not (q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:3] == v.shape[:3]):
        return
    dtype, steps = working_dtype(q, k, v), [t for t in (decay, beta) if torch.is_tensor(t)]
    for heads_first in (False, True):
        query, key, value, *rest = (
            t.transpose(1, 2) if heads_first and t.dim() > 2 else t for t in (q, k, v, *steps)
        )
        if any(t.dim() > 2 and t.shape[:3] != query.shape[:3] for t in rest):
            continue
        query, key = query.to(dtype), key.to(dtype)
        if unit:
            query, key = (F.normalize(t, dim=-1, eps=1e-6) for t in (query, key))
        write = key
        if beta is not None:
            b = rest[-1].to(dtype)
            write = key * (b[..., None] if b.dim() == 3 else b)
        erased = {} if beta is None else {"erase": write, "probe": key}
        own = None
        if bonus is not None and bonus.numel() == query.shape[2:].numel():
            own = (query * key * bonus.to(dtype).reshape(query.shape[2:])).sum(-1)
        scales = (q.shape[-1] ** -0.5, 1.0) if scale is None else (scale,)
        logs = log_decays(rest[0] if torch.is_tensor(decay) else None, query)
        operators: list[TokenOperator] = [
            LinearAttentionOperator(
                query=query * factor,
                key=write,
                log_decay=log_decay,
                width=v.shape[-1],
                bonus=None if own is None else own * factor,
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
    names=QKV | HEADS | {"decay": ("w",), "read": ("a",), "write": ("b",)},
    enlarge=("q",),
)
def transition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    read: Tensor,
    write: Tensor,
    heads: int | None = None,
    returned: Tensor | None = None,
) -> Iterator[Candidate]:
    r"""RWKV-7: :math:`S_t = S_{t-1} (\mathrm{diag}(w_t) + a_t b_t^\top) + v_t k_t^\top`."""
    if v.dim() == 3:
        others = dict(q=q, k=k, decay=decay, read=read, write=write)
        yield from of_joined_heads(transition, v, returned, heads, **others)
    if any(t.dim() != 4 or t.shape != q.shape for t in (k, decay, read, write)):
        return
    if v.shape[:3] != q.shape[:3]:
        return
    dtype = working_dtype(q, k, v)
    for heads_first in (False, True):
        given = (q, k, v, decay, read, write)
        query, key, value, w, a, b = (t.transpose(1, 2) if heads_first else t for t in given)
        for log_decay in log_decays(w, query.to(dtype)):
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
    names=QKV
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
    dtype = working_dtype(q, k, v)
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
