"""S6 as the reference models share it: coefficients from the values, and the scan with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.models._scan import selective_scan


def s6(
    v: Tensor,
    x_proj: Callable[[Tensor], Tensor],
    dt_proj: Callable[[Tensor], Tensor],
    A_log: Tensor,
    D: Tensor,
) -> Tensor:
    """The scan ``(B, L, D)`` of values ``v (B, L, D)``, with A ``(D, N)`` and D ``(D,)``.

    ``x_proj`` returns the low-rank step, B and C, ``(B, L, rank + 2 N)``; ``dt_proj`` makes it a
    step per channel.
    """
    N = A_log.shape[1]
    found = x_proj(v)
    step, B, C = found.split([found.shape[-1] - 2 * N, N, N], -1)
    dt = F.softplus(dt_proj(step))
    wide = torch.promote_types(v.dtype, torch.float32)
    v, dt, A_log, B, C, D = (t.to(wide) for t in (v, dt, A_log, B, C, D))
    return selective_scan(v, dt, -torch.exp(A_log), B, C, D)


def initial_dt_bias(*shape: int) -> Tensor:
    """Biases whose softplus is log-uniform between 0.001 and 0.1, as in Mamba."""
    dt = torch.exp(torch.rand(shape) * math.log(100.0) + math.log(1e-3)).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
