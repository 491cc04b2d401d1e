"""Wirings that deceive: ways that are hidden at their own tokens, and results that go nowhere."""

import copy

import pytest
import torch
from methods import MAPS, assert_close
from three_mixers import (
    DoubledOnce,
    E,
    L,
    straight,
    tokens,
    two,
    warnings_of_relevance,
    with_forward,
)
from torch import nn

from captum_ssm import LaTIM, MambaLRP, MambaRollout, UnsupportedModelError
from captum_ssm.wiring import mixing_test


class Scaled(torch.autograd.Function):
    """The identity, whose backward pass makes gradients smaller."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 4


# Hidden at the tokens' own places: the share of a change that is, where it is known.
IN_PLACE = {
    "around two mixers": (lambda m, x: two(m, x, lambda h: h + 5 * h.detach()), 5 / 6),
    "from the input": (lambda m, x: two(m, x, lambda h: h + 5 * x.detach()), None),
    "before the score": (lambda m, x: m.head((m.towards(x) + 9 * x.detach())[:, -1]), None),
    "the stream": (lambda m, x: m.head((lambda h: h.detach() + m.b(h))(x + m.a(x))[:, -1]), None),
    "the branch": (lambda m, x: m.head((lambda h: h + m.b(h).detach())(x + m.a(x))[:, -1]), None),
    "a smaller gradient": (lambda m, x: two(m, x, Scaled.apply), 3 / 4),
    "a gate": (lambda m, x: two(m, x, lambda h: h * m.gate(h).sigmoid().detach()), None),
    "of one token": (
        lambda m, x: two(m, x, lambda h: h + (torch.arange(L) == 3)[:, None] * h.detach()),
        1 / 2,
    ),
}
# What autograd shows, or stands for by a straight-through estimator, at the tokens' own places.
SHOWN = {
    "an MLP": lambda h, m: h + nn.functional.gelu(m.linear(h)),
    "a kink": lambda h, m: h + m.linear(h).relu(),
    "a cube": lambda h, m: h + m.linear(h) ** 3,
    "experts": lambda h, m: torch.where(m.gate(h) > 0, m.linear(h), 2 * h),
    "rounded": lambda h, m: straight(h, (16 * h).round() / 16),
    "a kernel": lambda h, m: DoubledOnce.apply(h),
    "the largest channels": lambda h, m: h * (h >= h.topk(4, -1).values[..., -1:]),
}


# In bfloat16, the parts that have no share here are as small as what is rounded.
SAID = [
    (name, dtype)
    for name, (_, share) in IN_PLACE.items()
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    if dtype is not torch.bfloat16 or share is not None
]


@pytest.mark.parametrize(("name", "dtype"), SAID, ids=str)
def test_the_share_that_is_hidden_is_said(name, dtype):
    forward, share = IN_PLACE[name]
    model, x = with_forward(forward).to(dtype), tokens().to(dtype)
    for _ in range(2):
        for method in (MambaLRP, MambaRollout):
            said = warnings_of_relevance(model, x, method)
            told = next(one for one in said if "autograd does not show" in one)
            assert share is None or f"for {share:.0%} of" in told


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHOWN)
def test_what_bends_or_is_rounded_is_not_hidden(name, dtype):
    model = with_forward(lambda m, x: two(m, x, lambda h: SHOWN[name](h, m))).to(dtype)
    said = warnings_of_relevance(model, tokens().to(dtype))
    assert not any("autograd does not show" in one for one in said)


def on_some(m, x):
    h = x + m.a(x)
    y = torch.cat([m.b(h)[:, :5], h[:, 5:]], 1)
    return m.head((h + y + m.c(y))[:, -1])


def written_to_some(m, x):
    h = (x + m.a(x)).clone()
    h[:, 2:5] += m.b(h.clone())[:, 2:5]
    return m.head((h + m.c(h))[:, -1])


def of_either(m, x):
    h, other = x + m.a(x), x + m.b(x)
    h = torch.where(m.gate(other) > 0, h, other)
    return m.head((h + m.c(h))[:, -1])


@pytest.mark.parametrize("forward", [on_some, written_to_some, of_either])
def test_a_mixer_of_which_some_tokens_are_read_is_refused(forward):
    for method in MAPS:
        with pytest.raises(UnsupportedModelError, match="given some of their copies"):
            method(with_forward(forward)).attribute(tokens(), target=1)


@pytest.mark.parametrize("wide", [1, 256])  # by products of rank one, or of all
@pytest.mark.parametrize("share", [0, 1], ids=["multiplied by zero", "subtracted again"])
def test_a_mixer_that_reaches_nothing_is_said(share, wide, monkeypatch):
    monkeypatch.setattr(mixing_test, "_WIDE", wide)

    def forward(m, x):
        y = m.a(x)
        h = x + share * m.after(y) - share * m.after(y)
        return m.head((h + m.b(h))[:, -1])

    model = with_forward(forward)
    model.after = nn.Linear(E, E).double()
    for method in (*MAPS, LaTIM):
        said = warnings_of_relevance(model, tokens(), method)
        assert any("does not depend on what a returned" in one for one in said)
    assert not warnings_of_relevance(model, tokens())


# What each token is compared with: steps, without a gradient, that other tokens decide on.
COMPARED = {
    "their mean": lambda h: h * (h > h.mean(1, keepdim=True)),
    "their median": lambda h: h * (h > h.median(1, keepdim=True).values),
    "the first": lambda h: h * (h > h[:, :1]),
    "those of the largest norm": lambda h: (
        h * (1 + (h.norm(dim=-1) >= h.norm(dim=-1).topk(4, 1).values[:, -1:]))[..., None]
    ),
    "a sign": lambda h: h + h.mean(1, keepdim=True).sign(),
}
ENDS = {
    "between": lambda m, x, change: two(m, x, change),
    "before the score": lambda m, x, change: m.head(change(m.towards(x))[:, -1]),
    "before a masked score": lambda m, x, change: m.head(change(m.towards(x))[:, -1]).masked_fill(
        torch.tensor([True, False, False]), -torch.inf
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", COMPARED)
def test_a_threshold_against_other_tokens_is_refused_or_said(name, end):
    model = with_forward(lambda m, x: ENDS[end](m, x, COMPARED[name]))
    try:
        said = warnings_of_relevance(model, tokens(), MambaRollout)
    except UnsupportedModelError as error:
        said = [str(error)]
    hidden = ("autograd does not show", "a choice between tokens")
    assert any(words in one for one in said for words in hidden)


# What mixes tokens after the last mixer: a layer, and the weights with which one token reads all.
AFTER = {
    "a layer over time": (
        lambda m, h: h + (m.time.weight @ h),
        lambda m: torch.eye(L)[-1] + m.time.weight[-1],
    ),
    "a token shift": (
        lambda m, h: h + 2 * h.roll(1, 1),
        lambda m: torch.eye(L)[-1] + 2 * torch.eye(L)[-2],
    ),
}


@pytest.mark.parametrize("name", AFTER)
def test_latim_follows_what_mixes_tokens_after_the_last_mixer(name):
    mix, weights = AFTER[name]

    def mixed(m, x):
        return m.head(nn.functional.layer_norm(mix(m, m.towards(x)), (E,))[:, -1])

    def pooled(m, x):
        h = (m.towards(x) * weights(m)[:, None]).sum(1)
        return m.head(nn.functional.layer_norm(h, (E,)))

    found, truth = (
        LaTIM(with_forward(forward)).attribute(tokens(), target=1) for forward in (mixed, pooled)
    )
    assert_close(found, truth, 1e-9)


def copied(m):
    mixer = copy.deepcopy(m.b)
    with torch.no_grad():
        mixer.in_proj.weight.mul_(2)
    return mixer


def rebuilt(m):
    mixer = type(m.b)(E, state=4, bimamba_type="none").double()
    held = m.b.state_dict()
    mixer.load_state_dict(held | {"in_proj.weight": 2 * held["in_proj.weight"]})
    return mixer


@pytest.mark.parametrize("method", MAPS)
def test_a_mixer_that_is_copied_in_the_run_is_the_copy(method):
    def forward(of):
        return lambda m, x: (lambda h: m.head((h + of(m)(h))[:, -1]))(x + m.a(x))

    found, truth = (
        method(with_forward(forward(of))).attribute(tokens(), target=1) for of in (copied, rebuilt)
    )
    assert_close(found, truth, 1e-9)


# The graph of a maximum shows the largest token alone.
LARGEST = {
    "max_pool": lambda h: nn.functional.max_pool1d(h.mT, L)[..., 0],
    "cummax": lambda h: h.cummax(1).values[:, -1],
    "sort": lambda h: h.sort(1).values[:, -1],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGEST)
def test_a_maximum_over_tokens_is_not_hidden(name, dtype):
    model = with_forward(lambda m, x: m.head(LARGEST[name](m.towards(x)))).to(dtype)
    assert not warnings_of_relevance(model, tokens().to(dtype), MambaRollout)
