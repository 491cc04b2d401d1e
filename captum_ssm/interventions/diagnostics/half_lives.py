"""One input of one layer: half-lives of writes, shares of the state, and its size and rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.capture import exact_arithmetic
from captum_ssm.interventions.states import left_of_writes
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import memory_of, reads, states_of
from captum_ssm.operators import HeadOperator
from captum_ssm.operators.recurrence import StateOperator

# A decay of exp(-1000) is zero, and sums of such decays can still be subtracted.
_GONE = -1000.0


@dataclass(frozen=True)
class HalfLives:
    """In tokens, ``(B, R, M)``: until half of a write is left, or seen so long and more is left."""

    tokens: Tensor
    is_over: Tensor
    is_written: Tensor


@dataclass(frozen=True)
class StateSizes:
    """How large the states after some tokens are, and how full, each ``(B, R, U)``."""

    norm: Tensor
    change: Tensor  # of the state by the token, over the norm
    used: Tensor  # participation ratio of squared singular values over the possible rank


def half_lives(mixer: FrozenMixer, at: Tensor) -> HalfLives:
    """Half-lives of what tokens ``at`` wrote, by channel or head; linear between tokens in log."""
    operator = memory_of(mixer)
    with exact_arithmetic():
        decays = operator.decays()
        return _by_scans(operator, at) if decays is None else _by_decays(*decays, at)


def _by_decays(written: Tensor, logs: Tensor, rates: Tensor, at: Tensor) -> HalfLives:
    written, rates = written.double(), rates.double()
    decays = logs.double().clamp(min=_GONE).cumsum(1)
    B, L, M, _ = written.shape
    start, weight = decays[:, at], written[:, at].square()

    def log_size(token: Tensor) -> Tensor:
        index = token[..., None].expand(*token.shape, decays.shape[-1])
        faded = weight * (2 * rates * (decays.gather(1, index) - start)).exp()
        return faded.sum(-1).log() / 2

    first = at[None, :, None].expand(B, -1, M)
    half = log_size(first) - torch.tensor(2.0).double().log()
    low, high = first, torch.full_like(first, L - 1)
    is_over = log_size(high) <= half
    for _ in range(L.bit_length()):  # sizes never grow: low is above half, high is not
        middle = (low + high) // 2
        is_gone = log_size(middle) <= half
        low, high = torch.where(is_gone, low, middle), torch.where(is_gone, middle, high)
    tokens = (high - first - 1) + _crossing(log_size(high - 1), log_size(high), half)
    tokens = torch.where(is_over, tokens, L - 1 - first)
    return HalfLives(tokens, is_over, weight.sum(-1) > 0)


def _by_scans(operator: StateOperator, at: Tensor) -> HalfLives:
    lives: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in at.tolist():
        size = left_of_writes(operator, t).double()  # (B, L - t, M)
        logs, half = size.log(), (size[:, 0] / 2).log()
        gone = logs <= half[:, None]
        end = gone.int().argmax(1, keepdim=True).clamp(min=1)
        end = end.clamp(max=size.shape[1] - 1)
        before, after = (logs.gather(1, i)[:, 0] for i in ((end - 1).clamp(min=0), end))
        tokens = end[:, 0] - 1 + _crossing(before, after, half)
        tokens = torch.where(gone.any(1), tokens, size.shape[1] - 1)
        lives.append((tokens, gone.any(1), size[:, 0] > 0))
    return HalfLives(*(torch.stack(parts, 1) for parts in zip(*lives, strict=True)))


def _crossing(before: Tensor, after: Tensor, half: Tensor) -> Tensor:
    return ((before - half) / (before - after)).nan_to_num(0.0).clamp(0, 1)


def shares(mixer: FrozenMixer, t: int) -> Tensor:
    r"""Each token's share of the state after token t, ``(B, t + 1, U)``; they sum to one.

    What token j wrote and is left, projected on the state: :math:`\langle S_j, S \rangle / |S|^2`.
    It is negative where a write points against the state.
    """
    operator, v = memory_of(mixer), mixer.values
    with exact_arithmetic():
        projected, total = torch.zeros_like(v), torch.zeros_like(v[:, t])
        for read in reads(operator):
            state = torch.zeros_like(v)
            state[:, t] = read.matvec(v)[:, t]
            projected = projected + v * read.rmatvec(state)
            total = total + state[:, t].square()
        projected, total = (_units(x, operator).sum(-1) for x in (projected, total))
        return (projected / total[:, None])[:, : t + 1]


def state_sizes(mixer: FrozenMixer, at: Tensor) -> StateSizes:
    """Norm, change and rank of the states after tokens ``at``, by head; a diagonal layer is one."""
    operator = memory_of(mixer)
    with exact_arithmetic():
        pairs = []
        for state in states_of(mixer):  # (B, L, D), N times
            before = torch.where((at > 0)[:, None], state[:, (at - 1).clamp(min=0)], 0)
            pairs.append(torch.stack((state[:, at], state[:, at] - before)))
        state, change = (_units(x, operator) for x in torch.stack(pairs, -2).double())
        # (B, R, N, U, P) -> (B, R, U, N, P)
        state, change = state.transpose(2, 3), change.transpose(2, 3)
        norm, step = (torch.linalg.matrix_norm(x) for x in (state, change))
        N, P = state.shape[-2:]
        gram = state @ state.mT if N <= P else state.mT @ state
        ranks = norm.pow(4) / gram.square().sum((-1, -2))
        return StateSizes(norm, step / norm, ranks / min(N, P))


def _units(x: Tensor, operator: StateOperator) -> Tensor:
    # (..., D) -> (..., heads, width); a diagonal recurrence is one unit of all channels.
    return x.unflatten(-1, (operator.maps if isinstance(operator, HeadOperator) else 1, -1))
