"""Three mixers, what else people put between them, and their rollout written out by hand."""

import warnings

import torch
from inputs import noise
from models import randomize
from torch import nn
from torch.autograd.function import once_differentiable

from captum_ssm import MambaLRP
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.models import BidirectionalMamba

L, E = 9, 16


class Base(nn.Module):
    """Three mixers and what else people put between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            BidirectionalMamba(E, state=4, bimamba_type="none") for _ in range(3)
        )
        self.linear, self.head, self.gate = nn.Linear(E, E), nn.Linear(E, 3), nn.Linear(E, 1)
        self.flat, self.time = nn.Linear(L * E, 3), nn.Linear(L, L)
        self.gru = nn.GRU(E, E, batch_first=True)
        randomize(self)

    def towards(self, x):
        x = x + self.a(x)
        return x + self.b(x)


def with_forward(forward):
    return type("Model", (Base,), {"forward": forward})().double().eval()


def tokens():
    return noise(1, L, E, seed=2)


def after(mixer, x, rows):
    """The state after a mixer with a residual stream, and the rows of its rollout."""
    call = MixerCall("mixer", mixer, (x,), {}, mixer(x))
    return x + call.result, rows + find_adapter(mixer)(call).recurrence.matrix("mean") @ rows


@torch.no_grad()
def rollout(model, x, *mixers):
    """The states and the rows, ``(1, L, L)``, before and after each mixer."""
    found = [(x, torch.eye(x.shape[1], dtype=x.dtype)[None])]
    for mixer in mixers:
        found.append(after(mixer, *found[-1]))
    return found


def straight(x, moved):
    return x + (moved - x).detach()


def two(m, x, between):
    h = between(x + m.a(x))
    return m.head((h + m.b(h))[:, -1])


class Doubled(torch.autograd.Function):
    """Each token twice, by a kernel whose backward pass is right, and leaves no graph."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient.detach()


class DoubledOnce(Doubled):
    """Each token twice, by a kernel that says that its backward pass cannot be differentiated."""

    backward = staticmethod(once_differentiable(Doubled.backward))


def warnings_of_relevance(model, x, method=MambaLRP):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        method(model).attribute(x, target=1)
    return [str(one.message) for one in said]
