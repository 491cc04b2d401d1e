r"""Linear attention with decay, and the delta rule: recurrences on a matrix-valued state.

Per head, with a state :math:`S \in \mathbb{R}^{N \times P}`:

.. math::
    S' = \mathrm{diag}(a_t) S_{t-1}, \qquad
    S_t = S' - e_t (r_t^\top S') + k_t v_t^\top, \qquad y_t = q_t^\top S_t

Without e and r this is linear attention with a decay per head or per key dimension; with them it
is the delta rule. With a bonus u, as in RWKV, :math:`y_t = q_t^\top S_{t-1} + u_t v_t`. Either way
a head maps its P channels by one lower triangular matrix,

.. math::
    K^{xy}_{tj} = \textstyle\sum_n x_{tn} y_{jn} \prod_{k=j+1}^{t} a_{kn},
    \qquad \alpha = K^{qk} - K^{qe} (I + \check K^{re})^{-1} \check K^{rk},

K lower triangular and :math:`\check K` strictly so (the inverse: Yang et al., *Parallelizing Linear
Transformers with the Delta Rule over Sequence Length*, 2024).

Shapes: ``query, key, erase, probe (B, L, H, N)``, ``log_decay (B, L, H, 1)`` for a decay per head
or ``(B, L, H, N)`` for one per key dimension, at most zero and possibly ``-inf``,
``bonus (B, L, H)``; values ``(B, L, H, P)``. Heads may share memory (``expand``): nothing is
copied where the numbers of one token and head lie side by side. The CUDA kernels take N up to 1024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.ops._operator import (
    promote,
    register,
    row_index,
    row_range,
    shape_error,
    warn_if_missing,
)

# A full reset, also one given as -inf: it has to stay finite in sums.
MIN_LOG_DECAY = -1e4
# exp(-60) is far below float32's resolution and far above its denormals.
MIN_EXPONENT = -60.0


def _check_coefficients(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None,
    probe: Tensor | None,
    bonus: Tensor | None,
) -> None:
    if query.dim() != 4 or 0 in query.shape[1:]:
        raise shape_error("query", query, "(B, L, H, N) with L, H and N at least 1")
    for name, x in (("key", key), ("erase", erase), ("probe", probe)):
        if x is not None and x.shape != query.shape:
            raise shape_error(name, x, f"that of query, {tuple(query.shape)}")
    if log_decay.shape not in (query.shape, (*query.shape[:3], 1)):
        raise shape_error("log_decay", log_decay, f"{(*query.shape[:3], 1)} or that of query")
    if bonus is not None and bonus.shape != query.shape[:3]:
        raise shape_error("bonus", bonus, f"{tuple(query.shape[:3])}, or None")
    if (erase is None) != (probe is None):
        raise ValueError("erase and probe go together: accepted are both or neither")


# ---- operators ------------------------------------------------------------------------------


def linear_scan(
    v: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """Apply the recurrence to values: ``y_h = alpha_h v_h`` for every head, in linear time.

    Args:
        v (Tensor): values, ``(B, L, H, P)``.
        query, key (Tensor): ``(B, L, H, N)``.
        log_decay (Tensor): ``(B, L, H, 1)``, or ``(B, L, H, N)``; at most 0.
        erase, probe (Tensor, optional): ``(B, L, H, N)``, both for the delta rule. Default: None
        bonus (Tensor, optional): ``(B, L, H)``, as in RWKV. Default: None

    Returns:
        Tensor: ``(B, L, H, P)``. Differentiable; the gradient with respect to ``v`` is one
        :func:`linear_vecmat`.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> linear_scan(v, query, key, log_decay).shape
        torch.Size([1, 5, 2, 3])
    """
    args = promote(
        v=v, query=query, key=key, log_decay=log_decay, erase=erase, probe=probe, bonus=bonus
    )
    _check_coefficients(query, key, log_decay, erase, probe, bonus)
    if v.dim() != 4 or v.shape[:3] != query.shape[:3]:
        raise shape_error("v", v, f"(B, L, H, P) with (B, L, H) = {tuple(query.shape[:3])}")
    warn_if_missing()
    return torch.ops.captum_ssm.linear_scan(*args)


def linear_vecmat(
    w: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """Multiply row vectors with the maps, ``u_h = w_h^T alpha_h``, in linear time.

    Args:
        w (Tensor): ``(B, L, H, P)``, P row vectors for each head, or ``(B, L, 1, P)`` for all of
            them.
        query, key (Tensor): ``(B, L, H, N)``.
        log_decay (Tensor): ``(B, L, H, 1)``, or ``(B, L, H, N)``; at most 0.
        erase, probe (Tensor, optional): ``(B, L, H, N)``, both for the delta rule. Default: None
        bonus (Tensor, optional): ``(B, L, H)``, as in RWKV. Default: None

    Returns:
        Tensor: ``(B, L, H, P)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> last = torch.eye(5)[-1].view(1, 5, 1, 1)
        >>> row = linear_vecmat(last, query, key, log_decay)[..., 0].mean(-1)
        >>> torch.testing.assert_close(row, linear_mean(query, key, log_decay)[:, -1])
    """
    args = promote(
        w=w, query=query, key=key, log_decay=log_decay, erase=erase, probe=probe, bonus=bonus
    )
    _check_coefficients(query, key, log_decay, erase, probe, bonus)
    B, L, H, _ = query.shape
    if w.dim() != 4 or w.shape[:3] not in ((B, L, H), (B, L, 1)):
        raise shape_error("w", w, f"(B, L, H or 1, P) with (B, L, H) = {(B, L, H)}")
    warn_if_missing()
    return torch.ops.captum_ssm.linear_vecmat(*args)


def linear_rows(
    index: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """Rows of every head's matrix. All of them together cost what half a matrix product does.

    Args:
        index (Tensor): the rows wanted, ``(B, R)`` int64 (or ``(R,)`` for the same rows in every
            sequence), each in ``[0, L)``; all of ``0 .. L - 1`` gives the whole matrices.
        query, key (Tensor): ``(B, L, H, N)``.
        log_decay (Tensor): ``(B, L, H, 1)``, or ``(B, L, H, N)``; at most 0.
        erase, probe (Tensor, optional): ``(B, L, H, N)``, both for the delta rule. Default: None
        bonus (Tensor, optional): ``(B, L, H)``, as in RWKV. Default: None

    Returns:
        Tensor: ``(B, H, R, L)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted.
        IndexError: a row outside the sequence was asked for.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> maps = linear_rows(torch.arange(5), query, key, log_decay)  # (B, H, L, L)
        >>> y = torch.einsum("bhij,bjhp->bihp", maps, v)
        >>> torch.testing.assert_close(y, linear_scan(v, query, key, log_decay))
    """
    args = promote(query=query, key=key, log_decay=log_decay, erase=erase, probe=probe, bonus=bonus)
    _check_coefficients(query, key, log_decay, erase, probe, bonus)
    index = row_index(index, query)
    warn_if_missing()
    return torch.ops.captum_ssm.linear_rows(index, *args)


def linear_mean(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows ``[start, stop)`` of the mean over heads, ``mean_h(alpha_h)``.

    Heads are added up as they come: no head's own matrix is ever formed. A range of rows costs
    its share of the whole.

    Args:
        query, key (Tensor): ``(B, L, H, N)``.
        log_decay (Tensor): ``(B, L, H, 1)``, or ``(B, L, H, N)``; at most 0.
        erase, probe (Tensor, optional): ``(B, L, H, N)``, both for the delta rule. Default: None
        bonus (Tensor, optional): ``(B, L, H)``, as in RWKV. Default: None
        start, stop (int, optional): the rows wanted, ``0 <= start < stop <= L``; a ``stop`` of None
            stands for L. Default: all rows

    Returns:
        Tensor: ``(B, stop - start, L)``. Differentiable.

    Raises:
        ValueError, TypeError: an argument's shape, dtype or device is not accepted, or the range of
            rows is empty or leaves the sequence.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> linear_mean(query, key, log_decay, start=2, stop=4).shape
        torch.Size([1, 2, 5])
    """
    args = promote(query=query, key=key, log_decay=log_decay, erase=erase, probe=probe, bonus=bonus)
    _check_coefficients(query, key, log_decay, erase, probe, bonus)
    start, stop = row_range(start, stop, query)
    warn_if_missing()
    return torch.ops.captum_ssm.linear_mean(*args, start, stop)


