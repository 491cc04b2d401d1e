"""Linear attention written in line from the right: keys and values are added up before queries.

The truth is the module's own code, run on one impulse per token in place of its values, with its
queries and keys held.
"""

import copy

import pytest
import torch
import wild
from frozen import measured, recorded
from torch import nn
from torch.nn import functional as F

from captum_ssm import LaTIM, MambaLRP, UnsupportedModelError, supported
from captum_ssm.discovery.measure import freeze_measured

WIDTH, HEADS = 12, 3


def based(q, k, v):
    q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-1)
    y = (q * (k * v).cumsum(dim=2)).sum(dim=-1)
    return y / ((q * k.cumsum(dim=2)).sum(dim=-1) + 1e-6)


def values_last(q, k, v):
    states = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=2)
    return (q.unsqueeze(-1) * states).sum(-2)


def by_einsum(q, k, v):
    y = torch.einsum("bhlf,bhlfp->bhlp", q, torch.einsum("bhlf,bhlp->bhlfp", k, v).cumsum(2))
    return y / torch.einsum("bhlf,bhlf->bhl", q, k.cumsum(2))[..., None]


def normalizer_inside(q, k, v):
    states = torch.einsum("bhlf,bhlp->blhfp", k, v).cumsum(1)
    z = 1 / torch.einsum("bhlf,bhlf->bhl", q, k.cumsum(2))
    return torch.einsum("bhlf,blhfp,bhl->bhlp", q, states, z)


def outer(q, k, v):
    return (q.unsqueeze(-2) @ (k.unsqueeze(-1) @ v.unsqueeze(-2)).cumsum(2)).squeeze(-2)


def of_all_tokens(q, k, v):
    n = k.shape[2]
    z = 1 / (q @ k.mean(dim=-2, keepdim=True).mT + 1e-6)
    return q @ ((k.mT * n**-0.5) @ (v * n**-0.5)) * z


def heads_after_tokens(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = 1 / torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1))
    state = torch.einsum("nshd,nshm->nhmd", k, v)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, state, z).transpose(1, 2)


def of_channels(q, k, v):  # an attention free transformer
    weight = torch.exp(k)
    return torch.sigmoid(q) * (v * weight).cumsum(2) / weight.cumsum(2)


WRITTEN = (
    based,
    values_last,
    by_einsum,
    normalizer_inside,
    outer,
    of_all_tokens,
    heads_after_tokens,
    of_channels,
)


