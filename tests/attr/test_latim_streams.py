"""LaTIM's residual stream, however a model adds to it: compared with sums of explicit vectors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import Residual, ids, made
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import LaTIM
from captum_ssm.models import BidirectionalMamba

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

    def vectors(self, x: Tensor, tokens: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """What block i adds to the stream, ``(B, L, E)``, and by token: ``(B, L, L, E)``."""
        given, T = self.norms[i](x), LaTIM(self).contributions(tokens, i, list(range(L)))
        # What follows the mixer is a factor of each entry, which is what it makes of ones.
        y = self.mixers[i](given)
        z = self.added(y, given)
        return z, T * (z / y)[:, :, None]

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
        z, T = model.vectors(x, tokens, i)
        of_stream = model.whole(x + z) / (x + z)
        T, before, after = T * of_stream[:, :, None], of_stream * x, model.block(x, i)
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
    """A matrix lies between each mixer and the stream."""

    def added(self, y, given):
        return self.factor(y)


class ProjectedBeforeMLP(Projected, WithMLP):
    pass


class ProjectedHalved(Projected, Halved):
    pass


class ProjectedNormed(Blocks):
    """And then a norm, whose factor differs by token."""

    def added(self, y, given):
        return self.later(self.factor(y))


class ProjectedByConv(Projected):
    """The matrix is a convolution of one token."""

    def added(self, y, given):
        return F.conv1d(y.mT, self.factor.weight[..., None]).mT


PROJECTED = [Projected, ProjectedBeforeMLP, ProjectedHalved, ProjectedNormed, ProjectedByConv]


@pytest.mark.parametrize("make", PROJECTED)
def test_a_matrix_between_a_mixer_and_the_stream_is_part_of_its_vectors(make) -> None:
    """As if it were part of the mixer's output projection."""
    model, tokens = made(make), ids(2, L)
    model.factor.bias.data.zero_()
    found, delta = LaTIM(model).attribute(tokens, target=TARGET, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-6
    for mixer in model.mixers:
        mixer.out_proj.weight.data = model.factor.weight.data @ mixer.out_proj.weight.data
    model.factor.weight.data.copy_(torch.eye(E))
    torch.testing.assert_close(found, LaTIM(model).attribute(tokens, target=TARGET))


class Joined(Blocks):
    """Two directions, read by one layer, as in models of speech and of time series."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(BidirectionalMamba, E, state=4, bimamba_type="none")
        self.backward_mixers = nn.ModuleList(make() for _ in range(3))
        self.joining = nn.Linear(2 * E, E, bias=False)

    def joined(self, x: Tensor, i: int) -> Tensor:
        given = self.norms[i](x)
        both = self.mixers[i](given), self.backward_mixers[i](given.flip(1)).flip(1)
        return self.joining(torch.cat(both, -1))

    def vectors(self, x, tokens, i):
        latim, rows = LaTIM(self), list(range(L))
        both = [latim.contributions(tokens, 2 * i + k, rows) for k in range(2)]
        return self.joined(x, i), self.joining(torch.cat(both, -1))

    def block(self, x, i):
        return x + self.joined(x, i)


class JoinedWithMLP(Joined):
    def block(self, x, i):
        x = super().block(x, i)
        return x + self.mlp(self.later(x)).tanh()


class Wide(Joined):
    """One mixer, wider than the stream."""

    def __init__(self) -> None:
        super().__init__()
        for mixer in self.mixers:
            mixer.out_proj = nn.Linear(mixer.out_proj.in_features, 2 * E, bias=False)

    def joined(self, x, i):
        return self.joining(self.mixers[i](self.norms[i](x)))

    def vectors(self, x, tokens, i):
        T = LaTIM(self).contributions(tokens, i, list(range(L)))
        return self.joined(x, i), self.joining(T)


@pytest.mark.parametrize("make", [*MODELS, Halved, NormedAsAWhole, Joined, JoinedWithMLP, Wide])
def test_mixers_count_as_they_are_added_to_the_stream(make) -> None:
    model, tokens = made(make), ids(2, L)
    found, delta = LaTIM(model).attribute(tokens, target=TARGET, return_convergence_delta=True)
    with torch.no_grad():
        torch.testing.assert_close(found, by_hand(model, tokens))
    assert float(delta.abs().max()) < 1e-6
