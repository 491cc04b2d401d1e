"""Exceptions that a model catches, of its mixers or the library, and one that a graph raises."""

import types
import warnings
from contextlib import suppress

import pytest
import torch
import wild
from families import build
from inputs import Series, noise
from methods import assert_close, each, each_method
from models import ids, tiny
from torch import nn
from transformers.models.mamba.modeling_mamba import MambaMixer

from captum_ssm import LaTIM, MambaLRP, MambaRollout, RawAttention, UnsupportedModelError
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.nested import map_tensors


def forward_or_raise(self, *args, **kwargs):
    result = type(self).forward(self, *args, **kwargs)
    if self.raises:
        raise RuntimeError("all is computed")
    return result


class SecondTime(nn.Module):
    """Calls a mixer in vain, which raises early or late, and then as it has to be called."""

    def __init__(self, inner: nn.Module, late: bool) -> None:
        super().__init__()
        self.inner, self.late = inner, late
        inner.raises = False
        inner.forward = types.MethodType(forward_or_raise, inner)

    def forward(self, *args, **kwargs):
        wrong = (args, kwargs) if self.late else map_tensors(lambda x: x[..., 1:], (args, kwargs))
        self.inner.raises = self.late
        with pytest.raises((RuntimeError, ValueError)):
            self.inner(*wrong[0], **wrong[1])
        self.inner.raises = False
        return self.inner(*args, **kwargs)


def at_the_second_time(model, mixers, late):
    for mixer in mixers:
        parent = next(m for m in model.modules() if mixer in m.children())
        name = next(name for name, child in parent.named_children() if child is mixer)
        parent._modules[name] = SecondTime(mixer, late)
    return model


def explained(method, model, tokens, **options):
    """Relevance, where nothing says that a part could not be checked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be run with its tokens moved")
        return method(model).attribute(tokens, **options)


@each_method
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("family", ["mamba2", "jamba", "recurrent_gemma"])
def test_a_call_that_raises_is_no_call(family, late, method):
    tokens, model = ids(2, 9), build(family)
    truth = method(build(family)).attribute(tokens, target=5)
    model = at_the_second_time(model, [m for _, m in find_mixers(model)], late)
    assert_close(explained(method, model, tokens, target=5), truth)


@each_method
def test_a_call_that_raises_is_no_call_of_a_measured_mixer(method):
    def stack():
        torch.manual_seed(0)
        return wild.Stack(wild.Mixer(), wild.Mixer()).eval()

    tokens, model = wild.tokens(1), stack()
    truth = method(stack()).attribute(tokens, target=(6, 1))
    model = at_the_second_time(model, list(model.layers), late=False)
    assert_close(explained(method, model, tokens, target=(6, 1)), truth)


class Falls(Series):
    """Goes on without its first mixer where that raises."""

    def forward(self, x):
        h = self.inp(x)
        first, second = self.body.mixers
        with torch.inference_mode(self.hides), suppress(Exception):
            h = h + first(h if self.hides else h[..., 1:])
        return self.head(self.norm((h + second(self.body.norms[1](h))).mean(1)))


def falling(*, hides):
    torch.manual_seed(0)
    model = Falls().double().eval()
    model.hides = hides
    return model


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


@each_method
def test_a_model_that_goes_on_without_a_mixer(method):
    x, without = noise(2, 8, 3), falling(hides=False)
    without.body.mixers[0] = Zero()
    found = explained(method, falling(hides=False), x, target=1)
    assert_close(found, method(without).attribute(x, target=1))


@each_method
def test_no_model_catches_what_the_library_refuses(method):
    with pytest.raises(UnsupportedModelError, match=r"run under torch.inference_mode\(\)"):
        method(falling(hides=True)).attribute(noise(2, 8, 3), target=1)


class Viewed(torch.autograd.Function):
    """Returns a view, as the short convolution of flash-linear-attention does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone().view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


class WritesIntoAView(MambaMixer):
    """Runs without a graph only: autograd refuses the write."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(Viewed.apply(hidden_states).mul_(1), *args, **kwargs)


@each([RawAttention, MambaRollout, LaTIM, MambaLRP])
def test_a_mixer_that_runs_without_a_graph_only(method):
    tokens, model = ids(2, 9), tiny("mamba")
    truth = method(model).attribute(tokens, target=5)
    model = tiny("mamba")
    for _, mixer in find_mixers(model):
        mixer.__class__ = WritesIntoAView
    with pytest.raises(RuntimeError, match="view was created inside a custom Function"):
        model(tokens)
    assert torch.equal(explained(method, model, tokens, target=5), truth)
