"""The gradients of a diagonal recurrence, as an operation of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.kernels.diagonal import RECURRENCE, DiagonalCoefficients
from captum_ssm.kernels.diagonal_states import HUGE, reversed_states, scaled, states
from captum_ssm.kernels.registration import empty_like_wanted, only_wanted, operation


@operation(
    f"diagonal_scan_backward(Tensor grad, Tensor v, {RECURRENCE}, bool[] wanted) "
    "-> (Tensor v, Tensor dt, Tensor right, Tensor A, Tensor B, Tensor C, Tensor left)",
    DiagonalCoefficients,
    fake=lambda grad, v, c, wanted: empty_like_wanted(
        (v, c.dt, c.right, c.A, c.B, c.C, c.left), wanted
    ),
)
def diagonal_scan_backward_torch(
    grad: Tensor, v: Tensor, c: DiagonalCoefficients, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of :func:`diagonal_scan`; those that are not ``wanted`` are empty.

    With the states h and their gradients s all others are products. Both are (B, L, G, D/G, N), all
    of them in memory, as autograd would keep them.
    """

    def by_group(x: Tensor) -> Tensor:
        return x.unflatten(-1, (c.B.shape[2], -1)).unsqueeze(-1)

    enter, leave = v * c.right, scaled(grad, c.left)
    x, g, dt = by_group(enter), by_group(leave), by_group(c.dt.clamp(max=HUGE))
    rate = c.A.unflatten(0, (c.B.shape[2], -1))
    write, read = c.B.unsqueeze(-2), c.C.unsqueeze(-2)
    h, s = states(enter, c.dt, c.A, c.B), reversed_states(leave, c.dt, c.A, c.C)
    before = F.pad(h[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    of_exponent = s * before * torch.exp(dt * rate)
    of_x = (s * write).sum(-1).flatten(2)
    gradients = (
        of_x * c.right,
        (of_exponent * rate).sum(-1).flatten(2).where(c.dt <= HUGE, 0.0),
        of_x * v,
        (of_exponent * dt).sum((0, 1)).flatten(0, 1),
        (s * x).sum(-2),
        (h * g).sum(-2),
        None if c.left is None else grad * (h * read).sum(-1).flatten(2),
    )
    return only_wanted(gradients, wanted)
