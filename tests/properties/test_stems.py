"""To the input by way of a stem: finer tokens of many channels that all ways go through."""

from __future__ import annotations

import inputs
import pytest
import torch
from inputs import noise, options
from methods import METHODS, assert_close, each
from models import made
from torch import Tensor, nn
from torch.nn.functional import pad

from captum_ssm import MambaLRP
from captum_ssm.capture import Request, freeze
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import meetings
from captum_ssm.graph.token_weights import WeightsThroughStem

OF_TOKENS = [method for method in METHODS if method is not MambaLRP]
SIDE = 12


class Convolutions(inputs.Classifier):
    """Pixels ``(B, 3, H, W)``, 64 channels at half the resolution, tokens at a quarter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.merge = nn.Conv2d(64, inputs.E, 3, stride=2, padding=1)

    def tokens(self, x: Tensor) -> Tensor:
        return self.merge(nn.functional.gelu(self.stem(x))).flatten(2).mT


class ChannelsLast(Convolutions):
    """Pixels ``(B, H, W, 3)`` in a linear layer, and merged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 64)

    def tokens(self, x: Tensor) -> Tensor:
        return self.merge(self.stem(x).permute(0, 3, 1, 2)).flatten(2).mT


class Linear(Convolutions):
    def tokens(self, x: Tensor) -> Tensor:
        return self.merge(self.stem(x)).flatten(2).mT


class Past(Convolutions):
    """Patches of the pixels are added to what comes of the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, inputs.E, 4, stride=4)

    def tokens(self, x: Tensor) -> Tensor:
        return super().tokens(x) + self.patches(x).flatten(2).mT


class Cropped(Convolutions):
    def tokens(self, x: Tensor) -> Tensor:
        return super().tokens(pad(x[..., 4:, :], (0, 0, 0, 4)))


def freeze_of(model: nn.Module, x: Tensor):
    return freeze(Request.of(model, None, x, None), query=False)


@pytest.mark.parametrize(
    ("kind", "shape", "axis"),
    [
        (Convolutions, (2, 3, SIDE, SIDE), 1),
        (ChannelsLast, (2, SIDE, SIDE, 3), 3),
    ],
    ids=["channels first", "channels last"],
)
def test_the_stem_is_found(kind, shape, axis):
    wiring = freeze_of(made(kind), noise(*shape)).wiring
    stem = wiring.inputs[0].stem
    assert stem.channels == axis
    assert stem.shape[axis] == 64
    assert isinstance(wiring.steps[0].reads[0][1].transport, WeightsThroughStem)


@pytest.mark.parametrize("kind", [Past, inputs.Stem], ids=["a way past it", "few channels"])
def test_what_is_no_stem(kind):
    x = noise(2, 3, SIDE, SIDE) if kind is Past else noise(2, 3, SIDE)
    wiring = freeze_of(made(kind), x).wiring
    assert wiring.inputs[0].stem is None
    assert not isinstance(wiring.steps[0].reads[0][1].transport, WeightsThroughStem)


def test_it_is_the_product_of_two_transports():
    model, x = made(Linear), noise(1, 3, 8, 8)
    (read,) = freeze_of(model, x).wiring.steps[0].reads
    found = read[1].transport.matrix(probes=500)[0]

    def centered(h: Tensor) -> Tensor:
        # What the norm before the mixer makes of it, but for a factor of each token.
        weight = model.body.norms[0].weight[:, None, None]
        return weight * (h - h.mean(0))

    def shares(function, values: Tensor) -> Tensor:
        # Squared norms of the blocks of J diag(values); rows that add up to one.
        jacobian = torch.func.jacrev(function)(values)  # (c, h, w, C, H, W)
        blocks = (jacobian * values).square().sum((0, 3)).flatten(2).flatten(0, 1)
        return blocks / blocks.sum(-1, keepdim=True)

    with torch.no_grad():
        added = model.stem(x)[0] - model.stem.bias[:, None, None]
        near = shares(lambda one: model.stem(one[None])[0], x[0])
        far = shares(lambda one: centered(model.merge(one[None])[0]), added)
    assert_close(found, far @ near, 0.05)


@each(OF_TOKENS)
def test_relevance_stays_on_what_is_read(method):
    model, x = made(Cropped), noise(2, 3, SIDE, SIDE)
    found = method(model).attribute(x, 1, **options(method))
    assert found.shape == x.shape
    assert not bool(found[..., :4, :].any())
    assert bool(found[..., 4:, :].any())
    even = method(model, feature_share="even").attribute(x, 1, **options(method))
    assert_close(found.sum(1), even.sum(1), 1e-6)


@each(OF_TOKENS)
def test_a_color_without_weight_gets_nothing(method):
    model, x = made(Convolutions), noise(1, 3, SIDE, SIDE)
    with torch.no_grad():
        model.stem.weight[:, 1] = 0
    found = method(model).attribute(x, 1, **options(method))
    assert not bool(found[:, 1].any())
    assert bool(found[:, 0].any())


def test_tensors_that_all_ways_pass():
    leaf = torch.randn(4, requires_grad=True)
    whole = leaf * 2
    first, second = whole.exp().chunk(2)
    joined = first + second
    root = joined.sin()
    names = [edge.node.name() for edge in meetings([Point.of(root)], [Point.of(leaf)])]
    assert [name.partition("Backward")[0] for name in names] == ["Mul", "Exp", "Add"]
    both = meetings([Point.of(root), Point.of(first.cos())], [Point.of(leaf)])
    assert [edge.node.name().partition("Backward")[0] for edge in both] == ["Mul", "Exp"]
    past = meetings([Point.of(root), Point.of(leaf)], [Point.of(leaf)])
    assert list(past) == []
