"""U-shapes: what is read around a coarser grid, against a product of explicit Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from inputs import noise
from methods import MAPS, assert_close
from models import made
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from captum_ssm import MambaRollout, UnsupportedModelError
from captum_ssm.attr.maps.maps import GridMaps, MapOptions, rollout_row
from captum_ssm.capture import Request, freeze
from captum_ssm.graph.token_weights import TokenWeights
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.models import BidirectionalMamba

E, L = 8, 8
States = dict[str, Tensor]


def mixer() -> nn.Module:
    return BidirectionalMamba(E, state=4, bimamba_type="none")


@dataclass(frozen=True)
class Shape:
    """A model of stages: how each makes its residual stream of earlier ones, ``(B, L, E)`` each.

    Args:
        streams (dict): by stage, of the model and the states after earlier stages.
        head (Callable): the output, likewise.
        mixers (int): side by side in each stage.
        is_residual (bool): whether a stage adds to its stream.
    """

    streams: dict[str, Callable[[Model, States], Tensor]]
    head: Callable[[Model, States], Tensor]
    mixers: int = 1
    is_residual: bool = True


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norms = nn.ModuleDict({name: nn.LayerNorm(E) for name in shape.streams})
        self.mixers = nn.ModuleDict(
            {name: nn.ModuleList(mixer() for _ in range(shape.mixers)) for name in shape.streams}
        )
        self.merges = nn.ModuleList(nn.Conv1d(E, E, 2, stride=2) for _ in range(2))
        self.splits = nn.ModuleList(nn.ConvTranspose1d(E, E, 2, stride=2) for _ in range(2))
        self.joined, self.wide = nn.Linear(2 * E, E), nn.ConvTranspose1d(E, E, 4, stride=4)
        self.pixels = nn.Linear(E, 3)

    def down(self, x: Tensor, k: int = 0) -> Tensor:
        return self.merges[k](x.mT).mT

    def up(self, x: Tensor, k: int = 0) -> Tensor:
        return self.splits[k](x.mT).mT

    def given(self, name: str, states: States) -> Tensor:
        """The tokens that a stage's mixers are given."""
        return self.norms[name](self.shape.streams[name](self, states))

    def after(self, name: str, states: States) -> Tensor:
        """The state after a stage."""
        stream = self.shape.streams[name](self, states)
        given = self.norms[name](stream)
        added = sum(one(given) for one in self.mixers[name])
        return stream + added if self.shape.is_residual else added

    def states(self, x: Tensor) -> States:
        states = {"x": x}
        for name in self.shape.streams:
            states[name] = self.after(name, states)
        return states

    def forward(self, x: Tensor) -> Tensor:
        # (B, 3, L): a class per place, a dense output.
        return self.shape.head(self, self.states(x)).mT


def blocks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The squared norms of the Jacobian's blocks, ``(T, S)``, of tokens of one example."""
    return jacobian(f, x)[0, :, :, 0].square().sum((1, 3))


def energies(f: Callable[[States], Tensor], states: States) -> dict[str, Tensor]:
    """By stage that is read with the states of all others held: squared norms ``(T, S)``."""
    found = {
        name: blocks(lambda one, name=name: f({**states, name: one}), state)
        for name, state in states.items()
    }
    return {name: one for name, one in found.items() if bool((one > 0).any())}


Read = dict[str, Tensor]


def reads(model: Model, states: States, target: tuple[int, int]) -> dict[str, Read]:
    """What each stage and the entry of the output reads, squared norms ``(T, S)``."""
    kind, place = target
    found = {
        name: energies(lambda s, name=name: model.given(name, s), states)
        for name in model.shape.streams
    }
    found["output"] = energies(
        lambda s: model.shape.head(model, s)[:, place : place + 1, kind : kind + 1], states
    )
    return found


