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

from captum_ssm import MambaLRP, MambaRollout, UnsupportedModelError
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


class InSteps(Convolutions):
    """A loop over the tokens, whose results are put together in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(inputs.E, inputs.E)

    def tokens(self, x: Tensor) -> Tensor:
        x = super().tokens(x)
        state, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.again(state) + x[:, t])
            made.append(state)
        return self.joined(made)

    def joined(self, made: list[Tensor]) -> Tensor:
        return torch.cat([state[:, None] for state in made], 1)


class WrittenInSteps(InSteps):
    def joined(self, made: list[Tensor]) -> Tensor:
        whole = made[0].new_empty(len(made[0]), len(made), inputs.E)
        for t, state in enumerate(made):
            whole[:, t] = state
        return whole


class GrownInSteps(InSteps):
    def joined(self, made: list[Tensor]) -> Tensor:
        whole = made[0][:, None]
        for state in made[1:]:
            whole = torch.cat([whole, state[:, None]], 1)
        return whole


class EachAlone(InSteps):
    """One token after the other, none of which reads another one."""

    def tokens(self, x: Tensor) -> Tensor:
        x = Convolutions.tokens(self, x)
        return self.joined([torch.tanh(self.again(x[:, t]) + x[:, t]) for t in range(x.shape[1])])


class AtOnce(InSteps):
    def tokens(self, x: Tensor) -> Tensor:
        x = Convolutions.tokens(self, x)
        return torch.tanh(self.again(x) + x)


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


@pytest.mark.parametrize("kind", [InSteps, WrittenInSteps, GrownInSteps])
def test_a_loop_over_tokens_is_no_transport(kind):
    with pytest.raises(UnsupportedModelError, match=r"no known mixer \(a loop over tokens\)"):
        MambaRollout(made(kind)).attribute(noise(2, 3, SIDE, SIDE))


def test_a_loop_over_tokens_that_do_not_read_one_another_is_one():
    loop, at_once, x = made(EachAlone), made(AtOnce), noise(2, 3, SIDE, SIDE)
    at_once.load_state_dict(loop.state_dict())
    rows = [MambaRollout(model).attribute(x) for model in (loop, at_once)]
    assert_close(*rows, 1e-6)


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
