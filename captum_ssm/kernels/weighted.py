"""Rows of maps times what their rows and columns weigh, summed over all channels.

The inner loop of a channel mean where the channels of a head share a map, but have factors of
their own: the sum over a head's channels is a product of two matrices for each tap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels.arguments import check_dims, shape_error
from captum_ssm.kernels.extension import NAMESPACE, OPS, warn_if_missing


def weighted_rows(rows: Tensor, left: Tensor, sources: Tensor, last: int | None = None) -> Tensor:
    """``out[b, r, j] = sum_kd rows[b, m, r, j + k] left[b, r, d] sources[k, b, d, j + k]``.

    m is the map of channel d: the channels of a map are consecutive. Not differentiable.

    Args:
        rows (Tensor): ``(B, M, R, L)``.
        left (Tensor): ``(B, R, D)``; D is a multiple of M.
        sources (Tensor): ``(K, B, D, L)``, the weights of each column through each of K taps.
        last (int, optional): the last column of the first row that is not zero; a later row has one
            more each, as in a causal map. None stands for all. Default: None

    Returns:
        Tensor: ``(B, R, L)``.

    Raises:
        ValueError: an argument has an unexpected shape.
        TypeError: the tensors are not of one dtype.

    Examples::

        >>> rows, left = torch.rand(1, 2, 3, 5), torch.rand(1, 3, 4)
        >>> sources = torch.rand(1, 1, 4, 5)
        >>> out = weighted_rows(rows, left, sources)
        >>> each = rows.repeat_interleave(2, 1) * left.mT[..., None] * sources[0, :, :, None]
        >>> torch.testing.assert_close(out, each.sum(1))
    """
    check_dims(rows=(rows, 4), left=(left, 3), sources=(sources, 4))
    (B, M, R, L), D = rows.shape, left.shape[-1]
    if left.shape != (B, R, D) or M == 0 or D == 0 or D % M:
        raise shape_error("left", left, f"(B, R, D) = {(B, R, 'D')} with D a multiple of M = {M}")
    if sources.shape[1:] != (B, D, L):
        raise shape_error("sources", sources, f"(K, B, D, L) with (B, D, L) = {(B, D, L)}")
    warn_if_missing()
    last = L if last is None else max(0, last)
    return OPS.weighted_rows(rows, left, sources, last)


def weighted_rows_torch(rows: Tensor, left: Tensor, sources: Tensor, last: int = 0) -> Tensor:
    (B, M, R, L), P = rows.shape, left.shape[-1] // rows.shape[1]
    total = rows.new_zeros(B, R, L)
    for m in range(M):
        at = slice(m * P, (m + 1) * P)
        for lag, source in enumerate(sources[:L]):
            part = rows[:, m] * (left[..., at] @ source[:, at])
            total[..., : L - lag] += part[..., lag:]
    return total


torch.library.define(
    f"{NAMESPACE}::weighted_rows", "(Tensor rows, Tensor left, Tensor sources, int last) -> Tensor"
)
torch.library.impl(f"{NAMESPACE}::weighted_rows", "CompositeExplicitAutograd")(weighted_rows_torch)
torch.library.register_fake(f"{NAMESPACE}::weighted_rows")(
    lambda rows, left, sources, last: rows.new_empty(*rows.shape[:1], *rows.shape[2:])
)
