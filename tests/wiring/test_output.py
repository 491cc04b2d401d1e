"""What a score reads, by token: uneven readouts, ways around mixers, hidden and unknown ways."""

import warnings

import pytest
import torch
from methods import assert_close
from models import randomize
from three_mixers import (
    Doubled,
    DoubledOnce,
    E,
    L,
    after,
    rollout,
    straight,
    tokens,
    two,
    warnings_of_relevance,
    with_forward,
)
from torch import nn
from torch.autograd.function import once_differentiable

from captum_ssm import (
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnsupportedModelError,
    supported,
)
from captum_ssm.capture import freeze
from captum_ssm.capture.request import Request


def attention(m, h):
    return (8 * m.gate(h)).softmax(1)


POOLS = {
    "the last token": (lambda m, h: m.head(h[:, -1]), lambda m, h: torch.eye(L)[-1]),
    "the first": (lambda m, h: m.head(h[:, 0]), lambda m, h: torch.eye(L)[0]),
    "the mean": (lambda m, h: m.head(h.mean(1)), lambda m, h: torch.ones(L)),
    "the mean of normed tokens": (
        lambda m, h: m.head(nn.functional.layer_norm(h, (E,)).mean(1)),
        lambda m, h: torch.ones(L),
    ),
    "the mean of what two layers make of them": (
        lambda m, h: m.head(m.linear(nn.functional.gelu(m.linear(h))).relu().mean(1)),
        lambda m, h: torch.ones(L),
    ),
    "attention": (lambda m, h: m.head((h * attention(m, h)).sum(1)), attention),
    "a weighted sum": (
        lambda m, h: m.head((h * torch.arange(L)[:, None]).sum(1)),
        lambda m, h: torch.arange(L),
    ),
    "a complex number of two tokens": (
        lambda m, h: m.head(in_phase(h, h.roll(1, 1))[:, -1]),
        lambda m, h: 4 * torch.eye(L)[-1] + 3 * torch.eye(L)[-2],
    ),
    "two tokens": (
        lambda m, h: m.head(h[:, 2] + 3 * h[:, 5]),
        lambda m, h: torch.eye(L)[2] + 3 * torch.eye(L)[5],
    ),
    "the first ones only": (lambda m, h: m.head(h[:, :4].sum(1)), lambda m, h: torch.arange(L) < 4),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("method", [MambaRollout, MambaAttribution])
def test_rows_are_weighed_as_the_score_reads_them(name, method):
    head, read = POOLS[name]
    model, x = with_forward(lambda m, x: head(m, m.towards(x))), tokens()
    (_, _), _, (h, rows) = rollout(model, x, model.a, model.b)
    w = read(model, h).double().detach().flatten()
    request = Request.of(model, None, x)
    gradients = {"gradients": True, "target": 1} if method is MambaAttribution else {}
    (found,) = freeze(request, **gradients).require_query()
    assert_close(found[0], w / w.sum(), 1e-9)
    if method is MambaRollout:
        assert_close(method(model).attribute(x).sum(-1)[0], (w / w.sum()) @ rows[0], 1e-9)


def test_a_flat_head_is_read_with_its_weights():
    model, x = with_forward(lambda m, x: m.flat(m.towards(x).flatten(1))), tokens()
    w = model.flat.weight[1].detach().view(L, E).abs().sum(1)
    frozen = freeze(Request.of(model, None, x), target=1, gradients=True)
    assert_close(frozen.require_query()[0][0], w / w.sum(), 1e-9)


@pytest.mark.parametrize("place", [0, 1])
def test_what_the_score_reads_past_its_tokens_is_followed(place):
    def forward(m, x):
        h = x + m.a(x)
        return m.head((h + m.b(h))[:, -1] + 5 * [x, h][place][:, 0])

    model, x = with_forward(forward), tokens()
    states = rollout(model, x, model.a, model.b)
    expected = (states[2][1][0, -1] + 5 * states[place][1][0, 0]) / 6
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)
    found = supported(model, x)
    assert "83% goes around, from" in found.between
    assert abs(found.held - 1 / 6) < 1e-6
    with pytest.warns(UserWarning, match="83% goes around"):
        RawAttention(model).attribute(x)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("order", ["flipped", "rolled"])
def test_tokens_in_other_places_are_followed_past_mixers(place, order):
    move = {"flipped": lambda x: x.flip(1), "rolled": lambda x: x.roll(2, 1)}[order]

    def forward(m, x):
        states = [x, x + m.a(x)]
        h = states[1] + m.b(states[1])
        if place == 0:
            h = h + 2 * move(x)
            return m.head((h + m.c(h))[:, -1])
        h = h + m.c(h)
        return m.head((h + 2 * move(states[1]))[:, -1])

    model, x = with_forward(forward), tokens()
    mixers = (model.a, model.b) if place == 0 else (model.a, model.b, model.c)
    states = rollout(model, x, *mixers)
    h, rows = states[-1]
    h, rows = h + 2 * move(states[place][0]), (rows + 2 * move(states[place][1])) / 3
    if place == 0:
        with torch.no_grad():
            h, rows = after(model.c, h, rows)
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], rows[0, -1], 1e-6)


