"""Heads that are modules of their own, whose results the module around them puts side by side."""

import pytest
import torch
import wild
from frozen import measured
from torch import nn
from torch.nn import functional as F

from captum_ssm import LaTIM, MambaLRP, hidden_attention, supported

WIDTH = 12


class Retention(nn.Module):
    """One head of RetNet, without its rotation."""

    def __init__(self, decay, width):
        super().__init__()
        self.decay = decay
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(WIDTH, n) / 3) for n in (width, width, 2 * width)
        )

    def weights(self, x):
        at = torch.arange(x.shape[1])
        lag = (at[:, None] - at).to(x)
        return x @ self.q @ (x @ self.k).mT * torch.where(lag >= 0, self.decay**lag, 0)

    def forward(self, x):
        return self.weights(x) @ (x @ self.v)


class Heads(nn.Module):
    """Its heads side by side, with a group norm of each and a gate."""

    def __init__(self, heads=3, normed=True):
        super().__init__()
        self.heads = nn.ModuleList(
            Retention(1 - 2.0 ** -(n + 1), 12 // heads) for n in range(heads)
        )
        self.norm = nn.GroupNorm(heads, 2 * WIDTH) if normed else nn.Identity()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def heads_of(self, x):
        return torch.cat([head(x) for head in self.heads], -1)

    def forward(self, x):
        y = self.heads_of(x)
        y = self.norm(y.flatten(0, 1)).view_as(y)
        return self.out(F.silu(self.gate(x)) * y)


class BothWays(Heads):
    """Half of the heads' sum is of the tokens in the reversed order."""

    def heads_of(self, x):
        return super().heads_of(x) + super().heads_of(x.flip(1)).flip(1) / 2


# As many tokens as a head has channels, as there are heads, and other numbers.
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("heads", [2, 3, 4])
def test_each_head_has_its_own_map(heads, length):
    module = Heads(heads).double()
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    mixer = measured(module, x)
    expected = torch.stack([head.weights(x) for head in module.heads], 1)
    torch.testing.assert_close(mixer.recurrence.matrix(), expected.detach())


def test_heads_that_read_the_tokens_both_ways():
    module, x = BothWays().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    mixer = measured(module, x)
    there, back = (
        torch.stack([head.weights(y) for head in module.heads], 1) for y in (x, x.flip(1))
    )
    assert [len(scan.recurrence.parts) for scan in mixer.scans] == [3, 3]
    torch.testing.assert_close(mixer.recurrence.matrix(), (there + back.flip(2, 3)).detach())


@pytest.mark.parametrize("normed", [False, True])
def test_relevance_adds_up(normed):
    model = wild.Stack(Heads(normed=normed), Heads(normed=normed), width=WIDTH).double().eval()
    model.head.bias.data.zero_()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    assert set(supported(model, x, target=(6, 1)).methods.values()) == {None}
    assert hidden_attention(model, x)["layers.0"].shape == (2, 3, 7, 7)
    score = model(x)[:, 6, 1].detach()
    found, delta = MambaLRP(model).attribute(x, target=(6, 1), return_convergence_delta=True)
    torch.testing.assert_close(found.sum((1, 2)) + delta, score)
    assert delta.abs().max() < 1e-8
    if not normed:  # the mean that a norm subtracts is of no token
        found = LaTIM(model).attribute(x, target=(6, 1))
        torch.testing.assert_close(found.sum((1, 2)), score)
