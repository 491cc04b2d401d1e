"""S6, shared by the reference models: coefficients from the values, and the scan with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm import kernels

# For longer sequences, storing the states of every token needs too much memory.
LONGEST_KEPT = 1024


def s6(
    v: Tensor,
    x_proj: Callable[[Tensor], Tensor],
    dt_proj: Callable[[Tensor], Tensor],
    A_log: Tensor,
    D: Tensor,
) -> Tensor:
    """The scan ``(B, L, D)`` of values ``v (B, L, D)``, with A ``(D, N)`` and D ``(D,)``.

    ``x_proj`` returns the low-rank step, B and C, ``(B, L, rank + 2 N)``; ``dt_proj`` maps the
    step to one per channel.
    """
    N = A_log.shape[1]
    found = x_proj(v)
    step, B, C = found.split([found.shape[-1] - 2 * N, N, N], -1)
    dt = F.softplus(dt_proj(step))
    wide = torch.promote_types(v.dtype, torch.float32)
    v, dt, A_log, B, C, D = (t.to(wide) for t in (v, dt, A_log, B, C, D))
    return selective_scan(v, dt, -torch.exp(A_log), B, C) + D * v


def selective_scan(v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """h_t = exp(A dt_t) h_(t-1) + dt_t B_t v_t, y_t = C_t . h_t (Gu & Dao, eq. 2).

    ``v`` and ``dt`` are ``(B, L, D)``, A is ``(D, N)``, B and C are ``(B, L, N)``.
    """
    # Fast for inference, with fast gradients for training.
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (dt, A, B, C))
    if learns and v.shape[1] <= LONGEST_KEPT:
        return _stepwise(v, dt, A, B, C)
    coefficients = kernels.DiagonalCoefficients(dt, dt, A, B[:, :, None], C[:, :, None])
    return kernels.diagonal_scan(v, coefficients)


def _stepwise(v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    # Gradients of coefficients are two to three times faster with the plain recurrence than with
    # the chunked form of `kernels`. Unbinding, not indexing: the gradient of an index is an array
    # of the whole size at every step. Tokens come first, so each step's slice is contiguous.
    v, dt, B, C = (t.transpose(0, 1) for t in (v, dt, B, C))
    decay = torch.exp(dt[..., None] * A).unbind()
    write = ((dt * v)[..., None] * B[:, :, None]).unbind()
    state = write[0]
    states = [state]
    for a, b in zip(decay[1:], write[1:], strict=True):
        state = torch.addcmul(b, a, state)
        states.append(state)
    return (torch.stack(states) @ C[..., None])[..., 0].transpose(0, 1)


def initial_dt_bias(*shape: int) -> Tensor:
    """Biases whose softplus is log-uniform between 0.001 and 0.1, as in Mamba."""
    dt = torch.exp(torch.rand(shape) * math.log(100.0) + math.log(1e-3))
    return dt + torch.log(-torch.expm1(-dt))
