"""The recurrence whose state a mixer keeps, and a mixer that returns features of that state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import DiagonalOperator, LinearAttentionOperator

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
    operator = memory_of(mixer)
    F, expected = len(directions), state_shape(operator)
    if directions.shape[1:] != expected:
        raise InputError(
            f"directions have shape {tuple(directions.shape)}, and the state after a token is "
            f"{expected}; expected {(F, *expected)}, one for each of {F} features."
        )
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
