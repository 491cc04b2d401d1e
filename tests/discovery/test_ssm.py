"""Recurrences of a diagonal decay: complex, one for all, from keys, and Mamba-2 as listed."""

import pytest
import torch
import wild
from frozen import measured, recorded
from proofs import proven
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
from captum_ssm.operators import LinearAttentionOperator

LENGTHS = (1, 3, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 63, 100)))


def joined(one, other):
    return one[0] * other[0], other[0] * one[1] + other[1]


def associative_scan(operator, elems, axis=0, reverse=False):
    """By doubling: each element is joined with the one before it, two, four, and so on."""
    parts = [x.movedim(axis, 0).flip(0) if reverse else x.movedim(axis, 0) for x in elems]
    step = 1
    while step < len(parts[0]):
        later = operator([x[:-step] for x in parts], [x[step:] for x in parts])
        parts = [torch.cat([x[:step], y]) for x, y in zip(parts, later, strict=True)]
        step *= 2
    return tuple((x.flip(0) if reverse else x).movedim(0, axis) for x in parts)


def plain(decay, inputs):
    return associative_scan(joined, (decay.expand_as(inputs), inputs), axis=1)[1]


def backward(decay, inputs):
    return associative_scan(joined, (decay.expand_as(inputs), inputs), axis=1, reverse=True)[1]


def by_vmap(decay, inputs):
    decay = decay.tile(inputs.shape[1], 1)
    return torch.vmap(lambda one: associative_scan(joined, (decay, one))[1])(inputs)


class LRU(nn.Module):
    """A complex diagonal recurrence of all channels, with a dense skip."""

    def __init__(self, scan=plain, width=6, states=5, skip=True):
        super().__init__()
        self.scan = scan
        self.rate, self.angle = (
            nn.Parameter(torch.rand(states) - 2),
            nn.Parameter(3 * torch.rand(states)),
        )
        self.B, self.C = (
            nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) / 2)
            for shape in ((states, width), (width, states))
        )
        self.D = nn.Parameter(torch.randn(width, width)) if skip else None

    def forward(self, x):
        decay = torch.exp(torch.complex(-self.rate.exp(), self.angle))
        states = self.scan(decay, x.to(self.B.dtype) @ self.B.T)
        y = (states @ self.C.T).real
        return y if self.D is None else y + x @ self.D.T


def as_double(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float64))
    return module


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scan", [plain, backward, by_vmap])
def test_a_complex_recurrence_has_four_real_maps_for_each_state(scan, length):
    module = as_double(LRU(scan))
    x = torch.randn(2, length, 6, dtype=torch.float64)
    mixer = measured(module, x)
    power = torch.arange(length)[:, None] - torch.arange(length)
    power = -power if scan is backward else power
    decay = torch.exp(torch.complex(-module.rate.exp(), module.angle)).detach()
    maps = torch.where(power >= 0, decay[:, None, None] ** power.clamp(min=0), 0)
    found = mixer.recurrence.matrix()
    assert found.shape == (2, 20, length, length)
    torch.testing.assert_close(found[0, :5], maps.real)
    torch.testing.assert_close(found[0, 5:10], maps.imag)
    torch.testing.assert_close(found[1, 10:], torch.cat([-maps.imag, maps.real]))


def test_the_maps_of_complex_states_are_the_jacobian_of_the_module():
    module, x = as_double(LRU(skip=False)), torch.randn(1, 7, 6, dtype=torch.float64)
    mixer = freeze_measured(recorded(module, x))
    given = torch.view_as_real(module.B.detach()).movedim(-1, 0)  # parts, states, channels
    given = given.repeat_interleave(2, 0).flatten(0, 1)
    found = torch.einsum("ed,dij,dc->iejc", mixer.out_weight, mixer.recurrence.matrix()[0], given)
    (jacobian,) = torch.autograd.functional.jacobian(lambda x: module(x)[0], (x,))
    torch.testing.assert_close(found, jacobian[:, :, 0])


class Real(LRU):
    """A real recurrence, some of whose decays are negative."""

    def forward(self, x):
        decay = torch.cos(self.angle) * torch.exp(-self.rate.exp())
        return plain(decay, x @ self.B.T.real) @ self.C.T.real


