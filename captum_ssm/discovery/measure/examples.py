"""A padded batch, measured one example at a time without its padding.

Layers that remove padding pack the tokens of all examples into one row, in which nothing says where
a token was. Alone, and without padding, each example runs over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from captum_ssm.discovery.measure.cut_run import token_argument
from captum_ssm.discovery.measure.rerun import is_close
from captum_ssm.discovery.scans import first_tensor
from captum_ssm.mixers.call import MixerCall, without_caches
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import PackedOperator


def freeze_examples(
    call: MixerCall, freeze: Callable[[MixerCall], FrozenMixer]
) -> FrozenMixer | None:
    """The mixer of a recorded call, put together from those of its examples; zero at padding.

    None where there is one example without padding, or where the module computes something else of
    an example alone.
    """
    tokens = token_argument(call)
    if tokens.dim() != 3:
        return None
    B, L = tokens.shape[:2]
    mask = call.token_mask()
    real = torch.ones(B, L, device=tokens.device) if mask is None else mask
    if real.shape != (B, L) or (B == 1 and bool((real != 0).all())):
        return None
    rows = [row for row in range(B) if bool((real[row] != 0).any())]
    positions = [(real[row] != 0).nonzero()[:, 0] for row in rows]
    mixers = []
    for row, at in zip(rows, positions, strict=True):
        alone = _alone(call, row, at, (B, L))
        if not is_close(alone.output, call.output[row : row + 1, at]):
            return None
        mixer = freeze(alone)
        if type(mixer) is not FrozenMixer or mixer.out_gate is not None:
            return None
        mixers.append(mixer)
    return _together(mixers, rows, positions, (B, L))


def _alone(call: MixerCall, row: int, at: Tensor, shape: tuple[int, int]) -> MixerCall:
    mask = call.arguments.get("attention_mask")

    def put(value: Any) -> Any:
        if value is mask or not torch.is_tensor(value):
            return None if torch.is_tensor(value) else value
        return value[row : row + 1, at] if value.shape[:2] == shape else value

    args = tree_map(put, call.args)
    kwargs = tree_map(put, without_caches(call.kwargs))
    with torch.no_grad():
        alone = replace(call, args=args, kwargs=kwargs, linears=None).run()
    return replace(alone, result=first_tensor(alone.result))


def _together(
    mixers: Sequence[FrozenMixer],
    rows: Sequence[int],
    positions: Sequence[Tensor],
    shape: tuple[int, int],
) -> FrozenMixer:
    first, recurrences = mixers[0], tuple(mixer.recurrence for mixer in mixers)
    operator = PackedOperator(recurrences, tuple(rows), tuple(positions), shape)
    ones = [torch.ones_like(mixer.inputs) for mixer in mixers]

    def scattered(name: str) -> Tensor | None:
        tensors = [getattr(mixer, name) for mixer in mixers]
        if all(x is None for x in tensors):
            return None
        pairs = zip(tensors, ones, strict=True)
        return operator.placed(
            ones_of_mixer if x is None else x.expand_as(ones_of_mixer) for x, ones_of_mixer in pairs
        )

    inputs, activation = scattered("inputs"), scattered("activation")
    factors: dict[str, Any] = {name: scattered(name) for name in ("skip", "gate", "norm", "offset")}
    dense = [mixer.dense_skip for mixer in mixers if mixer.dense_skip is not None]
    if len(dense) == len(mixers):
        factors["dense_skip"] = operator.placed(dense)
    assert inputs is not None
    if activation is None and first.conv is not None:
        activation = operator.placed(ones)  # nothing enters from padding, after a convolution
    return replace(
        first,
        recurrence=operator,
        inputs=inputs,
        activation=activation,
        neighbor_share=max(mixer.neighbor_share for mixer in mixers),
        **factors,
    )
