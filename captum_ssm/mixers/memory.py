"""The recurrence whose state a mixer keeps, its parts, and a mixer that returns features of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import (
    ConvolvedOperator,
    DiagonalOperator,
    LinearAttentionOperator,
    SumOperator,
    TokenOperator,
)

StateOperator: TypeAlias = DiagonalOperator | LinearAttentionOperator


def memory_of(mixer: FrozenMixer) -> StateOperator:
    """The recurrence whose state a mixer keeps.

    Raises:
        UnsupportedModelError: the mixer keeps no state, or several.
    """
    operator = mixer.recurrence if mixer.memory is None else mixer.memory()
    if isinstance(operator, (DiagonalOperator, LinearAttentionOperator)):
        return operator
    raise UnsupportedModelError(
        f"this mixer is a {type(operator).__name__}, which keeps no state of one scan; expected a "
        "recurrent layer that reads its tokens in their order. Softmax attention keeps all keys "
        "and values, and a mixer of several directions a state for each: name other layers."
    )


def state_shape(operator: StateOperator) -> tuple[int, ...]:
    """The state at a token: ``(D, N)``, or per head a matrix of keys by values ``(H, K, P)``."""
    if isinstance(operator, DiagonalOperator):
        return (operator.channels, operator.A.shape[-1])
    return (*operator.query.shape[2:], operator.width)


def check_directions(operator: StateOperator, directions: Tensor) -> None:
    """Raise unless directions are ``(F, D, N)`` or ``(F, H, K, P)``, as the state is.

    Raises:
        InputError: for another shape.
    """
    F, expected = len(directions), state_shape(operator)
    if directions.shape[1:] != expected:
        raise InputError(
            f"directions have shape {tuple(directions.shape)}, and the state after a token is "
            f"{expected}; expected {(F, *expected)}, one for each of {F} features."
        )


def reads(operator: StateOperator) -> Iterator[TokenOperator]:
    """For each of the N states, the operator that returns it: a unit vector reads it."""
    for unit in torch.eye(_states(operator)):
        yield _reading(operator, unit)


def writes(operator: StateOperator) -> Iterator[TokenOperator]:
    """For each of the N states, the operator whose tokens write into that state alone."""
    for unit in torch.eye(_states(operator)):
        if isinstance(operator, DiagonalOperator):
            B, right = unit.to(operator.B).expand_as(operator.B), torch.ones_like(operator.right)
            yield replace(operator, B=B, right=right, columns=None)
        else:
            bonus = None if operator.bonus is None else torch.zeros_like(operator.bonus)
            yield replace(operator, key=unit.to(operator.key).expand_as(operator.key), bonus=bonus)


def states_of(mixer: FrozenMixer) -> Iterator[Tensor]:
    """Each of the N states after every token, ``(B, L, D)``."""
    return (read.matvec(mixer.values) for read in reads(memory_of(mixer)))


def state_of(mixer: FrozenMixer) -> Tensor:
    """The state after every token, ``(B, L, D, N)`` or ``(B, L, H, K, P)``."""
    return joined_states([*states_of(mixer)], memory_of(mixer))


def changes_of_state(mixer: FrozenMixer) -> Iterator[TokenOperator]:
    """For each of the N states, what the recurrence makes of changes of it.

    A change of a state after a token is a write at that token, which no convolution goes before and
    which the token itself reads where it reads its own write.

    Raises:
        UnsupportedModelError: the mixer keeps no state, or several, or one that is not what its
            recurrence reads.
    """
    kept = memory_of(mixer)
    if mixer.memory is None:
        return writes(replace(kept, conv=None) if isinstance(kept, DiagonalOperator) else kept)
    whole = mixer.recurrence
    parts = whole.parts if isinstance(whole, SumOperator) else (whole,)
    alone = (x.joined if isinstance(x, ConvolvedOperator) else x for x in parts)
    readers = [x for x in alone if isinstance(x, (DiagonalOperator, LinearAttentionOperator))]
    if len(readers) != 1 or not _is_read(kept, readers[0], mixer.values):
        raise UnsupportedModelError(
            f"this mixer keeps the state of a {type(kept).__name__}, which is not what its "
            f"recurrence, a {type(whole).__name__}, reads, so what comes of a change of it is not "
            "known; expected a recurrence that reads the state that is kept, as it is or a few "
            "tokens later."
        )
    return writes(readers[0])


def carried(state: Tensor, operator: StateOperator, t: int) -> Tensor:
    """What a state before token t is after it, without what that token writes, ``(B, ...)``."""
    if isinstance(operator, DiagonalOperator):
        return state * torch.exp(operator.A * operator.dt[:, t, :, None])
    state = state * operator.log_decay[:, t, ..., None].exp()  # (B, H, K, P)
    if operator.erase is None or operator.probe is None:
        return state
    read = (operator.probe[:, t, ..., None] * state).sum(-2, keepdim=True)
    return state - operator.erase[:, t, ..., None] * read


def _is_read(kept: StateOperator, reader: StateOperator, values: Tensor) -> bool:
    # Whether a recurrence has the state that is kept, or, where it delays its values by a
    # convolution, had it as many tokens before. One sum of the N states tells.
    if state_shape(kept) != state_shape(reader):
        return False
    weights = torch.linspace(1, 2, _states(kept))
    state, found = (_reading(one, weights).matvec(values) for one in (kept, reader))
    if isinstance(reader, DiagonalOperator) and reader.conv is not None:
        state = causal_conv(state, reader.conv)
    return bool((found - state).norm() <= 1e-3 * state.norm())


def _states(operator: StateOperator) -> int:
    is_diagonal = isinstance(operator, DiagonalOperator)
    return (operator.C if is_diagonal else operator.query).shape[-1]  # type: ignore[union-attr]


def _reading(operator: StateOperator, vector: Tensor) -> TokenOperator:
    # The recurrence, read by one vector (N,) at all tokens.
    if isinstance(operator, DiagonalOperator):
        return replace(operator, C=vector.to(operator.C).expand_as(operator.C), left=None)
    query = vector.to(operator.query).expand_as(operator.query)
    return replace(operator, query=query, bonus=None)


def joined_states(parts: Sequence[Tensor], operator: StateOperator) -> Tensor:
    """The N states, ``(..., D)`` each, as one of ``(..., D, N)`` or ``(..., H, N, P)``."""
    if isinstance(operator, DiagonalOperator):
        return torch.stack([*parts], -1)
    heads = [part.unflatten(-1, (-1, operator.width)) for part in parts]
    return torch.stack(heads, -2)


def split_states(state: Tensor, operator: StateOperator) -> tuple[Tensor, ...]:
    """The N states, ``(..., D)`` each, of ``(..., D, N)`` or ``(..., H, N, P)``."""
    if isinstance(operator, DiagonalOperator):
        return state.unbind(-1)
    return tuple(part.flatten(-2) for part in state.unbind(-2))


def state_reader(mixer: FrozenMixer, directions: Tensor) -> FrozenMixer:
    r"""A mixer that returns, in place of what the model makes of its state, features of it.

    Feature f is the sum of the state's entries times those of its direction. It is the model's
    recurrence, of whose channels there are as many as features, read by a direction in the place
    of C or the queries: all that goes into the state stays. No gate, norm, skip or projection
    follows.

    Args:
        mixer (FrozenMixer): the model's.
        directions (Tensor): ``(F, D, N)`` or ``(F, H, K, P)``.

    Raises:
        UnsupportedModelError: the mixer keeps no state, or several.
        InputError: for directions of another shape.
    """
    operator, F = memory_of(mixer), len(directions)
    check_directions(operator, directions)
    each = partial(_for_each, count=F)
    sums = torch.eye(F).to(mixer.inputs).repeat_interleave(operator.channels, 1)  # (F, F D)
    return FrozenMixer(
        recurrence=_read_by(operator, directions.to(mixer.inputs)),
        inputs=each(mixer.inputs),
        out_proj=lambda y: y.unflatten(-1, (F, -1)).sum(-1),
        out_weight=sums,
        conv=each(mixer.conv, dim=0),
        conv_bias=each(mixer.conv_bias),
        activation=each(mixer.activation),
        neighbor_share=mixer.neighbor_share,
        rounding=mixer.rounding,
    )


def _for_each(x: Any, count: int, dim: int = -1) -> Any:
    # A tensor's channels along an axis, once for each feature; None stays None.
    return x if x is None or count == 1 else torch.cat([x] * count, dim)


def _read_by(operator: StateOperator, directions: Tensor) -> StateOperator:
    # One channel, or head of width one, for each feature and channel of the values.
    F = len(directions)
    each = partial(_for_each, count=F)
    if isinstance(operator, DiagonalOperator):
        D, groups = operator.channels, operator.B.shape[2]
        write = each(operator.B.repeat_interleave(D // groups, 2), dim=2)
        return replace(
            operator,
            dt=each(operator.dt),
            right=each(operator.right),
            A=each(operator.A, dim=0),
            B=write,
            C=directions.flatten(0, 1).expand_as(write),
            left=None,
            conv=each(operator.conv, dim=0),
            columns=each(operator.columns),
        )
    P = operator.width

    def spread(x: Any) -> Any:
        return None if x is None else each(x.repeat_interleave(P, 2), dim=2)

    key = spread(operator.key)
    query = directions.movedim(2, 3).flatten(0, 2).expand_as(key)  # (F H P, K), by head and value
    return replace(
        operator,
        query=query,
        key=key,
        log_decay=spread(operator.log_decay),
        erase=spread(operator.erase),
        probe=spread(operator.probe),
        bonus=None,
        width=1,
    )
