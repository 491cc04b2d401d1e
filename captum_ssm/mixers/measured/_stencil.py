"""Whether tokens read a few neighbors only, as by a token shift or a convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Of the strength with which tokens are read.
_ALMOST_ALL = 0.99


def reads_neighbors(strength_of: Callable[[int], Tensor], length: int) -> bool:
    """Whether two tokens read the same few offsets, and hardly anything else.

    The neighbors of a token may be those of an image's patch, above and below it.

    Args:
        strength_of (Callable): takes a token of the first example, and returns how strongly it
            reads each token of the batch, ``(T,)``.
        length (int): L, the tokens of an example.
    """
    # Late enough that a causal recurrence would show.
    t = length - 1 - length // 4
    tokens = (t, max(0, t - 2))
    around = [_by_offset(strength_of(token), token) for token in tokens]
    count = 1 + 2 * max(1, min(4, length // 4))
    for one, other in (around, around[::-1]):
        # A token at the border reads some of the neighbors.
        few = torch.topk(one, min(count, len(one))).indices
        if all(float(x[few].sum()) >= _ALMOST_ALL * float(x.sum()) for x in (one, other)):
            return True
    return False


def _by_offset(strength: Tensor, token: int) -> Tensor:
    # Around the middle: (2 T,).
    found = strength.new_zeros(2 * len(strength))
    found[len(strength) - token :][: len(strength)] = strength
    return found
