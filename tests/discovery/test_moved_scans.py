"""Scans over some tokens or over padding, and whose results land on other tokens."""

import copy

import pytest
import torch
import wild
from frozen import recorded
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.operators import DiagonalOperator, MovedOperator

COMPONENTS = ("conv", "activation", "gate", "norm", "skip")


class Shifted(wild.Mixer):
    """A result belongs to the next token; the first one has none."""

    def mixed(self, u: Tensor) -> Tensor:
        return F.pad(super().mixed(u), (0, 0, 1, 0))[:, :-1]


class Rolled(wild.Mixer):
    """The last token's result belongs to the first one."""

    def mixed(self, u: Tensor) -> Tensor:
        return super().mixed(u).roll(1, 1)


class ShiftedBothWays(wild.Mixer):
    """Both directions in one batch, rolled, the first set to zero in place; and a skip."""

    def mixed(self, u: Tensor) -> Tensor:
        v = self.convolved(u)
        y = torch.roll(self.scanned(torch.cat([v, v.flip(1)])), 1, 1)
        y[:, 0, :] = 0
        there, back = y.chunk(2)
        return there + back.flip(1) + v * self.factor(v)

    def factor(self, v: Tensor) -> Tensor:
        return self.D


class OwnScale(ShiftedBothWays):
    """The factor of the skip is a linear layer of what it is multiplied with, as in Hydra."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def factor(self, v: Tensor) -> Tensor:
        return self.scale(v)


class Delayed(wild.Mixer):
    """A token is given to the scan one step later."""

    def mixed(self, u: Tensor) -> Tensor:
        return self.scanned(F.pad(self.convolved(u), (0, 0, 1, 0))[:, :-1])


class DelayedAlone(Delayed):
    """Without a convolution."""

    def convolved(self, u: Tensor) -> Tensor:
        return u


class Padded(wild.Mixer):
    """To a multiple of four, before the scan."""

    def mixed(self, u: Tensor) -> Tensor:
        return super().mixed(F.pad(u, (0, 0, 0, 4 - u.shape[1] % 4)))[:, : u.shape[1]]


class PaddedBefore(wild.Mixer):
    """At the start, with what the projection makes of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 3, 0)))[:, 3:]


