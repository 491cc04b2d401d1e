"""A model whose output changes from run to run is noticed; random draws alone are not."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from models import ids, tiny
from torch import Tensor, nn

from captum_ssm import LaTIM, MambaLRP, RawAttention


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model, self.kind = tiny("mamba"), kind
        self.torch = torch.Generator().manual_seed(0)
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.model(tokens).logits
        draws = {
            "gumbel": lambda: -torch.rand_like(y).log().neg().log(),
            "own": lambda: torch.rand(y.shape, generator=self.torch),
            "numpy": lambda: np.random.rand(),  # noqa: NPY002
            "own numpy": self.numpy.random,
            "python": random.random,
            "own python": self.python.random,
            "a layer": lambda: y * (random.random() < 0.5),  # some pairs of runs are alike
            "unused": lambda: 0 * torch.rand_like(y),
            "nothing": lambda: 0,
        }
        return y + draws[self.kind]()


NOISES = ["gumbel", "own", "numpy", "own numpy", "python", "own python", "a layer"]


@pytest.mark.parametrize("kind", NOISES)
def test_a_random_model_is_noticed(kind):
    random.seed(0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    for method in (RawAttention, MambaLRP, LaTIM):
        with pytest.warns(UserWarning, match="changes by .* from run to run"):
            method(Noisy(kind).eval()).attribute(ids(1, 7), target=(5, 3))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[2]  # noqa: NPY002


def test_what_is_in_train_mode_is_named():
    model = nn.Sequential(tiny("mamba").backbone, Read(), nn.Dropout(0.2), nn.Linear(16, 3))
    model.eval()[2].train()
    with pytest.warns(UserWarning, match=r"as 2 is in train mode: call model.eval\(\)"):
        RawAttention(model).attribute(ids(1, 7))


class Read(nn.Module):
    def forward(self, output) -> Tensor:
        return output.last_hidden_state[:, -1]


@pytest.mark.parametrize("kind", ["unused", "nothing"])
def test_draws_that_change_nothing_are_not_warned_of(kind, monkeypatch):
    from captum_ssm.capture import freezing

    compared = []
    own = freezing.warn_of_randomness
    monkeypatch.setattr(
        freezing,
        "warn_of_randomness",
        lambda *args, **options: compared.append(args) or own(*args, **options),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RawAttention(Noisy(kind).eval()).attribute(ids(1, 7))
    assert bool(compared) == (kind == "unused")  # without a draw the model runs no more often


def test_a_model_that_was_steady_is_run_less_often():
    """Noise whose size is a number among the modules' attributes is looked at anew."""

    runs: list[int] = []

    class Scaled(Noisy):
        size = 0.0

        def forward(self, tokens):
            runs.append(1)
            return self.model(tokens).logits + self.size * torch.rand(1)

    model, tokens, counts = Scaled("gumbel").eval(), ids(1, 7), []
    model.size = 0.0
    for _ in range(3):
        runs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            RawAttention(model).attribute(tokens, target=(5, 3))
        counts.append(len(runs))
    assert counts[1] == counts[2] <= counts[0] - 6
    model.size = 1.0
    with pytest.warns(UserWarning, match="changes by .* from run to run"):
        RawAttention(model).attribute(tokens, target=(5, 3))
