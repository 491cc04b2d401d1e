"""Diagonal linear recurrences.

A channel ``d`` of a diagonal recurrence maps tokens to tokens by the lower triangular matrix::

    alpha_d[i, j] = left[i, d] * sum_n Cm[i, g, n]
                    * exp(A[d, n] * sum(dt[j + 1 : i + 1, d])) * Bm[j, g, n] * right[j, d]

for ``j <= i`` (``g = d // (D // G)`` is the group of the channel), optionally after a causal
depthwise convolution with taps in ``nn.Conv1d`` order::

    Conv_d[s, j] = conv[d, K - 1 - (s - j)]   for 0 <= s - j < K

Shapes: ``dt (B, L, D) >= 0``, ``right (B, L, D)``, ``A (D, N) <= 0``, ``Bm, Cm (B, L, G, N)``,
``left (B, L, D)`` or None, ``conv (D, K)`` or None. Selective state spaces (S6) have
``right = dt``; gated linear RNNs have ``N = 1``, ``A = -1``, ``dt = -log(decay)``. ``dt`` may be
infinite where a decay is zero.

Arguments of any layout are accepted and made contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.ops._operator import (
    contiguous,
    promote,
    register,
    row_index,
    row_range,
    shape_error,
    warn_if_missing,
)


def _check_coefficients(
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None,
    conv: Tensor | None,
) -> None:
    if dt.dim() != 3 or dt.shape[1] == 0 or dt.shape[2] == 0:
        raise shape_error("dt", dt, "(B, L, D) with L and D at least 1")
    batch, length, channels = dt.shape
    if right.shape != dt.shape:
        raise shape_error("right", right, f"that of dt, {tuple(dt.shape)}")
    if left is not None and left.shape != dt.shape:
        raise shape_error("left", left, f"that of dt, {tuple(dt.shape)}, or None")
    if A.dim() != 2 or A.shape[0] != channels or A.shape[1] == 0:
        raise shape_error("A", A, f"(D, N) with D = {channels} and N at least 1")
    for name, x in (("Bm", Bm), ("Cm", Cm)):
        if (
            x.dim() != 4
            or x.shape[:2] != dt.shape[:2]
            or x.shape[2] == 0
            or x.shape[3] != A.shape[1]
        ):
            raise shape_error(
                name, x, f"(B, L, G, N) with B = {batch}, L = {length}, N = {A.shape[1]}"
            )
    if Cm.shape != Bm.shape:
        raise shape_error("Cm", Cm, f"that of Bm, {tuple(Bm.shape)}")
    if channels % Bm.shape[2]:
        raise ValueError(
            f"Bm and Cm have {Bm.shape[2]} groups, which do not divide the {channels} channels"
        )
    if conv is not None and (conv.dim() != 2 or conv.shape[0] != channels or conv.shape[1] == 0):
        raise shape_error("conv", conv, f"(D, K) with D = {channels} and K at least 1, or None")


# ---- operators ------------------------------------------------------------------------------


def diagonal_scan(
    v: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
) -> Tensor:
    """Apply the recurrence to values: ``y_d = alpha_d v_d`` for every channel, in linear time.

    Args:
        v (Tensor): values, ``(B, L, D)``.
        dt (Tensor): ``(B, L, D)``, what a channel decays by ahead of each token, at least 0.
        right (Tensor): ``(B, L, D)``, the weight of each token's value.
        A (Tensor): ``(D, N)``, the rates, at most 0.
        Bm, Cm (Tensor): ``(B, L, G, N)``, what tokens write with and read with; a group has D / G
            channels.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None

    Returns:
        Tensor: ``(B, L, D)``. Differentiable; the gradient with respect to ``v`` is one more scan.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> diagonal_scan(v, dt, dt, A, Bm, Cm).shape
        torch.Size([1, 5, 4])
    """
    args = contiguous(promote(v=v, dt=dt, right=right, A=A, Bm=Bm, Cm=Cm, left=left))
    _check_coefficients(dt, right, A, Bm, Cm, left, None)
    if v.shape != dt.shape:
        raise shape_error("v", v, f"that of dt, {tuple(dt.shape)}")
    warn_if_missing()
    return torch.ops.captum_ssm.diagonal_scan(*args)


def diagonal_vecmat(
    w: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Multiply row vectors with the maps, ``u_d = w_d^T (alpha_d Conv_d)``, in linear time.

    Args:
        w (Tensor): ``(B, L, D)``, or ``(B, L)`` for one row vector shared by all channels.
        dt (Tensor): ``(B, L, D)``, what a channel decays by ahead of each token, at least 0.
        right (Tensor): ``(B, L, D)``, the weight of each token's value.
        A (Tensor): ``(D, N)``, the rates, at most 0.
        Bm, Cm (Tensor): ``(B, L, G, N)``, what tokens write with and read with; a group has D / G
            channels.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None
        conv (Tensor, optional): ``(D, K)``, the taps of a convolution in front. Default: None
        mean (bool, optional): return the mean over channels, in O(L) memory beyond the arguments.
            Default: False

    Returns:
        Tensor: ``(B, L, D)``, or ``(B, L)`` with ``mean``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> last = torch.eye(5)[-1:]
        >>> row = diagonal_vecmat(last, dt, dt, A, Bm, Cm, mean=True)
        >>> torch.testing.assert_close(row, diagonal_mean(dt, dt, A, Bm, Cm)[:, -1])
    """
    args = contiguous(promote(w=w, dt=dt, right=right, A=A, Bm=Bm, Cm=Cm, left=left, conv=conv))
    _check_coefficients(dt, right, A, Bm, Cm, left, conv)
    if w.shape not in (dt.shape, dt.shape[:2]):
        raise shape_error("w", w, f"{tuple(dt.shape)} or {tuple(dt.shape[:2])}")
    warn_if_missing()
    return torch.ops.captum_ssm.diagonal_vecmat(*args, bool(mean))


