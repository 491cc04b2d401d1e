"""The selective scan as a model runs it: fast where nothing is learned, cheap to learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm import kernels

# Beyond this length the states of every token would take more memory than the time is worth.
LONGEST_KEPT = 1024


def selective_scan(
    v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> Tensor:
    """h_t = exp(A dt_t) h_(t-1) + dt_t B_t v_t, y_t = C_t . h_t + D v_t (Gu & Dao, eq. 2).

    Args:
        v (Tensor): ``(B, L, D)``.
        dt (Tensor): ``(B, L, D)``.
        A (Tensor): ``(D, N)``, negative.
        B (Tensor): ``(B, L, N)``.
        C (Tensor): ``(B, L, N)``.
        D (Tensor, optional): ``(D,)``. Default: None

    Returns:
        Tensor: ``(B, L, D)``, in float32 at least.
    """
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (dt, A, B, C))
    if learns and v.shape[1] <= LONGEST_KEPT:
        y = _stepwise(v, dt, A, B, C)
    else:
        coefficients = kernels.DiagonalCoefficients(dt, dt, A, B[:, :, None], C[:, :, None])
        y = kernels.diagonal_scan(v, coefficients)
    return y if D is None else y + D * v


def _stepwise(v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    # The gradients of coefficients come two to three times sooner from the plain recurrence than
    # from the chunked form of `kernels`. Unbinding, not indexing: the gradient of an index is an
    # array of the whole size at every step.
    # Tokens come first, so that each step's slice is one piece of memory.
    v, dt, B, C = (t.transpose(0, 1) for t in (v, dt, B, C))
    decay = torch.exp(dt[..., None] * A).unbind()
    write = ((dt * v)[..., None] * B[:, :, None]).unbind()
    state = write[0]
    states = [state]
    for a, b in zip(decay[1:], write[1:], strict=True):
        state = torch.addcmul(b, a, state)
        states.append(state)
    return (torch.stack(states) @ C[..., None])[..., 0].transpose(0, 1)
