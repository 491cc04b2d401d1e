"""The tokens that a scan's values are made of: their own, or a few neighbors by a token shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from captum_ssm.discovery.measure.convolution import Convolution
from captum_ssm.discovery.measure.directions import Direction
from captum_ssm.discovery.measure.rerun import Rerun
from captum_ssm.graph.points import gradients

# The share of the strength with which tokens are read that a few neighbors have to hold.
_ALMOST_ALL = 0.99


def share_of_neighbors(
    rerun: Rerun, directions: Sequence[Direction], convolutions: Sequence[Convolution | None]
) -> float:
    """The largest share of other tokens in what scans' values are made of, if these are near.

    Convolutions before the scans tell of the tokens by themselves.

    Raises:
        NotMeasured: values are made of other tokens than their own and a few neighbors.
    """
    pairs = zip(directions, convolutions, strict=True)
    return max(
        _share(rerun, direction) if conv is None and direction.enters is None else 0.0
        for direction, conv in pairs
    )


def _share(rerun: Rerun, direction: Direction) -> float:
    numbers = direction.readers(rerun)
    if numbers is None:
        return _of_shift(rerun, direction, direction.positions[0])
    lands = direction.order[numbers % rerun.L]
    is_other = lands != torch.arange(rerun.L, device=lands.device)
    if bool((is_other & (numbers >= 0)).any()):
        raise rerun.refused("a scan's result lands on another token than its values come from")
    return 0.0


def _of_shift(rerun: Rerun, direction: Direction, rows: Tensor) -> float:
    # The share in the first example, whose tokens are these of the scan, (k, L) in its order.
    values, position = direction.cut.values, torch.argsort(direction.order)
    assert values is not None
    noise = values.noise()
    channels = torch.zeros(values.width, dtype=torch.bool, device=noise.device)
    channels[direction.start : direction.stop] = True
    shares = []

    def strength_of(token: int) -> Tensor:
        seed, at = torch.zeros_like(noise), rows[:, position[token]]
        seed[at] = noise[at] * channels
        (gradient,) = gradients([values], [seed], [rerun.tokens])
        assert gradient is not None
        strength = gradient.double().square().sum(-1)
        shares.append(1 - float(strength[token] / strength.sum().clamp(min=1e-300)))
        return strength

    if not _reads_neighbors(strength_of, rerun.L):
        raise rerun.refused(
            f"before {direction.cut.scan.name} it mixes tokens by something that is neither a "
            "scan, nor a depthwise convolution, nor a shift by a few tokens"
        )
    return max(shares)


def _reads_neighbors(strength_of: Callable[[int], Tensor], length: int) -> bool:
    # Whether two tokens read the same few offsets, and hardly anything else. The neighbors of a
    # token may be those of an image's patch, above and below it. Made for RWKV's token shift and
    # Vision-RWKV's shift by a quarter of the channels to each side.
    # Late enough that a causal recurrence would show.
    t = length - 1 - length // 4
    tokens = (t, max(0, t - 2))
    around = [_by_offset(strength_of(token), token) for token in tokens]
    count = 1 + 2 * max(1, min(4, length // 4))
    for first, second in (around, around[::-1]):
        # A token at the border reads some of the neighbors.
        few = torch.topk(first, min(count, len(first))).indices
        if all(float(x[few].sum()) >= _ALMOST_ALL * float(x.sum()) for x in (first, second)):
            return True
    return False


def _by_offset(strength: Tensor, token: int) -> Tensor:
    # Around the middle: (2 T,).
    by_offset = strength.new_zeros(2 * len(strength))
    by_offset[len(strength) - token :][: len(strength)] = strength
    return by_offset
