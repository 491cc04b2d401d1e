"""Loops over tokens whose coefficients are computed in their steps.

The truth is an impulse through the loop's own code: what the coefficients are is written down in
one run, and read in the next one, in which the values have an impulse.
"""

import warnings

import pytest
import torch
from frozen import recorded
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
from captum_ssm.discovery.measure.cut_run import run_cut

WIDTH = 6


class Loop(nn.Module):
    """A mixer whose recurrence is written out, and which holds its coefficients when it is told."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.f, self.i, self.o, self.q, self.k, self.v, self.r = (
            nn.Linear(WIDTH, WIDTH) for _ in range(7)
        )
        self.rate = nn.Parameter(torch.randn(WIDTH))
        self.held, self.is_holding, self.impulse, self.states = [], False, None, []

    def forward(self, x):
        return self.leave(self.gathered([self.state(h) for h in self.steps(self.enter(x))]))

    def gathered(self, states):
        return torch.stack(states, 1)

    def hold(self, x):
        """A coefficient, as it was when nothing was held."""
        if self.is_holding:
            return self.held.pop(0)
        self.held.append(x.detach())
        return x

    def value(self, x):
        """A value, of the next token; it alone where coefficients are held."""
        if not self.is_holding:
            return x
        self.impulse, (now, *later) = self.impulse[1:], self.impulse
        assert len(later) == len(self.impulse)
        return torch.full_like(x, float(now))

    def state(self, h):
        self.states.append(h.detach())
        return h

    def maps(self, x):
        """What each token's state is of an impulse at each token, ``(B, D, L, L)``."""
        with torch.no_grad():
            self.held = []
            self(x)
            held, columns, self.is_holding = self.held, [], True
            for impulse in torch.eye(x.shape[1]):
                self.held, self.impulse, self.states = [*held], impulse, []
                self(x)
                columns.append(torch.stack(self.states, 1).flatten(2))
        self.is_holding = False
        return torch.stack(columns, -1).transpose(1, 2)


class Griffin(Loop):
    """RG-LRU, whose coefficients are computed in each step."""

    def steps(self, u):
        h = torch.zeros_like(u[:, 0])
        for x in u.unbind(1):
            a = self.hold(torch.exp(-F.softplus(self.rate) * self.f(x).sigmoid()))
            h = a * h + self.value((1 - a**2).sqrt() * (self.i(x).sigmoid() * x))
            yield h


class Cell(nn.Module):
    def __init__(self, loop):
        super().__init__()
        self.loop, self.gate, self.new = [loop], nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, h):
        (loop,) = self.loop
        z = loop.hold(self.gate(x).sigmoid())
        return (1 - z) * h + loop.value(z * self.new(x))


class MinGRU(Loop):
    """A cell that is a module of its own, called once per step."""

    def __init__(self):
        super().__init__()
        self.cell = Cell(self)

    def steps(self, u):
        h = torch.zeros_like(u[:, 0])
        for t in range(u.shape[1]):
            h = self.cell(u[:, t], h)
            yield h


class Sliced(MinGRU):
    """As SRU: ``u + (h - u) f``, whose value is sliced anew wherever it is read."""

    def steps(self, u):
        h, new = torch.zeros_like(u[:, 0]), self.i(u)
        for t in range(u.shape[1]):
            f = self.hold(self.f(u[:, t]).sigmoid())
            if self.is_holding:
                h = f * h + (1 - f) * self.value(new[:, t])
            else:
                h = new[:, t] + (h - new[:, t]) * f
            yield h


