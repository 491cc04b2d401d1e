"""The states of a diagonal recurrence, in PyTorch: about sqrt(L) chunks step in parallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

HUGE = 1e30  # stands for an infinite decay step: any A < 0 times this underflows


def decay(exponent: Tensor) -> Tensor:
    """exp of non-positive numbers, kept above the denormals, which are ten times slower."""
    return exponent.clamp(min=-700.0 if exponent.dtype == torch.float64 else -70.0).exp()


def _steps(x: Tensor, dt: Tensor, A: Tensor, write: Tensor, chunk: int) -> Iterator[Tensor]:
    """The states h_t = exp(A dt_t) h_(t-1) + write_t x_t, of one token of every chunk at a time.

    x is (B, R, L, D), with R inputs for the same coefficients; dt (B, L, D), write (B, L, G, N);
    each state is (B, R, chunks, G, D/G, N). The chunks step in parallel: first from zero, for each
    chunk's final state, then from the correct initial states.
    """
    groups = write.shape[2]
    x = _cut(x, 2, chunk).unflatten(-1, (groups, -1))  # (B, R, chunks, chunk, G, D/G)
    dt = _cut(dt.clamp(max=HUGE), 1, chunk).unflatten(-1, (groups, -1)).unsqueeze(1)
    write = _cut(write, 1, chunk)[:, None, :, :, :, None]  # (B, 1, chunks, chunk, G, 1, N)
    rate = A.unflatten(0, (groups, -1))
    chunks = x.shape[2]

    def step(h: Tensor | None, t: int) -> Tensor:
        enter = x[:, :, :, t, ..., None] * write[:, :, :, t]
        return enter if h is None else enter + decay(dt[:, :, :, t, ..., None] * rate) * h

    h = None
    if chunks > 1:
        last = None
        for t in range(chunk):
            last = step(last, t)
        assert last is not None
        across = decay(dt.double().sum(3).to(dt.dtype)[..., None] * rate)
        carried = [torch.zeros_like(last[:, :, 0])]
        for c in range(chunks - 1):
            carried.append(last[:, :, c] + across[:, :, c] * carried[-1])
        h = torch.stack(carried, 2)
    for t in range(chunk):
        h = step(h, t)
        yield h


def _cut(x: Tensor, axis: int, chunk: int) -> Tensor:
    """Cut the tokens into chunks, the last one padded with zeros."""
    chunks = -(-x.shape[axis] // chunk)
    pad = [0, 0] * (x.dim() - 1 - axis) + [0, chunks * chunk - x.shape[axis]]
    return F.pad(x, pad).unflatten(axis, (chunks, chunk))


def _chunk_length(length: int) -> int:
    """About sqrt(L), a power of two."""
    return 1 << max(0, (length - 1).bit_length() // 2)


def outputs(x: Tensor, dt: Tensor, A: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """y_t = read_t . h_t for the states of :func:`_steps`: (B, R, L, D)."""
    length = x.shape[2]
    chunk = _chunk_length(length)
    read = _cut(read, 1, chunk)[:, None, :, :, :, None]  # (B, 1, chunks, chunk, G, 1, N)
    steps = enumerate(_steps(x, dt, A, write, chunk))
    by_step = [(h * read[:, :, :, t]).sum(-1) for t, h in steps]
    y = torch.stack(by_step, 3).flatten(4)  # (B, R, chunks, chunk, D)
    return y.flatten(2, 3)[:, :, :length]


def states(x: Tensor, dt: Tensor, A: Tensor, write: Tensor) -> Tensor:
    """All states of x (B, L, D): (B, L, G, D/G, N)."""
    length = x.shape[1]
    steps = _steps(x[:, None], dt, A, write, _chunk_length(length))
    return torch.stack([h[:, 0] for h in steps], 2).flatten(1, 2)[:, :length]


def _late(dt: Tensor) -> Tensor:
    """The steps of a recurrence from the last token to the first: each the next token's."""
    return F.pad(dt[:, 1:], (0, 0, 0, 1)).flip(1)


def reversed_outputs(x: Tensor, dt: Tensor, A: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """u_t = read_t . s_t with s_t = write_t x_t + exp(A dt_(t+1)) s_(t+1)."""
    return outputs(x.flip(2), _late(dt), A, write.flip(1), read.flip(1)).flip(2)


def reversed_states(x: Tensor, dt: Tensor, A: Tensor, write: Tensor) -> Tensor:
    """All states of :func:`reversed_outputs`, for x (B, L, D)."""
    return states(x.flip(1), _late(dt), A, write.flip(1)).flip(1)


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
