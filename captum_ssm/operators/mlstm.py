"""The mLSTM cell of xLSTM (Beck et al., 2024) as linear attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators.linear_attention import LinearAttentionOperator


def mlstm_operator(
    q: Tensor, k: Tensor, i: Tensor, f: Tensor, *, width: int, eps: float
) -> LinearAttentionOperator:
    r"""Linear attention with a forget gate, an exponential input gate and a normalizer.

    .. math::
        C_t = f_t C_{t-1} + i_t k_t v_t^\top, \quad n_t = f_t n_{t-1} + i_t k_t, \quad
        y_t = C_t^\top q_t / \max(|n_t^\top q_t|, e^{-m_t})

    with a running maximum m, which keeps the input gate in range.

    Args:
        q, k (Tensor): queries, before their scale, and keys, ``(B, L, H, N)``.
        i, f (Tensor): input and forget gates before their activations, ``(B, L, H)``.
        width (int): P, the channels of a head.
        eps (float): added to the normalizer.

    Examples::

        >>> q, k, (i, f) = *torch.randn(2, 1, 5, 2, 3), torch.randn(2, 1, 5, 2)
        >>> mlstm_operator(q, k, i, f, width=4, eps=1e-6).matrix().shape
        torch.Size([1, 2, 5, 5])
    """
    log_f = F.logsigmoid(f)
    # m_t = max(log f_t + m_{t-1}, i_t) from m = 0.
    total_f = log_f.double().cumsum(1)
    peak = ((i - total_f).cummax(1).values.clamp(min=0) + total_f).to(q.dtype)
    before = F.pad(peak, (0, 0, 1, 0))[:, :-1]
    cell = LinearAttentionOperator(
        query=q * q.shape[-1] ** -0.5,
        key=k * torch.exp(i - peak)[..., None],
        log_decay=(log_f + before - peak)[..., None],
        width=width,
    )
    ones = q.new_ones(q.shape[0], q.shape[2], q.shape[1], 1)
    read = cell.matvec_heads(ones)[..., 0].transpose(1, 2)  # q^T n, (B, L, H)
    total = torch.maximum(read.abs(), torch.exp(-peak)) + eps
    return replace(cell, query=cell.query / total[..., None])