class Register(wild.Mixer):
    """A learned token before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def mixed(self, u: Tensor) -> Tensor:
        return super().mixed(torch.cat([self.token.expand(len(u), -1, -1), u], 1))[:, 1:]


class Alternating(wild.Mixer):
    """Even tokens forward, odd tokens backward, each in a call of its own."""

    def mixed(self, u: Tensor) -> Tensor:
        v = self.convolved(u)
        y = torch.empty_like(v)
        y[:, ::2] = self.scanned(v[:, ::2])
        y[:, 1::2] = self.scanned(v[:, 1::2].flip(1)).flip(1)
        return y


class Quarters(wild.FourWays):
    """Each direction runs over a quarter of the tokens."""

    def ways(self, v: Tensor) -> Tensor:
        rows, columns = v, v.mT
        return torch.stack(
            [
                rows[:, :, ::2, ::2].flatten(2),
                columns[:, :, ::2, 1::2].flatten(2),
                rows[:, :, ::2, 1::2].flatten(2).flip(2),
                columns[:, :, 1::2, 1::2].flatten(2).flip(2),
            ],
            1,
        )

    def scanned(self, v: Tensor) -> Tensor:
        B, D, H, W = v.shape
        y = self.scans(self.ways(v))
        out = torch.empty_like(v)
        half = (B, D, H // 2, W // 2)
        out[:, :, ::2, ::2] = y[:, 0].view(half)
        out[:, :, 1::2, ::2] = y[:, 1].view(half).mT
        out[:, :, ::2, 1::2] = y[:, 2].flip(2).view(half)
        out[:, :, 1::2, 1::2] = y[:, 3].flip(2).view(half).mT
        return out.flatten(2)


class Windows(wild.FourWays):
    """Windows of four by four, larger than the grid that they cover."""

    def scanned(self, v: Tensor) -> Tensor:
        B, D, H, W = v.shape
        v = F.pad(v, (0, -W % 4, 0, -H % 4))
        cut = v.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)
        y = super().scanned(cut.reshape(-1, D, 4, 4)).view(*cut.shape)
        y = y.permute(0, 3, 1, 4, 2, 5).reshape(B, D, *v.shape[2:])
        return y[:, :, :H, :W].reshape(B, D, -1)


TEXT = (
    Shifted, Rolled, ShiftedBothWays, OwnScale, Delayed, DelayedAlone, Padded, PaddedBefore,
    Register, Alternating,
)  # fmt: skip
IMAGES = (Quarters, Windows)
KINDS = (*TEXT, *IMAGES)


def given(kind: type) -> Tensor:
    return torch.randn(2, 6, 6, 6) if kind in IMAGES else torch.randn(2, 8, 6)


def jacobian(module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """How the module's output reads its projected tokens, all coefficients being constants.

    By the module's own code: ``(L, E, L, D)`` of the first example.
    """
    held: list[Tensor] = []

    def constant(scan):
        def run(x, *others):
            return scan(x, *(one.detach() for one in others))

        return run

    def norm(y, shape, weight, bias, eps):
        scale = (y.var(-1, correction=0, keepdim=True) + eps).rsqrt().detach()
        return (y - y.mean(-1, keepdim=True).detach()) * scale * weight + bias

    def projected(layer, args, y):
        u, z = y.chunk(2, -1)
        held.append(u.detach().requires_grad_())
        return torch.cat([held[0], z.detach()], -1)

    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", lambda t: t * torch.sigmoid(t).detach())
        patch.setattr(F, "layer_norm", norm)
        patch.setattr(wild, "scan", constant(wild.scan))
        patch.setattr(wild, "last_scan", constant(wild.last_scan))
        hooks = [module.in_proj.register_forward_hook(projected)]
        if hasattr(module, "scale"):
            hooks.append(module.scale.register_forward_hook(lambda layer, args, y: y.detach()))
        y = module(x)[0].flatten(0, -2)
        for hook in hooks:
            hook.remove()
    rows = [
        torch.autograd.grad(one, held[0], retain_graph=True)[0][0].flatten(0, -2)
        for one in y.flatten()
    ]
    return torch.stack(rows).view(*y.shape, *rows[0].shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_is_the_jacobian_of_the_modules_own_code(kind, monkeypatch):
    module, x = kind().eval(), given(kind)
    mixer = freeze_measured(recorded(module, x), partly=False)
    maps = mixer.operator("unified", COMPONENTS).matrix()[0]
    found = torch.einsum("ed,dij->iejd", mixer.out_weight, maps)
    expected = jacobian(module, x, monkeypatch)[:, :, -maps.shape[-1] :]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [ShiftedBothWays, Padded, Quarters, Windows])
def test_methods(kind):
    model, x = wild.Stack(kind(), kind()).eval(), given(kind)
    target = (3, 1) if kind in TEXT else (2, 3, 1)
    tokens = x[0].numel() // 6
    assert hidden_attention(model, x)["layers.1"].shape == (2, 8, tokens, tokens)
    for method in (MambaRollout, MambaAttribution, LaTIM, MambaLRP):
        needs = {"target": target} if method(model).needs_target() or kind in IMAGES else {}
        assert method(copy.deepcopy(model)).attribute(x, **needs).shape == x.shape


@pytest.mark.parametrize("kind", [Shifted, Delayed, DelayedAlone])
def test_a_token_later_is_not_read_in_its_own_place(kind):
    module, x = kind().eval(), given(kind)
    hidden = freeze_measured(recorded(module, x)).operator("hidden")
    assert hidden.is_causal
    maps = hidden.matrix()
    assert not bool(maps.triu().any())
    assert bool(maps.diagonal(-1, 2, 3).all())


class PaddedWithTokens(wild.Mixer):
    """What it pads with at the start is made of the last tokens."""

    def mixed(self, u: Tensor) -> Tensor:
        v = self.convolved(u)
        return self.scanned(torch.cat([v[:, -2:].mean(1, keepdim=True), v], 1))[:, 1:]


def test_padding_that_is_made_of_tokens_is_refused():
    with pytest.raises(UnsupportedModelError, match="cannot be measured"):
        freeze_measured(recorded(PaddedWithTokens().eval(), torch.randn(1, 8, 6)))


def test_a_moved_operator():
    dt, v, w = torch.rand(3, 2, 4, 6)
    B, C = torch.randn(2, 2, 4, 1, 3)
    inner = DiagonalOperator(dt, dt, -torch.rand(6, 3), B, C)
    enters, lands = torch.tensor([4, -1, 0, 2]), torch.tensor([1, 0, -1, 4])
    operator = MovedOperator(inner, enters, lands, 5)
    v, w = torch.randn(2, 2, 5, 6)
    matrix = operator.matrix()
    expected = torch.zeros(2, 6, 6, 6)
    expected[:, :, lands[:, None], enters] = inner.matrix()  # -1 is the last one
    torch.testing.assert_close(matrix, expected[..., :5, :5])
    torch.testing.assert_close(operator.matvec(v), torch.einsum("bdij,bjd->bid", matrix, v))
    torch.testing.assert_close(operator.rmatvec(w), torch.einsum("bdij,bid->bjd", matrix, w))
    mean = torch.einsum("bij,bi->bj", matrix.mean(1), w[..., 0])
    torch.testing.assert_close(operator.rmatvec(w[..., 0], "mean"), mean)
    scaled = w.mT[..., None] * matrix * v.mT[:, :, None]
    torch.testing.assert_close(operator.scaled(w, v).matrix(), scaled)
    torch.testing.assert_close(operator.matrix("mean"), matrix.mean(1))
    assert not operator.is_causal
    later = MovedOperator(inner, torch.arange(4), torch.tensor([1, 2, 3, -1]), 4)
    assert later.is_causal
