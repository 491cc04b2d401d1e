"""The scans of Mamba, Mamba-2 and RWKV, so that they train quickly on a CPU.

Without the CUDA kernels, transformers steps through the sequence by indexing tensors of shape
``(batch, channels, length, state)``; autograd then fills a zero tensor of that size for every step,
so the cost of the backward pass grows with the square of the length.  :func:`selective_scan` has
the signature of the function it replaces and computes the same numbers, with the backward
pass written out; :func:`wkv` replaces a dozen small operations per token by two
products.  :func:`reference_scan` is the first for captum_ssm's own reference models.  They are for
training only: the saved model runs on the stock code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.rwkv import modeling_rwkv

from captum_ssm import kernels
from captum_ssm.models import s6


class _Scan(torch.autograd.Function):
    """``h[t] = exp(dt[t] A) h[t-1] + (u[t] B[t]^T)``, ``y[t] = h[t] C[t]``, time first.

    Shapes: ``dt`` and ``u`` are ``(length, batch, channels)``, ``a`` is ``(channels, state)``,
    ``b`` and ``c`` are ``(length, batch, state)``.  ``u`` is the input already times ``dt``.
    With time as the leading axis every step works on one contiguous slab.
    """

    @staticmethod
    def forward(ctx: Any, dt: Tensor, u: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        length, batch, channels = dt.shape
        decay = torch.empty(length, batch, channels, a.shape[1], dtype=dt.dtype)
        states = torch.empty_like(decay)
        out = torch.empty_like(dt)
        for t in range(length):
            torch.mul(dt[t].unsqueeze(-1), a, out=decay[t]).exp_()
            torch.mul(u[t].unsqueeze(-1), b[t].unsqueeze(1), out=states[t])
            if t > 0:
                states[t].addcmul_(decay[t], states[t - 1])
            torch.bmm(states[t], c[t].unsqueeze(-1), out=out[t].unsqueeze(-1))
        ctx.save_for_backward(dt, u, a, b, c, decay, states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dt, u, a, b, c, decay, states = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_dt, grad_u = torch.zeros_like(dt), torch.empty_like(u)
        grad_b, grad_c = torch.empty_like(b), torch.empty_like(c)
        grad_a = torch.zeros_like(a)
        carry = torch.zeros_like(states[0])
        work, scratch = torch.empty_like(carry), torch.empty_like(carry)
        for t in range(dt.shape[0] - 1, -1, -1):
            grad_row = grad_out[t].unsqueeze(1)
            torch.bmm(grad_row, states[t], out=grad_c[t].unsqueeze(1))
            carry.addcmul_(grad_out[t].unsqueeze(-1), c[t].unsqueeze(1))
            torch.bmm(carry, b[t].unsqueeze(-1), out=grad_u[t].unsqueeze(-1))
            torch.bmm(u[t].unsqueeze(1), carry, out=grad_b[t].unsqueeze(1))
            if t > 0:
                carry.mul_(decay[t])
                # carry now holds the gradient times the decay: all that the exponent needs.
                torch.mul(carry, states[t - 1], out=work)
                grad_a += torch.mul(work, dt[t].unsqueeze(-1), out=scratch).sum(0)
                torch.sum(work.mul_(a), dim=-1, out=grad_dt[t])
        return grad_dt, grad_u, grad_a, grad_b, grad_c


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Tensor:
    """Stand-in for transformers' ``mamba_selective_scan``; the layout is theirs.

    ``hidden_states``, ``dt`` and ``z`` are ``(batch, channels, length)``, ``B`` and ``C`` are
    ``(batch, state, length)``. On a GPU, the library's own scan takes its gradients in one pass.
    """
    if return_last_state:
        raise NotImplementedError("the training scan keeps no cache; pass use_cache=False")
    if delta_bias is not None:
        dt = dt + delta_bias[:, None]
    if delta_softplus:
        dt = functional.softplus(dt)

    def time_first(tensor: Tensor) -> Tensor:
        return tensor.permute(2, 0, 1).contiguous()

    out: Tensor
    if dt.is_cuda:
        step, B, C = (x.transpose(1, 2) for x in (dt, B, C))
        coefficients = kernels.DiagonalCoefficients(step, step, A, B[:, :, None], C[:, :, None])
        out = kernels.diagonal_scan(hidden_states.transpose(1, 2), coefficients).transpose(1, 2)
    else:
        step = time_first(dt)
        signal = time_first(hidden_states)
        out = _Scan.apply(step, step * signal, A, time_first(B), time_first(C))
        out = out.permute(1, 2, 0)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * functional.silu(z)
    return out


def reference_scan(v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Stand-in for the scan of ``captum_ssm.models``, whose layout is ``(batch, length, D)``."""
    v, dt, B, C = (tensor.transpose(0, 1).contiguous() for tensor in (v, dt, B, C))
    out: Tensor = _Scan.apply(dt, dt * v, A, B, C)
    return out.transpose(0, 1)


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    return_final_states: bool = False,
    **_: Any,
) -> Tensor:
    """Stand-in for transformers' ``mamba2_chunk_scan``: the whole sequence is one chunk.

    ``hidden_states`` is ``(batch, length, heads, head_dim)``, ``dt`` lacks the last axis, and ``B``
    and ``C`` are ``(batch, length, groups, state)``. Lengths are short here, so two products with
    matrices of tokens cost less than a state per chunk.
    """
    if return_final_states:
        raise NotImplementedError("the training scan keeps no cache; pass use_cache=False")
    dt = functional.softplus(dt + dt_bias)
    total = (dt * A).cumsum(1).mT  # (batch, heads, length)
    later = torch.ones(dt.shape[1], dt.shape[1], dtype=torch.bool, device=dt.device).triu(1)
    decays = (total[..., None] - total[:, :, None]).masked_fill(later, -torch.inf).exp()
    scores = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)  # (batch, groups, length, length)
    maps = (decays.unflatten(1, (B.shape[2], -1)) * scores[:, :, None]).flatten(1, 2)
    out = maps @ (hidden_states * dt[..., None]).transpose(1, 2)
    return out.transpose(1, 2) + hidden_states * D[:, None]


