"""Mixers of some of the channels each, side by side, between grids of different sizes."""

import pytest
import torch
import wild
from models import made
from torch import nn
from torch.nn import functional as F

from captum_ssm import MambaLRP, MambaRollout, UnsupportedModelError, supported

L = 8


def flipped(x):
    return x.flip(1)


def as_it_is(x):
    return x


class Divided(nn.Module):
    """Halves of the channels, mixed in orders of their own, between a convolution and a stride."""

    def __init__(self, *ways, read=0):
        super().__init__()
        self.stem = nn.Conv1d(12, 12, 3, padding=1)
        self.norm, self.mixers = nn.LayerNorm(12), nn.ModuleList(wild.Mixer() for _ in range(2))
        self.merge, self.last = nn.Conv1d(12, 6, 2, stride=2), wild.Mixer()
        self.head, self.ways, self.read = nn.Linear(6, 3), ways, read

    def forward(self, x):
        parts = self.norm(self.stem(x.mT).mT).chunk(2, -1)
        *ways, way = self.ways
        mixed = [way(m(way(c))) for way, m, c in zip(ways, self.mixers, parts, strict=True)]
        x = self.merge(torch.cat(mixed, -1).mT).mT
        return self.head(way(self.last(way(x)))[:, self.read])


WAYS = as_it_is, flipped, as_it_is


def reads(model, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    return gradient.abs().sum(-1) > 0


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("ways", [(as_it_is,) * 3, (flipped,) * 3, (as_it_is, flipped, as_it_is)])
def test_rows_reach_the_tokens_that_the_score_reads(read, ways):
    model, x = made(lambda: Divided(*ways, read=read)), torch.randn(1, L, 12).double()
    row = MambaRollout(model).attribute(x).abs().sum(-1)
    assert torch.equal(row > 1e-12 * row.max(), reads(model, x))


def test_relevance_adds_up_without_a_warning():
    model, x = made(lambda: Divided(*WAYS)), torch.randn(1, L, 12).double()
    for name, p in model.named_parameters():
        if "bias" in name:
            p.data.zero_()
    relevance, delta = MambaLRP(model).attribute(x, 1, return_convergence_delta=True)
    assert relevance.abs().max() > 1e-3
    assert delta.abs().max() < 1e-9


def test_an_order_that_is_not_there_is_refused():
    model = made(lambda: Divided(as_it_is, lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT, as_it_is))
    with pytest.raises(UnsupportedModelError, match="side by side, in orders"):
        MambaRollout(model).attribute(torch.randn(1, L, 12).double())


def test_supported_says_the_order_of_each():
    found = supported(made(lambda: Divided(*WAYS)), torch.randn(1, L, 12).double())
    assert [mixer.order for mixer in found.mixers] == ["forward", "backward", "forward"]
