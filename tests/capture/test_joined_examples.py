"""Models that join the examples of a batch, and functions that cannot be differentiated twice."""

import warnings

import pytest
import torch
from inputs import noise
from methods import assert_close
from models import randomize, without_biases
from torch import nn
from torch.nn import functional as F

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    RelevanceFlow,
    TargetError,
    UnifiedImplicitAttention,
    UnsupportedModelError,
)
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


@pytest.mark.parametrize("method", [MambaAttribution, UnifiedImplicitAttention, LaTIM])
def test_gradients_of_joined_examples_are_said(method):
    """The sum of such scores, whose gradient is taken, may even depend on nothing."""
    joined, x = Two(after=lambda h: (h + h.roll(1, 0))[:, -1]).eval(), noise(2, L, E)
    for _ in range(2):
        with pytest.warns(UserWarning, match="depends on others of the batch"):
            method(joined).attribute(x, target=1)
    model = Two().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method(joined).attribute(x[:1], target=1)
        method(model).attribute(x, target=1)


def test_tokens_that_come_first_are_not_taken_for_examples():
    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings, self.two = nn.Embedding(9, E), Two(after=lambda h: h)
            randomize(self).double()

        def forward(self, ids):
            return self.two(self.embeddings(ids.T).transpose(0, 1))

    ids = torch.randint(9, (2, L), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MambaLRP(TokensFirst().eval()).attribute(ids, target=(-1, 1))


def test_ids_that_no_table_embeds_are_refused():
    class ByProduct(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.two = nn.Parameter(torch.zeros(9, E)), Two(after=lambda h: h)
            randomize(self).double()

        def forward(self, ids):
            return self.two(F.one_hot(ids, 9).to(self.weight) @ self.weight)

    ids = torch.randint(9, (2, L), generator=torch.Generator().manual_seed(0))
    for run in (MambaLRP(ByProduct()).attribute, RelevanceFlow(ByProduct()).edges):
        with pytest.raises(InputError, match="embeds 0 of the 12 ids"):
            run(ids, target=(-1, 1))


class Guided(Two):
    """Classifier-free guidance: the model without a condition is given a learned sequence."""

    def __init__(self, *, is_one_batch):
        super().__init__()
        self.is_one_batch = is_one_batch
        self.nothing = nn.Parameter(noise(1, L, E))

    def forward(self, x):
        nothing = self.nothing.expand_as(x)
        if self.is_one_batch:
            given, without = super().forward(torch.cat([x, nothing])).chunk(2)
        else:
            given, without = super().forward(x), super().forward(nothing)
        return 3 * given - 2 * without


def test_a_branch_of_constants_in_one_batch():
    """Maps hold the share of the branch that reads the input; several examples are refused."""
    model, x = Guided(is_one_batch=True).eval(), noise(2, L, E)
    with pytest.raises(UnsupportedModelError, match=r"guidance.* one example at a time"):
        MambaRollout(model).attribute(x)
    found = MambaRollout(model).attribute(x[:1])
    given = MambaRollout(lambda x: Two.forward(model, x), model).attribute(x[:1])
    assert_close(found, 3 / (3 + 2) * given)


def test_a_branch_of_constants():
    """Maps are refused in words; MambaLRP takes constants as they are."""
    model, x = Guided(is_one_batch=False).eval(), noise(1, L, E)
    for method in (MambaRollout, MambaAttribution):
        with pytest.raises(UnsupportedModelError, match="classifier-free guidance"):
            method(model).attribute(x, target=1)
    with pytest.warns(UserWarning, match="nothing tells what else mixes tokens"):
        found = MambaLRP(model).attribute(x, target=1)
    guided = MambaLRP(lambda x: 3 * Two.forward(model, x), model).attribute(x, target=1)
    assert_close(found, guided)


def test_an_encoder_and_a_decoder_side_by_side():
    """They work on other numbers of tokens of one input."""

    class Translator(Two):
        def forward(self, x):
            memory, h = x + self.a(x), x[:, :4]
            h = h + self.b(h)
            h = h + (self.linear(h) @ memory.mT).softmax(-1) @ memory
            return self.head(h[:, -1])

    model, x = without_biases(Translator().eval()), noise(1, L, E)
    with pytest.raises(UnsupportedModelError, match="a and b are side by side, on 6 and 4 tokens"):
        MambaRollout(model).attribute(x, target=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, delta = MambaLRP(model).attribute(x, target=1, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-6


@pytest.mark.parametrize(
    "mode", [lambda: torch.autograd.set_detect_anomaly(True), torch.inference_mode]
)
def test_modes_of_the_caller(mode):
    """NaN, by which the library asks who reads a token, is not an anomaly."""
    model, x = Two().eval(), noise(1, L, E)
    methods = (MambaRollout, MambaAttribution, LaTIM, MambaLRP)
    expected = [method(model).attribute(x, target=1) for method in methods]
    edges = RelevanceFlow(model).edges(x, target=1).matrix()
    again = Two().eval()
    with mode():
        found = [method(again).attribute(x, target=1) for method in methods]
        of_flow = RelevanceFlow(again).edges(x, target=1).matrix()
    for one, other in zip([*found, of_flow], [*expected, edges], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", [MambaRollout, RawAttention])
@pytest.mark.parametrize("part", ["between", "after"])
def test_methods_without_a_score_say_that_examples_are_joined(method, part):
    def centered(h):
        return h - h.mean(0)

    def of(model):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            method(model).attribute(noise(2, L, E), position=L - 1)
        return [str(one.message) for one in found if "act on one another" in str(one.message)]

    changes = (
        {"between": centered} if part == "between" else {"after": lambda h: centered(h)[:, -1]}
    )
    model = Two(**changes).eval()
    assert [len(of(model)) for _ in range(2)] == [1, 1]
    assert of(Two().eval()) == []
