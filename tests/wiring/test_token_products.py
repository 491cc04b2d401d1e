"""Products of tokens with others outside of the mixers: found, frozen, or said."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from inputs import noise
from models import made, without_biases
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import (
    MambaLRP,
    MambaRollout,
    UnifiedImplicitAttention,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.models import BidirectionalMamba
from captum_ssm.models.token_grid import TokenGrid

E, L = 16, 12


class LinearAttention(nn.Module):
    """Attention without a softmax, whose coefficients may be held constant."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E, bias=False) for _ in range(3))
        self.held: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        weights = self.held((self.q(x) @ self.k(x).mT).tril() / 8)
        return weights @ self.v(x)


class Mixes(nn.Module):
    """Mixers, and what is ``mixed`` before the first, between, in a tower beside, or at the end."""

    def __init__(
        self, place: str, mixed: nn.Module | Callable[[Tensor], Tensor], *, is_pooled: bool = False
    ) -> None:
        super().__init__()
        self.place, self.mixed, self.is_pooled = place, mixed, is_pooled
        self.enter = nn.Linear(6, E, bias=False)
        self.mixers = nn.ModuleList(BidirectionalMamba(E, bimamba_type="none") for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(3))
        self.head = nn.Linear(E, 5, bias=False)

    def entered(self, x: Tensor) -> Tensor:
        return self.enter(x)

    def forward(self, x: Tensor) -> Tensor:
        begun = h = self.entered(x)
        for place, mixer, norm in zip(("first", "between"), self.mixers, self.norms, strict=False):
            h = h + self.mixed(norm(h)) if place == self.place else h
            h = h + mixer(norm(h))
        h = h + self.mixed(self.norms[2](begun)) if self.place == "tower" else h
        h = h + self.mixed(self.norms[2](h)) if self.place == "end" else h
        return self.head(h.mean(1) if self.is_pooled else h[:, -1])


PLACES = ["first", "between", "tower", "end"]


