"""What modules take and return: tokens first, dicts, fewer tokens, one example at a time."""

import copy

import pytest
import torch
import wild
from torch import Tensor, nn

import captum_ssm
from captum_ssm import (
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnifiedImplicitAttention,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.graph.readers import decoded

METHODS = (MambaRollout, MambaAttribution, UnifiedImplicitAttention, MambaLRP)


class TokensFirst(wild.Mixer):
    """``(L, B, E)``, as fairseq's layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class TokensFirstStack(wild.Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class InDict(wild.Mixer):
    """The tokens are not the first tensor."""

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        return {"state": None, "loss": x.mean(), "tokens": super().forward(x)}


class InDictStack(wild.Stack):
    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))["tokens"]
        return self.head(x)


class Loop(wild.Mixer):
    """One call of the scan per example."""

    def scanned(self, v: Tensor) -> Tensor:
        return torch.cat([super(Loop, self).scanned(one[None]) for one in v])


FORMS = [
    (TokensFirstStack, TokensFirst, 1),
    (TokensFirstStack, TokensFirst, 2),
    (InDictStack, InDict, 2),
    (wild.Stack, Loop, 2),
]


@pytest.mark.parametrize(("stack", "kind", "batch"), FORMS)
def test_a_form_is_explained_as_the_plain_one(stack, kind, batch):
    model, plain = stack(kind(), kind()).eval(), wild.Stack(wild.Mixer(), wild.Mixer()).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(batch, 7, 6)
    torch.testing.assert_close(model(x), plain(x))
    maps, expected = (hidden_attention(copy.deepcopy(m), x) for m in (model, plain))
    torch.testing.assert_close(maps, expected)
    for method in METHODS:
        given = {"target": (3, 1)} if method(model).needs_target() else {"position": 3}
        ours, theirs = (method(m).attribute(x, **given) for m in (model, plain))
        torch.testing.assert_close(ours, theirs)


class OneByOne(wild.Stack):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(one[None]) for one in x])


@pytest.mark.parametrize("length", [7, 8])
def test_a_model_that_runs_one_example_at_a_time_is_refused_in_words(length):
    model, x = OneByOne(wild.Mixer(), wild.Mixer()).eval(), torch.randn(2, length, 6)
    with pytest.raises(UnsupportedModelError, match="2 times for 2 examples"):
        MambaRollout(model).attribute(x)
    assert hidden_attention(model, x)["layers.1:1"].shape == (1, 8, length, length)
    assert MambaRollout(model).attribute(x[:1]).shape == (1, length, 6)


class Decimated(wild.Mixer):
    """It keeps the half of the tokens with the largest steps, and returns no others."""

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        v = self.convolved(u)
        self.kept = v.detach().sum((0, 2)).topk(x.shape[1] // 2).indices.sort().values
        return self.out_proj(self.scanned(v[:, self.kept]) * torch.sigmoid(z[:, self.kept]))


class Named(Decimated):
    """In a copy of a package."""


Named.__module__, Named.__qualname__ = "mamba_ssm.modules.mamba_simple", "Mamba"


class DecimatedStack(wild.Stack):
    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = layer(norm(x))
            x = x[:, layer.kept] + y
        return self.head(x)


@pytest.mark.parametrize("kind", [Decimated, Named])
@pytest.mark.parametrize("batch", [1, 2])
def test_fewer_tokens_than_were_given_are_refused_in_words(kind, batch):
    model, x = DecimatedStack(kind(), kind()).eval(), torch.randn(batch, 12, 6)
    for run in (lambda: hidden_attention(model, x), lambda: MambaLRP(model).attribute(x, (3, 1))):
        with pytest.raises(UnsupportedModelError, match="expected tokens"):
            run()
    with pytest.raises(UnsupportedModelError):
        MambaRollout(model).attribute(x)


class Router(nn.Module):
    """Some tokens are chosen, mixed, and spread over those that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = (wild.Mixer() for _ in range(3))
        self.choice, self.head = nn.Linear(6, 1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before(x)
        chosen = self.choice(x)[..., 0] > 0
        chosen = torch.cat([torch.ones_like(chosen[:, :1]), chosen[:, 1:]], 1)
        y = self.inner(x[chosen][None])[0][chosen.flatten().long().cumsum(0) - 1]
        x = x + y.view(x.shape)
        return self.head(x + self.after(x))


def test_a_router_is_followed_in_one_example_and_refused_in_words_in_more():
    model, x = Router().eval(), torch.randn(2, 11, 6)
    model.choice(x)
    for one in x:
        row = MambaRollout(model).attribute(one[None], position=8).abs().sum(-1)[0]
        leaf = one[None].clone().requires_grad_()
        (g,) = torch.autograd.grad(model(leaf)[0, 8].sum(), leaf)
        assert torch.equal(row > 0, g[0].abs().sum(-1) > 0)
    with pytest.raises(UnsupportedModelError, match="explain one example at a time"):
        MambaRollout(model).attribute(x)
    assert captum_ssm.supported(model, x).methods["mamba-lrp"] is None


def test_rounding_makes_no_token_of_a_number_that_is_none():
    first = torch.tensor([[1.0, 2.0], [1e-45, 1e-45], [0.0, 0.0], [torch.inf, 1.0]])
    second = first * torch.tensor([[1.5], [2.0], [1.0], [1.0]])
    found, is_clear = decoded(first[:1], second[:1], 4)
    assert found is not None
    assert found.tolist() == [2]
    assert is_clear
    for k in (1, 3):
        found, is_clear = decoded(first[k : k + 1], second[k : k + 1], 4)
        assert not is_clear
        assert found is None or int(found) == -1
    found, is_clear = decoded(first[2:3], second[2:3], 4)
    assert found is not None
    assert found.tolist() == [-1]
    assert is_clear