@pytest.mark.parametrize("kind", [LRU, Real])
def test_every_method_explains_a_model_of_them(kind):
    model, x = wild.Stack(kind(skip=False), kind(skip=False)).eval(), torch.randn(2, 7, 6)
    assert MambaRollout(model).attribute(x).shape == x.shape
    assert len(hidden_attention(model, x, formulation="unified")) == 2
    found = MambaLRP(model).attribute(x, target=(6, 1)).sum(-1)
    torch.testing.assert_close(found, gradient_times_input(model, x), atol=1e-5, rtol=1e-4)
    found, delta = LaTIM(model).attribute(x, target=(6, 1), return_convergence_delta=True)
    torch.testing.assert_close(found.sum((1, 2)) + delta, model(x)[:, 6, 1], atol=1e-5, rtol=0)


def gradient_times_input(model, x):
    norms, x = model.norms, x.clone().requires_grad_()
    model.norms = nn.ModuleList(map(wild.ConstantNorm, norms))
    (gradient,) = torch.autograd.grad(model(x)[:, 6, 1].sum(), x)
    model.norms = norms
    return (gradient * x).detach().sum(-1)


class OneExample(LRU):
    """As S5 writes it: a module of one sequence, that knows no batch."""

    def forward(self, x):
        decay = torch.exp(torch.complex(-self.rate.exp(), self.angle)).tile(len(x), 1)
        inputs = torch.vmap(lambda u: self.B @ u)(x.to(self.B.dtype))
        _, ahead = associative_scan(joined, (decay, inputs))
        _, back = associative_scan(joined, (decay, inputs), reverse=True)
        read = torch.vmap(lambda state: (self.C @ state).real)(ahead + back / 2)
        return read + torch.vmap(lambda u: self.D @ u)(x)


class Mapped(nn.Module):
    """Such a module, over a batch."""

    def __init__(self):
        super().__init__()
        self.inner = OneExample()

    def forward(self, x):
        return torch.vmap(self.inner)(x)


@pytest.mark.parametrize("scan", [plain, backward, by_vmap])
def test_a_skip_by_a_matrix_is_what_each_token_adds_to_its_own_output(scan):
    model, x = wild.Stack(LRU(scan), LRU(scan)).eval(), torch.randn(2, 7, 6)
    model = as_double(model)
    model.head.bias.data.zero_()
    x = x.double()
    assert set(supported(model, x, target=(6, 1)).methods.values()) == {None}
    score = model(x)[:, 6, 1].detach()
    for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
        found, delta = method(model).attribute(
            x, target=(6, 1), return_convergence_delta=True, **options
        )
        torch.testing.assert_close(found.sum((1, 2)), score)
        assert delta.abs().max() < 1e-8
    module = model.layers[0]
    added = LaTIM(model).contributions(x, "layers.0", range(7))
    inputs = model.norms[0](x)
    maps = torch.autograd.functional.jacobian(lambda y: module(y[None])[0], inputs[0])
    expected = torch.einsum("iejc,jc->ije", maps, inputs[0])
    torch.testing.assert_close(added[0], expected.detach())


def test_of_several_scans_a_skip_by_a_matrix_is_left_out_of_the_maps_and_said():
    model, x = wild.Stack(Mapped(), Mapped()).eval(), torch.randn(2, 7, 6)
    assert MambaRollout(model).attribute(x).shape == x.shape
    found = MambaLRP(model).attribute(x, target=(6, 1)).sum(-1)
    torch.testing.assert_close(found, gradient_times_input(model, x), atol=1e-5, rtol=1e-4)
    with pytest.raises(UnsupportedModelError, match="only the scans could be measured"):
        LaTIM(model).attribute(x, target=(6, 1))
    told = supported(model, x, target=(6, 1))
    assert [mixer.known for mixer in told.mixers] == ["measured"] * 2
    assert told.methods["rollout"] is None
    assert "only the scans could be measured" in told.methods["latim"]


def test_a_scan_of_another_operator_is_not_one():
    def largest(one, other):
        return one[0] * other[0], torch.maximum(other[0] * one[1], other[1])

    class Largest(nn.Module):
        def forward(self, x):
            return associative_scan(largest, (torch.sigmoid(x), x), axis=1)[1]

    with pytest.raises(UnsupportedModelError, match="Largest"):
        MambaRollout(wild.Stack(Largest()).eval()).attribute(torch.randn(1, 7, 6))


