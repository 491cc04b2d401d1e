"""Forms of linear attention: with decay, with the delta rule, RWKV's, xLSTM's mLSTM, and WKV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import log_decays, working_dtype
from captum_ssm.discovery.scans.forms.heads import Heads, register_heads
from captum_ssm.operators import (
    LinearAttentionOperator,
    PermutedOperator,
    SumOperator,
    TokenOperator,
    mlstm_operator,
    wkv_operator,
)


@register_heads(
    {
        "decay": ("g", "gk", "log_decay", "w", "alpha", "log_alpha"),
        "beta": ("eta", "lr"),  # rates of test-time training
        "bonus": ("u",),
    },
    enlarge=("q", "k"),
    layouts=(("BLHP", "BHLP"), ("BHLP", "BLHP")),
)
def linear_attention(
    heads: Heads,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Iterator[Candidate]:
    """Linear attention; with beta the delta rule.

    The decay, if any, is one per head or per key dimension. Without one, the function may have a
    decay per head of its own, or look at all tokens. A bonus per key dimension is the weight of
    the token itself, as in RWKV-5 and 6, whose heads may stand side by side.
    """
    query, key = heads.q, heads.k
    decay, beta = (t if torch.is_tensor(t) else None for t in (decay, beta))
    steps = [t for t in (decay, beta) if t is not None]
    per_token = (query.shape[:3], (*query.shape[:3], 1), query.shape)
    if any(t.dim() > 2 and t.shape not in per_token for t in steps):
        return
    write = key
    if beta is not None:
        write = key * (beta[..., None] if beta.dim() == 3 else beta).to(key)
    erased = {} if beta is None else {"erase": write, "probe": key}
    to_itself = None
    if bonus is not None and bonus.numel() == math.prod(query.shape[2:]):
        to_itself = (query * key * bonus.to(query).reshape(query.shape[2:])).sum(-1)
    scales = (query.shape[-1] ** -0.5, 1.0) if heads.scale is None else (heads.scale,)
    for factor, log_decay in product(scales, log_decays(decay, query)):
        bonus = None if to_itself is None else to_itself * factor
        yield heads.linear(query * factor, write, log_decay, bonus=bonus, **erased)
    if not steps and heads.returned is not None:
        v, y = heads.v.detach().to(query), heads.returned.to(query)
        for operator in _built_in(query, key, v, y):
            yield heads.candidate(operator)


@register_heads(
    {"decay": ("w",), "read": ("a",), "write": ("b",)},
    enlarge=("q",),
    layouts=(("BLHP",), ("BHLP",)),
)
def transition(heads: Heads, decay: Tensor, read: Tensor, write: Tensor) -> Iterator[Candidate]:
    r"""RWKV-7: :math:`S_t = S_{t-1} (\mathrm{diag}(w_t) + a_t b_t^\top) + v_t k_t^\top`."""
    if any(t.shape != heads.q.shape for t in (decay, read, write)):
        return
    for log_decay in log_decays(decay, heads.q):
        # The operator reads the state after the decay, the function before.
        probe = read.to(heads.q) * torch.exp(-log_decay)
        yield heads.linear(heads.q, heads.k, log_decay, probe=probe, erase=-write)


@register_heads(
    {"i": ("igate_preact", "i_preact", "igate"), "f": ("fgate_preact", "f_preact", "fgate")},
    layouts=(("BHLP",), ("BLHP",)),
)
def mlstm(heads: Heads, i: Tensor, f: Tensor, eps: float = 1e-6) -> Iterator[Candidate]:
    """xLSTM's mLSTM; the gates i and f before their activations."""
    shape = heads.q.shape[:3]
    if i.shape != f.shape or i.numel() != math.prod(shape):
        return
    gates = (t.to(heads.q).reshape(shape) for t in (i, f))
    operator, _ = mlstm_operator(heads.q, heads.k, *gates, width=heads.v.shape[-1], eps=eps)
    yield heads.candidate(operator)


@register_scan(
    names={
        "k": ("key",),
        "v": ("value",),
        "decay": ("w", "time_decay"),
        "bonus": ("u", "time_first"),
    }
)
def wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Iterator[Candidate]:
    """RWKV-4 and Vision-RWKV: k and v ``(B, L, D)``, decay and bonus one per channel.

    It averages earlier tokens or all of them. The decay is given as it is, as its logarithm, or
    with its sign turned.
    """
    D = v.shape[-1]
    if v.dim() != 3 or k.shape != v.shape or decay.numel() != D or bonus.numel() != D:
        return
    dtype = working_dtype(k, v)
    key, w, u = k.to(dtype), decay.to(dtype).reshape(-1), bonus.to(dtype).reshape(-1)
    for two_way, rate in product((False, True), (w.exp(), w, -w)):
        yield Candidate(
            operator=wkv_operator(key, rate, u, two_way=two_way), values=v, layouts=("BLD",)
        )


def _built_in(query: Tensor, key: Tensor, v: Tensor, y: Tensor) -> Iterator[TokenOperator]:
    # Linear attention whose scale and decay per head no argument says, fitted to its result y: one
    # that looks back, if a decay fits, and one that looks at all tokens.
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
        result = operator.matvec(flat).view_as(v)
        slope = time * result - operator.matvec((time * v).flatten(2)).view_as(v)
        # Least squares in (d log scale, d log decay) per head.
        aa, ab, bb = dot(result, result), dot(result, slope), dot(slope, slope)
        left = y - result
        ra, rb = dot(result, left), dot(slope, left)
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
        looking_back = attention(scale, torch.zeros_like(scale))
        return SumOperator((looking_back, PermutedOperator(flipped, backward)))

    result = everywhere(torch.ones_like(scale)).matvec(flat).view_as(v)
    yield everywhere(dot(result, y) / dot(result, result))
