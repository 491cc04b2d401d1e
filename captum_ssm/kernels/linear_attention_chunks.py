"""The states of linear attention and of the delta rule, in PyTorch: chunk by chunk of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.kernels.linear_attention_coefficients import (
    MIN_EXPONENT,
    MIN_LOG_DECAY,
    LinearAttentionCoefficients,
)


def states(
    v: Tensor, c: LinearAttentionCoefficients
) -> Iterator[tuple[slice, Chunk, Tensor, Tensor | None]]:
    """The chunks, each with the state before it and what its probes read (the delta rule's)."""
    B, _, H, N = c.query.shape
    state = v.new_zeros(B, H, N, v.shape[-1])
    for at in chunks(c.log_decay):
        chunk, x = chunk_of(at, c), part_of(v, at)
        after, probed = chunk.through * state + chunk.k_out.mT @ x, None
        if chunk.delta is not None:
            # Probes read earlier writes within the chunk, too.
            probed = chunk.delta.solve(chunk.delta.r_in @ state + chunk.delta.rk @ x)
            after = after - chunk.delta.e_out.mT @ probed
        yield at, chunk, state, probed
        state = after


def chunks(log_decay: Tensor) -> Iterator[slice]:
    """Stretches of tokens. With a decay per key scores are (T, T, N) before the sum over N."""
    L = log_decay.shape[1]
    size = 64 if log_decay.shape[-1] == 1 else 16
    for start in range(0, L, size):
        yield slice(start, min(L, start + size))


@dataclass(frozen=True)
class Decays:
    """The decays within a chunk: each (B, H, T, N), or with N = 1 for a decay per head."""

    seen: Tensor  # from the boundary to a token's read
    total: Tensor  # from the boundary to a token's write
    to_end: Tensor  # from a token's write to the end
    read: Tensor  # (B, H, T, T, N), from the write of j to the read of i, zero where it is later
    probe: Tensor  # likewise to the probe of i
    through: Tensor  # (B, H, N, 1), from the boundary to the end


def decays_of(at: slice, c: LinearAttentionCoefficients) -> Decays:
    dtype = c.query.dtype
    steps = c.log_decay[:, at].transpose(1, 2).double().clamp(min=MIN_LOG_DECAY)
    total = steps.cumsum(2)
    seen, last_read = total, 0
    if c.bonus is not None:
        seen, last_read = torch.cat([torch.zeros_like(total[:, :, :1]), total[:, :, :-1]], 2), -1

    def between(seen: Tensor, diagonal: int) -> Tensor:
        exponent = seen[:, :, :, None] - total[:, :, None]
        is_read = _triangle(exponent, diagonal)
        # Later writes would overflow. A clamp would have no gradient where nothing decays.
        return _exp(exponent.where(is_read, 0.0), dtype) * is_read

    return Decays(
        seen=_exp(seen, dtype),
        total=_exp(total, dtype),
        to_end=_exp(total[:, :, -1:] - total, dtype),
        read=between(seen, last_read),
        probe=between(total, -1),
        through=_exp(total[:, :, -1], dtype)[..., None],
    )


@dataclass(frozen=True)
class _Delta:
    # The delta rule's part of a chunk: probes and erasures, and their scores.
    r_in: Tensor
    e_out: Tensor
    rk: Tensor
    qe: Tensor
    re: Tensor

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        # With I + re, or its transpose.
        matrix = self.re.mT if transpose else self.re
        return torch.linalg.solve_triangular(matrix, b, upper=transpose, unitriangular=True)


@dataclass(frozen=True)
class Chunk:
    """The coefficients of T tokens: (B, H, T, N), scores (B, H, T, T), through (B, H, N, 1)."""

    q_in: Tensor
    k_out: Tensor
    qk: Tensor
    through: Tensor
    delta: _Delta | None

    def adjoint(self, g: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of the values, of the state before the chunk, and of what probes read.

        They are those for gradients of its output, ``g``, and of the state after it.
        """
        of_values = self.qk.mT @ g + self.k_out @ after
        before = self.q_in.mT @ g + self.through * after
        if self.delta is None:
            return of_values, before, None
        z = -(self.delta.qe.mT @ g) - self.delta.e_out @ after
        z = self.delta.solve(z, transpose=True)
        return of_values + self.delta.rk.mT @ z, before + self.delta.r_in.mT @ z, z


def part_of(x: Tensor, at: slice) -> Tensor:
    """Some tokens of (B, L, H, N), as (B, H, T, N)."""
    return x[:, at].transpose(1, 2)


def chunk_of(at: slice, c: LinearAttentionCoefficients) -> Chunk:
    decays = decays_of(at, c)
    q, k = part_of(c.query, at), part_of(c.key, at)
    qk = _scores(q, k, decays.read)
    if c.bonus is not None:
        qk = qk + torch.diag_embed(c.bonus[:, at].mT)
    delta = None
    if c.erase is not None and c.probe is not None:
        e, r = part_of(c.erase, at), part_of(c.probe, at)
        delta = _Delta(
            r_in=r * decays.total,
            e_out=e * decays.to_end,
            rk=_scores(r, k, decays.probe),
            qe=_scores(q, e, decays.read),
            re=_scores(r, e, decays.probe),
        )
    return Chunk(q * decays.seen, k * decays.to_end, qk, decays.through, delta)


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp(min=MIN_EXPONENT).to(dtype).exp()


def _triangle(exponent: Tensor, diagonal: int) -> Tensor:
    T = exponent.shape[2]
    return exponent.new_ones(T, T, dtype=torch.bool).tril(diagonal)[..., None]


def _scores(x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
    """sum_n x_in y_jn decay_ijn: (B, H, T, T)."""
    if decay.shape[-1] == 1:
        return (x @ y.mT) * decay[..., 0]
    return torch.einsum("bhin,bhjn,bhijn->bhij", x, y, decay)
