"""Attention and other products with a matrix of tokens, written into a module's forward."""

from types import SimpleNamespace

import pytest
import torch
import wild
from frozen import measured, recorded
from torch import nn
from torch.nn import functional as F

from captum_ssm import (
    LaTIM,
    MambaLRP,
    MambaRollout,
    UnsupportedModelError,
    hidden_attention,
    supported,
)
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.discovery.measure.cut_run import run_cut
from captum_ssm.discovery.scans.forms.products import name_of
from captum_ssm.operators import PermutedOperator

WRITTEN = {
    "@": lambda a, v: a @ v,
    "matmul": torch.matmul,
    "bmm": lambda a, v: torch.bmm(a.flatten(0, 1), v.flatten(0, 1)).view(v.shape),
    "baddbmm": lambda a, v: torch.baddbmm(
        0 * v.flatten(0, 1), a.flatten(0, 1), v.flatten(0, 1), beta=0, alpha=1
    ).view(v.shape),
    "einsum": lambda a, v: torch.einsum("bhnm,bhmp->bhnp", a, v),
    "ellipsis": lambda a, v: torch.einsum("... n m, ... m p -> ... n p", a, v),
    "values first": lambda a, v: (v.mT @ a.mT).mT,
    "tokens last": lambda a, v: torch.einsum("bhpm,bhnm->bhpn", v.mT, a).mT,
}


def softmax(scores):
    later = torch.ones_like(scores[0, 0]).triu(1).bool()
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def both_ways(scores):
    return scores.softmax(-1)


def windowed(scores):
    at = torch.arange(scores.shape[-1])
    hidden = (at[:, None] - at < 0) | (at[:, None] - at > 2)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def retention(scores):
    at = torch.arange(scores.shape[-1])
    decayed = scores * (0.8 ** (at[:, None] - at)).tril()
    return decayed / decayed.detach().abs().sum(-1, keepdim=True).clamp(min=1)


def taylor(scores):
    return (1 + scores + scores.square() / 2).tril()


def squared(scores):
    return F.relu(scores).square().tril() / scores.shape[-1]


KINDS = (softmax, both_ways, windowed, retention, taylor, squared)


class InLine(nn.Module):
    """Attention of a kind, its product with the values written in a way; keeps its weights."""

    def __init__(self, kind=softmax, written="@", width=12, heads=3):
        super().__init__()
        self.kind, self.written, self.heads = kind, WRITTEN[written], heads
        self.query, self.key, self.value, self.gate, self.out = (
            nn.Linear(width, width) for _ in range(5)
        )

    def apart(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.apart(layer(x)) for layer in (self.query, self.key, self.value))
        self.weights = self.kind(q @ k.mT * q.shape[-1] ** -0.5)
        y = self.written(self.weights, v)
        if self.kind is taylor:  # its rows are divided afterwards
            y = y / self.weights.sum(-1, keepdim=True)
        if self.kind is retention:
            y = F.rms_norm(y, y.shape[-1:])
        y = y.transpose(1, 2).flatten(2)
        return self.out(F.silu(self.gate(x)) * y if self.gate is not None else y)


def explained(kind, written, length):
    torch.manual_seed(length)
    module = InLine(kind, written).double().eval()
    call = recorded(module, torch.randn(2, length, 12, dtype=torch.float64))
    return module, call, freeze_measured(call)


