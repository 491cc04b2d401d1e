"""S6, shared by the reference models: coefficients from the values, and the scan with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm import kernels


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
    projected = x_proj(v)
    step, B, C = projected.split([projected.shape[-1] - 2 * N, N, N], -1)
    dt = F.softplus(dt_proj(step))
    wide = torch.promote_types(v.dtype, torch.float32)
    v, dt, A_log, B, C, D = (t.to(wide) for t in (v, dt, A_log, B, C, D))
    return selective_scan(v, dt, -torch.exp(A_log), B, C) + D * v


def selective_scan(v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """h_t = exp(A dt_t) h_(t-1) + dt_t B_t v_t, y_t = C_t . h_t (Gu & Dao, eq. 2).

    ``v`` and ``dt`` are ``(B, L, D)``, A is ``(D, N)``, B and C are ``(B, L, N)``.
    """
    coefficients = kernels.DiagonalCoefficients(dt, dt, A, B[:, :, None], C[:, :, None])
    return kernels.diagonal_scan(v, coefficients)


def initial_dt_bias(*shape: int) -> Tensor:
    """Biases whose softplus is log-uniform between 0.001 and 0.1, as in Mamba."""
    dt = torch.exp(torch.rand(shape) * math.log(100.0) + math.log(1e-3))
    return dt + torch.log(-torch.expm1(-dt))
