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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.kernels.arguments import row_index, row_range, shape_error
from captum_ssm.kernels.extension import OPS, warn_if_missing
from captum_ssm.kernels.linear_attention_chunks import chunk_of, chunks, part_of, states
from captum_ssm.kernels.linear_attention_coefficients import (
    TENSORS,
    LinearAttentionCoefficients,
    checked,
    tensors_of,
)
from captum_ssm.kernels.registration import operation


def linear_attention_scan(v: Tensor, coefficients: LinearAttentionCoefficients) -> Tensor:
    """Apply the maps to values, ``y_h = alpha_h v_h`` for every head, in linear time.

    Args:
        v (Tensor): values, ``(B, L, H, P)``.
        coefficients (LinearAttentionCoefficients): the recurrence.

    Returns:
        Tensor: ``(B, L, H, P)``. Differentiable; the gradient with respect to ``v`` alone is one
        :func:`linear_attention_rmatvec`, all gradients are one ``linear_attention_scan_backward``.

    Raises:
        ValueError, TypeError: an argument has an unexpected shape, dtype or device.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> linear_attention_scan(v, coefficients).shape
        torch.Size([1, 5, 2, 3])
    """
    tensors = checked(coefficients, v=v)
    shape = tuple(coefficients.query.shape[:3])
    if v.dim() != 4 or v.shape[:3] != shape:
        raise shape_error("v", v, f"(B, L, H, P) with (B, L, H) = {shape}")
    warn_if_missing()
    return OPS.linear_attention_scan(*tensors)


@operation(
    f"linear_attention_scan(Tensor v, {TENSORS}) -> Tensor",
    LinearAttentionCoefficients,
    fake=lambda v, c: v.new_empty(v.shape),
    backward=lambda grad, v, c, needed: _scan_backward(grad, v, c, needed),
)
def linear_attention_scan_torch(v: Tensor, c: LinearAttentionCoefficients) -> Tensor:
    out = []
    for at, chunk, state, probed in states(v, c):
        y = chunk.q_in @ state + chunk.qk @ part_of(v, at)
        if chunk.delta is not None and probed is not None:
            y = y - chunk.delta.qe @ probed
        out.append(y)
    return torch.cat(out, 2).transpose(1, 2)


def _scan_backward(
    grad: Tensor, v: Tensor, c: LinearAttentionCoefficients, wanted: list[bool]
) -> Sequence[Tensor | None]:
    """The gradients of v and of the coefficients; those not wanted are empty."""
    if not any(wanted[1:]):
        return linear_attention_rmatvec(grad, c), *[None] * 6
    return OPS.linear_attention_scan_backward(grad, v, *tensors_of(c).values(), wanted)


def linear_attention_rmatvec(w: Tensor, coefficients: LinearAttentionCoefficients) -> Tensor:
    """Multiply row vectors with the maps, ``u_h = w_h^T alpha_h``, in linear time.

    The coefficients and the errors are those of :func:`linear_attention_scan`.

    Args:
        w (Tensor): ``(B, L, H, P)``, P row vectors for each head, or ``(B, L, 1, P)`` for all of
            them.

    Returns:
        Tensor: ``(B, L, H, P)``. Differentiable; the gradient with respect to ``w`` is one
        :func:`linear_attention_scan`.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> last = torch.eye(5)[-1].view(1, 5, 1, 1)
        >>> row = linear_attention_rmatvec(last, coefficients)[..., 0].mean(-1)
        >>> torch.testing.assert_close(row, linear_attention_mean(coefficients)[:, -1])
    """
    tensors = checked(coefficients, w=w)
    B, L, H, _ = coefficients.query.shape
    if w.dim() != 4 or w.shape[:3] not in ((B, L, H), (B, L, 1)):
        raise shape_error("w", w, f"(B, L, H or 1, P) with (B, L, H) = {(B, L, H)}")
    warn_if_missing()
    return OPS.linear_attention_rmatvec(*tensors)


def _rmatvec_backward(
    grad: Tensor, w: Tensor, c: LinearAttentionCoefficients, needed: list[bool]
) -> Sequence[Tensor | None]:
    back = None
    if needed[0]:
        back = linear_attention_scan(grad, c)
        back = back if w.shape[2] == back.shape[2] else back.sum(2, keepdim=True)
    if not any(needed[1:]):
        return back, *[None] * 6
    # w^T alpha grad is bilinear: w takes the place of a scan's gradient, grad that of its values.
    _, *others = _scan_backward(w.expand_as(grad), grad, c, [False, *needed[1:]])
    return back, *others