# A head has 4 channels and the module 12: as many as there are tokens in two cases.
@pytest.mark.parametrize("length", [2, 3, 4, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_itself_is_the_operator(kind, length):
    module, call, mixer = explained(kind, "@", length)
    assert torch.equal(mixer.recurrence.matrix(), module.weights)
    torch.testing.assert_close(mixer.output(), call.output)


def test_a_matrix_of_zeros_is_one_too():
    module = InLine(lambda scores: 0 * scores)
    call = recorded(module, torch.randn(1, 5, 12))
    assert not freeze_measured(call).recurrence.matrix().any()
    model, x = wild.Stack(InLine(squared), width=12).eval(), torch.randn(1, 5, 12)
    MambaLRP(model).attribute(x, target=(4, 1))
    model.layers[0].kind = lambda scores: 0 * scores
    assert MambaLRP(model).attribute(x, target=(4, 1))[0, 4].any()


class OfBlocks(InLine):
    """Attention, and one to means of the whole blocks before a token, for one example at a time."""

    def forward(self, x):
        q, k, v = (self.apart(layer(x)) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y + torch.cat([self.of_blocks(*one) for one in zip(q, k, v, strict=True)])
        return self.out(y.transpose(1, 2).flatten(2))

    def of_blocks(self, q, k, v, size=4):
        blocks = range(0, q.shape[1], size)
        k, v = (torch.stack([y[:, i : i + size].mean(1) for i in blocks], 1) for y in (k, v))
        is_whole = torch.arange(q.shape[1])[:, None] >= torch.tensor(blocks) + size - 1
        scores = torch.einsum("hnp,hmp->hnm", q, k).masked_fill(~is_whole, -torch.inf)
        return torch.einsum("hnm,hmp->hnp", scores.softmax(-1).nan_to_num(0), v)[None]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_product_without_weights_adds_nothing_to_others(batch):
    # As many blocks as tokens, and none of them whole.
    mixer = measured(OfBlocks(), torch.randn(batch, 1, 12))
    assert mixer.operator("unified").matrix().shape[0] == batch


@pytest.mark.parametrize("length", [4, 12, 63, 65])
@pytest.mark.parametrize("written", WRITTEN)
def test_the_product_may_be_written_in_any_way(written, length):
    module, call, mixer = explained(softmax, written, length)
    maps = mixer.recurrence.matrix()
    torch.testing.assert_close(maps, module.weights.expand_as(maps))
    torch.testing.assert_close(mixer.output(), call.output)


def test_the_unified_map_is_the_jacobian_of_the_module_with_its_coefficients_frozen():
    module, call, mixer = explained(retention, "einsum", 7)
    values = module.value(call.args[0]).detach()
    maps = mixer.operator("unified", ("gate", "norm", "activation", "skip")).matrix()
    gated = torch.einsum("bdij,bjd->bid", maps, values)
    torch.testing.assert_close(mixer.projected(gated + mixer.remainder()), call.output)


class AllAtOnce(InLine):
    """Queries, keys and values in one product; heads that share one value; its last layer too."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(12, 4)
        self.weight = nn.Parameter(torch.randn(3, 4, 12))

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (3, 4)) for layer in (self.query, self.key))
        mask = torch.ones(len(x[0]), len(x[0])).to(x).tril()
        y = torch.einsum("btha,bsha,ts,bsp->bthp", q, k, mask, self.value(x))
        self.weights = torch.einsum("btha,bsha,ts->bhts", q, k, mask)
        return torch.einsum("bthp,hpe->bte", y, self.weight)


@pytest.mark.parametrize("length", [3, 4, 5, 12])
def test_a_product_of_many_factors_and_a_last_layer_by_einsum(length):
    module = AllAtOnce().double()
    mixer = measured(module, torch.randn(2, length, 12, dtype=torch.float64))
    torch.testing.assert_close(mixer.recurrence.matrix(), module.weights)


class Odd(InLine):
    """Products that are no layers and no mixers beside one that is."""

    def forward(self, x):
        size = torch.einsum("ble,e->bl", x, self.gate.bias)
        total = torch.einsum("ble,bkf->bk", x[:, :1], x)
        outer = torch.einsum("ble,fe->blfe", x, self.gate.weight).sum((2, 3))
        y = super().forward(x) * torch.tanh(size + outer)[..., None]
        return y if x.shape[1] == 1 else y + 0 * total.mean()


def test_a_place_has_a_name_on_python_3_10_too():
    assert name_of(SimpleNamespace(co_name="forward")) == "forward"


def test_other_products_are_left_alone():
    call = recorded(Odd(), torch.randn(2, 7, 12))
    torch.testing.assert_close(freeze_measured(call).output(), call.output)


class InWindows(InLine):
    """Attention in windows of four tokens, which the module makes and joins, rolled by one."""

    def forward(self, x):
        windows = x.roll(-1, 1).reshape(-1, 4, x.shape[-1])
        return super().forward(windows).reshape(x.shape).roll(1, 1)


@pytest.mark.parametrize("length", [8, 12])
def test_windows_in_a_module_are_blocks_of_its_map(length):
    mixer = measured(InWindows().double(), torch.randn(2, length, 12, dtype=torch.float64))
    windowed = mixer.scans[0].recurrence
    assert isinstance(windowed, PermutedOperator)
    assert windowed.windows == length // 4
    here = (torch.arange(length) - 1) % length // 4
    maps = mixer.recurrence.matrix("mean")
    assert torch.equal(maps[0] != 0, (here[:, None] == here) & (maps[0] != 0))
    sums = maps.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def trained_in_chunks(q, k, v, rate, inner=lambda y: y, chunk=4):
    """A linear layer that is trained by each token to map its key to its value, then reads q."""
    weight, found = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for at in range(0, q.shape[2], chunk):
        some = slice(at, at + chunk)
        queries, keys, rates = q[:, :, some], k[:, :, some], rate[:, :, some]
        error = inner(keys @ weight) - v[:, :, some]
        found.append(queries @ weight - ((queries @ keys.mT).tril() * rates.mT) @ error)
        weight = weight - (keys * rates).mT @ error
    return torch.cat(found, 2)


class Trained(InLine):
    """A layer trained at test time, whose loss may be of something else than the layer returns."""

    def __init__(self, inner=lambda y: y):
        super().__init__()
        self.inner, self.rate = inner, nn.Linear(12, 3)

    def forward(self, x):
        q, k, v = (self.apart(layer(x)) for layer in (self.query, self.key, self.value))
        rate = torch.sigmoid(self.rate(x)).mT[..., None] / 4
        y = trained_in_chunks(q, k, v, rate, self.inner)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [4, 8, 9])
def test_a_layer_trained_at_test_time_is_linear_in_its_values_where_its_loss_is(length):
    measured(Trained().double(), torch.randn(2, length, 12, dtype=torch.float64))
    module = Trained(torch.tanh).double()
    call = recorded(module, torch.randn(2, length, 12, dtype=torch.float64))
    if length > 4:  # within the first chunk the layer is what it was
        with pytest.raises(UnsupportedModelError, match="Trained"):
            freeze_measured(call)


class OfChannels(nn.Module):
    """Attention between channels looks like one between tokens and mixes none."""

    def __init__(self):
        super().__init__()
        self.qkv, self.weight = nn.Linear(12, 36), nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x):
        q, k, v = self.qkv(x @ self.weight).mT.unflatten(1, (3, 12)).unbind(1)
        return (torch.softmax(q @ k.mT, -1) @ v).mT


@pytest.mark.parametrize("length", [6, 12])
def test_attention_between_channels_is_not_taken_for_a_mixer(length):
    with pytest.raises(UnsupportedModelError, match="OfChannels"):
        MambaRollout(wild.Stack(OfChannels(), width=12).eval()).attribute(
            torch.randn(1, length, 12)
        )


class Projected(InLine):
    """Projections by square matrices, as many channels as tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x):
        return super().forward(x @ self.weight)


@pytest.mark.parametrize("kind", [InLine, InWindows, AllAtOnce, Projected])
def test_every_method_explains_a_model_of_them(kind):
    model, x = wild.Stack(kind(), kind(), width=12).eval(), torch.randn(1, 12, 12)
    assert [mixer.known for mixer in supported(model, x).mixers] == ["measured"] * 2
    assert MambaRollout(model).attribute(x).shape == x.shape
    for maps in hidden_attention(model, x, formulation="unified").values():
        assert maps.shape[-2:] == (12, 12)
    for method in (MambaLRP, LaTIM):
        _, delta = method(model).attribute(x, target=(5, 1), return_convergence_delta=True)
        assert delta.abs().max() < 1


# Tokens as many as a head's channels, as all channels, and other numbers, after one of them.
@pytest.mark.parametrize("written", ["@", "values first", "bmm"])
def test_relevance_is_the_gradient_times_the_input_with_the_matrix_held_constant(written):
    model = wild.Stack(InLine(softmax, written), InLine(squared, written), width=12).eval()
    for layer in model.layers:
        layer.gate = None
    for length in (4, 1, 7, 12):
        x = torch.randn(2, length, 12, requires_grad=True)
        found = MambaLRP(model).attribute(x.detach(), target=(length - 1, 1))
        norms, kinds = model.norms, [layer.kind for layer in model.layers]
        model.norms = nn.ModuleList(map(wild.ConstantNorm, norms))
        for layer, kind in zip(model.layers, kinds, strict=True):
            layer.kind = lambda scores, kind=kind: kind(scores).detach()
        (gradient,) = torch.autograd.grad(model(x)[:, -1, 1].sum(), x)
        model.norms = norms
        for layer, kind in zip(model.layers, kinds, strict=True):
            layer.kind = kind
        torch.testing.assert_close(found, (gradient * x).detach(), atol=1e-6, rtol=1e-4)


class Rated(wild.Mixer):
    """Its values have a gate that a plain matrix makes of their channels."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def scanned(self, v):
        return super().scanned(v * torch.sigmoid(v @ self.matrix))


def test_a_product_that_was_taken_for_one_of_tokens_is_left_out_for_good():
    call = recorded(Rated().eval(), wild.tokens())
    run = run_cut(call)
    assert len(run.without) == 1
    again = run_cut(call, {wild.scan, *run.without})  # as where another input made it look like one
    assert again.without == run.without
    assert [cut.function for cut in again.scans] == [wild.scan]
