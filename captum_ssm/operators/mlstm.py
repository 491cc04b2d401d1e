"""The mLSTM cell of xLSTM (Beck et al., 2024) as linear attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.operators.states import continued


def mlstm_operator(
    q: Tensor,
    k: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    width: int,
    eps: float,
    begun: tuple[Tensor, Tensor] | None = None,
) -> tuple[LinearAttentionOperator, tuple[Tensor, Tensor] | None]:
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
        begun (tuple of Tensor, optional): m, ``(B, 1, H)``, and n, ``(B, N, H)``, after the tokens
            before. Default: None, where there are none, and none will come after

    Returns:
        tuple: the operator, whose state is in units of exp(m), and m and n after the last token,
        None where ``begun`` is.

    Examples::

        >>> q, k, (i, f) = *torch.randn(2, 1, 5, 2, 3), torch.randn(2, 1, 5, 2)
        >>> operator, _ = mlstm_operator(q, k, i, f, width=4, eps=1e-6)
        >>> operator.matrix().shape
        torch.Size([1, 2, 5, 5])
    """
    log_f = F.logsigmoid(f)
    m = i.new_zeros(i.shape[0], 1, i.shape[2]) if begun is None else begun[0]
    # m_t = max(log f_t + m_{t-1}, i_t).
    total_f = log_f.double().cumsum(1)
    peak = (torch.maximum((i - total_f).cummax(1).values, m) + total_f).to(q.dtype)
    cell = LinearAttentionOperator(
        query=q * q.shape[-1] ** -0.5,
        key=k * torch.exp(i - peak)[..., None],
        log_decay=(log_f + torch.cat([m, peak[:, :-1]], 1) - peak)[..., None],
        width=1,
    )
    ones = torch.ones_like(i)
    if begun is None:
        read, left = cell.matvec(ones), None  # q^T n, (B, L, H)
    else:
        read, n = continued(cell, ones, begun[1])
        left = peak[:, -1:].clone(), n
    total = torch.maximum(read.abs(), torch.exp(-peak)) + eps
    return replace(cell, query=cell.query / total[..., None], width=width), left
