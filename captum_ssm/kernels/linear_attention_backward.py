"""The gradients of linear attention and of the delta rule, as an operation of its own.

Tokens of a chunk read from the state, and write to it. Reads are those of q, whose values are the
gradient g of the output, and of r, whose values z are the gradient of what it read. Writes are
those of k, with values v, and of e, with the negative of what r read. What a write leaves for a
later read is the decay between the two, times the product of their values: summed over writes it is
the gradient of the read, summed over reads that of the write, and the decays of all tokens between
the two have their product with the coefficients as gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_ssm.kernels.linear_attention_chunks import decays_of, part_of, states
from captum_ssm.kernels.linear_attention_coefficients import (
    MIN_LOG_DECAY,
    TENSORS,
    LinearAttentionCoefficients,
)
from captum_ssm.kernels.registration import empty_like_wanted, only_wanted, operation

Pair = tuple[Tensor, Tensor]  # coefficients (B, H, T, N) and values (B, H, T, P)


@operation(
    f"linear_attention_scan_backward(Tensor grad, Tensor v, {TENSORS}, bool[] wanted) -> "
    "(Tensor v, Tensor query, Tensor key, Tensor log_decay, Tensor erase, Tensor probe, "
    "Tensor bonus)",
    LinearAttentionCoefficients,
    fake=lambda grad, v, c, wanted: empty_like_wanted(
        (v, c.query, c.key, c.log_decay, c.erase, c.probe, c.bonus), wanted
    ),
)
def linear_attention_scan_backward_torch(
    grad: Tensor, v: Tensor, c: LinearAttentionCoefficients, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of :func:`linear_attention_scan`; those that are not ``wanted`` are empty."""
    passed = list(states(v, c))
    adjoint = torch.zeros_like(passed[0][2])  # the gradient of the state at the end of a chunk
    parts: list[tuple[Tensor | None, ...]] = []
    for at, chunk, state, probed in reversed(passed):
        x, g = part_of(v, at), part_of(grad, at)
        of_v, before, z = chunk.adjoint(g, adjoint)
        reads, writes = [(part_of(c.query, at), g)], [(part_of(c.key, at), x)]
        if c.erase is not None and c.probe is not None and probed is not None and z is not None:
            reads.append((part_of(c.probe, at), z))
            writes.append((part_of(c.erase, at), -probed))
        of_reads, of_writes, of_decay = _coefficients(at, c, reads, writes, state, adjoint)
        of_bonus = None if c.bonus is None else (g * x).sum(-1, keepdim=True)
        of_probe, of_erase = [*of_reads[1:], None][0], [*of_writes[1:], None][0]
        parts.append((of_v, of_reads[0], of_writes[0], of_decay, of_erase, of_probe, of_bonus))
        adjoint = before

    def joined(some: Sequence[Tensor | None]) -> Tensor | None:
        known = [x for x in some if x is not None]
        return torch.cat(known[::-1], 2).transpose(1, 2) if known else None

    of_v, query, key, log_decay, erase, probe, bonus = map(joined, zip(*parts, strict=True))
    assert log_decay is not None
    if c.log_decay.shape[-1] == 1:
        log_decay = log_decay.sum(-1, keepdim=True)
    log_decay = log_decay.where(c.log_decay >= MIN_LOG_DECAY, 0.0)
    bonus = None if bonus is None else bonus.squeeze(-1)
    return only_wanted((of_v, query, key, log_decay, erase, probe, bonus), wanted)


def _coefficients(
    at: slice,
    c: LinearAttentionCoefficients,
    reads: list[Pair],
    writes: list[Pair],
    state: Tensor,
    adjoint: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gradients of a chunk's reads, writes and log decays, each (B, H, T, N)."""
    decays = decays_of(at, c)
    early = c.bonus is not None  # a read precedes the token's decay
    # From the state before the chunk, to that after it, and through both.
    of_reads = [
        decay * (values @ state.mT)
        for decay, (_, values) in zip((decays.seen, decays.total), reads, strict=False)
    ]
    of_writes = [decays.to_end * (values @ adjoint.mT) for _, values in writes]
    of_decay = (decays.through * (state * adjoint).sum(-1, keepdim=True)).mT
    for k, ((x, _), of_read) in enumerate(zip(reads, of_reads, strict=True)):
        of_decay = of_decay + _from(x * of_read, 2, early and k == 0)
    for (y, _), of_write in zip(writes, of_writes, strict=True):
        of_decay = of_decay + _before(y * of_write, 2)

    # From token to token.
    for i, (x, read) in enumerate(reads):
        decay = decays.probe if i else decays.read
        for j, (y, write) in enumerate(writes):
            left = decay * (read @ write.mT)[..., None]  # (B, H, T, T, 1 or N)
            if left.shape[-1] == 1:
                of_reads[i] = of_reads[i] + left[..., 0] @ y
                of_writes[j] = of_writes[j] + left[..., 0].mT @ x
                both = left * (x @ y.mT)[..., None]
            else:
                of_reads[i] = of_reads[i] + torch.einsum("bhijn,bhjn->bhin", left, y)
                of_writes[j] = of_writes[j] + torch.einsum("bhijn,bhin->bhjn", left, x)
                both = left * x[:, :, :, None] * y[:, :, None]
            crossing = _before(_from(both, 2, early and i == 0), 3)
            crossing = crossing.diagonal(dim1=2, dim2=3).mT  # (B, H, T, 1 or N)
            if left.shape[-1] == 1:
                # Shared by all keys; their gradients are added up in the end.
                crossing = crossing / x.shape[-1]
            of_decay = of_decay + crossing
    return of_reads, of_writes, of_decay


def _from(x: Tensor, dim: int, later: bool) -> Tensor:
    """Sums over all tokens from each one on, or from the one after it."""
    sums = x.flip(dim).cumsum(dim).flip(dim)
    return _shifted(sums.flip(dim), dim).flip(dim) if later else sums


def _before(x: Tensor, dim: int) -> Tensor:
    """Sums over all tokens before each one."""
    return _shifted(x.cumsum(dim), dim)


def _shifted(x: Tensor, dim: int) -> Tensor:
    """Each entry at the next position, zero at the first."""
    first = torch.zeros_like(x.narrow(dim, 0, 1))
    return torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
