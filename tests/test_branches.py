"""xLSTM's layers as their own code writes them: convolved tokens are added to the scan."""

import pytest
import torch
import wild
from frozen import measured, recorded
from methods import OF_A_TARGET, each_method
from models import without_biases
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from captum_ssm import (
    LaTIM,
    MambaLRP,
    UnsupportedModelError,
    hidden_attention,
    supported,
)
from captum_ssm.mixers.measured import freeze_measured

HEADS, WIDTH, SIDE = 2, 8, 4
L = SIDE * SIDE
EVERY = ("conv", "activation", "gate", "norm", "skip")


def mlstm(q, k, v, igate_preact, fgate_preact):
    """Heads first, (B, H, L, N); gates (B, H, L, 1)."""
    forget = F.logsigmoid(fgate_preact[..., 0]).cumsum(-1)
    weights = (forget[..., None] - forget[..., None, :] + igate_preact.mT).exp().tril()
    scores = weights * (q @ k.mT) * q.shape[-1] ** -0.5
    return scores @ v / scores.sum(-1, keepdim=True).abs().clamp(min=1)


class GroupNorm(nn.GroupNorm):
    """Of heads side by side, token by token."""

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y.flatten(0, 1)).view_as(y)


class HeadwiseLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, y: Tensor) -> Tensor:
        return self.norm(y.unflatten(-1, (HEADS, -1))).flatten(-2)


class WrittenOutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, (HEADS, -1))
        centered = heads - heads.mean(-1, keepdim=True)
        scale = torch.rsqrt(heads.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return (centered * scale).flatten(-2) * self.weight


NORMS = {
    "group": lambda: GroupNorm(HEADS, WIDTH),
    "heads": HeadwiseLayerNorm,
    "written out": WrittenOutNorm,
    "all": lambda: nn.LayerNorm(WIDTH),
}


class Layer(nn.Module):
    """The mLSTM layer of xLSTM and, turned around or with an image's convolution, Vision-LSTM."""

    def __init__(self, norm: str = "group", image: bool = False, back: bool = False) -> None:
        super().__init__()
        self.back, self.image = back, image
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            if image
            else nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        )
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.norm = NORMS[norm]()
        self.skip = nn.Parameter(torch.randn(WIDTH))

    def convolved(self, x: Tensor) -> Tensor:
        if self.image:
            return self.conv(x.mT.unflatten(-1, (SIDE, SIDE))).flatten(2).mT
        return self.conv(x.mT)[..., : x.shape[1]].mT

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        x, z = self.up(x).chunk(2, -1)
        return x, F.silu(z), self.convolved(x)

    def scan(self, *args: Tensor) -> Tensor:
        return mlstm(*args)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(1) if self.back else x
        u, gate, psi = self.parts(x)
        c = F.silu(psi)
        given = (self.q(c), self.k(c), self.v(u), *self.gates(c).chunk(2, -1))
        q, k, v, i, f = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in given)
        y = self.norm(self.scan(q, k, v, i, f).transpose(1, 2).flatten(2))
        y = self.down((y + self.skip * c) * gate)
        return y.flip(1) if self.back else y


class Checkpointed(Layer):
    def scan(self, *args: Tensor) -> Tensor:
        if any(t.requires_grad for t in args):
            return checkpoint(mlstm, *args, use_reentrant=True)
        return mlstm(*args)


def tokens(B=1):
    return torch.randn(B, L, WIDTH)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("image", [False, True], ids=["along tokens", "over an image"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_branch_is_measured(norm, image, back):
    layer, x = Layer(norm, image, back).eval(), tokens(2)
    mixer = measured(layer, x)
    # The hidden attention is that of the scan alone, of impulses in its values.
    calls = []
    layer.scan = lambda *args: (calls.append(args), mlstm(*args))[1]
    layer(x)
    q, k, v, i, f = calls[0]
    eye = torch.eye(L).expand(*v.shape[:2], L, L)
    maps = mlstm(q, k, eye, i, f)
    maps = maps.flip(-1, -2) if back else maps
    torch.testing.assert_close(mixer.operator("hidden").matrix(), maps, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("image", [False, True], ids=["along tokens", "over an image"])
def test_the_branch_is_the_skip_of_the_map(image, back):
    layer, x = Layer("group", image, back).eval(), tokens()
    mixer = freeze_measured(recorded(layer, x))
    with_it, without = (
        mixer.operator("unified", chosen).matrix()[0]
        for chosen in (EVERY, [c for c in EVERY if c != "skip"])
    )
    with torch.no_grad():
        _, gate, psi = layer.parts(x.flip(1) if back else x)
        factor = (layer.skip * torch.sigmoid(psi) * gate)[0].mT  # (D, L)
        layer.conv.bias.zero_()
        columns = [layer.convolved(one[None, :, None].expand(1, L, WIDTH)) for one in torch.eye(L)]
        band = torch.stack([column[0] for column in columns], -1).transpose(0, 1)  # (D, L, L)
        expected = factor[..., None] * band
    expected = expected.flip(-1, -2) if back else expected
    torch.testing.assert_close(with_it - without, expected, rtol=1e-3, atol=1e-5)
    assert bool(expected.any())


@pytest.mark.parametrize(
    "kind", [Layer, Checkpointed, lambda: Layer(image=True, back=True)], ids=["1d", "saved", "2d"]
)
@each_method
def test_every_method_explains_such_a_layer(method, kind):
    model, x = wild.Stack(kind(), Layer(), width=WIDTH).eval(), tokens()
    where = {} if method not in OF_A_TARGET else {"target": (L - 1, 2)}
    found = method(model).attribute(x, position=L - 1, **where)
    assert found.shape == x.shape
    assert found.isfinite().all()
    assert found.abs().sum() > 0


def test_contributions_and_relevance_add_up():
    model = without_biases(wild.Stack(Layer(), Layer(back=True), width=WIDTH).eval())
    x = tokens()
    _, delta = LaTIM(model).attribute(
        x, target=(5, 1), aggregation="alti_logit", return_convergence_delta=True
    )
    assert float(delta.abs().max()) < 1e-4
    found = MambaLRP(model).attribute(x, target=(5, 1)).sum()
    torch.testing.assert_close(found, model(x)[0, 5, 1], rtol=1e-3, atol=1e-5)


def test_a_layer_that_is_turned_around_is_said_to_be_backward():
    model = wild.Stack(Layer(), Layer(back=True), width=WIDTH).eval()
    found = supported(model, tokens(), target=(5, 1))
    assert [mixer.order for mixer in found.mixers] == ["forward", "backward"]
    assert set(found.methods.values()) == {None}


class AddsAnotherToken(Layer):
    """What it adds is no convolution: the last token, to all."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down(x[:, -1:] * x)


def test_what_else_is_added_is_refused():
    model = wild.Stack(AddsAnotherToken(), width=WIDTH).eval()
    with pytest.raises(UnsupportedModelError):
        hidden_attention(model, tokens(), formulation="unified")