# ---- PyTorch forms --------------------------------------------------------------------------
#
# Chunk by chunk in matrix products, with decays taken from the nearest chunk boundary.


def linear_scan_torch(
    v: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """PyTorch form of :func:`linear_scan`.

    The arguments are those of :func:`linear_scan`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, L, H, P)``.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> y = linear_scan_torch(v, query, key, log_decay)
        >>> torch.testing.assert_close(y, linear_scan(v, query, key, log_decay))
    """
    B, _, H, N = query.shape
    state = v.new_zeros(B, H, N, v.shape[-1])
    out = []
    for at in _chunks(log_decay):
        chunk = _chunk(at, query, key, log_decay, erase, probe, bonus)
        x = v[:, at].transpose(1, 2)
        y = chunk.q_in @ state + chunk.qk @ x
        after = chunk.through * state + chunk.k_out.mT @ x
        if chunk.delta is not None:
            # What the probes find, earlier writes within the chunk included.
            u = chunk.delta.solve(chunk.delta.r_in @ state + chunk.delta.rk @ x)
            y = y - chunk.delta.qe @ u
            after = after - chunk.delta.e_out.mT @ u
        state = after
        out.append(y)
    return torch.cat(out, 2).transpose(1, 2)


def linear_vecmat_torch(
    w: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """PyTorch form of :func:`linear_vecmat`.

    The arguments are those of :func:`linear_vecmat`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, L, H, P)``.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> u = linear_vecmat_torch(v, query, key, log_decay)
        >>> torch.testing.assert_close(u, linear_vecmat(v, query, key, log_decay))
    """
    B, L, H, N = query.shape
    w = w.expand(B, L, H, -1)
    state = w.new_zeros(B, H, N, w.shape[-1])
    out = []
    for at in reversed(list(_chunks(log_decay))):
        chunk = _chunk(at, query, key, log_decay, erase, probe, bonus)
        x = w[:, at].transpose(1, 2)
        u = chunk.qk.mT @ x + chunk.k_out @ state
        before = chunk.q_in.mT @ x + chunk.through * state
        if chunk.delta is not None:
            z = -(chunk.delta.qe.mT @ x) - chunk.delta.e_out @ state
            z = chunk.delta.solve(z, transpose=True)
            u = u + chunk.delta.rk.mT @ z
            before = before + chunk.delta.r_in.mT @ z
        state = before
        out.append(u)
    return torch.cat(out[::-1], 2).transpose(1, 2)


def linear_rows_torch(
    index: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """PyTorch form of :func:`linear_rows`: row i is e_i^T alpha.

    The arguments are those of :func:`linear_rows`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, H, R, L)``.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> rows = linear_rows_torch(torch.tensor([[1, 4]]), query, key, log_decay)
        >>> expected = linear_rows(torch.tensor([1, 4]), query, key, log_decay)
        >>> torch.testing.assert_close(rows, expected)
    """
    w = F.one_hot(index, query.shape[1]).to(query.dtype).mT.unsqueeze(2)  # (B, L, 1, R)
    u = linear_vecmat_torch(w, query, key, log_decay, erase, probe, bonus)
    return u.permute(0, 2, 3, 1)


def linear_mean_torch(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """PyTorch form of :func:`linear_mean`.

    The arguments are those of :func:`linear_mean`, of one floating dtype and device, and are
    not checked.

    Returns:
        Tensor: ``(B, stop - start, L)``.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> mean = linear_mean_torch(query, key, log_decay)
        >>> torch.testing.assert_close(mean, linear_mean(query, key, log_decay))
    """
    B, L, H, _ = query.shape
    index = torch.arange(start, L if stop is None else stop, device=query.device).expand(B, -1)
    total = query.new_zeros(B, index.shape[1], L)
    together = max(1, 2**24 // max(1, total.numel()))
    for h in range(0, H, together):
        heads: Any = [
            None if x is None else x[:, :, h : h + together]
            for x in (query, key, log_decay, erase, probe, bonus)
        ]
        total = total + linear_rows_torch(index, *heads).sum(1)
    return total / H


def _chunks(log_decay: Tensor) -> Iterator[slice]:
    # A decay per key dimension makes a chunk's scores (T, T, N) on the way.
    L = log_decay.shape[1]
    size = 64 if log_decay.shape[-1] == 1 else 16
    for start in range(0, L, size):
        yield slice(start, min(L, start + size))


@dataclass(frozen=True)
class _Delta:
    # What the delta rule adds to a chunk: probes and erasures, their scores, the inner solve.
    r_in: Tensor
    e_out: Tensor
    rk: Tensor
    qe: Tensor
    solve: _UnitTriangular


@dataclass(frozen=True)
class _Chunk:
    # The coefficients of T tokens: (B, H, T, N), scores (B, H, T, T), through (B, H, 1 or N, 1).
    q_in: Tensor
    k_out: Tensor
    qk: Tensor
    through: Tensor
    delta: _Delta | None


class _UnitTriangular:
    """Solves with I plus a strictly lower triangular matrix."""

    def __init__(self, lower: Tensor) -> None:
        self.lower = lower

    def __call__(self, b: Tensor, transpose: bool = False) -> Tensor:
        matrix = self.lower.mT if transpose else self.lower
        return torch.linalg.solve_triangular(matrix, b, upper=transpose, unitriangular=True)


def _chunk(
    at: slice,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None,
    probe: Tensor | None,
    bonus: Tensor | None,
) -> _Chunk:
    def part(x: Tensor) -> Tensor:
        return x[:, at].transpose(1, 2)  # (B, H, T, N)

    q, k = part(query), part(key)
    steps = part(log_decay).double().clamp(min=MIN_LOG_DECAY)
    total = steps.cumsum(2)  # from the boundary to the token
    seen, own = total, 0
    if bonus is not None:
        seen, own = torch.cat([torch.zeros_like(total[:, :, :1]), total[:, :, :-1]], 2), -1
    qk = _scores(q, k, seen, total, own)
    if bonus is not None:
        qk = qk + torch.diag_embed(bonus[:, at].mT)
    to_end = _exp(total[:, :, -1:] - total, q.dtype)
    delta = None
    if erase is not None and probe is not None:
        e, r = part(erase), part(probe)
        delta = _Delta(
            r_in=r * _exp(total, q.dtype),
            e_out=e * to_end,
            rk=_scores(r, k, total, total, -1),
            qe=_scores(q, e, seen, total, own),
            solve=_UnitTriangular(_scores(r, e, total, total, -1)),
        )
    return _Chunk(
        q_in=q * _exp(seen, q.dtype),
        k_out=k * to_end,
        qk=qk,
        through=_exp(total[:, :, -1], q.dtype)[..., None],
        delta=delta,
    )


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp(min=MIN_EXPONENT).to(dtype).exp()


def _scores(x: Tensor, y: Tensor, seen: Tensor, total: Tensor, diagonal: int) -> Tensor:
    # sum_n x_in y_jn exp(seen_in - total_jn) for j <= i + diagonal: (B, H, T, T).
    exponent = seen[:, :, :, None] - total[:, :, None]  # (B, H, T, T, 1 or N)
    decay = _exp(exponent.clamp(max=0.0), x.dtype)
    if decay.shape[-1] == 1:
        scores = (x @ y.mT) * decay[..., 0]
    else:
        scores = torch.einsum("bhin,bhjn,bhijn->bhij", x, y, decay)
    return scores.tril(diagonal)


# ---- naive forms ----------------------------------------------------------------------------


def naive_linear_matrix(
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    erase: Tensor | None = None,
    probe: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """Every head's map: the recurrence with unit vectors for values, in float64.

    Args:
        query, key (Tensor): ``(B, L, H, N)``.
        log_decay (Tensor): ``(B, L, H, 1)``, or ``(B, L, H, N)``; at most 0.
        erase, probe (Tensor, optional): ``(B, L, H, N)``, both for the delta rule. Default: None
        bonus (Tensor, optional): ``(B, L, H)``, as in RWKV. Default: None

    Returns:
        Tensor: ``(B, H, L, L)``, float64.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> maps = naive_linear_matrix(query, key, log_decay)
        >>> expected = linear_rows(torch.arange(5), query, key, log_decay)
        >>> torch.testing.assert_close(maps.float(), expected)
    """
    q, k, a = (t.double() for t in (query, key, log_decay.double().exp()))
    B, L, H, N = q.shape
    state = torch.zeros(B, H, N, L, dtype=torch.float64)
    rows = []
    for t, value in enumerate(torch.eye(L, dtype=torch.float64)):
        before = state
        state = a[:, t, :, :, None] * state
        if erase is not None and probe is not None:
            found = (probe[:, t, :, :, None].double() * state).sum(2, keepdim=True)
            state = state - erase[:, t, :, :, None].double() * found
        state = state + k[:, t, :, :, None] * value
        row = (q[:, t, :, :, None] * (state if bonus is None else before)).sum(2)
        rows.append(row if bonus is None else row + bonus[:, t, :, None].double() * value)
    return torch.stack(rows, 2)


def naive_linear_scan(v: Tensor, *coefficients: Any) -> Tensor:
    """:func:`linear_scan` through the matrices, in float64.

    Args:
        v (Tensor): values, ``(B, L, H, P)``.
        *coefficients: those of :func:`naive_linear_matrix`, in its order.

    Returns:
        Tensor: ``(B, L, H, P)``, float64.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> y = naive_linear_scan(v, query, key, log_decay)
        >>> torch.testing.assert_close(y.float(), linear_scan(v, query, key, log_decay))
    """
    return torch.einsum("bhij,bjhp->bihp", naive_linear_matrix(*coefficients), v.double())


def naive_linear_vecmat(w: Tensor, *coefficients: Any) -> Tensor:
    """:func:`linear_vecmat` through the matrices, in float64.

    Args:
        w (Tensor): ``(B, L, H, P)`` or ``(B, L, 1, P)``.
        *coefficients: those of :func:`naive_linear_matrix`, in its order.

    Returns:
        Tensor: ``(B, L, H, P)``, float64.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> u = naive_linear_vecmat(v, query, key, log_decay)
        >>> torch.testing.assert_close(u.float(), linear_vecmat(v, query, key, log_decay))
    """
    matrix = naive_linear_matrix(*coefficients)
    w = w.double().expand(-1, -1, matrix.shape[1], -1)
    return torch.einsum("bihp,bhij->bjhp", w, matrix)


def naive_linear_rows(index: Tensor, *coefficients: Any) -> Tensor:
    """:func:`linear_rows` through the matrices, in float64.

    Args:
        index (Tensor): the rows wanted, ``(B, R)`` int64.
        *coefficients: those of :func:`naive_linear_matrix`, in its order.

    Returns:
        Tensor: ``(B, H, R, L)``, float64.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> rows = naive_linear_rows(torch.tensor([[1, 4]]), query, key, log_decay)
        >>> expected = linear_rows(torch.tensor([1, 4]), query, key, log_decay)
        >>> torch.testing.assert_close(rows.float(), expected)
    """
    matrix = naive_linear_matrix(*coefficients)
    return torch.stack([matrix[b][:, index[b]] for b in range(len(matrix))])


def naive_linear_mean(*coefficients: Any, start: int = 0, stop: int | None = None) -> Tensor:
    """:func:`linear_mean` through the matrices, in float64.

    Args:
        *coefficients: those of :func:`naive_linear_matrix`, in its order.
        start, stop (int, optional): the rows wanted. Default: all rows

    Returns:
        Tensor: ``(B, stop - start, L)``, float64.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> log_decay = -torch.rand(1, 5, 2, 1)
        >>> mean = naive_linear_mean(query, key, log_decay)
        >>> torch.testing.assert_close(mean.float(), linear_mean(query, key, log_decay))
    """
    return naive_linear_matrix(*coefficients).mean(1)[:, start:stop]


# ---- registration ---------------------------------------------------------------------------

_COEFFICIENTS = (
    "Tensor query, Tensor key, Tensor log_decay, Tensor? erase, Tensor? probe, Tensor? bonus"
)


def _fake_scan(v: Tensor, *coefficients: Tensor | None) -> Tensor:
    return v.new_empty(v.shape)


def _fake_vecmat(w: Tensor, query: Tensor, *coefficients: Tensor | None) -> Tensor:
    return w.new_empty(*query.shape[:3], w.shape[3])


def _fake_rows(index: Tensor, query: Tensor, *coefficients: Tensor | None) -> Tensor:
    B, L, H, _ = query.shape
    return query.new_empty(B, H, index.shape[1], L)


def _fake_mean(query: Tensor, *rest: Any) -> Tensor:
    start, stop = rest[-2:]
    return query.new_empty(query.shape[0], stop - start, query.shape[1])


def _backward_scan(grad: Tensor, v: Tensor, *coefficients: Tensor | None) -> Tensor:
    return torch.ops.captum_ssm.linear_vecmat(grad, *coefficients)


def _backward_vecmat(grad: Tensor, w: Tensor, *coefficients: Tensor | None) -> Tensor:
    back = torch.ops.captum_ssm.linear_scan(grad, *coefficients)
    return back if w.shape[2] == back.shape[2] else back.sum(2, keepdim=True)


register(
    "linear_scan",
    f"(Tensor v, {_COEFFICIENTS}) -> Tensor",
    linear_scan_torch,
    _fake_scan,
    _backward_scan,
)
register(
    "linear_vecmat",
    f"(Tensor w, {_COEFFICIENTS}) -> Tensor",
    linear_vecmat_torch,
    _fake_vecmat,
    _backward_vecmat,
)
register(
    "linear_rows",
    f"(Tensor index, {_COEFFICIENTS}) -> Tensor",
    linear_rows_torch,
    _fake_rows,
    None,
)
register(
    "linear_mean",
    f"({_COEFFICIENTS}, int start, int stop) -> Tensor",
    linear_mean_torch,
    _fake_mean,
    None,
)
