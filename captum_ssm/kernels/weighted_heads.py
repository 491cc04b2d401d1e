"""Channel means of linear attention where each channel of a head weighs rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels.arguments import row_range, shape_error
from captum_ssm.kernels.extension import OPS, warn_if_missing
from captum_ssm.kernels.linear_attention import linear_attention_rows_torch
from captum_ssm.kernels.linear_attention_coefficients import (
    TENSORS,
    LinearAttentionCoefficients,
    checked,
)
from captum_ssm.kernels.registration import operation


def linear_attention_weighted(
    left: Tensor,
    right: Tensor | None,
    taps: Tensor | None,
    columns: Tensor | None,
    coefficients: LinearAttentionCoefficients,
    start: int = 0,
) -> Tensor:
    r"""Rows of the mean over channels of ``diag(left) alpha diag(right) conv diag(columns)``.

    .. math::
        E_{ij} = \frac{1}{D} \sum_{d, k} l_{id}\, \alpha^{m(d)}_{i, j + k}\, r_{j + k, d}\,
            c_{d, K - 1 - k}\, x_{jd}

    The maps are never held: their entries are weighed where they are made. Entries whose state has
    decayed to zero cost nothing. The coefficients are those of
    :func:`~captum_ssm.kernels.linear_attention_scan`.

    Args:
        left (Tensor): ``(B, R, D)``, of the rows ``start .. start + R - 1``; the channels of a head
            are consecutive.
        right (Tensor, optional): ``(B, L, D)``. None stands for ones.
        taps (Tensor, optional): c, ``(D, K)``, of a causal convolution. None stands for none.
        columns (Tensor, optional): x, ``(B, L, D)``. None stands for ones.
        coefficients (LinearAttentionCoefficients): the recurrence.
        start (int, optional): the first row. Default: 0

    Returns:
        Tensor: ``(B, R, L)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument has an unexpected shape, dtype or device.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> left = torch.ones(1, 5, 8)  # two heads of four channels
        >>> mean = linear_attention_weighted(left, None, None, None, coefficients)
        >>> torch.testing.assert_close(mean, linear_attention_mean(coefficients))
    """
    tensors = checked(coefficients, left=left, right=right, taps=taps, columns=columns)
    B, L, H, _ = coefficients.query.shape
    D = left.shape[-1]
    if left.dim() != 3 or len(left) != B or D == 0 or D % H:
        raise shape_error("left", left, f"({B}, R, D) with D a multiple of {H} heads")
    row_range(start, start + left.shape[1], coefficients.query)
    for name, x in (("right", right), ("columns", columns)):
        if x is not None and x.shape != (B, L, D):
            raise shape_error(name, x, f"(B, L, D) = {(B, L, D)}, or None")
    if taps is not None and (taps.dim() != 2 or len(taps) != D or taps.shape[1] == 0):
        raise shape_error("taps", taps, f"(D, K) with D = {D}, or None")
    warn_if_missing()
    return OPS.linear_attention_weighted(*tensors, start)


@operation(
    "linear_attention_weighted(Tensor left, Tensor? right, Tensor? taps, Tensor? columns, "
    f"{TENSORS}, int start) -> Tensor",
    LinearAttentionCoefficients,
    fake=lambda left, r, k, x, c, start: left.new_empty(*left.shape[:2], c.query.shape[1]),
)
def linear_attention_weighted_torch(
    left: Tensor,
    right: Tensor | None,
    taps: Tensor | None,
    columns: Tensor | None,
    c: LinearAttentionCoefficients,
    start: int = 0,
) -> Tensor:
    (B, R, D), (_, L, H, _) = left.shape, c.query.shape
    index = torch.arange(start, start + R, device=left.device).expand(B, -1)
    by_lag = left.new_ones(1, D) if taps is None else taps.flip(-1)[:, :L].mT
    sources = by_lag[:, None, None] if right is None else right * by_lag[:, None, None]
    sources = sources.expand(-1, B, L, D)  # (K, B, L, D)
    total = left.new_zeros(B, R, L)
    for h in range(H):
        rows = linear_attention_rows_torch(index, c.narrow(h, h + 1))[:, 0]
        at = slice(h * (D // H), (h + 1) * (D // H))
        for lag, source in enumerate(sources):
            x = source[:, lag:, at]
            x = x if columns is None else x * columns[:, : L - lag, at]
            part = rows[..., lag:] * (left[..., at] @ x.mT)
            total = total + torch.nn.functional.pad(part, (0, lag))
    return total / D