class FromTheRight(nn.Module):
    """Linear attention, written in a way; its features are those of Based where they can be."""

    def __init__(self, read=based, taylor=False):
        super().__init__()
        self.read, self.taylor = read, taylor
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def features(self, x):
        if not self.taylor:
            return F.elu(x) + 1
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / 2**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, outer], -1)

    def parts(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.features(q), self.features(k), v

    def forward(self, x):
        return self.out(self.read(*self.parts(x)).transpose(1, 2).flatten(2))


def added(mixer):
    """What each token adds to each, channel by channel, ``(B, D, L, L)``."""
    return mixer.operator("unified").matrix() * mixer.values.mT[:, :, None]


@torch.no_grad()
def added_by_impulses(module, x):
    """What a module reads of each token's values alone."""
    q, k, v = module.parts(x)
    alone = torch.eye(x.shape[1], dtype=x.dtype)[:, None, :, None]
    columns = [module.read(q, k, e * v).transpose(1, 2).flatten(2) for e in alone]
    return torch.stack(columns, -1).transpose(1, 2)


# As many tokens as a head has channels or features, as all have, and other numbers.
@pytest.mark.parametrize("length", [3, 5, 9, 12])
@pytest.mark.parametrize("read", WRITTEN)
def test_the_maps_are_those_of_impulses_with_queries_and_keys_held(read, length):
    module = FromTheRight(read).double()
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    mixer = measured(module, x)
    torch.testing.assert_close(added(mixer), added_by_impulses(module, x))


def test_features_of_the_second_order():
    module, x = FromTheRight(taylor=True).double(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(added(measured(module, x)), added_by_impulses(module, x))


@pytest.mark.parametrize("read", [based, normalizer_inside, of_all_tokens, of_channels])
def test_relevance_adds_up(read):
    model = wild.Stack(FromTheRight(read), FromTheRight(read), width=WIDTH).double().eval()
    model.head.bias.data.zero_()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    told = supported(model, x, target=(6, 1))
    assert [mixer.known for mixer in told.mixers] == ["measured"] * 2
    assert set(told.methods.values()) == {None}
    for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
        found, delta = method(model).attribute(
            x, target=(6, 1), return_convergence_delta=True, **options
        )
        torch.testing.assert_close(found.sum((1, 2)), model(x)[:, 6, 1].detach())
        assert delta.abs().max() < 1e-8


class Rotated(FromTheRight):
    """MLLA's: queries and keys are rotated, and convolved values are added, then gated."""

    def __init__(self):
        super().__init__(of_all_tokens)
        self.lepe = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, _ = self.parts(x)
        v = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        turned = torch.polar(torch.ones(9, 2), torch.arange(18.0).view(9, 2)).to(torch.cdouble)
        y = self.rotated(q, turned) @ (self.rotated(k, turned).mT @ v / 9)
        y = y / (q @ k.mean(dim=-2, keepdim=True).mT + 1e-6)
        image = x.mT.unflatten(-1, (3, 3))
        y = y.transpose(1, 2).flatten(2) + self.lepe(image).flatten(2).mT
        return self.out(y * F.silu(self.gate(x)))

    @staticmethod
    def rotated(x, turned):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turned).flatten(-2)


def test_rotated_queries_and_convolved_values():
    module = Rotated().double()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    mixer = measured(module, x)
    model = wild.Stack(module, width=WIDTH).double().eval()
    assert set(supported(model, x, target=(6, 1)).methods.values()) == {None}
    with torch.no_grad():
        q, k, _ = module.parts(x)
        turned = torch.polar(torch.ones(9, 2), torch.arange(18.0).view(9, 2)).to(torch.cdouble)
        expected = module.rotated(q, turned) @ module.rotated(k, turned).mT
    torch.testing.assert_close(mixer.operator("hidden").matrix(), expected / 9)


class Softened(FromTheRight):
    """What all tokens wrote is not read linearly."""

    def forward(self, x):
        q, k, v = self.parts(x)
        y = q @ torch.tanh(k.mT @ v)
        return self.out(y.transpose(1, 2).flatten(2))


def test_what_is_not_linear_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"\(Softened\) lets tokens act on one another"):
        MambaLRP(wild.Stack(Softened(), width=WIDTH).eval()).attribute(
            torch.randn(1, 7, WIDTH), target=(6, 1)
        )


def test_a_sum_of_features_is_none_of_tokens():
    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = (nn.Parameter(torch.randn(2, *s)) for s in ((12, 3), (3, 12)))

        def forward(self, x):
            return x @ self.down @ self.up

    with pytest.raises(UnsupportedModelError):
        freeze_measured(recorded(Low(), torch.randn(2, 12, WIDTH)))


class OwnShape(torch.Tensor):
    """As some models of images make them, for kernels that take no ``torch.Size``."""

    @property
    def shape(self):
        return tuple(map(int, super().shape))


class OverAnImage(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x):
        return self.conv(super().forward(x).mT.unflatten(-1, (3, -1))).flatten(2).mT


class OfAnImage(FromTheRight):
    made = staticmethod(torch.Tensor.clone)

    def __init__(self):
        super().__init__(of_all_tokens)
        self.value = OverAnImage()

    def forward(self, x):
        return super().forward(self.made(x))


class MakesItsOwn(OfAnImage):
    made = OwnShape


def test_tensors_of_a_class_with_a_shape_of_its_own():
    model = wild.Stack(MakesItsOwn(), MakesItsOwn(), width=WIDTH).eval()
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.__class__ = OfAnImage
    x = torch.randn(1, 12, WIDTH)
    for method in (MambaLRP, LaTIM):
        found, expected = (method(m).attribute(x, target=(6, 1)) for m in (model, plain))
        torch.testing.assert_close(found, expected)
