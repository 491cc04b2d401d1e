"""The recurrence whose state a mixer keeps, its parts, and a mixer that returns features of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import ConvolvedOperator, DiagonalOperator, SumOperator, TokenOperator
from captum_ssm.operators.recurrence import StateOperator, for_each


def memory_of(mixer: FrozenMixer) -> StateOperator:
    """The recurrence whose state a mixer keeps, or an error where there is not exactly one."""
    operator = mixer.recurrence if mixer.memory is None else mixer.memory()
    if isinstance(operator, StateOperator):
        return operator
    raise UnsupportedModelError(
        f"this mixer is a {type(operator).__name__}, which keeps no state of one scan; expected a "
        "recurrent layer that reads its tokens in their order. Softmax attention keeps all keys "
        "and values, and a mixer of several directions a state for each: name other layers."
    )


def check_directions(operator: StateOperator, directions: Tensor) -> None:
    """Raise unless directions are ``(F, D, N)`` or ``(F, H, K, P)``, as the state is."""
    F, expected = len(directions), operator.state_shape
    if directions.shape[1:] != expected:
        raise InputError(
            f"directions have shape {tuple(directions.shape)}, and the state after a token is "
            f"{expected}; expected {(F, *expected)}, one for each of {F} features."
        )


def reads(operator: StateOperator) -> Iterator[StateOperator]:
    """For each of the N states, the operator that returns it: a unit vector reads it."""
    return map(operator.reading, torch.eye(operator.state_shape[1]))


def _writes(operator: StateOperator) -> Iterator[StateOperator]:
    """For each of the N states, the operator whose tokens write into that state alone."""
    return map(operator.writing, torch.eye(operator.state_shape[1]))


def states_of(mixer: FrozenMixer) -> Iterator[Tensor]:
    """Each of the N states after every token, ``(B, L, D)``."""
    return (read.matvec(mixer.values) for read in reads(memory_of(mixer)))


def state_of(mixer: FrozenMixer) -> Tensor:
    """The state after every token, ``(B, L, D, N)`` or ``(B, L, H, K, P)``."""
    return memory_of(mixer).joined_states([*states_of(mixer)])


def changes_of_state(mixer: FrozenMixer) -> Iterator[TokenOperator]:
    """For each of the N states, what the recurrence makes of changes of it.

    A change of a state after a token is a write at that token, which no convolution goes before and
    which the token itself reads where it reads its own write.

    Raises:
        UnsupportedModelError: the mixer keeps no state, or several, or one that is not what its
            recurrence reads.
    """
    memory = memory_of(mixer)
    if mixer.memory is None:
        return _writes(
            replace(memory, conv=None) if isinstance(memory, DiagonalOperator) else memory
        )
    whole = mixer.recurrence
    parts = whole.parts if isinstance(whole, SumOperator) else (whole,)
    alone = (x.joined if isinstance(x, ConvolvedOperator) else x for x in parts)
    readers = [x for x in alone if isinstance(x, StateOperator)]
    if len(readers) != 1 or not _is_read(memory, readers[0], mixer.values):
        raise UnsupportedModelError(
            f"this mixer keeps the state of a {type(memory).__name__}, which is not what its "
            f"recurrence, a {type(whole).__name__}, reads, so what comes of a change of it is not "
            "known; expected a recurrence that reads the state that is kept, as it is or a few "
            "tokens later."
        )
    return _writes(readers[0])


def _is_read(memory: StateOperator, reader: StateOperator, values: Tensor) -> bool:
    # Whether a recurrence has the state that is kept, or, where it delays its values by a
    # convolution, had it as many tokens before. One sum of the N states tells.
    if memory.state_shape != reader.state_shape:
        return False
    weights = torch.linspace(1, 2, memory.state_shape[1])
    state, read = (operator.reading(weights).matvec(values) for operator in (memory, reader))
    if isinstance(reader, DiagonalOperator) and reader.conv is not None:
        state = causal_conv(state, reader.conv)
    return bool((read - state).norm() <= 1e-3 * state.norm())


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
    each = partial(for_each, count=F)
    sums = torch.eye(F).to(mixer.inputs).repeat_interleave(operator.channels, 1)  # (F, F D)
    return FrozenMixer(
        recurrence=operator.of_features(directions.to(mixer.inputs)),
        inputs=each(mixer.inputs),
        out_proj=lambda y: y.unflatten(-1, (F, -1)).sum(-1),
        out_weight=sums,
        conv=each(mixer.conv, dim=0),
        conv_bias=each(mixer.conv_bias),
        activation=each(mixer.activation),
        neighbor_share=mixer.neighbor_share,
        rounding=mixer.rounding,
    )
