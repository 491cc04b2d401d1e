"""Models that join the examples of a batch, and functions that cannot be differentiated twice."""

from __future__ import annotations

import warnings

import pytest
import torch
from inputs import noise
from methods import assert_close
from models import randomize
from torch import nn
from torch.nn import functional as F

from captum_ssm import MambaLRP, MambaRollout, TargetError, UnsupportedModelError
from captum_ssm.models import BidirectionalMamba

L, E = 6, 8


class Two(nn.Module):
    """Two mixers, something between them, and something after them."""

    def __init__(self, between=lambda h: h, after=lambda h: h[:, -1]):
        super().__init__()
        self.a, self.b = (BidirectionalMamba(E, state=4, bimamba_type="none") for _ in range(2))
        self.linear, self.head = nn.Linear(E, E), nn.Linear(E, 3)
        self.between, self.after = between, after
        randomize(self).double()

    def forward(self, x):
        h = x + self.a(x)
        h = h + self.between(self.linear(h))
        return self.head(self.after(h + self.b(h)))


def said(model, x):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        MambaLRP(model).attribute(x, target=1)
    return [str(one.message) for one in found]


def test_examples_that_are_mixed_are_said():
    model = Two(after=lambda h: (h + h.roll(1, 0))[:, -1]).eval()
    for _ in range(2):
        assert not said(model, noise(1, L, E))  # alone there is no other
        assert any("depends on others of the batch" in one for one in said(model, noise(2, L, E)))
    assert not said(Two().eval(), noise(2, L, E))


def test_examples_that_are_mixed_later_are_said():
    class Normalized(Two):
        def __init__(self):
            super().__init__(after=lambda h: self.norm(h.mT)[..., -1])
            self.norm = nn.BatchNorm1d(E).double()

    model = Normalized().eval()
    assert not said(model, noise(2, L, E))
    said(model.train(), noise(1, L, E))  # looked at with one example, which mixes with no other
    assert any("depends on others of the batch" in one for one in said(model, noise(2, L, E)))


def test_examples_in_one_sequence_are_refused():
    class Joined(Two):
        def forward(self, x):
            y = x.reshape(1, -1, E)
            h = (y + self.a(y)).view_as(x)
            return self.head((h + self.b(h))[:, -1])

    model = Joined().eval()
    with pytest.raises(UnsupportedModelError, match="one example at a time"):
        MambaRollout(model).attribute(noise(2, L, E))
    assert MambaRollout(model).attribute(noise(1, L, E)).shape == (1, L, E)


def test_logits_of_fewer_examples_are_refused():
    class Summed(Two):
        def get_input_embeddings(self):
            return self.embed

        def forward(self, input_ids):
            return super().forward(self.embed(input_ids)).sum(0, keepdim=True)

    model = Summed(after=lambda h: h)
    model.embed = nn.Embedding(7, E).double()
    with pytest.raises(TargetError, match="for 2 examples"):
        MambaLRP(model.eval()).attribute(torch.arange(2 * L).view(2, L) % 7, target=1)


def test_a_complex_score_is_refused():
    class Complex(Two):
        def forward(self, x):
            y = super().forward(x)
            return torch.complex(y, y)

    with pytest.raises(TargetError, match="complex128"):
        MambaLRP(Complex().eval()).attribute(noise(1, L, E), target=1)


def test_a_function_without_a_second_derivative():
    # A hard sigmoid; what is written out has one.
    x, found = noise(1, L, E), []
    for between in (F.hardsigmoid, lambda h: torch.clamp(h / 6 + 0.5, 0, 1)):
        found.append(MambaRollout(Two(between).eval()).attribute(x))
    assert_close(*found, 1e-6)


def test_a_way_that_cannot_be_measured_is_refused():
    class Past(Two):
        def forward(self, x):
            h = x + self.a(x)
            h = h + self.b(h)
            return self.head((h + F.hardsigmoid(x))[:, -1])

    with pytest.raises(UnsupportedModelError, match="differentiated twice"):
        MambaRollout(Past().eval()).attribute(noise(1, L, E))