class Highway(Loop):
    """As SRU too: what a step returns has a part of the module's own token."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.f(x[:, t]).sigmoid() * h + self.i(x[:, t])
            r = self.r(x[:, t]).sigmoid()
            out.append(r * h + (1 - r) * x[:, t])
        return torch.stack(out, 1)


class InPlace(Loop):
    def steps(self, u):
        h = torch.zeros_like(u[:, 0])
        for t in range(u.shape[1]):
            z = self.hold(self.f(u[:, t]).sigmoid())
            h = h.clone()
            h.mul_(1 - z).add_(self.value(z * self.v(u[:, t])))
            yield h


class SLSTM(Loop):
    """The scalar cell of xLSTM with its stabilizer and its normalizer."""

    recurrent = 0.0

    def steps(self, u):
        c = n = h = torch.zeros_like(u[:, 0])
        m = c - 100
        for t in range(u.shape[1]):
            x, r = u[:, t], self.recurrent * self.r(h)
            forget, write = F.logsigmoid(self.f(x) + r), self.i(x) + r
            new = torch.maximum(forget + m, write)
            f, i = self.hold(torch.exp(forget + m - new)), self.hold(torch.exp(write - new))
            c = f * c + i * self.value(torch.tanh(self.v(x)))
            n, m = self.hold(f * n + i), new
            h = self.hold(self.o(x).sigmoid()) * c / n
            yield h


class GatesReadTheState(SLSTM):
    """As above; its gates, coefficients, read the result of the step before."""

    recurrent = 1.0


class MLSTM(Loop):
    """The matrix cell of xLSTM."""

    def steps(self, u):
        C, n = u.new_zeros(len(u), WIDTH, WIDTH), u.new_zeros(len(u), WIDTH)
        m = u.new_zeros(len(u), 1) - 100
        for t in range(u.shape[1]):
            x = u[:, t]
            q, k = self.hold(self.q(x)), self.hold(self.k(x))
            forget, write = F.logsigmoid(self.f(x)[:, :1]), self.i(x)[:, :1]
            new = torch.maximum(forget + m, write)
            f, i = self.hold(torch.exp(forget + m - new)), self.hold(torch.exp(write - new))
            C = f[..., None] * C + i[..., None] * self.value(self.v(x))[:, :, None] * k[:, None]
            n, m = self.hold(f * n + i * k), new
            size = self.hold(torch.maximum((n * q).sum(-1, True).abs(), torch.exp(-m)))
            yield (C @ q[..., None])[..., 0] / size


class Mamba(Loop):
    """S6, whose step size, B and C are computed in each step."""

    def steps(self, u):
        h = 0.0
        for t in range(u.shape[1]):
            x = u[:, t]
            dt = self.hold(F.softplus(self.f(x)))
            b, c = self.hold(self.k(x)[:, None]), self.hold(self.q(x)[:, None])
            decay = torch.exp(-dt[..., None] * F.softplus(self.rate))
            h = decay * h + dt[..., None] * b * self.value(self.v(x))[..., None]
            yield (h * c).sum(-1)


class Titans(Loop):
    """A linear memory trained per token, with momentum and forgetting."""

    def steps(self, u):
        memory = moment = u.new_zeros(len(u), WIDTH, WIDTH)
        for t in range(u.shape[1]):
            x = u[:, t]
            q, k = self.hold(self.q(x)), self.hold(F.normalize(self.k(x), dim=-1))
            kept, rate, lost = (
                self.hold(gate(x)[:, :1, None].sigmoid()) for gate in (self.f, self.i, self.o)
            )
            error = (memory @ k[..., None])[..., 0] - self.value(self.v(x))
            moment = kept * moment - rate * error[..., None] * k[:, None]
            memory = (1 - lost) * memory + moment
            yield (memory @ q[..., None])[..., 0]


class Written(Griffin):
    def gathered(self, states):
        out = torch.empty(len(states[0]), len(states), WIDTH)
        for t in range(len(states)):
            out[:, t] = states[t]
        return out


class Grown(Griffin):
    def forward(self, x):
        u, out = self.enter(x), x[:, :0]
        for h in self.steps(u):
            out = torch.cat([out, self.state(h)[:, None]], 1)
        return self.leave(out)


class TokensFirst(Griffin):
    def gathered(self, states):
        return torch.stack(states).transpose(0, 1)


class Backward(Griffin):
    def steps(self, u):
        return super().steps(u.flip(1))

    def gathered(self, states):
        return torch.stack(states[::-1], 1)


class Started(Loop):
    """A recurrence whose first step has no state to add."""

    how = "if"

    def steps(self, u):
        h, f, v = None, self.f(u).sigmoid(), self.v(u)
        for t in range(u.shape[1]):
            b = self.value(v[:, t])
            if self.how == "within":
                b = b if h is None else b + self.hold(f[:, t]) * h
                h = b.view(len(b), -1)
            else:
                h = b if h is None else self.hold(f[:, t]) * h + b
            yield h


class StartedWithin(Started):
    how = "within"


class StartedAhead(Loop):
    """All it adds is known before the loop, and the first of it is the first state."""

    def forward(self, x):
        u = self.enter(x)
        f, v = self.f(u).sigmoid(), self.v(u).tanh()
        v = torch.stack([self.value(x) for x in v.unbind(1)], 1) if self.is_holding else v
        out = torch.empty_like(v)
        out[:, 0] = self.state(v[:, 0])
        for t in range(1, x.shape[1]):
            out[:, t] = self.state(self.hold(f[:, t]) * out[:, t - 1] + v[:, t])
        return self.leave(out)


class Alone(Griffin):
    """Its results have another axis, of one entry."""

    def gathered(self, states):
        out = torch.empty(len(states[0]), len(states), 1, WIDTH)
        for t, h in enumerate(states):
            out[:, t, 0] = h
        return out[:, :, 0]


class OfTime(nn.Module):
    """A loop of ``(L, B, E)``, as recurrent layers of PyTorch take their tokens."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def forward(self, x):
        loop, u = self.loop, self.loop.enter(x)
        return loop.leave(torch.stack([loop.state(h) for h in loop.steps(u.transpose(0, 1))]))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(OfTime(Started()) for _ in range(2)), Model().head

    def forward(self, x):
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x[-1])


