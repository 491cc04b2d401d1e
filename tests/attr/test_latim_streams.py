"""LaTIM's residual stream, however a model adds to it: compared with sums of explicit vectors."""

from __future__ import annotations

import pytest
import torch
from models import Residual, ids, made
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import LaTIM

L, E, TARGET = 9, 16, 3


class Blocks(Residual):
    """Three mixers, each after a norm, and what comes after them."""

    def __init__(self) -> None:
        super().__init__(3)
        self.norms = nn.ModuleList(nn.RMSNorm(E) for _ in range(3))
        self.mlp, self.factor = nn.Linear(E, E), nn.Linear(E, E)
        self.later, self.norm = nn.RMSNorm(E), nn.RMSNorm(E)
        self.head = nn.Linear(E, 30, bias=False)

    def added(self, y: Tensor, given: Tensor) -> Tensor:
        return y

    def whole(self, x: Tensor) -> Tensor:
        """What is made of the stream and the mixer's output, a factor of each entry."""
        return x

    def block(self, x: Tensor, i: int) -> Tensor:
        given = self.norms[i](x)
        return self.whole(x + self.added(self.mixers[i](given), given))

    def last(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = self.block(x, i)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.last(self.embeddings(ids))))


class GatedByToken(Blocks):
    def added(self, y, given):
        return y * self.factor(given).sigmoid()


class NormedAfter(Blocks):
    """As blocks of LFM3 and OLMo hybrids."""

    def added(self, y, given):
        return self.later(y)


class WithMLP(Blocks):
    def block(self, x, i):
        x = super().block(x, i)
        return x + self.mlp(x).tanh()


class ScaledBeforeMLP(WithMLP):
    """No norm tells the stream before the MLP."""

    def added(self, y, given):
        return 2 * y


class Parallel(Blocks):
    """The MLP's norm is called after the mixer, and is given what the mixer's was given."""

    def block(self, x, i):
        return super().block(x, i) + self.mlp(self.later(x)).tanh()


class Halved(Blocks):
    """The stream itself is multiplied, too."""

    def whole(self, x):
        return x / 2


class NormedAsAWhole(Blocks):
    def whole(self, x):
        return self.later(x)


class InPlace(WithMLP):
    """What norms were given is written over."""

    def last(self, x):
        x = x.clone()
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x += mixer(norm(x))
            x += self.mlp(x).tanh()
        return x


def by_hand(model: Blocks, tokens: Tensor) -> Tensor:
    """Eq. 7-8, with the vectors of each layer, at the last token: ``(B, L)``."""
    B, at = len(tokens), torch.arange(L)
    x = model.embeddings(tokens)
    steps = []
    for i in range(3):
        given, T = model.norms[i](x), LaTIM(model).contributions(tokens, i, list(range(L)))
        # What follows the mixer is a factor of each entry, which is what it makes of ones.
        y = model.mixers[i](given)
        z = model.added(y, given)
        of_stream = model.whole(x + z) / (x + z)
        T, before, after = T * (of_stream * z / y)[:, :, None], of_stream * x, model.block(x, i)
        steps.append((before, T, after - before - of_stream * z, of_stream))
        x = after
    scale = torch.rsqrt(x.square().mean(-1) + torch.finfo(x.dtype).eps)[:, -1:]
    d = F.pad((model.head.weight[TARGET] * model.norm.weight * scale)[:, None], (0, 0, L - 1, 0))
    row = torch.zeros(B, L, dtype=x.dtype)
    for before, T, local, of_stream in reversed(steps):
        row = row + (d * local).sum(-1)
        whole = T.clone()
        whole[:, at, at] += before
        out = whole.sum(2)
        near = out.abs().sum(-1, keepdim=True) - (out[:, :, None] - whole).abs().sum(-1)
        near = near.clamp(min=0)
        row = (row[:, None] @ (near / near.sum(-1, keepdim=True)))[:, 0]
        row = row + torch.einsum("bie,bije->bj", d, T)
        d = d * of_stream
    return row + (d * model.embeddings(tokens)).sum(-1)


MODELS = [Blocks, WithMLP, GatedByToken, NormedAfter, ScaledBeforeMLP, Parallel, InPlace]


@pytest.mark.parametrize("make", [*MODELS, Halved, NormedAsAWhole])
def test_a_mixer_counts_as_it_is_added_to_the_stream(make) -> None:
    model, tokens = made(make), ids(2, L)
    found, delta = LaTIM(model).attribute(tokens, target=TARGET, return_convergence_delta=True)
    with torch.no_grad():
        torch.testing.assert_close(found, by_hand(model, tokens))
    assert float(delta.abs().max()) < 1e-6


@pytest.mark.parametrize("make", [GatedByToken, ScaledBeforeMLP])
def test_a_large_token_hides_no_factor(make) -> None:
    """What mixers add is less than the rounding of the largest token, whose stream it is not."""
    model, tokens = made(make), ids(1, L)
    tokens[tokens == 7] = 8
    tokens[0, 0] = 7
    with torch.no_grad():
        model.embeddings.weight[7] *= 3e7
    expected = LaTIM(model).attribute(tokens, target=TARGET)
    found = LaTIM(model.float()).attribute(tokens, target=TARGET)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


class Projected(Blocks):
    def added(self, y, given):
        return self.factor(y)


def test_what_is_added_by_more_than_a_factor_is_read_off_the_graph() -> None:
    """By the last mixer alone, whose vectors no later layer mixes."""
    model, tokens = made(Projected), ids(1, L)
    model.factor.bias.data.zero_()
    found = LaTIM(model).attribute(tokens, target=TARGET, layer=-1)
    with torch.no_grad():
        x = model.embeddings(tokens)
        for i in range(2):
            x = model.block(x, i)
        vectors = LaTIM(model).contributions(tokens, 2, [-1])[:, 0]  # (B, L, E)
        x = model.block(x, 2)[:, -1:]
        scale = torch.rsqrt(x.square().mean(-1) + torch.finfo(x.dtype).eps)
        expected = scale * (model.factor(vectors) @ (model.head.weight[TARGET] * model.norm.weight))
    torch.testing.assert_close(found, expected)