@operation(
    f"linear_attention_rmatvec(Tensor w, {TENSORS}) -> Tensor",
    LinearAttentionCoefficients,
    fake=lambda w, c: w.new_empty(*c.query.shape[:3], w.shape[3]),
    backward=_rmatvec_backward,
)
def linear_attention_rmatvec_torch(w: Tensor, c: LinearAttentionCoefficients) -> Tensor:
    B, L, H, N = c.query.shape
    w = w.expand(B, L, H, -1)
    adjoint = w.new_zeros(B, H, N, w.shape[-1])
    out = []
    for at in reversed(list(chunks(c.log_decay))):
        u, adjoint, _ = chunk_of(at, c).adjoint(part_of(w, at), adjoint)
        out.append(u)
    return torch.cat(out[::-1], 2).transpose(1, 2)


def linear_attention_mean(
    coefficients: LinearAttentionCoefficients, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows ``[start, stop)`` of the mean over heads, ``mean_h(alpha_h)``.

    Heads are added up without storing every head's matrix. A range of rows costs its share of the
    whole. The coefficients are those of :func:`linear_attention_scan`, the range of rows and the
    errors those of :func:`~captum_ssm.kernels.diagonal_mean`.

    Returns:
        Tensor: ``(B, stop - start, L)``. Differentiable.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> linear_attention_mean(coefficients, start=2, stop=4).shape
        torch.Size([1, 2, 5])
    """
    tensors = checked(coefficients)
    rows = row_range(start, stop, coefficients.query)
    warn_if_missing()
    return OPS.linear_attention_mean(*tensors, *rows)


@operation(
    f"linear_attention_mean({TENSORS}, int start, int stop) -> Tensor",
    LinearAttentionCoefficients,
    fake=lambda c, start, stop: c.query.new_empty(len(c.query), stop - start, c.query.shape[1]),
)
def linear_attention_mean_torch(
    c: LinearAttentionCoefficients, start: int = 0, stop: int | None = None
) -> Tensor:
    B, L, H, _ = c.query.shape
    index = torch.arange(start, L if stop is None else stop, device=c.query.device).expand(B, -1)
    total = c.query.new_zeros(B, index.shape[1], L)
    together = max(1, 2**24 // max(1, total.numel()))
    for h in range(0, H, together):
        total = total + linear_attention_rows_torch(index, c.narrow(h, h + together)).sum(1)
    return total / H


def linear_attention_rows(index: Tensor, coefficients: LinearAttentionCoefficients) -> Tensor:
    """Rows of every head's matrix. All rows together cost half a matrix product.

    The coefficients are those of :func:`linear_attention_scan`, ``index`` and the errors those of
    :func:`~captum_ssm.kernels.diagonal_rows`.

    Returns:
        Tensor: ``(B, H, R, L)``. Differentiable.

    Examples::

        >>> query, key, v = torch.randn(3, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> maps = linear_attention_rows(torch.arange(5), coefficients)  # (B, H, L, L)
        >>> y = torch.einsum("bhij,bjhp->bihp", maps, v)
        >>> torch.testing.assert_close(y, linear_attention_scan(v, coefficients))
    """
    tensors = checked(coefficients)
    index = row_index(index, coefficients.query)
    warn_if_missing()
    return OPS.linear_attention_rows(index, *tensors)


@operation(
    f"linear_attention_rows(Tensor index, {TENSORS}) -> Tensor",
    LinearAttentionCoefficients,
    fake=lambda index, c: c.query.new_empty(
        len(c.query), c.query.shape[2], index.shape[1], c.query.shape[1]
    ),
)
def linear_attention_rows_torch(index: Tensor, c: LinearAttentionCoefficients) -> Tensor:
    # Row i is e_i^T alpha.
    w = F.one_hot(index, c.query.shape[1]).to(c.query.dtype).mT.unsqueeze(2)  # (B, L, 1, R)
    return linear_attention_rmatvec_torch(w, c).permute(0, 2, 3, 1)


def naive_linear_attention_matrix(coefficients: LinearAttentionCoefficients) -> Tensor:
    """Every head's map, ``(B, H, L, L)``: the recurrence with unit vectors for values, for tests.

    Computed in float64. The ``coefficients`` are those of :func:`linear_attention_scan`.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
        >>> maps = naive_linear_attention_matrix(coefficients)
        >>> expected = linear_attention_rows(torch.arange(5), coefficients)
        >>> torch.testing.assert_close(maps.float(), expected)
    """
    c = coefficients
    q, k, a = c.query.double(), c.key.double(), c.log_decay.double().exp()
    B, L, H, N = q.shape
    state = torch.zeros(B, H, N, L, dtype=torch.float64)
    rows = []
    for t, value in enumerate(torch.eye(L, dtype=torch.float64)):
        before = state
        state = a[:, t, :, :, None] * state
        if c.erase is not None and c.probe is not None:
            read = (c.probe[:, t, :, :, None].double() * state).sum(2, keepdim=True)
            state = state - c.erase[:, t, :, :, None].double() * read
        state = state + k[:, t, :, :, None] * value
        row = (q[:, t, :, :, None] * (state if c.bonus is None else before)).sum(2)
        rows.append(row if c.bonus is None else row + c.bonus[:, t, :, None].double() * value)
    return torch.stack(rows, 2)
