"""Diagonal linear recurrences.

A channel ``d`` of a diagonal recurrence maps tokens to tokens by the lower triangular matrix::

    alpha_d[i, j] = left[i, d] * sum_n C[i, g, n]
                    * exp(A[d, n] * sum(dt[j + 1 : i + 1, d])) * B[j, g, n] * right[j, d]

for ``j <= i`` (``g = d // (D // G)`` is the group of the channel), optionally after a causal
depthwise convolution with taps in ``nn.Conv1d`` order::

    Conv_d[s, j] = conv[d, K - 1 - (s - j)]   for 0 <= s - j < K

and after factors ``columns[j, d]`` of the tokens that the convolution reads: ``alpha_d Conv_d
diag(columns_d)``.

Selective state spaces (S6) have ``right = dt``; gated linear RNNs have ``N = 1``, ``A = -1``,
``dt = -log(decay)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.kernels.arguments import promote, row_index, row_range, shape_error
from captum_ssm.kernels.convolution import causal_conv, causal_conv_taps, causal_conv_transpose
from captum_ssm.kernels.diagonal_states import HUGE, outputs, reversed_outputs, scaled
from captum_ssm.kernels.extension import OPS, warn_if_missing
from captum_ssm.kernels.registration import operation


@dataclass(frozen=True)
class DiagonalCoefficients:
    """The coefficients of a diagonal recurrence, and of a convolution before it.

    Any floating dtype and any layout; tensors of different dtypes are computed in the widest.

    Args:
        dt (Tensor): ``(B, L, D)``, by how much a channel decays before each token, at least 0;
            infinite for a decay factor of zero.
        right (Tensor): ``(B, L, D)``, a factor of each token's value (``dt`` for S6).
        A (Tensor): ``(D, N)``, the decay rates, at most 0.
        B (Tensor): ``(B, L, G, N)``, the factor of each token's write into the state; each of
            the G groups has D / G channels.
        C (Tensor): ``(B, L, G, N)``, the factor of each token's read of the state.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None
        conv (Tensor, optional): ``(D, K)``, the taps of a causal convolution before the
            recurrence; the last tap is the current token. Default: None
        columns (Tensor, optional): ``(B, L, D)``, a factor of each token's value before the
            convolution. Default: None

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> coefficients = DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)
    """

    dt: Tensor
    right: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    left: Tensor | None = None
    conv: Tensor | None = None
    columns: Tensor | None = None

    def narrow(self, start: int, stop: int) -> DiagonalCoefficients:
        """The coefficients of channels ``start .. stop - 1``."""
        B, C = self.B, self.C
        channels, groups = self.dt.shape[2], B.shape[2]
        if (start, stop) != (0, channels):
            size = channels // groups
            first, last = start // size, (stop - 1) // size
            B, C = B[:, :, first : last + 1], C[:, :, first : last + 1]
            if first != last and (start % size or stop % size):
                # The channels do not cover whole groups: repeat the group's numbers per channel.
                group = torch.arange(start, stop, device=B.device) // size - first
                B, C = B[:, :, group], C[:, :, group]
        return DiagonalCoefficients(
            self.dt[..., start:stop],
            self.right[..., start:stop],
            self.A[start:stop],
            B,
            C,
            None if self.left is None else self.left[..., start:stop],
            None if self.conv is None else self.conv[start:stop],
            None if self.columns is None else self.columns[..., start:stop],
        )


_NAMES = tuple(field.name for field in fields(DiagonalCoefficients))


def _checked(c: DiagonalCoefficients, **first: Tensor) -> list[Any]:
    # All tensors in one dtype, `first` before the coefficients, whose shapes agree.
    tensors = promote(**first, **{name: getattr(c, name) for name in _NAMES})
    shape, N = tuple(c.dt.shape), c.A.shape[-1]
    if len(shape) != 3 or 0 in shape[1:]:
        raise shape_error("dt", c.dt, "(B, L, D) with L and D at least 1")
    for name, x in (("right", c.right), ("left", c.left), ("columns", c.columns)):
        if x is not None and x.shape != shape:
            raise shape_error(name, x, f"that of dt, {shape}")
    if c.A.dim() != 2 or c.A.shape[0] != shape[2] or N == 0:
        raise shape_error("A", c.A, f"(D, N) with D = {shape[2]} and N at least 1")
    B, L, D = shape
    if c.B.dim() != 4 or c.B.shape[:2] != (B, L) or c.B.shape[2] == 0 or c.B.shape[3] != N:
        raise shape_error("B", c.B, f"(B, L, G, N) with B = {B}, L = {L}, N = {N}")
    if c.C.shape != c.B.shape:
        raise shape_error("C", c.C, f"that of B, {tuple(c.B.shape)}")
    if D % c.B.shape[2]:
        raise ValueError(f"B and C have {c.B.shape[2]} groups; expected a divisor of D = {D}")
    if c.conv is not None and (c.conv.dim() != 2 or c.conv.shape[0] != D or c.conv.shape[1] == 0):
        raise shape_error("conv", c.conv, f"(D, K) with D = {D} and K at least 1, or None")
    right, conv, columns = len(first) + 1, -2, -1
    if tensors[conv] is None and tensors[columns] is not None:
        tensors[right], tensors[columns] = tensors[right] * tensors[columns], None
    return tensors


# The tensors of the schemas, in the order of the fields; the convolution comes after them. The mean
# has the factors of columns in its sum; other operations take them outside.
RECURRENCE = "Tensor dt, Tensor right, Tensor A, Tensor B, Tensor C, Tensor? left"


def diagonal_scan(v: Tensor, coefficients: DiagonalCoefficients) -> Tensor:
    """Apply the maps to values, ``y_d = alpha_d Conv_d diag(columns_d) v_d``, in linear time.

    Args:
        v (Tensor): values, ``(B, L, D)``.
        coefficients (DiagonalCoefficients): the recurrence.

    Returns:
        Tensor: ``(B, L, D)``. Differentiable; the gradient with respect to ``v`` alone is one
        :func:`diagonal_rmatvec`, all gradients are one ``diagonal_scan_backward``.

    Raises:
        ValueError, TypeError: an argument has an unexpected shape, dtype or device.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> B, C = torch.randn(2, 1, 5, 1, 3)
        >>> diagonal_scan(v, DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)).shape
        torch.Size([1, 5, 4])
    """
    v, *recurrence, conv, columns = _checked(coefficients, v=v)
    if v.shape != coefficients.dt.shape:
        raise shape_error("v", v, f"that of dt, {tuple(coefficients.dt.shape)}")
    warn_if_missing()
    v = causal_conv(scaled(v, columns), conv)
    return OPS.diagonal_scan(v, *recurrence)


@operation(
    f"diagonal_scan(Tensor v, {RECURRENCE}) -> Tensor",
    DiagonalCoefficients,
    fake=lambda v, c: v.new_empty(v.shape),
    backward=lambda grad, v, c, needed: _scan_backward(grad, v, c, needed),
)
def diagonal_scan_torch(v: Tensor, c: DiagonalCoefficients) -> Tensor:
    x = (causal_conv(scaled(v, c.columns), c.conv) * c.right)[:, None]
    return scaled(outputs(x, c.dt, c.A, c.B, c.C)[:, 0], c.left)


def _scan_backward(
    grad: Tensor, v: Tensor, c: DiagonalCoefficients, wanted: list[bool]
) -> Sequence[Tensor | None]:
    """The gradients of v and of the coefficients except conv; those not wanted are empty."""
    if not any(wanted[1:]):
        return diagonal_rmatvec(grad, replace(c, conv=None)), *[None] * 6
    return OPS.diagonal_scan_backward(grad, v, c.dt, c.right, c.A, c.B, c.C, c.left, wanted)


def diagonal_rmatvec(w: Tensor, coefficients: DiagonalCoefficients, mean: bool = False) -> Tensor:
    """Multiply row vectors with the maps, ``u_d = w_d^T alpha_d Conv_d diag(columns_d)``.

    It takes linear time. The coefficients and the errors are those of :func:`diagonal_scan`.

    Args:
        w (Tensor): ``(B, L, D)``, or ``(B, L)`` for one row vector shared by all channels.
        mean (bool, optional): return the mean over channels, with O(L) memory in addition to the
            arguments unless there is a convolution after ``columns``. Default: False

    Returns:
        Tensor: ``(B, L, D)``, or ``(B, L)`` with ``mean``. Differentiable; the gradient with
        respect to ``w`` is one :func:`diagonal_scan`.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> coefficients = DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)
        >>> last = torch.eye(5)[-1:]
        >>> row = diagonal_rmatvec(last, coefficients, mean=True)
        >>> torch.testing.assert_close(row, diagonal_mean(coefficients)[:, -1])
    """
    w, *tensors, columns = _checked(coefficients, w=w)
    shape = tuple(coefficients.dt.shape)
    if w.shape not in (shape, shape[:2]):
        raise shape_error("w", w, f"{shape} or {shape[:2]}")
    warn_if_missing()
    if columns is None:
        return OPS.diagonal_rmatvec(w, *tensors, bool(mean))
    u = OPS.diagonal_rmatvec(w, *tensors, False) * columns
    return u.mean(-1) if mean else u


def _rmatvec_backward(
    grad: Tensor, w: Tensor, c: DiagonalCoefficients, mean: bool, needed: list[bool]
) -> Sequence[Tensor | None]:
    if mean:
        grad = (grad / c.dt.shape[2]).unsqueeze(-1).expand_as(c.dt)
    back: Tensor | None = None
    if needed[0]:
        back = diagonal_scan(grad, c)
        back = back if w.dim() == 3 else back.sum(-1)
    if not any(needed[1:]):
        return back, *[None] * 8
    # w^T alpha Conv grad is bilinear: w takes the place of a scan's gradient, grad of its values.
    v = causal_conv(grad, c.conv)
    w = w if w.dim() == 3 else w[..., None].expand_as(c.dt)
    of_v, *others = _scan_backward(w, v, c, [needed[7], *needed[1:7]])
    of_conv = None
    if c.conv is not None and of_v is not None and needed[7]:
        of_conv = causal_conv_taps(grad, of_v, c.conv.shape[1])
    return back, *others, of_conv, None


@operation(
    f"diagonal_rmatvec(Tensor w, {RECURRENCE}, Tensor? conv, bool mean) -> Tensor",
    DiagonalCoefficients,
    fake=lambda w, c, mean: c.dt.new_empty(c.dt.shape[:2] if mean else c.dt.shape),
    backward=_rmatvec_backward,
)
def diagonal_rmatvec_torch(w: Tensor, c: DiagonalCoefficients, mean: bool = False) -> Tensor:
    w = w if w.dim() == 3 else w[..., None].expand_as(c.dt)
    s = reversed_outputs(scaled(w, c.left)[:, None], c.dt, c.A, c.C, c.B)[:, 0]
    u = scaled(causal_conv_transpose(s * c.right, c.conv), c.columns)
    return u.mean(-1) if mean else u


def diagonal_mean(
    coefficients: DiagonalCoefficients, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows ``[start, stop)`` of the channel mean, ``mean_d(alpha_d Conv_d diag(columns_d))``.

    No per-channel matrix is ever formed: blocks off the diagonal are matrix products with an
    inner dimension of channels times state. A range of rows costs its share of the whole, so a
    caller can stream tiles of rows (256 or more at a time) in O(R L) memory. A CPU's kernel passes
    over terms that change no digit of an entry, so that states that decay take less time. The
    coefficients are those of :func:`diagonal_scan`, as are the errors.

    Args:
        start, stop (int, optional): the rows asked for, ``0 <= start < stop <= L``; None stands
            for L. Default: all rows

    Returns:
        Tensor: ``(B, stop - start, L)``. Differentiable.

    Raises:
        ValueError: the range of rows is empty or not in [0, L).

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> coefficients = DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)
        >>> diagonal_mean(coefficients, start=2, stop=4).shape
        torch.Size([1, 2, 5])
    """
    tensors = _checked(coefficients)
    rows = row_range(start, stop, coefficients.dt)
    warn_if_missing()
    return OPS.diagonal_mean(*tensors, *rows)


