"""xLSTM's layers as their own code writes them: convolved tokens are added to the scan."""

import pytest
import torch
import wild
from frozen import measured, recorded
from methods import OF_A_TARGET, each_method
from models import without_biases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from xlstm_layers import NORMS, WIDTH, L, Layer, mlstm

from captum_ssm import LaTIM, MambaAttribution, UnsupportedModelError, hidden_attention, supported
from captum_ssm.discovery.measure import freeze_measured

EVERY = ("conv", "activation", "gate", "norm", "skip")


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


def test_contributions_add_up():
    model = without_biases(wild.Stack(Layer(), Layer(back=True), width=WIDTH).eval())
    x = tokens()
    _, delta = LaTIM(model).attribute(
        x, target=(5, 1), aggregation="alti_logit", return_convergence_delta=True
    )
    assert float(delta.abs().max()) < 1e-4


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


class OfHeads(nn.Module):
    """A linear layer of each head, which a token has to itself, as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...hi,hoi->...ho", x.unflatten(-1, (2, -1)), self.weight).flatten(-2)


class BentCell(nn.Module):
    """An ordinary recurrent network, which has no map, of gates that are made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.read = OfHeads(), OfHeads(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for gate, value in zip(self.gate(x).unbind(1), self.value(x).unbind(1), strict=True):
            h = torch.tanh(value + self.read(h)) * torch.sigmoid(gate)
            out.append(h)
        return torch.stack(out, 1)


def test_a_layer_beside_an_unknown_recurrence_has_the_tokens_of_the_scans():
    model = wild.Stack(Layer(), BentCell(), width=WIDTH).eval()
    told = supported(model, tokens(), target=(L - 1, 1))
    assert [mixer.name for mixer in told.mixers] == ["layers.0"]
    with pytest.raises(UnsupportedModelError, match="no known mixer"):
        MambaAttribution(model).attribute(tokens(), target=(L - 1, 1))
