"""The selective scan of a model: fast for inference, with fast gradients for training."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm import kernels

# For longer sequences, storing the states of every token needs too much memory.
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