class OneRate(wild.Mixer):
    """CMamba's: one channel of rates for all, and a skip for each token."""

    def scanned(self, v):
        step, B, C = self.x_proj(v).split([8, 3, 3], -1)
        return wild.scan(v, F.softplus(step), -self.rates[:1].exp(), B, C, torch.tanh(step))


def online_scan(u, Q, K, T, D=None, t_bias=None):
    step = torch.sigmoid(T + t_bias)
    step = step / (1 + step * K.square().sum(-1, keepdim=True))
    state, found = 0, []
    for t in range(u.shape[1]):
        write = step[:, t, :, None] * K[:, t, None]
        state = state * (1 - write * K[:, t, None]) + write * u[:, t, :, None]
        found.append((state * Q[:, t, None]).sum(-1))
    return torch.stack(found, 1) + D * u


class Online(wild.Mixer):
    """Longhorn's: what is forgotten is said by the keys, for each channel and state."""

    def scanned(self, v):
        step, k, q = self.x_proj(v).split([8, 3, 3], -1)
        return online_scan(v, q, k, step, D=self.D, t_bias=self.D)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [OneRate, Online])
def test_maps_are_what_the_function_returns_of_impulses(kind, length, monkeypatch):
    module, x = kind().double().eval(), torch.randn(1, length, 6, dtype=torch.float64)
    calls = []
    name, owner = ("scan", wild) if kind is OneRate else ("online_scan", globals())
    scan = owner[name] if kind is Online else wild.scan

    mixer = measured(module, x)

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        return scan(*args, **kwargs)

    if kind is OneRate:
        monkeypatch.setattr(wild, "scan", noted)
    else:
        monkeypatch.setitem(owner, name, noted)
    with torch.no_grad():
        module(x)
    (((v, *others), named),) = calls
    maps = mixer.recurrence.matrix()[0]
    for j in {0, length // 2, length - 1}:
        impulse = torch.zeros_like(v)
        impulse[:, j] = 1
        column = scan(impulse, *others, **named)[0]
        skip = mixer.skip if mixer.skip.dim() == 1 else mixer.skip[0, j]
        column[j] -= skip
        torch.testing.assert_close(maps[:, :, j].mT, column)


def blocks(X, A, B, C, block_len, initial_states=None):
    """Mamba-2's scan as its paper lists it, in blocks: ``(Y, last state)``."""
    B, C = (t.repeat_interleave(X.shape[2] // t.shape[2], 2) for t in (B, C))
    state, out = X.new_zeros(len(X), X.shape[2], X.shape[3], B.shape[-1]), []
    for x, a, b, c in zip(*(t.split(block_len, 1) for t in (X, A, B, C)), strict=True):
        decay = a.cumsum(1)
        before = torch.ones(block_len, block_len).tril()[..., None]
        between = (decay[:, :, None] - decay[:, None]).exp() * before
        inside = torch.einsum("blhn,bshn,blsh,bshp->blhp", c, b, between, x)
        out.append(inside + torch.einsum("blhn,bhpn,blh->blhp", c, state, decay.exp()))
        added = torch.einsum("bshn,bsh,bshp->bhpn", b, (decay[:, -1:] - decay).exp(), x)
        state = decay[:, -1].exp()[..., None, None] * state + added
    return torch.cat(out, 1), state


def late(X, A, B, C, block_len):
    """What each token writes is read from the next one on."""
    return F.pad(blocks(X, A, B, C, block_len)[0], (0, 0, 0, 0, 1, 0))[:, :-1]


def listed(groups):
    length, heads = 6, 4
    x, step = torch.randn(2, length, heads, 5), torch.rand(2, length, heads)
    B, C = torch.randn(2, 2, length, groups, 3)
    return dict(X=x * step[..., None], A=-step * torch.rand(heads), B=B, C=C, block_len=3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_listing_of_mamba_2_is_proven(groups):
    given = listed(groups)
    scan = proven(blocks, **given)
    assert isinstance(scan.operator, LinearAttentionOperator)
    j, h = 1, 2
    impulse = torch.zeros_like(given["X"])
    impulse[:, j, h, 0] = 1
    column = blocks(**given | {"X": impulse})[0][:, :, h, 0]
    torch.testing.assert_close(scan.operator.matrix()[:, h, :, j], column)
    assert proven(late, **given) is None
