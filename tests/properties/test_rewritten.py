"""One function, written in two ways: equal relevance, or an error in words."""

import pytest
import torch
import wild
from methods import assert_close, each_method
from three_mixers import E, tokens, with_forward
from torch import nn

from captum_ssm import MambaLRP, UnsupportedModelError
from captum_ssm.models import BidirectionalMamba


class Identity(torch.autograd.Function):
    """A function that no rule knows."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


PLAIN = {
    "an MLP": lambda m, h: nn.functional.gelu(m.linear(h)),
    "a gated one": lambda m, h: nn.functional.glu(torch.cat([m.linear(h), h], -1)),
    "a moment": lambda m, h: h * torch.var_mean(h, -1, keepdim=True)[0],
}


def as_written(change, part):
    """Two mixers with ``part`` between them, and ``change`` applied to all that is read."""
    return with_forward(
        lambda m, x: m.head(change((lambda h: h + part(m, h) + m.b(h))(x + m.a(x)))[:, -1])
    )


@pytest.mark.parametrize("part", PLAIN)
def test_all_relevance_may_go_through_a_function_without_a_rule(part):
    plain, other = (as_written(one, PLAIN[part]) for one in (lambda h: h, Identity.apply))
    expected = MambaLRP(plain).attribute(tokens(), target=1)
    with pytest.warns(UserWarning, match="Identity, which has no rule: .* for 100%"):
        found = MambaLRP(other).attribute(tokens(), target=1)
    assert_close(found, expected, 1e-9)


class Wrapped(nn.Module):
    """A layer inside of a module that has nothing else of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@each_method
@pytest.mark.parametrize("wrapper", [Wrapped, nn.Sequential])
@pytest.mark.parametrize("kind", [lambda: BidirectionalMamba(E, bimamba_type="none"), wild.Mixer])
def test_linear_layers_may_be_wrapped(kind, wrapper, method):
    model = wild.Stack(kind(), kind(), width=6 if kind is wild.Mixer else E).double().eval()
    x = torch.randn(2, 7, model.head.in_features, dtype=torch.float64)
    expected = method(model).attribute(x, target=(4, 1))
    for layer in model.layers:
        for name, part in list(layer.named_children()):
            if isinstance(part, nn.Linear):
                setattr(layer, name, wrapper(part))
    assert_close(method(model).attribute(x, target=(4, 1)), expected, 1e-9)


def in_a_map(forward):
    return lambda m, x: torch.vmap(lambda one: forward(m, one[None])[0])(x)


def with_cotangents(forward):
    return lambda m, x: torch.func.vjp(lambda t: forward(m, t), x)[0]


UNFOLLOWED = {
    "vmap": (in_a_map, "torch.func"),
    "vjp": (with_cotangents, "torch.func"),
    "inference mode": (torch.inference_mode(), "torch.inference_mode"),
}


@each_method
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_cannot_be_followed_is_refused_in_words(name, method):
    around, said = UNFOLLOWED[name]
    model = with_forward(around(lambda m, x: m.head(m.towards(x)[:, -1])))
    with pytest.raises(UnsupportedModelError, match=f"[ab] is run under {said}"):
        method(model).attribute(tokens(), target=1)
