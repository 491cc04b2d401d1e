r"""Linear attention with decay, and the delta rule: recurrences on a matrix-valued state.

Per head, with a state :math:`S \in \mathbb{R}^{N \times P}`:

.. math::
    S' = \mathrm{diag}(a_t) S_{t-1}, \qquad
    S_t = S' - e_t (r_t^\top S') + k_t v_t^\top, \qquad y_t = q_t^\top S_t

Without e and r this is linear attention with a decay per head (Mamba-2, RetNet, lightning
attention, mLSTM) or per key dimension (GLA, HGRN2, RWKV-6). With them it is the delta rule
(DeltaNet, Gated DeltaNet, Kimi Delta Attention, RWKV-7): before a value is written, what the
state holds under r_t is read and e_t takes it away. The matrix stays exact. With

.. math::
    K^{xy}_{tj} = \textstyle\sum_n x_{tn} y_{jn} \prod_{k=j+1}^{t} a_{kn},
    \qquad \alpha = K^{qk} - K^{qe} (I + \check K^{re})^{-1} \check K^{rk},

K lower triangular and :math:`\check K` strictly so. Everything runs chunk by chunk in matrix
products, forwards for :meth:`apply` and backwards for rows, with decays taken from the nearest
chunk boundary so that every factor is at most one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators.heads import HeadOperator

# exp(-60) is far below float32's resolution and far above its denormals.
MIN_EXPONENT = -60.0
# A full reset, also one given as -inf: it has to stay finite in sums.
MIN_LOG_DECAY = -1e4


@dataclass(frozen=True)
class LinearAttentionOperator(HeadOperator):
    """Linear attention with decay and an optional delta rule; one map per head.

    Args:
        query (Tensor): q, ``(B, L, H, N)``.
        key (Tensor): k, ``(B, L, H, N)``, with every factor of the value folded in.
        log_decay (Tensor): log a <= 0, ``(B, L, H, 1)`` for a decay per head or
            ``(B, L, H, N)`` for one per key dimension.
        width (int): P, the channels of a head.
        erase (Tensor, optional): e, ``(B, L, H, N)``. Default: None
        probe (Tensor, optional): r, ``(B, L, H, N)``, given with ``erase``. Default: None
        bonus (Tensor, optional): ``(B, L, H)``. With it the output reads the state ahead of the
            token's own decay and write, and the token's own value enters with this weight
            (RWKV). Default: None
    """

    query: Tensor
    key: Tensor
    log_decay: Tensor
    width: int
    erase: Tensor | None = None
    probe: Tensor | None = None
    bonus: Tensor | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        B, L, H, _ = self.query.shape
        return B, L, H

    @property
    def reference(self) -> Tensor:
        return self.query

    def apply_heads(self, v: Tensor) -> Tensor:
        B, _, H = self.heads
        state = v.new_zeros(B, H, self.query.shape[-1], v.shape[-1])
        out = []
        for at in self._chunks():
            chunk = self._chunk(at, 0, H)
            x = v[:, :, at]
            y = chunk.q_in @ state + chunk.qk @ x
            after = chunk.through * state + chunk.k_out.mT @ x
            if chunk.delta is not None:
                # What the probes find, earlier writes within the chunk included.
                u = chunk.delta.solve(chunk.delta.r_in @ state + chunk.delta.rk @ x)
                y = y - chunk.delta.qe @ u
                after = after - chunk.delta.e_out.mT @ u
            state = after
            out.append(y)
        return torch.cat(out, 2)

    def vecmat_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        B, L, _ = self.heads
        w = w.expand(B, stop - start, L, -1)
        # Behind the last row asked for there is nothing to carry back.
        rows = (w != 0).any(-1).any(1).any(0).nonzero()
        end = int(rows[-1]) + 1 if rows.numel() else 0
        state = w.new_zeros(B, stop - start, self.query.shape[-1], w.shape[-1])
        out = []
        for at in reversed(list(self._chunks())):
            if at.start >= end:
                out.append(torch.zeros_like(w[:, :, at]))
                continue
            chunk = self._chunk(at, start, stop)
            x = w[:, :, at]
            u = chunk.qk.mT @ x + chunk.k_out @ state
            before = chunk.q_in.mT @ x + chunk.through * state
            if chunk.delta is not None:
                z = -(chunk.delta.qe.mT @ x) - chunk.delta.e_out @ state
                z = chunk.delta.solve(z, transpose=True)
                u = u + chunk.delta.rk.mT @ z
                before = before + chunk.delta.r_in.mT @ z
            state = before
            out.append(u)
        return torch.cat(out[::-1], 2)

    def _chunks(self) -> Iterator[slice]:
        # A decay per key dimension makes a chunk's scores (T, T, N) on the way.
        L = self.length
        size = 64 if self.log_decay.shape[-1] == 1 else 16
        for start in range(0, L, size):
            yield slice(start, min(L, start + size))

    def _chunk(self, at: slice, start: int, stop: int) -> _Chunk:
        def part(x: Tensor) -> Tensor:
            return x[:, at, start:stop].transpose(1, 2)  # (B, h, T, N)

        q, k = part(self.query), part(self.key)
        steps = part(self.log_decay).double().clamp(min=MIN_LOG_DECAY)
        total = steps.cumsum(2)  # from the boundary to the token
        seen, own = total, 0
        if self.bonus is not None:
            seen, own = torch.cat([torch.zeros_like(total[:, :, :1]), total[:, :, :-1]], 2), -1
        qk = _scores(q, k, seen, total, own)
        if self.bonus is not None:
            qk = qk + torch.diag_embed(self.bonus[:, at, start:stop].mT)
        to_end = _exp(total[:, :, -1:] - total, q.dtype)
        delta = None
        if self.erase is not None and self.probe is not None:
            e, r = part(self.erase), part(self.probe)
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
    # The coefficients of T tokens: (B, h, T, N), scores (B, h, T, T), through (B, h, 1 or N, 1).
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


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp(min=MIN_EXPONENT).to(dtype).exp()


def _scores(x: Tensor, y: Tensor, seen: Tensor, total: Tensor, diagonal: int) -> Tensor:
    # sum_n x_in y_jn exp(seen_in - total_jn) for j <= i + diagonal: (B, h, T, T).
    exponent = seen[:, :, :, None] - total[:, :, None]  # (B, h, T, T, 1 or N)
    decay = _exp(exponent.clamp(max=0.0), x.dtype)
    if decay.shape[-1] == 1:
        scores = (x @ y.mT) * decay[..., 0]
    else:
        scores = torch.einsum("bhin,bhjn,bhijn->bhij", x, y, decay)
    return scores.tril(diagonal)


def naive_matrix(op: LinearAttentionOperator) -> Tensor:
    """Every head's map, one unit value at a time through the recurrence: ``(B, H, L, L)``."""
    q, k, a = (t.double() for t in (op.query, op.key, op.log_decay.exp()))
    B, L, H = op.heads
    out = torch.zeros(B, H, L, L, dtype=torch.float64)
    for j in range(L):
        state = torch.zeros(B, H, q.shape[-1], dtype=torch.float64)
        for t in range(j, L):
            before = state
            state = a[:, t] * state
            if op.erase is not None and op.probe is not None:
                found = (op.probe[:, t].double() * state).sum(-1, keepdim=True)
                state = state - op.erase[:, t].double() * found
            if t == j:
                state = state + k[:, t]
            out[:, :, t, j] = (q[:, t] * (state if op.bonus is None else before)).sum(-1)
        if op.bonus is not None:
            out[:, :, j, j] += op.bonus[:, j].double()
    return out
