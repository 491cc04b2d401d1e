"""Mamba-2's scan as its paper lists it, which is given the steps' products."""

import pytest
import torch
from proofs import proven
from torch.nn import functional as F

from captum_ssm.operators import LinearAttentionOperator

LENGTH, HEADS, STATE = 6, 4, 3


def blocks(X, A, B, C, block_len, initial_states=None):
    """In blocks, with the state at the end of each: ``(Y, last state)``."""
    B, C = (t.repeat_interleave(X.shape[2] // t.shape[2], 2) for t in (B, C))
    state, out = X.new_zeros(len(X), X.shape[2], X.shape[3], B.shape[-1]), []
    for x, a, b, c in zip(*(t.split(block_len, 1) for t in (X, A, B, C)), strict=True):
        decay = a.cumsum(1)
        before = torch.ones(block_len, block_len).tril()[..., None]
        between = (decay[:, :, None] - decay[:, None]).exp() * before
        inside = torch.einsum("blhn,bshn,blsh,bshp->blhp", c, b, between, x)
        out.append(inside + torch.einsum("blhn,bhpn,blh->blhp", c, state, decay.exp()))
        added = torch.einsum("bshn,bsh,bshp->bhpn", b, (decay[:, -1:] - decay).exp(), x)
        state = decay[:, -1].exp()[..., None, None] * state + added
    return torch.cat(out, 1), state


def late(X, A, B, C, block_len):
    """What each token writes is read from the next one on."""
    return F.pad(blocks(X, A, B, C, block_len)[0], (0, 0, 0, 0, 1, 0))[:, :-1]


def arguments(groups):
    x, step = torch.randn(2, LENGTH, HEADS, 5), torch.rand(2, LENGTH, HEADS)
    B, C = torch.randn(2, 2, LENGTH, groups, STATE)
    return dict(X=x * step[..., None], A=-step * torch.rand(HEADS), B=B, C=C, block_len=3)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_the_listing_of_mamba_2_is_proven(groups):
    given = arguments(groups)
    scan = proven(blocks, **given)
    assert isinstance(scan.operator, LinearAttentionOperator)
    j, h = 1, 2
    impulse = torch.zeros_like(given["X"])
    impulse[:, j, h, 0] = 1
    column = blocks(**given | {"X": impulse})[0][:, :, h, 0]
    torch.testing.assert_close(scan.operator.matrix()[:, h, :, j], column)
    assert proven(late, **given) is None