def diagonal_mean(
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows ``[start, stop)`` of the channel-mean matrix, ``mean_d(alpha_d Conv_d)``.

    No per-channel matrix is ever formed: blocks off the diagonal are matrix products with an
    inner dimension of channels times state. A range of rows costs its share of the whole, so a
    caller can stream tiles of rows (256 or more at a time) in O(R L) memory.

    Args:
        dt (Tensor): ``(B, L, D)``, what a channel decays by ahead of each token, at least 0.
        right (Tensor): ``(B, L, D)``, the weight of each token's value.
        A (Tensor): ``(D, N)``, the rates, at most 0.
        Bm, Cm (Tensor): ``(B, L, G, N)``, what tokens write with and read with; a group has D / G
            channels.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None
        conv (Tensor, optional): ``(D, K)``, the taps of a convolution in front. Default: None
        start, stop (int, optional): the rows wanted, ``0 <= start < stop <= L``; a ``stop`` of None
            stands for L. Default: all rows

    Returns:
        Tensor: ``(B, stop - start, L)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted, or the range of
            rows is empty or leaves the sequence.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> tile = diagonal_mean(dt, dt, A, Bm, Cm, start=2, stop=4)
        >>> tile.shape
        torch.Size([1, 2, 5])
    """
    args = contiguous(promote(dt=dt, right=right, A=A, Bm=Bm, Cm=Cm, left=left, conv=conv))
    _check_coefficients(dt, right, A, Bm, Cm, left, conv)
    start, stop = row_range(start, stop, dt)
    warn_if_missing()
    return torch.ops.captum_ssm.diagonal_mean(*args, start, stop)


def diagonal_rows(
    index: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
) -> Tensor:
    """Rows of every channel's own matrix ``alpha_d Conv_d``.

    Args:
        index (Tensor): the rows wanted, ``(B, R)`` int64 (or ``(R,)`` for the same rows in every
            sequence), each in ``[0, L)``; all of ``0 .. L - 1`` gives the whole matrices.
        dt (Tensor): ``(B, L, D)``, what a channel decays by ahead of each token, at least 0.
        right (Tensor): ``(B, L, D)``, the weight of each token's value.
        A (Tensor): ``(D, N)``, the rates, at most 0.
        Bm, Cm (Tensor): ``(B, L, G, N)``, what tokens write with and read with; a group has D / G
            channels.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None
        conv (Tensor, optional): ``(D, K)``, the taps of a convolution in front. Default: None

    Returns:
        Tensor: ``(B, D, R, L)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.
        IndexError: a row outside the sequence was asked for.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> maps = diagonal_rows(torch.arange(5), dt, dt, A, Bm, Cm)  # (B, D, L, L)
        >>> y = torch.einsum("bdij,bjd->bid", maps, v)
        >>> torch.testing.assert_close(y, diagonal_scan(v, dt, dt, A, Bm, Cm))
    """
    args = contiguous(promote(dt=dt, right=right, A=A, Bm=Bm, Cm=Cm, left=left, conv=conv))
    _check_coefficients(dt, right, A, Bm, Cm, left, conv)
    index = row_index(index, dt)
    warn_if_missing()
    return torch.ops.captum_ssm.diagonal_rows(index, *args)


# ---- PyTorch forms --------------------------------------------------------------------------

_HUGE = 1e30  # stands for an infinite decay step: any A < 0 times this underflows


def _decay(exponent: Tensor) -> Tensor:
    """exp of non-positive numbers, kept above the denormals, which cost a factor of ten."""
    return exponent.clamp(min=-700.0 if exponent.dtype == torch.float64 else -70.0).exp()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(..., D) -> (..., G, D / G)."""
    return x.unflatten(-1, (groups, -1))


def _recurrence(x: Tensor, dt: Tensor, A: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """y_t = read_t . h_t with h_t = exp(A dt_t) h_(t-1) + write_t x_t.

    x is (B, R, L, D), with R inputs for the same coefficients; dt (B, L, D), write and read
    (B, L, G, N). The sequence is cut in about sqrt(L) chunks that step in parallel: once from
    zero for what each chunk passes on, once more from the right start.
    """
    length, groups, states = write.shape[1:]
    chunk = 1 << max(0, (length - 1).bit_length() // 2)
    chunks = -(-length // chunk)
    padding = chunks * chunk - length

    def cut(t: Tensor, axis: int) -> Tensor:
        pad = [0, 0] * (t.dim() - 1 - axis) + [0, padding]
        return F.pad(t, pad).unflatten(axis, (chunks, chunk))

    x = _by_group(cut(x, 2), groups)  # (B, R, chunks, chunk, G, D/G)
    dt = _by_group(cut(dt.clamp(max=_HUGE), 1), groups).unsqueeze(1)
    write = cut(write, 1)[:, None, :, :, :, None]  # (B, 1, chunks, chunk, G, 1, N)
    read = cut(read, 1)[:, None, :, :, :, None]
    rate = A.view(groups, -1, states)

    def step(h: Tensor | None, t: int) -> Tensor:
        enter = x[:, :, :, t, ..., None] * write[:, :, :, t]
        return enter if h is None else enter + _decay(dt[:, :, :, t, ..., None] * rate) * h

    start = None
    if chunks > 1:
        last = None
        for t in range(chunk):
            last = step(last, t)
        assert last is not None
        across = _decay(dt.double().sum(3).to(dt.dtype)[..., None] * rate)
        carried = [torch.zeros_like(last[:, :, 0])]
        for c in range(chunks - 1):
            carried.append(last[:, :, c] + across[:, :, c] * carried[-1])
        start = torch.stack(carried, 2)

    outputs = []
    h = start
    for t in range(chunk):
        h = step(h, t)
        outputs.append((h * read[:, :, :, t]).sum(-1))
    y = torch.stack(outputs, 3).flatten(4)  # (B, R, chunks, chunk, D)
    return y.flatten(2, 3)[:, :, :length]


def _reversed_recurrence(x: Tensor, dt: Tensor, A: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """u_t = read_t . s_t with s_t = write_t x_t + exp(A dt_(t+1)) s_(t+1)."""
    late = F.pad(dt[:, 1:], (0, 0, 0, 1)).flip(1)
    return _recurrence(x.flip(2), late, A, write.flip(1), read.flip(1)).flip(2)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _convolve(x: Tensor, conv: Tensor | None) -> Tensor:
    """Conv_d x_d, for x (..., L, D)."""
    if conv is None:
        return x
    taps = conv.shape[1]
    length = x.shape[-2]
    x = F.pad(x, (0, 0, taps - 1, 0))
    out = x[..., :length, :] * conv[:, 0]
    for k in range(1, taps):
        out = out + x[..., k : k + length, :] * conv[:, k]
    return out


def _convolve_transposed(x: Tensor, conv: Tensor | None) -> Tensor:
    """Conv_d^T x_d, for x (..., L, D)."""
    return x if conv is None else _convolve(x.flip(-2), conv).flip(-2)


def diagonal_scan_torch(
    v: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
) -> Tensor:
    """PyTorch form of :func:`diagonal_scan`.

    The arguments are those of :func:`diagonal_scan`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, L, D)``.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> y = diagonal_scan_torch(v, dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(y, diagonal_scan(v, dt, dt, A, Bm, Cm))
    """
    return _scaled(_recurrence((v * right)[:, None], dt, A, Bm, Cm)[:, 0], left)


def diagonal_vecmat_torch(
    w: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """PyTorch form of :func:`diagonal_vecmat`.

    The arguments are those of :func:`diagonal_vecmat`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, L, D)``, or ``(B, L)`` with ``mean``.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> u = diagonal_vecmat_torch(v, dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(u, diagonal_vecmat(v, dt, dt, A, Bm, Cm))
    """
    w = w if w.dim() == 3 else w[..., None].expand_as(dt)
    s = _reversed_recurrence(_scaled(w, left)[:, None], dt, A, Cm, Bm)[:, 0]
    u = _convolve_transposed(s * right, conv)
    return u.mean(-1) if mean else u


def _channel_chunks(channels: int, groups: int, width: int) -> list[tuple[slice, slice]]:
    """Slices of channels and of the groups they belong to, about ``width`` channels each."""
    per_group = channels // groups
    if width >= per_group:
        step = max(1, width // per_group)
        return [
            (slice(g * per_group, min(g + step, groups) * per_group), slice(g, g + step))
            for g in range(0, groups, step)
        ]
    return [
        (slice(d, min(d + width, (g + 1) * per_group)), slice(g, g + 1))
        for g in range(groups)
        for d in range(g * per_group, (g + 1) * per_group, width)
    ]


def _after(dt: Tensor, dim: int) -> Tensor:
    """Sums over all later positions: out[j] = sum(dt[j + 1:]).

    Sums of what lies between, never differences of longer sums: a huge step (a reset) must not
    swallow the small ones after it.
    """
    later = dt.narrow(dim, 1, dt.shape[dim] - 1).flip(dim).cumsum(dim).flip(dim)
    return torch.cat([later, torch.zeros_like(dt.narrow(dim, 0, 1))], dim)


def _panel(exponent: Tensor, rate: Tensor, coefficient: Tensor, factor: Tensor | None) -> Tensor:
    """One side of the products: (..., positions, D * N) of decay, coefficient and factor.

    exponent and factor are (..., D), rate (D, N), coefficient (..., G, N).
    """
    groups = coefficient.shape[-2]
    x = _decay(exponent.unsqueeze(-1) * rate).unflatten(-2, (groups, -1))
    x = x * coefficient.unsqueeze(-2)
    if factor is not None:
        x = x * _by_group(factor, groups).unsqueeze(-1)
    return x.flatten(-3)


def _fold(q: Tensor, conv: Tensor | None, states: int) -> Tensor:
    """Push taps into a panel of sources, which then reaches K - 1 columns further left."""
    if conv is None:
        return q
    reach = conv.shape[1] - 1
    taps = conv.repeat_interleave(states, 0)
    width = q.shape[-2] + reach
    wide = F.pad(q, (0, 0, reach, reach))
    out = wide[..., :width, :] * taps[:, reach]
    for m in range(1, reach + 1):
        out = out + wide[..., m : m + width, :] * taps[:, reach - m]
    return out


def diagonal_mean_torch(
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """PyTorch form of :func:`diagonal_mean`.

    Rows are cut in tiles. What lies left of a tile is one matrix product, with decays split at
    the tile's first row; the tiles' own triangles are halved until nothing is left, every level
    of all tiles being one batched product.

    The arguments are those of :func:`diagonal_mean`, of one floating dtype and device; they are not
    checked.

    Returns:
        Tensor: ``(B, stop - start, L)``.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> mean = diagonal_mean_torch(dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(mean, diagonal_mean(dt, dt, A, Bm, Cm))
    """
    batch, length, channels = dt.shape
    groups, states = Bm.shape[2:]
    stop = length if stop is None else stop
    rows = stop - start
    tile = min(256, 1 << (rows - 1).bit_length())
    padded = -(-rows // tile) * tile
    reach = 0 if conv is None else conv.shape[1] - 1

    def near(x: Tensor) -> Tensor:
        """The positions of the rows themselves, padded to whole tiles."""
        return F.pad(x[:, start:stop], [0, 0] * (x.dim() - 2) + [0, padded - rows])

    # Columns are stored `reach` places to the right: the first sources reach out on the left.
    width = reach + start + padded
    out = dt.new_zeros(batch, padded, width)
    halves = [tile >> k for k in range(1, tile.bit_length())]
    triangles = {h: dt.new_zeros(batch, padded // (2 * h), h, reach + h) for h in halves}
    diagonal = dt.new_zeros(batch, padded, reach + 1)
    steps = dt.clamp(max=_HUGE).double()

    for ds, gs in _channel_chunks(channels, groups, max(1, 1024 // states)):
        rate, taps = A[ds], None if conv is None else conv[ds]
        t, r, b, c = steps[..., ds], right[..., ds], Bm[:, :, gs], Cm[:, :, gs]
        f = None if left is None else near(left[..., ds])
        t_near, r_near, b_near, c_near = near(t), near(r), near(b), near(c)

        for first in range(0, padded, tile):
            edge, own = start + first, slice(first, first + tile)
            if edge == 0:
                continue
            p = _panel(
                t_near[:, own].cumsum(1).to(dt.dtype),
                rate,
                c_near[:, own],
                None if f is None else f[:, own],
            )
            q = _panel(_after(t[:, :edge], 1).to(dt.dtype), rate, b[:, :edge], r[:, :edge])
            q = _fold(q, taps, states)
            out[:, own, : reach + edge] += p @ q.transpose(1, 2)

        for h in halves:
            # (B, blocks, h, ...) of the sources' half and of the rows' half.
            def early(x: Tensor, h: int = h) -> Tensor:
                return x.unflatten(1, (-1, 2, h))[:, :, 0]

            def late(x: Tensor, h: int = h) -> Tensor:
                return x.unflatten(1, (-1, 2, h))[:, :, 1]

            q = _panel(_after(early(t_near), 2).to(dt.dtype), rate, early(b_near), early(r_near))
            p = _panel(
                late(t_near).cumsum(2).to(dt.dtype),
                rate,
                late(c_near),
                None if f is None else late(f),
            )
            triangles[h] += p @ _fold(q, taps, states).transpose(2, 3)

        z = (b_near * c_near).sum(-1, keepdim=True) * _by_group(r_near, b.shape[2])
        z = _scaled(z.flatten(2), f)
        diagonal += z.sum(-1, keepdim=True) if taps is None else z @ taps

    for h in halves:
        place = (padded * width, 2 * h * (width + 1), width, 1)
        out.as_strided(triangles[h].shape, place, h * width + start).add_(triangles[h])
    out.as_strided(diagonal.shape, (padded * width, width + 1, 1), start).add_(diagonal)
    return F.pad(out[:, :rows, reach : reach + stop], (0, length - stop)) / channels


def diagonal_rows_torch(
    index: Tensor,
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
) -> Tensor:
    """PyTorch form of :func:`diagonal_rows`: row i is e_i^T alpha.

    The arguments are those of :func:`diagonal_rows`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, D, R, L)``.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> rows = diagonal_rows_torch(torch.tensor([[1, 4]]), dt, dt, A, Bm, Cm)
        >>> expected = diagonal_rows(torch.tensor([1, 4]), dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(rows, expected)
    """
    batch, length, channels = dt.shape
    rows = index.shape[1]
    if rows == 0:
        return dt.new_zeros(batch, channels, 0, length)
    together = max(1, 2**23 // (batch * length * channels))
    parts = []
    for first in range(0, rows, together):
        at = index[:, first : first + together]
        w = F.one_hot(at, length).to(dt.dtype).unsqueeze(-1)
        s = _reversed_recurrence(w * _scaled(torch.ones_like(dt), left)[:, None], dt, A, Cm, Bm)
        u = _convolve_transposed(s * right[:, None], conv)
        parts.append(u.permute(0, 3, 1, 2))
    return torch.cat(parts, 2)


# ---- naive forms ----------------------------------------------------------------------------


def naive_diagonal_matrix(
    dt: Tensor,
    right: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    left: Tensor | None = None,
    conv: Tensor | None = None,
) -> Tensor:
    """The maps of all channels, line by line in float64.

    Args:
        dt (Tensor): ``(B, L, D)``, what a channel decays by ahead of each token, at least 0.
        right (Tensor): ``(B, L, D)``, the weight of each token's value.
        A (Tensor): ``(D, N)``, the rates, at most 0.
        Bm, Cm (Tensor): ``(B, L, G, N)``, what tokens write with and read with; a group has D / G
            channels.
        left (Tensor, optional): ``(B, L, D)``, a factor of each output. Default: None
        conv (Tensor, optional): ``(D, K)``, the taps of a convolution in front. Default: None

    Returns:
        Tensor: ``(B, D, L, L)``, float64.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> maps = naive_diagonal_matrix(dt, dt, A, Bm, Cm)
        >>> expected = diagonal_rows(torch.arange(5), dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(maps.float(), expected)
    """
    dt, right, A, Bm, Cm = (x.double() for x in (dt, right, A, Bm, Cm))
    batch, length, channels = dt.shape
    group = torch.arange(channels) // (channels // Bm.shape[2])
    out = torch.zeros(batch, channels, length, length, dtype=torch.float64)
    for j in range(length):
        h = Bm[:, j, group] * right[:, j, :, None]
        for i in range(j, length):
            if i > j:
                h = h * torch.exp(A * dt[:, i, :, None].clamp(max=_HUGE))
            out[:, :, i, j] = (Cm[:, i, group] * h).sum(-1)
    if left is not None:
        out *= left.double().transpose(1, 2)[..., None]
    if conv is not None:
        taps = conv.shape[1]
        shift = torch.zeros(channels, length, length, dtype=torch.float64)
        for s in range(length):
            for j in range(max(0, s - taps + 1), s + 1):
                shift[:, s, j] = conv[:, taps - 1 - (s - j)].double()
        out = out @ shift
    return out


def naive_diagonal_scan(v: Tensor, *coefficients: Any) -> Tensor:
    """:func:`diagonal_scan` through the matrices, in float64.

    Args:
        v (Tensor): values, ``(B, L, D)``.
        *coefficients: those of :func:`naive_diagonal_matrix`, in its order.

    Returns:
        Tensor: ``(B, L, D)``, float64.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> y = naive_diagonal_scan(v, dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(y.float(), diagonal_scan(v, dt, dt, A, Bm, Cm))
    """
    return torch.einsum("bdij,bjd->bid", naive_diagonal_matrix(*coefficients), v.double())


def naive_diagonal_vecmat(w: Tensor, *coefficients: Any, mean: bool = False) -> Tensor:
    """:func:`diagonal_vecmat` through the matrices, in float64.

    Args:
        w (Tensor): ``(B, L, D)`` or ``(B, L)``.
        *coefficients: those of :func:`naive_diagonal_matrix`, in its order.
        mean (bool, optional): return the mean over channels. Default: False

    Returns:
        Tensor: ``(B, L, D)``, or ``(B, L)`` with ``mean``, float64.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> u = naive_diagonal_vecmat(v, dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(u.float(), diagonal_vecmat(v, dt, dt, A, Bm, Cm))
    """
    matrix = naive_diagonal_matrix(*coefficients)
    w = w.double() if w.dim() == 3 else w.double()[..., None].expand(-1, -1, matrix.shape[1])
    u = torch.einsum("bid,bdij->bjd", w, matrix)
    return u.mean(-1) if mean else u


def naive_diagonal_mean(*coefficients: Any, start: int = 0, stop: int | None = None) -> Tensor:
    """:func:`diagonal_mean` through the matrices, in float64.

    Args:
        *coefficients: those of :func:`naive_diagonal_matrix`, in its order.
        start, stop (int, optional): the rows wanted. Default: all rows

    Returns:
        Tensor: ``(B, stop - start, L)``, float64.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> mean = naive_diagonal_mean(dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(mean.float(), diagonal_mean(dt, dt, A, Bm, Cm))
    """
    return naive_diagonal_matrix(*coefficients).mean(1)[:, start:stop]


def naive_diagonal_rows(index: Tensor, *coefficients: Any) -> Tensor:
    """:func:`diagonal_rows` through the matrices, in float64.

    Args:
        index (Tensor): the rows wanted, ``(B, R)`` int64.
        *coefficients: those of :func:`naive_diagonal_matrix`, in its order.

    Returns:
        Tensor: ``(B, D, R, L)``, float64.

    Examples::

        >>> dt, v = torch.rand(2, 1, 5, 4)
        >>> A, (Bm, Cm) = -torch.ones(4, 3), torch.randn(2, 1, 5, 1, 3)
        >>> rows = naive_diagonal_rows(torch.tensor([[1, 4]]), dt, dt, A, Bm, Cm)
        >>> expected = diagonal_rows(torch.tensor([1, 4]), dt, dt, A, Bm, Cm)
        >>> torch.testing.assert_close(rows.float(), expected)
    """
    matrix = naive_diagonal_matrix(*coefficients)
    return torch.stack([matrix[b][:, index[b]] for b in range(len(matrix))])


# ---- registration ---------------------------------------------------------------------------

_COEFFICIENTS = "Tensor dt, Tensor right, Tensor A, Tensor Bm, Tensor Cm, Tensor? left"


def _fake_scan(v: Tensor, dt: Tensor, *coefficients: Tensor | None) -> Tensor:
    return torch.empty_like(dt)


def _fake_vecmat(w: Tensor, dt: Tensor, *rest: Any) -> Tensor:
    return dt.new_empty(dt.shape[:2]) if rest[-1] else torch.empty_like(dt)


def _fake_mean(dt: Tensor, *rest: Any) -> Tensor:
    start, stop = rest[-2:]
    return dt.new_empty(dt.shape[0], stop - start, dt.shape[1])


def _fake_rows(index: Tensor, dt: Tensor, *coefficients: Tensor | None) -> Tensor:
    return dt.new_empty(dt.shape[0], dt.shape[2], index.shape[1], dt.shape[1])


def _backward_scan(grad: Tensor, v: Tensor, *coefficients: Tensor | None) -> Tensor:
    return torch.ops.captum_ssm.diagonal_vecmat(grad.contiguous(), *coefficients, None, False)


def _backward_vecmat(grad: Tensor, w: Tensor, *rest: Any) -> Tensor:
    *coefficients, conv, mean = rest
    if mean:
        channels = coefficients[0].shape[2]
        grad = (grad / channels).unsqueeze(-1).expand(-1, -1, channels)
    back = torch.ops.captum_ssm.diagonal_scan(_convolve(grad, conv).contiguous(), *coefficients)
    return back if w.dim() == 3 else back.sum(-1)


register(
    "diagonal_scan",
    f"(Tensor v, {_COEFFICIENTS}) -> Tensor",
    diagonal_scan_torch,
    _fake_scan,
    _backward_scan,
)
register(
    "diagonal_vecmat",
    f"(Tensor w, {_COEFFICIENTS}, Tensor? conv, bool mean) -> Tensor",
    diagonal_vecmat_torch,
    _fake_vecmat,
    _backward_vecmat,
)
register(
    "diagonal_mean",
    f"({_COEFFICIENTS}, Tensor? conv, int start, int stop) -> Tensor",
    diagonal_mean_torch,
    _fake_mean,
    None,
)
register(
    "diagonal_rows",
    f"(Tensor index, {_COEFFICIENTS}, Tensor? conv) -> Tensor",
    diagonal_rows_torch,
    _fake_rows,
    None,
)
