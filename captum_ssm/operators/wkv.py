r"""The WKV average of RWKV-4 (Peng et al., 2023; Zimerman et al., eq. 19) and Vision-RWKV.

An exponential average of values with a decay per channel and a bonus for the current token:

.. math::
    \alpha_{ij} = e^{k_j - (|i - j| - 1) w} / d_i \ (j \ne i), \qquad
    \alpha_{ii} = e^{u + k_i} / d_i

with :math:`d_i` the sum of the numerators; in RWKV-4 over the tokens up to i, in Vision-RWKV (Duan
et al., 2024, eq. 3) over all. The largest exponent is taken out, so that large keys do not
overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.operators.base import TokenOperator
from captum_ssm.operators.composed import SkipOperator, SumOperator
from captum_ssm.operators.diagonal import DiagonalOperator, one_state
from captum_ssm.operators.permuted import PermutedOperator


def wkv_state(key: Tensor, decay: Tensor) -> DiagonalOperator:
    """The recurrence of WKV's numerator, of which the largest exponent is taken out."""
    peak = _peak(key, decay)
    dt = torch.zeros_like(key)
    dt[:, 1:] = (peak[:, 1:] - peak[:, :-1] + decay).clamp(min=0)
    return one_state(dt, torch.exp(key - peak))


def wkv_operator(
    key: Tensor, decay: Tensor, bonus: Tensor, *, two_way: bool = False
) -> SumOperator:
    """WKV: earlier tokens, the current token and, where it goes two ways, what comes after.

    Args:
        key (Tensor): k, ``(B, L, D)``.
        decay (Tensor): w, ``(D,)``.
        bonus (Tensor): u, ``(D,)``.
        two_way (bool, optional): as in Vision-RWKV. Default: False

    Examples::

        >>> operator = wkv_operator(torch.randn(1, 5, 4), torch.rand(4), torch.randn(4))
        >>> ones = torch.ones(1, 5, 4)
        >>> torch.testing.assert_close(operator.matvec(ones), ones)  # an average
    """
    backward = torch.arange(key.shape[1], device=key.device).flip(0)
    before = [_before(key, decay)]
    if two_way:
        before.append(_before(key.flip(1), decay).flip(1))
    itself = key + bonus
    top = torch.stack([itself, *before]).amax(0)
    parts: list[TokenOperator] = [_earlier(key, decay, top)]
    if two_way:
        parts.append(PermutedOperator(_earlier(key.flip(1), decay, top.flip(1)), backward))
    parts.append(SkipOperator(torch.exp(itself - top)))
    total = SumOperator(tuple(parts)).matvec(torch.ones_like(key))
    return SumOperator(tuple(part.scaled(1 / total, None) for part in parts))


def _peak(key: Tensor, decay: Tensor) -> Tensor:
    # The largest exponent in the state after token j, max over i <= j of k_i - (j - i) w.
    L = key.shape[1]
    faded = torch.arange(L, dtype=torch.float64, device=key.device)[:, None] * decay.double()
    return ((key.double() + faded).cummax(1).values - faded).to(key.dtype)


def _before(key: Tensor, decay: Tensor) -> Tensor:
    # The largest exponent in the state that a token reads.
    peak = _peak(key, decay)
    return torch.cat([torch.full_like(peak[:, :1], -torch.inf), peak[:, :-1]], 1)


def _earlier(key: Tensor, decay: Tensor, top: Tensor) -> TokenOperator:
    # exp(-top) times the state before each token: that of the recurrence, one token later.
    D = key.shape[-1]
    before = _before(key, decay)
    dt = torch.zeros_like(key)
    dt[:, 2:] = (before[:, 2:] - before[:, 1:-1] + decay).clamp(min=0)
    right = torch.zeros_like(key)
    right[:, 1:] = torch.exp(key[:, :-1] - before[:, 1:])
    shift = torch.zeros(D, 2, dtype=key.dtype, device=key.device)
    shift[:, 0] = 1.0
    return one_state(dt, right, left=torch.exp(before - top)).compose(conv=shift)