def wkv(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, None]:
    """Stand-in for transformers' ``rwkv_linear_attention``: ``(batch, length, channels)`` in, out.

    Decays do not change over time, so a channel's sums over the past are a product with one matrix,
    quadratic in a length that is short here.
    """
    if state is not None or return_state:
        raise NotImplementedError("the training scan keeps no cache; pass use_cache=False")
    steps = torch.arange(key.shape[1], device=key.device)
    lag = steps[:, None] - steps - 1  # the token before has not decayed yet
    decays = torch.exp(-torch.exp(time_decay)[:, None, None] * lag.clamp(min=0)) * (lag >= 0)
    weight = torch.exp(key - key.amax(1, keepdim=True).detach())  # of both sums: it cancels
    own = torch.exp(time_first) * weight

    def past(x: Tensor) -> Tensor:
        return (decays @ x.permute(2, 1, 0)).permute(2, 1, 0)

    return (past(weight * value) + own * value) / (past(weight) + own), None


@contextmanager
def fast_scan() -> Iterator[None]:
    """Let transformers' models and the reference models use these inside the block."""
    stock = getattr(modeling_mamba, "mamba_selective_scan", None)
    if stock is None:
        # Older releases have the scan inline, where it cannot be replaced.
        raise RuntimeError(f"transformers {transformers.__version__} has no scan to replace")
    stock_wkv, stock_reference = modeling_rwkv.rwkv_linear_attention, s6.selective_scan
    stock_chunks = modeling_mamba2.mamba2_chunk_scan
    modeling_mamba.mamba_selective_scan = selective_scan
    modeling_mamba2.mamba2_chunk_scan = chunk_scan
    modeling_rwkv.rwkv_linear_attention = wkv
    s6.selective_scan = reference_scan
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = stock
        modeling_mamba2.mamba2_chunk_scan = stock_chunks
        modeling_rwkv.rwkv_linear_attention = stock_wkv
        s6.selective_scan = stock_reference
