"""Steps of a model's tokens, some of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from captum_ssm.capture.promise import Promise
from captum_ssm.wiring.mixing_test import halves

# In so many steps some of the tokens are moved: two halves of them and their rests, which tell
# three of four pairs of tokens apart.
_STEPS = 4
# The size of a step, of that of the tokens: what is rounded between them has to move as well. Long
# steps are of tokens that the output does not read.
STEP, _LONG = 0.3, 1.0


def steps_of_some(starts: Sequence[Tensor], generator: torch.Generator) -> list[list[Tensor]]:
    """Steps that move some of the tokens each."""
    axes = [*map(_axis, starts)]
    sizes = {x.shape[axis] for x, axis in zip(starts, axes, strict=True)}
    chosen = {n: [*islice(halves(n, generator), _STEPS)] for n in sizes}
    all_steps = []
    for k in range(max(map(len, chosen.values()), default=0)):
        steps = []
        for x, axis in zip(starts, axes, strict=True):
            sets = chosen[x.shape[axis]]
            shape = [1] * x.dim()
            shape[axis] = -1
            step = _noise(x, generator)
            steps.append(step * sets[k % len(sets)].to(x.device).view(shape))
        all_steps.append(steps)
    return all_steps


def steps_of_others(
    starts: Sequence[Tensor], promise: Promise, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """Steps of all tokens that the last end does not read, as the graph says: forth, back, erased.

    Where an output is read off one token, half of the others may not move what that token is
    compared with.
    """
    reads = [
        read.movedim(_axis(read), 1)[..., None].flatten(2).any(-1) for read in promise.reads(-1)
    ]
    others = []
    for x in starts:
        alike = [
            read.to(x.device) for read in reads if read.shape == (x.shape[0], x.shape[_axis(x)])
        ]
        shape = [1] * x.dim()
        shape[0], shape[_axis(x)] = alike[0].shape
        others.append(~torch.stack(alike).any(0).view(shape))
    if any(bool(mask.any()) for mask in others):
        pairs = [*zip(starts, others, strict=True)]
        steps = [_LONG / STEP * _noise(x, generator) * mask for x, mask in pairs]
        yield from (steps, [-step for step in steps])
        yield [-x.detach() * mask for x, mask in pairs]


def _axis(x: Tensor) -> int:
    # The axis of the tokens, for which the columns of an image stand.
    return 1 if x.dim() < 4 else -1


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    # A step of all tokens, of which each has a part of its own, and all have one together: a mean
    # over tokens has to move as well.
    size = STEP * x.detach().double().square().mean().sqrt().clamp(min=1e-6)
    noise = torch.randn(x.shape, generator=generator)
    noise = noise + noise.mean(_axis(x), keepdim=True) * x.shape[_axis(x)] ** 0.5
    return (noise.to(x.device) * size).to(x.dtype)
