"""Rows of maps times the input of each token through each tap of a convolution.

The inner loop of LaTIM's vectors: if a nonlinear activation follows the convolution, its taps
cannot be folded into the map, and the input of token j at token j + k depends on both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels.arguments import check_dims, shape_error
from captum_ssm.kernels.extension import NAMESPACE, OPS, warn_if_missing


def tap_rows(rows: Tensor, values: Tensor, left: Tensor | None, out: Tensor) -> None:
    """Write ``out[b, d, r, j] = left[b, d, r] sum_k rows[b, m, r, j + k] values[k, b, d, j + k]``.

    m is the map of channel d: the channels of a map are consecutive. Not differentiable.

    Args:
        rows (Tensor): ``(B, M, R, L)``.
        values (Tensor): ``(K, B, D, L)``, the input at each token through each of the K taps; D is
            a multiple of M.
        left (Tensor, optional): ``(B, D, R)``, or None.
        out (Tensor): ``(B, D, R, C)`` with C at most L, contiguous except for its first
            dimension; written to.

    Raises:
        ValueError: an argument has an unexpected shape.
        TypeError: the tensors are not of one dtype.

    Examples::

        >>> rows, values = torch.rand(1, 2, 3, 5), torch.rand(4, 1, 6, 5)
        >>> out = torch.empty(1, 6, 3, 5)
        >>> tap_rows(rows, values, None, out)
        >>> last = rows[0, 0, 0, 4] * values[0, 0, 0, 4]  # the last token enters through one tap
        >>> torch.testing.assert_close(out[0, 0, 0, 4], last)
    """
    check_dims(out=(out, 4), rows=(rows, 4), values=(values, 4), left=(left, 3))
    B, D, R, C = out.shape
    M, L = rows.shape[1], rows.shape[-1]
    if rows.shape != (B, M, R, L) or M == 0 or D % M or C > L:
        raise shape_error("rows", rows, f"(B, M, R, L) with B, R = {B}, {R} for out {(B, D, R, C)}")
    if values.shape[1:] != (B, D, L) or len(values) == 0:
        raise shape_error("values", values, f"(K, B, D, L) with (B, D, L) = {(B, D, L)}")
    if left is not None and left.shape != (B, D, R):
        raise shape_error("left", left, f"{(B, D, R)}, or None")
    warn_if_missing()
    OPS.tap_rows(rows, values, left, out)


def tap_rows_torch(rows: Tensor, values: Tensor, left: Tensor | None, out: Tensor) -> None:
    C, L = out.shape[-1], rows.shape[-1]
    rows = rows.repeat_interleave(out.shape[1] // rows.shape[1], 1)
    for lag, value in enumerate(values[:L]):
        stop = min(C, L - lag)
        factors = rows[..., lag : lag + stop], value[:, :, None, lag : lag + stop]
        if lag == 0:
            torch.mul(*factors, out=out)
        else:
            out[..., :stop].addcmul_(*factors)
    if left is not None:
        out *= left[..., None]


torch.library.define(
    f"{NAMESPACE}::tap_rows", "(Tensor rows, Tensor values, Tensor? left, Tensor(a!) out) -> ()"
)
torch.library.impl(f"{NAMESPACE}::tap_rows", "CompositeExplicitAutograd")(tap_rows_torch)
torch.library.register_fake(f"{NAMESPACE}::tap_rows")(lambda rows, values, left, out: None)