def diagonal_rows(index: Tensor, coefficients: DiagonalCoefficients) -> Tensor:
    """Rows of every channel's own matrix ``alpha_d Conv_d diag(columns_d)``.

    The coefficients are those of :func:`diagonal_scan`, as are the errors.

    Args:
        index (Tensor): the rows asked for, ``(B, R)`` int64 (or ``(R,)`` for the same rows in
            every sequence), each in ``[0, L)``; all of ``0 .. L - 1`` gives the whole matrices.

    Returns:
        Tensor: ``(B, D, R, L)``. Differentiable.

    Raises:
        IndexError: a row outside the sequence was asked for.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> B, C = torch.randn(2, 1, 5, 1, 3)
        >>> coefficients = DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)
        >>> maps = diagonal_rows(torch.arange(5), coefficients)  # (B, D, L, L)
        >>> y = torch.einsum("bdij,bjd->bid", maps, v)
        >>> torch.testing.assert_close(y, diagonal_scan(v, coefficients))
    """
    *tensors, columns = _checked(coefficients)
    index = row_index(index, coefficients.dt)
    warn_if_missing()
    rows = OPS.diagonal_rows(index, *tensors)
    return rows if columns is None else rows * columns.mT[:, :, None]


@operation(
    f"diagonal_rows(Tensor index, {RECURRENCE}, Tensor? conv) -> Tensor",
    DiagonalCoefficients,
    fake=lambda index, c: c.dt.new_empty(len(c.dt), c.dt.shape[2], index.shape[1], c.dt.shape[1]),
)
def diagonal_rows_torch(index: Tensor, c: DiagonalCoefficients) -> Tensor:
    # Row i is e_i^T alpha.
    batch, length, channels = c.dt.shape
    if index.shape[1] == 0:
        return c.dt.new_zeros(batch, channels, 0, length)
    impulse = scaled(torch.ones_like(c.dt), c.left)[:, None]
    columns = None if c.columns is None else c.columns[:, None]
    together = max(1, 2**23 // max(1, c.dt.numel()))
    parts = []
    for at in index.split(together, 1):
        w = F.one_hot(at, length).to(c.dt.dtype).unsqueeze(-1)
        s = reversed_outputs(w * impulse, c.dt, c.A, c.C, c.B)
        rows = scaled(causal_conv_transpose(s * c.right[:, None], c.conv), columns)
        parts.append(rows.permute(0, 3, 1, 2))
    return torch.cat(parts, 2)


def naive_diagonal_matrix(coefficients: DiagonalCoefficients) -> Tensor:
    """The maps of all channels, ``(B, D, L, L)``, by the equation, line by line: for tests.

    Computed in float64. The ``coefficients`` are those of :func:`diagonal_scan`.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> coefficients = DiagonalCoefficients(dt, dt, -torch.ones(4, 3), B, C)
        >>> maps = naive_diagonal_matrix(coefficients)
        >>> expected = diagonal_rows(torch.arange(5), coefficients)
        >>> torch.testing.assert_close(maps.float(), expected)
    """
    c = coefficients
    dt, right, A, B, C = (x.double() for x in (c.dt, c.right, c.A, c.B, c.C))
    batch, length, channels = dt.shape
    group = torch.arange(channels) // (channels // B.shape[2])
    out = torch.zeros(batch, channels, length, length, dtype=torch.float64)
    h = torch.zeros(batch, length, channels, A.shape[1], dtype=torch.float64)  # by column j
    for i in range(length):
        h[:, :i] *= torch.exp(A * dt[:, i, None, :, None].clamp(max=HUGE))
        h[:, i] = B[:, i, group] * right[:, i, :, None]
        out[:, :, i] = (C[:, i, None, group] * h).sum(-1).mT
    if c.left is not None:
        out *= c.left.double().mT[..., None]
    if c.conv is not None:
        shift = torch.zeros(channels, length, length, dtype=torch.float64)
        for lag in range(min(length, c.conv.shape[1])):
            shift.diagonal(-lag, 1, 2).copy_(c.conv[:, -1 - lag, None])
        out = out @ shift
    return out if c.columns is None else out * c.columns.double().mT[:, :, None]