@torch.no_grad()
def product(model: Model, states: States, read: dict[str, Read], shares: dict[str, Read]) -> Tensor:
    """The row of the rollout, ``(L,)``."""
    after = {"x": torch.eye(L, dtype=torch.float64)}
    for name, one in read.items():
        parts = [
            shares[name][k][:, None] * (energy / energy.sum(1, keepdim=True)) @ after[k]
            for k, energy in one.items()
        ]
        after[name] = torch.stack(parts).sum(0)
        if name != "output":
            given = model.given(name, states)
            calls = [
                MixerCall("mixer", one, (given,), {}, one(given)) for one in model.mixers[name]
            ]
            maps = [find_adapter(call.module)(call).recurrence.matrix("mean") for call in calls]
            mixed = torch.stack(maps).sum((0, 1)) @ after[name]
            after[name] = after[name] + mixed if model.shape.is_residual else mixed
    return after["output"][0]


FINE, COARSE = lambda m, s: s["x"], lambda m, s: m.down(s["fine"])
TWO = {"fine": FINE, "coarse": COARSE}
THREE = TWO | {"low": lambda m, s: m.down(s["coarse"], 1)}


def blurred(x: Tensor) -> Tensor:
    return nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT


def ends(name: str) -> Callable[[Model, States], Tensor]:
    return lambda m, s: m.pixels(s[name])


SHAPES = {
    "a skip that is added": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"]) + s["fine"]}, ends("last")
    ),
    # The skip is made of what the coarser stages are made of, on other tokens.
    "a skip around two stages": Shape(
        TWO
        | {
            "middle": lambda m, s: s["coarse"],
            "last": lambda m, s: m.up(s["middle"]) + s["fine"],
        },
        ends("last"),
    ),
    "a state that is added once more, and then merged": Shape(
        {
            "fine": FINE,
            "second": lambda m, s: s["fine"],
            "third": lambda m, s: s["second"],
            "coarse": lambda m, s: m.down(s["third"] + s["fine"]),
        },
        lambda m, s: m.pixels(m.up(s["coarse"])),
    ),
    "a skip that is concatenated": Shape(
        TWO | {"last": lambda m, s: m.joined(torch.cat([m.up(s["coarse"]), s["fine"]], -1))},
        ends("last"),
    ),
    "mixers side by side": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"]) + s["fine"]}, ends("last"), mixers=2
    ),
    "three grids": Shape(
        THREE
        | {
            "middle": lambda m, s: m.up(s["low"], 1) + s["coarse"],
            "last": lambda m, s: m.up(s["middle"]) + s["fine"],
        },
        ends("last"),
    ),
    "three grids, up without mixers": Shape(
        THREE | {"last": lambda m, s: m.up(m.up(s["low"], 1) + s["coarse"]) + s["fine"]},
        ends("last"),
    ),
    # As in VM-UNet: what is added has as many tokens as the stage before.
    "a skip added before the next grid": Shape(
        THREE
        | {
            "middle": lambda m, s: m.up(s["low"], 1),
            "last": lambda m, s: m.up(s["middle"] + s["coarse"]),
        },
        ends("last"),
    ),
    "a skip added after the stage": Shape(
        TWO
        | {
            "middle": lambda m, s: m.up(s["coarse"]),
            "last": lambda m, s: s["middle"] + s["fine"],
        },
        ends("last"),
    ),
    "a skip added before the head": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"])},
        lambda m, s: m.pixels(s["last"] + s["fine"]),
    ),
    # As in feature pyramids.
    "a head that reads two grids": Shape(TWO, lambda m, s: m.pixels(m.up(s["coarse"]) + s["fine"])),
    "a head that reads three grids": Shape(
        THREE,
        lambda m, s: m.pixels(m.wide(s["low"].mT).mT + m.up(s["coarse"]) + s["fine"]),
    ),
    # As in U-Mamba: a product of maps, without the tokens that they read.
    "mixers that add to nothing": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"]) + s["fine"]}, ends("last"), is_residual=False
    ),
}


# Each token reads several of the skip: how much these add is estimated.
BLURRED = {
    "a skip that is blurred": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"]) + blurred(s["fine"])}, ends("last")
    ),
    "the input, blurred, past both": Shape(
        TWO | {"last": lambda m, s: m.up(s["coarse"]) + blurred(s["x"])}, ends("last")
    ),
}


@pytest.fixture
def few_probes(monkeypatch):
    """As many as channels: exact where each token reads one, as all of these do."""
    monkeypatch.setattr("captum_ssm.wiring.inputs._PASSES", E)