@pytest.mark.parametrize("place", PLACES)
def test_a_scan_is_frozen_wherever_it_stands(place: str) -> None:
    model, x = without_biases(made(Mixes(place, LinearAttention()))), noise(2, L, 6)
    found = MambaLRP(model).attribute(x, 1)
    weights: list[Tensor] = []
    model.mixed.held = lambda x: (weights.append(x.detach()), x)[1]
    model(x)
    model.mixed.held = lambda x: weights[0]
    expected = MambaLRP(model).attribute(x, 1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def attention_inline(x: Tensor) -> Tensor:
    return x @ (x.mT @ x) / 8


def loop_inline(x: Tensor) -> Tensor:
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append(states[-1] * x[:, t] + x[:, t])
    return torch.stack(states, 1)


def learned_inline(x: Tensor) -> Tensor:
    """Fast weights: a step against the gradient of a loss, which the model itself takes."""
    with torch.enable_grad():
        weight = torch.zeros(len(x), E, E, dtype=x.dtype).requires_grad_()
        loss = (x @ weight - x.flip(-1)).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return x @ gradient / -16


def forgetting_inline(x: Tensor) -> Tensor:
    x = x.clone()
    for t in range(1, x.shape[1]):  # next to nothing is left of what is five tokens back
        x[:, t].addcmul_(0.05 * torch.tanh(x[:, t]), x[:, t - 1])
    return x


def windowed_inline(x: Tensor) -> Tensor:
    windows = x.reshape(-1, 4, E)
    return ((windows @ windows.mT).tril() @ windows / 8).view_as(x)


def moment_inline(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True) * x.flip(1)


INLINE = [
    attention_inline,
    loop_inline,
    learned_inline,
    forgetting_inline,
    windowed_inline,
    moment_inline,
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mixed", INLINE)
def test_one_that_no_module_holds_is_said(place: str, mixed: Callable[[Tensor], Tensor]) -> None:
    model = without_biases(made(Mixes(place, mixed)))
    for _ in range(2):  # what is known of a model is kept
        with pytest.warns(UserWarning, match="tokens are mixed .*coefficients are not held"):
            MambaLRP(model).attribute(noise(2, L, 6), 1)


def gate(x: Tensor) -> Tensor:
    return x * F.silu(x.flip(-1))


def shifted_gate(x: Tensor) -> Tensor:
    return x * F.pad(x, (0, 0, 1, 0))[:, :-1]


def pooled_gate(x: Tensor) -> Tensor:
    return x * x.mean(1, keepdim=True).sigmoid()


def gate_of_products(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(x * x.mean(1, keepdim=True)))


def gate_of_a_mean(x: Tensor) -> Tensor:
    return gate(x.mean(1, keepdim=True)).expand_as(x)


def gate_of_sums(x: Tensor) -> Tensor:
    return gate(x.cumsum(1).flip(1))


def shifted_gate_of_sums(x: Tensor) -> Tensor:
    return shifted_gate(x.cumsum(1))


GATES = [
    gate,
    shifted_gate,
    pooled_gate,
    gate_of_products,
    gate_of_a_mean,
    gate_of_sums,
    shifted_gate_of_sums,
]


def assert_nothing_said(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, delta = MambaLRP(model).attribute(x, 1, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-9


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.parametrize("mixed", GATES)
@pytest.mark.parametrize("is_pooled", [False, True])
def test_gates_are_no_scans(place: str, mixed: Callable[[Tensor], Tensor], is_pooled: bool) -> None:
    model = without_biases(made(Mixes(place, mixed, is_pooled=is_pooled)))
    assert_nothing_said(model, noise(2, L, 6))


class PooledTower(Mixes):
    """Mixers, and a tower of the input whose mean is added at the end."""

    def forward(self, x: Tensor) -> Tensor:
        tower = self.norms[2](self.entered(x))
        return super().forward(x) + self.head((tower + self.mixed(tower)).mean(1))


@pytest.mark.parametrize("mixed", [gate, attention_inline])
def test_towers_that_are_pooled_are_looked_at(mixed: Callable[[Tensor], Tensor]) -> None:
    model, x = without_biases(made(PooledTower("", mixed, is_pooled=True))), noise(2, L, 6)
    if mixed is gate:
        assert_nothing_said(model, x)
        return
    with pytest.warns(UserWarning, match="tokens are mixed .*coefficients are not held"):
        MambaLRP(model).attribute(x, 1)


class Patches(Mixes):
    """Mixers of an image's patches."""

    def __init__(self, place: str, mixed: Callable[[Tensor], Tensor]) -> None:
        super().__init__(place, mixed, is_pooled=True)
        self.enter = nn.Conv2d(3, E, 4, 4, bias=False)

    def entered(self, x: Tensor) -> Tensor:
        return self.enter(x).flatten(2).mT


class GridOfPatches(Patches):
    """A model that tells which token is which patch."""

    def token_grid(self, height: int, width: int) -> TokenGrid:
        rows, columns = height // 4, width // 4
        return TokenGrid(torch.arange(rows * columns).view(rows, columns))


KINDS = [Patches, GridOfPatches]


def blurred_gate(x: Tensor) -> Tensor:
    image = x.mT.reshape(len(x), E, 5, 5)
    return x * F.avg_pool2d(image, 3, 1, 1).flatten(2).mT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mixed", [gate, blurred_gate, attention_inline, loop_inline])
@pytest.mark.parametrize("kind", KINDS)
def test_patches_are_looked_at(
    place: str, mixed: Callable[[Tensor], Tensor], kind: type[Patches]
) -> None:
    model, x = without_biases(made(kind(place, mixed))), noise(2, 3, 20, 20)
    if mixed in (gate, blurred_gate):
        assert_nothing_said(model, x)
        return
    with pytest.warns(UserWarning, match="tokens are mixed .*coefficients are not held"):
        MambaLRP(model).attribute(x, 1)


def test_a_declared_grid_is_not_believed_where_its_tokens_read_all_patches() -> None:
    x = noise(2, 3, 20, 20)
    known, measured = (without_biases(made(k("first", attention_inline))) for k in KINDS)
    for method in (MambaRollout, UnifiedImplicitAttention):
        expected = method(known).attribute(x, target=1)
        torch.testing.assert_close(method(measured).attribute(x, target=1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_of_patches_that_are_mixed_is_refused(kind: type[Patches]) -> None:
    with pytest.raises(UnsupportedModelError, match="tokens are mixed around"):
        MambaRollout(made(kind("tower", attention_inline))).attribute(noise(2, 3, 20, 20))


class ManyShifts(nn.Module):
    """Gates that read the token before, after each of many mixers: as RWKV's channel mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(BidirectionalMamba(E, bimamba_type="none") for _ in range(8))
        self.head = nn.Linear(E, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (E,)))
            x = x + shifted_gate(F.rms_norm(x, (E,)))
        return self.head(x[:, -1])


def test_shifts_of_many_layers_are_no_scan() -> None:
    model = without_biases(made(ManyShifts()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MambaLRP(model).attribute(noise(2, 20, E), 1)


class Moment(nn.Module):
    """A linear layer, and a product of tokens with others that is no scan."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(E, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.layer(x), x.mean(1, keepdim=True), x.roll(1, 1))


def test_channels_are_not_taken_for_tokens() -> None:
    model, x = without_biases(made(Mixes("first", Moment()))), noise(2, L, 6)
    with pytest.warns(UserWarning, match="tokens are mixed .*coefficients are not held"):
        MambaLRP(model).attribute(x, 1)
    assert list(hidden_attention(model, x)) == ["mixers.0", "mixers.1"]


class Nearest(nn.Module):
    """A linear layer of the mean of those three tokens that are the most alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, E))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.cdist(x, x).topk(3, -1, largest=False).indices
        return x[torch.arange(len(x))[:, None, None], index].mean(2) @ self.weight


class OfFew(Mixes):
    """Adds the mean of what something makes of half the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        few = F.avg_pool1d(x.mT, 2, ceil_mode=True).mT
        for k, mixer in enumerate(self.mixers):
            x = x + mixer(self.norms[k](x))
        return self.head(self.norms[-1](x + self.mixed(few).mean(1, keepdim=True)))


def test_channels_of_fewer_tokens_are_not_taken_for_tokens() -> None:
    model, x = without_biases(made(OfFew("end", Nearest()))), noise(2, L, 6)
    assert list(hidden_attention(model, x)) == ["mixers.0", "mixers.1"]


class Compiled(LinearAttention):
    """Linear attention by a compiled function."""

    def forward(self, x: Tensor) -> Tensor:
        torch.compiler.reset()
        forward = super().forward
        return torch.compile(lambda x: forward(x), backend="eager")(x)


def test_a_compiled_scan_is_read_as_it_is_written() -> None:
    x = noise(2, L, 6)
    rows = [MambaRollout(made(Mixes("end", m()))).attribute(x) for m in (Compiled, LinearAttention)]
    torch.testing.assert_close(*rows)


class Vmapped(LinearAttention):
    """A recurrence of one example, for each of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        def of_one(decay: Tensor, x: Tensor) -> Tensor:
            states = [x[0]]
            for t in range(1, len(x)):
                states.append(decay[t] * states[-1] + x[t])
            return torch.stack(states)

        return torch.func.vmap(of_one)(self.q(x).tanh(), self.v(x))


def test_a_loop_under_vmap_is_said() -> None:
    with pytest.warns(UserWarning, match="tokens are mixed .*coefficients are not held"):
        MambaLRP(without_biases(made(Mixes("between", Vmapped())))).attribute(noise(2, L, 6), 1)