STARTED = (Started, StartedWithin, StartedAhead, Alone)
FORMS = (Griffin, MinGRU, Sliced, InPlace, SLSTM, GatesReadTheState, MLSTM, Mamba, Titans)


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x[:, -1])


def tokens(length=7):
    return torch.randn(2, length, WIDTH)


def hidden(module, x):
    """The maps of a module, one per channel."""
    (maps,) = hidden_attention(Model(module).eval(), x).values()
    return maps.repeat_interleave(WIDTH // maps.shape[1], 1)


@pytest.mark.parametrize("kind", [*FORMS, *STARTED, Written, Grown, TokensFirst])
def test_a_loops_maps_are_those_of_impulses_with_held_coefficients(kind):
    module, x = kind().eval(), tokens()
    torch.testing.assert_close(hidden(module, x), module.maps(x), rtol=1e-5, atol=1e-5)


def test_what_an_allocation_held_says_nothing():
    module, x = StartedAhead().eval(), tokens()
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    try:
        maps = hidden(module, x)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(maps, module.maps(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_loop_of_tokens_that_come_before_the_batch(batch):
    model, x = TimeFirst().eval(), torch.randn(batch, 7, WIDTH)
    first, _ = hidden_attention(model, x).values()
    loop = model.layers[0].loop
    loop.forward = lambda x: model.layers[0](x.transpose(0, 1))
    torch.testing.assert_close(first, loop.maps(x), rtol=1e-5, atol=1e-5)


def test_a_loop_from_the_last_token_to_the_first():
    module, x = Backward().eval(), tokens()
    torch.testing.assert_close(hidden(module, x), module.maps(x).flip(2, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_a_loop_over_more_or_fewer_tokens_than_at_first(length):
    module, x = MLSTM().eval(), tokens(length)
    model = Model(module).eval()
    MambaRollout(model).attribute(tokens(), target=1)
    (maps,) = hidden_attention(model, x).values()
    expected = module.maps(x)[:, :1]
    torch.testing.assert_close(maps, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Griffin, GatesReadTheState, Titans])
def test_relevance_adds_up(kind):
    model = Model(kind()).eval().double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = tokens(4).double()
    for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
        relevance, delta = method(model).attribute(
            x, target=3, return_convergence_delta=True, **options
        )
        assert float(delta.abs().max()) < 1e-8
        assert float(relevance.abs().max()) > 1e-3


def test_a_loop_in_half_precision():
    model, x = Model(SLSTM()).eval().bfloat16(), tokens().bfloat16()
    relevance = MambaLRP(model).attribute(x, target=1)
    exact = MambaLRP(model.float()).attribute(x.float(), target=1)
    assert float((relevance - exact).norm()) < 0.1 * float(exact.norm())


class TwoWays(Loop):
    """Two loops in one module, one of them backward."""

    def forward(self, x):
        u = self.enter(x)
        return self.leave(self.run(u) + self.run(u.flip(1)).flip(1))

    def run(self, u):
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            z = self.f(u[:, t]).sigmoid()
            h = torch.lerp(h, self.v(u[:, t]), z)
            out.append(h)
        return torch.stack(out, 1)


def test_two_loops_in_one_module():
    module, x = TwoWays().eval(), tokens()
    (maps,) = hidden_attention(Model(module).eval(), x).values()
    with torch.no_grad():
        written = module.f(module.enter(x)).sigmoid().transpose(1, 2)
    decays = (1 - written).cumprod(-1)
    forward = written[..., None, :] * decays[..., :, None] / decays[..., None, :]
    torch.testing.assert_close(maps.tril(-1), forward.tril(-1), rtol=1e-4, atol=1e-5)
    assert bool((maps != 0).all())


class Skipped(Loop):
    """What a step returns is not its state alone."""

    def forward(self, x):
        u, c, out = self.enter(x), torch.zeros_like(x[:, 0]), []
        for t in range(u.shape[1]):
            f = self.f(u[:, t]).sigmoid()
            c = f * c + (1 - f) * self.v(u[:, t])
            out.append(self.o(u[:, t]).sigmoid() * torch.tanh(c))
        return self.leave(torch.stack(out, 1))


def test_a_step_that_returns_a_function_of_its_state():
    module, x = Skipped().eval(), tokens()
    (maps,) = hidden_attention(Model(module).eval(), x).values()
    with torch.no_grad():
        decays = module.f(module.enter(x)).sigmoid().cumprod(1).transpose(1, 2)
    expected = (decays[..., :, None] / decays[..., None, :]).tril()
    torch.testing.assert_close(maps, expected, rtol=1e-4, atol=1e-5)


class Rotating(Loop):
    """LRU: complex states, a decay that each step computes, and a projection in each step."""

    def forward(self, x):
        u, out = self.enter(x), []
        self.states = []
        h = torch.zeros(len(x), WIDTH, dtype=torch.complex64)
        for t in range(u.shape[1]):
            size = self.f(u[:, t]).sigmoid()
            decay = torch.polar(size, self.rate.expand_as(size))
            h = decay * h + torch.complex(self.v(u[:, t]), self.k(u[:, t]))
            self.states.append(h.detach())
            out.append(self.o(h.real) - self.q(h.imag))
        return torch.stack(out, 1)


def test_complex_states():
    module, x = Rotating().eval(), tokens()
    (cut,) = run_cut(recorded(module, x)).scans
    states = torch.stack(module.states, 1)
    y = cut.scan.operator.matvec(cut.scan.values).detach().unflatten(-1, (2, 2, -1)).sum(2)
    y = y if y.shape[2] == 2 else y.transpose(2, 3)
    torch.testing.assert_close(torch.complex(*y.unbind(2)), states, rtol=1e-4, atol=1e-5)
    assert hidden_attention(Model(module).eval(), x)["layers.0"].shape == (2, 24, 7, 7)


class Linear(nn.Module):
    """LRU as it is published: example by example, each token's output is written to its place."""

    def __init__(self):
        super().__init__()
        self.rate, self.angle = (nn.Parameter(torch.rand(4) + n) for n in (0, 1))
        self.B, self.C = (
            nn.Parameter(torch.randn(*shape, dtype=torch.cfloat)) for shape in ((4, 6), (6, 4))
        )
        self.D = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y, decay = torch.empty_like(x), torch.polar(torch.exp(-self.rate), self.angle)
        for i, example in enumerate(x):
            out, state = torch.empty_like(example), torch.zeros_like(decay)
            for j, token in enumerate(example):
                state = decay * state + self.B @ token.to(state.dtype)
                out[j] = (self.C @ state).real + self.D * token
            y[i] = out
        return y


class Batched(Linear):
    def forward(self, x):
        y, decay = torch.empty_like(x), torch.polar(torch.exp(-self.rate), self.angle)
        state = torch.zeros(len(x), 4, dtype=decay.dtype)
        for j in range(x.shape[1]):
            state = decay * state + x[:, j].to(state.dtype) @ self.B.T
            y[:, j] = (state @ self.C.T).real + self.D * x[:, j]
        return y


@pytest.mark.parametrize("kind", [Linear, Batched])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_loop_that_projects_its_states_and_adds_its_tokens(kind, batch):
    model, x = Model(kind()).eval(), torch.randn(batch, 5, WIDTH)
    model.head.bias.data.zero_()
    assert set(supported(model, x, target=1).methods.values()) == {None}
    found = LaTIM(model).contributions(x, "layers.0", range(5))
    module, alone = model.layers[0], torch.eye(5)[:, None, :, None] * x  # it is linear
    with torch.no_grad():
        expected = torch.stack([module(one) for one in alone], 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    score = model(x)[:, 1].detach()
    for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
        relevance = method(model).attribute(x, target=1, **options)
        torch.testing.assert_close(relevance.sum((1, 2)), score, rtol=1e-4, atol=1e-5)


class GRU(Loop):
    def steps(self, u):
        h = torch.zeros_like(u[:, 0])
        for x in u.unbind(1):
            z = (self.f(x) + self.r(h)).sigmoid()
            h = (1 - z) * h + z * torch.tanh(self.v(x) + self.k(h))
            yield h


class Mixing(Loop):
    def steps(self, u):
        h = torch.zeros_like(u[:, 0])
        for x in u.unbind(1):
            h = h @ self.r.weight + x
            yield h


class Normed(Loop):
    """TTT-Linear with the norm that its paper has in the inner model."""

    def steps(self, u):
        weight = u.new_zeros(len(u), WIDTH, WIDTH)
        for x in u.unbind(1):
            k = F.normalize(self.k(x), dim=-1)
            y = F.layer_norm((weight @ k[..., None])[..., 0], (WIDTH,), eps=1e-2)
            weight = weight - (y + k - self.v(x))[..., None] * k[:, None]
            yield x + F.layer_norm((weight @ self.q(x)[..., None])[..., 0], (WIDTH,))


def scripted(u: torch.Tensor):
    h, out = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = torch.sigmoid(u[:, t]) * h + u[:, t]
        out.append(h)
    return torch.stack(out, 1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(scripted)


class Scripted(Loop):
    def forward(self, x):
        return self.leave(scripted(self.enter(x)))


class Layer(Loop):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.leave(self.layer(self.enter(x))[0])


class Chunks(Loop):
    """Two tokens a step."""

    def forward(self, x):
        u, h, out = self.enter(x), torch.zeros_like(x[:, :1]), []
        for t in range(0, u.shape[1], 2):
            out.append(h + u[:, t : t + 2].cumsum(1))
            h = 0.5 * out[-1][:, -1:]
        return self.leave(torch.cat(out, 1))


class Convolved(Griffin):
    """As Spatial-Mamba: neighboring states are mixed after the loop."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def gathered(self, states):
        return self.conv(super().gathered(states).mT).mT


class Inverted(Loop):
    """A loop whose results are put together from the end."""

    def forward(self, x):
        u, h, out = self.enter(x), torch.zeros_like(x[:, 0]), None
        for t in range(u.shape[1]):
            h = 0.5 * h + u[:, t]
            out = h[:, None] if out is None else torch.cat([h[:, None], out], 1)
        return self.leave(out.flip(1))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Chunks, r"layers.0 \(Chunks\) lets tokens act .* steps are one token of all examples"),
        (Inverted, r"layers.0 \(Inverted\) lets tokens act .* in order or"),
        (GRU, r"layers.0 \(GRU\) .*a loop in .*gathered is not a scan: .*not linear \(.*tanh"),
        (
            Mixing,
            r"layers.0 \(Mixing\) .*a loop in .*is not a scan: its steps mix channels",
        ),
        (Convolved, r"layers.0 \(Convolved\) a part of what a loop in .* returns is convolved"),
        (Normed, r"layers.0 \(Normed\) .*a loop in .*gathered is not a scan: .*layer_norm"),
        (Highway, r"layers.0 \(Highway\) it adds something to its scans that depends on its"),
        (Scripted, r"layers.0 \(Scripted\) calls scripted, .*PYTORCH_JIT=0"),
        (Layer, r"layers.0.layer \(LSTM\) calls torch.lstm, .*not linear"),
    ],
)
def test_what_is_no_scan_is_refused_by_name(kind, why):
    with pytest.raises(UnsupportedModelError, match=why):
        MambaRollout(Model(kind()).eval()).attribute(tokens(), target=1)


def test_measured_mixers_are_not_told_among_other_layers():
    found = supported(Model(Griffin()).eval(), tokens())
    assert {mixer.kind for mixer in found.mixers} == {"Griffin"}
    assert "Griffin" not in found.outside
    assert found.outside["Linear"] == 1


def test_what_is_no_scan_is_named_beside_mixers():
    model, x = Model(Griffin(), Normed(), Griffin()).eval(), tokens()
    why = r"mixed by an operation .* layers.1 \(Normed\) a loop in .* is not a scan: .*layer_norm"
    with pytest.raises(UnsupportedModelError, match=why):
        MambaRollout(model).attribute(x, target=1)
    report = supported(model, x)
    assert report.methods["rollout"] == report.between
    assert str(report).count("layer_norm") == 1
    assert str(report).count("does not work with what is between the mixers") == 5