@pytest.fixture
def exact(monkeypatch):
    """Relevance is carried by whole matrices of weights."""

    def carried(self, w, probes=None):
        return torch.einsum("bt,bts->bs", w, self.matrix())

    monkeypatch.setattr(TokenWeights, "rmatvec", carried)


@pytest.mark.usefixtures("few_probes", "exact")
@pytest.mark.parametrize("name", SHAPES)
def test_a_rollout_is_the_product(name) -> None:
    compare(SHAPES[name], 1e-9)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", BLURRED)
def test_what_several_tokens_add_is_estimated(name, monkeypatch) -> None:
    monkeypatch.setattr("captum_ssm.wiring.inputs._PASSES", 32 * E)
    compare(BLURRED[name], 0.1)


def compare(shape: Shape, tolerance: float) -> None:
    """Shares of what is read, and the rollout by these, against explicit Jacobians."""
    model = made(Model(shape))
    x = noise(1, L, E, seed=3)
    states = model.states(x)
    read = reads(model, states, (1, 5))
    frozen = freeze(Request.of(model, None, x), target=(1, 5), gradients=True)
    names = ["x", *shape.streams]
    found = {own: {} for own in names[1:]}
    for stage, own in zip(frozen.wiring.steps, names[1:], strict=True):
        for k, link in stage.reads:
            alone = torch.ones(stage.tokens, dtype=x.dtype)
            found[own][names[k + 1]] = alone if link.share is None else link.share[0]
    query = frozen.require_query()
    found["output"] = {
        names[k + 1]: w.sum(1) for (k, _), w in zip(frozen.wiring.output, query, strict=True)
    }
    for own, one in read.items():
        sizes = {k: energy.sum(1) for k, energy in one.items()}
        assert set(found[own]) == set(sizes)
        for k, size in sizes.items():
            share = size / sum(sizes.values())
            assert_close(found[own][k], share, tolerance)
    row = product(model, states, read, found)
    (ours,) = rollout_row(GridMaps(frozen, frozen.layers, MapOptions()))
    assert_close(ours[0], row, 1e-9)
    # The entry is the score, or what the target names: either tells every method where it is.
    for ours in (
        MambaRollout(lambda x: model(x)[:, 1, 5], model).attribute(x),
        MambaRollout(model).attribute(x, target=(1, 5)),
    ):
        assert_close(ours.sum(-1)[0], row, 1e-9)


@pytest.mark.usefixtures("few_probes")
@pytest.mark.parametrize("name", SHAPES)
def test_every_method_of_maps_runs(name):
    model = made(Model(SHAPES[name]))
    x = noise(2, L, E, seed=3)
    for method in MAPS:
        found = method(model).attribute(x, target=(1, 5))
        # An example of a batch gets what it gets by itself.
        assert_close(method(model).attribute(x[1:], target=(1, 5)), found[1:], 1e-9)


def test_shares_of_a_skip_and_of_a_state_once_more_add_up():
    shape = Shape(
        THREE
        | {
            "middle": lambda m, s: m.up(s["low"], 1) + s["coarse"],
            "second": lambda m, s: s["middle"],
            "third": lambda m, s: s["second"],
            "fourth": lambda m, s: s["third"] + m.down(s["fine"]) + s["middle"],
        },
        lambda m, s: m.pixels(m.up(s["fourth"])),
    )
    wiring = freeze(Request.of(made(Model(shape)), None, noise(1, L, E, seed=3))).wiring
    links = dict(wiring.steps[-1].reads)
    assert list(links) == [5, 0, 3]
    assert_close(links[5].share, links[3].share, 1e-9)  # the stream, which the state is in
    assert_close(sum(link.share for link in links.values()), torch.ones(1, L // 2), 1e-9)


@pytest.mark.parametrize("grids", ["two", "three"])
def test_a_whole_rollout_has_one_axis_of_output_tokens(grids):
    model = made(Model(SHAPES[f"a head that reads {grids} grids"]))
    x = torch.randn(1, L, E, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=r"read from steps of .*8.* tokens.*attribute"):
        MambaRollout(model).rollout(x)