def ema(x):
    h, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        h = 0.7 * h + 0.3 * token
        out.append(h)
    return torch.stack(out, 1)


def hidden(x, how):
    with torch.no_grad() if how == "no_grad" else torch.enable_grad():
        first = x[:, :4].flip(1)
    return torch.cat([first.detach(), x[:, 4:]], 1)


def rounded(x):
    # Straight through: what is rounded moves in steps of a quarter.
    return straight(x, (4 * ema(x)).round() / 4)


class Lying(torch.autograd.Function):
    """A moving average whose backward pass is that of the identity."""

    @staticmethod
    def forward(ctx, x):
        return ema(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class LyingOnce(Lying):
    """A moving average by a kernel: its backward pass cannot be differentiated."""

    backward = staticmethod(once_differentiable(Lying.backward))


def normed(x):
    # By the size of all earlier tokens, which autograd does not see.
    size = x.square().mean(-1, keepdim=True).cumsum(1) / torch.arange(1, L + 1)[:, None]
    return x / size.sqrt().detach()


def masked(x):
    generator = torch.Generator().manual_seed(int(1e6 * x.detach().abs().sum()) % 2**31)
    return x * (torch.rand(x.shape[:2], generator=generator) > 0.4)[..., None]


def written(x):
    y = x.clone()
    y.data[:, 4:] = x.data[:, :-4]
    return y


def in_phase(x, other):
    # The real part of a complex number that is turned by 0.8 + 0.6i.
    return (torch.complex(x, other) * (0.8 + 0.6j)).real


REFUSED = {
    "a GRU around the mixers": lambda m, x: m.head((m.towards(x) + 9 * m.gru(x)[0])[:, -1]),
    "layers over time past them": lambda m, x: m.head((m.towards(x) + 9 * m.time(x.mT).mT)[:, -1]),
    "a moving average before the mean": lambda m, x: m.head((m.towards(x) + 9 * ema(x)).mean(1)),
    "a cumulative sum per token": lambda m, x: m.head(m.towards(x) + 3 * x.cumsum(1))[:, -1],
    "some moved under detach": lambda m, x: two(m, x, lambda h: hidden(h, "detach")),
    "some moved under no_grad": lambda m, x: two(m, x, lambda h: hidden(h, "no_grad")),
    "straight through, turned around": lambda m, x: two(m, x, lambda h: straight(h, h.flip(1))),
    "straight through, one token": lambda m, x: two(
        m, x, lambda h: straight(h, torch.cat([h[:, :3], h[:, 8:], h[:, 4:]], 1))
    ),
    "a hidden mean": lambda m, x: two(m, x, lambda h: h + h.mean(1, keepdim=True).detach()),
    "a hidden gate": lambda m, x: two(m, x, lambda h: h * torch.sigmoid(m.gate(h[:, :1]).detach())),
    "hidden after the last mixer": lambda m, x: m.head(
        (lambda h: straight(h, h.roll(1, 1)))(m.towards(x))[:, -1]
    ),
    "a backward pass of its own": lambda m, x: two(m, x, Lying.apply),
    "a backward pass of its own at the end": lambda m, x: m.head(Lying.apply(m.towards(x))[:, -1]),
    "a backward pass of a kernel's own": lambda m, x: two(m, x, LyingOnce.apply),
    "a hidden norm over tokens": lambda m, x: two(m, x, normed),
    "a mask that the input seeds": lambda m, x: two(m, x, masked),
    "tokens that are written to data": lambda m, x: two(m, x, written),
    "rounded averages": lambda m, x: two(m, x, rounded),
    "rounded averages at the end": lambda m, x: m.head(rounded(m.towards(x))[:, -1]),
    "content that is sorted": lambda m, x: two(
        m, x, lambda h: h.gather(1, m.gate(h).argsort(1).expand_as(h))
    ),
    "a hidden skip from the input": lambda m, x: m.head(
        m.towards(x)[:, -1] + m.linear(x[:, 0]).detach()
    ),
}

# They have no coefficients, or sigmoids, which are held constant wherever they are computed.
HELD = [
    "a GRU around the mixers",
    "layers over time past them",
    "a moving average before the mean",
    "a cumulative sum per token",
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unknown_or_hidden_is_refused_or_said(name):
    model, x = with_forward(REFUSED[name]), tokens()
    for method in (MambaRollout, MambaAttribution):
        with pytest.raises(UnsupportedModelError):
            method(model).attribute(x, target=1)
    for _ in range(2):
        said = warnings_of_relevance(model, x)
        is_said = any("autograd does not show" in one or "are mixed by" in one for one in said)
        assert is_said == (name not in HELD)


@pytest.mark.parametrize("kernel", [Doubled, DoubledOnce])
def test_a_kernel_whose_backward_pass_has_no_graph_hides_nothing(kernel):
    x = tokens()
    model, plain = (
        with_forward(lambda m, x, between=between: two(m, x, between))
        for between in (kernel.apply, lambda h: 2 * h)
    )
    assert_close(MambaRollout(model).attribute(x), MambaRollout(plain).attribute(x), 1e-9)
    (said,) = warnings_of_relevance(model, x)
    assert "has no rule" in said


class Own(nn.Module):
    """A linear attention that nobody knows."""

    def __init__(self, is_frozen):
        super().__init__()
        self.project, self.out = nn.Linear(E, 4 * E, bias=False), nn.Linear(E, E, bias=False)
        self.is_frozen = is_frozen

    def forward(self, x):
        q, k, v, g = self.project(x).chunk(4, -1)
        decay = torch.sigmoid(g)
        if self.is_frozen:
            q, k, decay = q.detach(), k.detach(), decay.detach()
        return self.out(linear_attention(q, k, v, decay))


def linear_attention(q, k, v, decay):
    h, found = q.new_zeros(len(q), E, E), []
    for t in range(q.shape[1]):
        h = decay[:, t, :, None] * h + k[:, t, :, None] * v[:, t, None, :]
        found.append(torch.einsum("bk,bkv->bv", q[:, t], h))
    return torch.stack(found, 1)


PLACES = {
    "beside": lambda m, x: m.head((x + m.a(x) + m.own(x))[:, -1]),
    "after": lambda m, x: (lambda h: m.head((h + m.own(h))[:, -1]))(x + m.a(x)),
    "after, pooled": lambda m, x: (lambda h: m.head((h + m.own(h)).mean(1)))(x + m.a(x)),
    "a second tower": lambda m, x: m.head((m.towards(x) + 4 * m.own(x))[:, -1]),
    "behind a flag": lambda m, x: m.head((m.towards(x) + (m.own(x) if m.flag else 0))[:, -1]),
    "in longer inputs": lambda m, x: m.head(
        (m.towards(x) + (m.own(x) if x.shape[1] > 6 else 0))[:, -1]
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_scans_are_found_wherever_they_stand(name):
    relevance = []
    for is_frozen in (False, True):
        model, x = with_forward(PLACES[name]), tokens()
        model.own, model.flag = randomize(Own(is_frozen)).double(), name != "behind a flag"
        if name in ("behind a flag", "in longer inputs"):
            MambaLRP(model).attribute(x[:, :5], target=1)
            model.flag = True
        relevance.append(MambaLRP(model).attribute(x, target=1))
    assert_close(*relevance, 1e-9)


class HeldGRU(nn.Module):
    """A GRU whose gates, and the factors of its activation, are constants."""

    def __init__(self, gru):
        super().__init__()
        self.gru = gru

    def forward(self, x):
        weights = self.gru.weight_ih_l0, self.gru.weight_hh_l0
        biases = self.gru.bias_ih_l0, self.gru.bias_hh_l0
        h, states = x.new_zeros(len(x), self.gru.hidden_size), []
        for token in x.unbind(1):
            given = zip((token, h), weights, biases, strict=True)
            here, before = (nn.functional.linear(*each).chunk(3, -1) for each in given)
            reset, update = (
                (a + b).sigmoid().detach() for a, b in zip(here[:2], before[:2], strict=True)
            )
            new = here[2] + reset * before[2]
            h = update * h + (1 - update) * new * (new.tanh() / new).detach()
            states.append(h)
        return torch.stack(states, 1), h


@pytest.mark.parametrize("pooled", [False, True])
def test_a_gru_is_frozen_by_the_rules(pooled):
    def forward(m, x):
        h = (lambda h: h + m.gru(h)[0])(m.towards(x))
        return m.head(h.mean(1) if pooled else h[:, -1])

    model, held, x = with_forward(forward), with_forward(forward), tokens()
    held.gru = HeldGRU(held.gru)
    relevance = []
    for each in (model, held):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            relevance.append(MambaLRP(each).attribute(x, target=1))
        assert not any("tokens are mixed" in str(one.message) for one in said)
    assert_close(*relevance, 1e-9)


@pytest.mark.parametrize("name", POOLS)
def test_plain_models_balance(name):
    model, x = with_forward(lambda m, x: POOLS[name][0](m, m.towards(x))), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wiring = freeze(Request.of(model, None, x)).wiring
        MambaLRP(model).attribute(x, target=1)
    assert wiring.is_simple
    assert wiring.unheld is None
    assert not wiring.neighbor_share


def test_a_model_that_cannot_be_moved_is_said():
    seen = []

    def forward(model, x):
        h = model.b(x)
        # Stands for a router that sends moved tokens elsewhere.
        seen.append(h.detach().clone())
        if not torch.equal(seen[0], h):
            raise ValueError("other experts")
        return model.head(x + h + model.c(h))[:, -1]

    with pytest.warns(UserWarning, match=r"moved a little \(ValueError: other experts\)"):
        MambaRollout(with_forward(forward)).attribute(tokens())
