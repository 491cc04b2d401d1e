"""Mixers whose scan is written out in a loop, or runs in a kernel that an adapter reproduces."""

import copy
import time

import pytest
import torch
from frozen import assert_shows_what_is_read, recorded
from models import randomize
from torch import nn
from torch.nn import functional as F
from wild import Kernel, Mixer, Stack, TwoBranches, tokens

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.capture.unknown_mixers import _reproduces
from captum_ssm.discovery.search import MeasuredAdapter, discover
from captum_ssm.mixers import find_adapter, find_mixers
from captum_ssm.mixers.families.s6 import freeze_s6
from captum_ssm.mixers.families.vision import FrozenScans, freeze_published, freeze_ss2d
from captum_ssm.mixers.registry import how_known
from captum_ssm.models import SS2D, BidirectionalMamba


class Block(nn.Module):
    """Mamba with its scan written out, one method per part, so that a look-alike changes one."""

    def __init__(self, width=6, inner=8, state=3, rank=2, kernel=4):
        super().__init__()
        self.rank, self.state = rank, state
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.randn(inner, state))
        self.D = nn.Parameter(torch.randn(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        u, z = self.split(self.in_proj(x))
        return self.out_proj(self.mixed(u) * self.gate(z))

    def split(self, xz):
        return xz.chunk(2, -1)

    def gate(self, z):
        return F.silu(z)

    def mixed(self, u):
        return self.scanned(self.convolved(u))

    def convolved(self, u):
        return F.silu(self.conv1d(u.mT)[..., : u.shape[1]].mT)

    def step(self, low):
        return F.softplus(self.dt_proj(low))

    def projected(self, v):
        low, B, C = self.x_proj(v).split([self.rank, self.state, self.state], -1)
        return self.step(low), B, C

    def scanned(self, v):
        dt, B, C = self.projected(v)
        A, h, out = -torch.exp(self.A_log), 0.0, []
        for t in range(v.shape[1]):
            h = (
                torch.exp(dt[:, t, :, None] * A) * h
                + (dt[:, t] * v[:, t])[..., None] * B[:, t, None]
            )
            out.append((h * C[:, t, None]).sum(-1))
        return torch.stack(out, 1) + self.skipped(v)

    def skipped(self, v):
        return self.D * v


class GateFirst(Block):
    def split(self, xz):
        return xz.chunk(2, -1)[::-1]


class BySigmoid(Block):
    def gate(self, z):
        return torch.sigmoid(z)


class ByItself(Block):
    def gate(self, z):
        return z


class Ungated(Block):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(6, 8)

    def split(self, x):
        return x, None

    def gate(self, z):
        return 1


class StepBiasTwice(Block):
    def step(self, low):
        return F.softplus(self.dt_proj(low) + self.dt_proj.bias)


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.dt_layernorm, self.b_layernorm = nn.RMSNorm(2), nn.RMSNorm(3)
        self.C_norm = nn.LayerNorm(3)

    def projected(self, v):
        low, B, C = self.x_proj(v).split([2, 3, 3], -1)
        return self.step(self.dt_layernorm(low)), self.b_layernorm(B), self.C_norm(C)


class Linear(Block):
    def convolved(self, u):
        return self.conv1d(u.mT)[..., : u.shape[1]].mT


class WithoutConvolution(Block):
    def __init__(self):
        super().__init__()
        del self.conv1d

    def convolved(self, u):
        return F.silu(u)


class WithoutSkip(Block):
    def __init__(self):
        super().__init__()
        del self.D

    def skipped(self, v):
        return 0


class InOneMethod(Block):
    """What enters the module is called as values of a scan often are, and D is the module's."""

    def __init__(self):
        super().__init__(inner=6)

    def forward(self, x):
        u, z = self.split(self.in_proj(x))
        u = self.convolved(u)
        dt, B, C = self.projected(u)
        h, out = 0.0, []
        for t in range(x.shape[1]):
            h = torch.exp(-dt[:, t, :, None] * self.A_log.exp()) * h
            h = h + (dt[:, t] * u[:, t])[..., None] * B[:, t, None]
            out.append((h * C[:, t, None]).sum(-1) + self.D * u[:, t])
        return self.out_proj(torch.stack(out, 1) * self.gate(z))


class LooksAhead(Block):
    def convolved(self, u):
        u = F.pad(u.mT, (1, 2))
        return F.silu(F.conv1d(u, self.conv1d.weight, self.conv1d.bias, groups=u.shape[1]).mT)


class BothWays(Block):
    def mixed(self, u):
        v = self.convolved(u)
        return self.scanned(v) + self.scanned(v.flip(1)).flip(1)


class MeanOfBothWays(LooksAhead):
    def mixed(self, u):
        v = self.convolved(u)
        return 0.5 * (self.scanned(v) + self.scanned(v.flip(1)).flip(1))


class Bidirectional(Block):
    """Vision Mamba's names; the scan of both is written out."""

    def __init__(self):
        super().__init__()
        back = Block()
        self.conv1d_b, self.x_proj_b, self.dt_proj_b = back.conv1d, back.x_proj, back.dt_proj
        self.A_b_log, self.D_b = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(8))

    def mixed(self, u):
        there, back = super().mixed(u), Block()
        for name in ("conv1d", "x_proj", "dt_proj", "D"):
            setattr(back, name, getattr(self, f"{name}_b"))
        back.A_log = self.A_b_log
        return there + back.mixed(u.flip(1)).flip(1)


class Written(Block):
    """The scan's outputs are written to a tensor, one after another."""

    def scanned(self, v):
        (dt, B, C), A = self.projected(v), -torch.exp(self.A_log)
        y, h = torch.zeros_like(v), torch.zeros(len(v), *A.shape, dtype=v.dtype)
        for t in range(v.shape[1]):
            h = torch.exp(dt[:, t, :, None] * A) * h + (dt * v)[:, t, :, None] * B[:, t, None]
            y[:, t] = (h * C[:, t, None]).sum(-1)
        return y + self.skipped(v)


class Joined(Block):
    """The scan's outputs are joined, and the code around it has other names for A."""

    def scanned(self, v):
        (dt, B, C), h, out = self.projected(v), 0.0, []
        for t in range(v.shape[1]):
            a = torch.exp(-dt[:, t, :, None] * self.A_log.exp())
            h = a * h + (dt * v)[:, t, :, None] * B[:, t, None]
            out.append((h @ C[:, t, :, None]).mT)
        return torch.cat(out, dim=1) + self.skipped(v)


class Fused(Block):
    def forward(self, x):
        return self.out_proj(Kernel.apply(self.in_proj(x), self.inner))

    def inner(self, xz):
        u, z = self.split(xz)
        return self.mixed(u) * self.gate(z)


class SSDBlock(nn.Module):
    """Mamba-2 with its scan written out."""

    def __init__(self, width=6, heads=4, per_head=2, state=3, groups=2, norm=True):
        super().__init__()
        D, channels = heads * per_head, heads * per_head + 2 * groups * state
        self.sizes, self.heads, self.groups = (D, channels, heads), heads, groups
        self.in_proj = nn.Linear(width, D + channels + heads)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)
        self.dt_bias = nn.Parameter(torch.randn(heads))
        self.A_log = nn.Parameter(torch.randn(heads))
        self.D = nn.Parameter(torch.randn(heads))
        self.norm = nn.RMSNorm(D, eps=1e-5) if norm else None
        self.out_proj = nn.Linear(D, width)

    def forward(self, x):
        z, mixed, step = self.in_proj(x).split(self.sizes, -1)
        y = self.scanned(F.silu(self.conv1d(mixed.mT)[..., : x.shape[1]].mT), step)
        return self.out_proj(self.normed(y, F.silu(z)))

    def normed(self, y, gate):
        return y * gate if self.norm is None else self.norm(y * gate)

    def scanned(self, v, step):
        D, channels, H = self.sizes
        v, B, C = v.split([D, (channels - D) // 2, (channels - D) // 2], -1)
        v = v.unflatten(-1, (H, -1))
        B, C = (
            t.unflatten(-1, (self.groups, -1)).repeat_interleave(H // self.groups, 2)
            for t in (B, C)
        )
        dt, h, out = F.softplus(step + self.dt_bias), 0.0, []
        for t in range(v.shape[1]):
            a = torch.exp(-dt[:, t] * self.A_log.exp())[..., None, None]
            h = a * h + dt[:, t, :, None, None] * v[:, t, ..., None] * B[:, t, :, None]
            out.append((h * C[:, t, :, None]).sum(-1))
        return (torch.stack(out, 1) + self.D[:, None] * v).flatten(2)


class Griffin(nn.Module):
    """Griffin's RG-LRU, whose loop has no name for a form but that of its decay."""

    def __init__(self, width=12):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 2 * width), nn.Linear(width, 6)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.forget, self.write = nn.Linear(width, width), nn.Linear(width, width)
        self.rate = nn.Parameter(torch.randn(width))

    def forward(self, x):
        y, z = self.enter(x).chunk(2, -1)
        y = self.conv(y.mT)[..., : x.shape[1]].mT
        a = (-8 * F.softplus(self.rate) * self.forget(y).sigmoid()).exp()
        read = (1 - a**2).sqrt() * self.write(y).sigmoid() * y
        h, states = torch.zeros_like(y[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + read[:, t]
            states.append(h)
        return self.leave(torch.stack(states, 1) * F.gelu(z))


class TrainedAtTest(nn.Module):
    """TTT-Linear: each token takes a step of gradient descent on a linear map of keys to values."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.leave = (nn.Linear(6, 6) for _ in range(4))
        self.rate = nn.Linear(6, 1)

    def forward(self, x):
        q, k, v = self.query(x), F.normalize(self.key(x), dim=-1), self.value(x)
        lr = self.rate(x).sigmoid()
        weight, out = x.new_zeros(len(x), 6, 6), []
        for t in range(x.shape[1]):
            error = (weight @ k[:, t, :, None])[..., 0] - v[:, t]
            weight = weight - lr[:, t, :, None] * error[:, :, None] * k[:, t, None]
            out.append((weight @ q[:, t, :, None])[..., 0])
        return self.leave(torch.stack(out, 1))


class NormBeforeGate(SSDBlock):
    def normed(self, y, gate):
        return self.norm(y) * gate


class FourWays(nn.Module):
    """VMamba's mixer, of another class than the registered one, on tokens of an image."""

    def __init__(self):
        super().__init__()
        inner = randomize(SS2D(6, (3, 4), state=3))
        self.held = [inner]  # not a submodule: its class is registered
        for name in ("in_proj", "conv2d", "out_norm", "out_proj"):
            setattr(self, name, getattr(inner, name))
        for name in ("x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds"):
            setattr(self, name, getattr(inner, name))
        self.gated, self.grid, self.act = inner.gated, inner.grid, inner.act

    def forward(self, x):
        return Kernel.apply(x.flatten(1, 2), self.held[0]).unflatten(1, x.shape[1:3])


def found(module, x):
    """The adapter that is found for a module, and its recorded call."""
    adapters = discover(module.eval(), lambda: module(x), _reproduces)
    assert list(adapters) == [module]
    return adapters[module], recorded(module.eval(), x)


LOOPS = (
    Block,
    GateFirst,
    BySigmoid,
    ByItself,
    Ungated,
    StepBiasTwice,
    Normed,
    Linear,
    WithoutConvolution,
    WithoutSkip,
    InOneMethod,
    LooksAhead,
    BothWays,
    MeanOfBothWays,
    Bidirectional,
    Written,
    Joined,
    SSDBlock,
    NormBeforeGate,
    Griffin,
    TrainedAtTest,
)


@pytest.mark.parametrize("kind", [*LOOPS, Fused])
def test_what_is_written_is_found(kind):
    adapter, call = found(kind(), tokens(2, 15))
    assert adapter is freeze_s6 if kind is Fused else isinstance(adapter, MeasuredAdapter)
    torch.testing.assert_close(adapter(call).output(), call.output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*LOOPS, Fused])
def test_a_map_of_a_loop_shows_every_token_that_is_read_and_no_other(kind):
    module, x = kind(), tokens(1, 9, 6)
    adapter, call = found(module, x)
    assert_shows_what_is_read(adapter(call).operator("unified").matrix("mean")[0], module, x)


def test_without_a_norm():
    adapter, call = found(SSDBlock(norm=False), tokens(2, 15))
    torch.testing.assert_close(adapter(call).output(), call.output, rtol=1e-4, atol=1e-5)


def test_four_directions_over_an_image():
    adapter, call = found(FourWays(), torch.randn(2, 3, 4, 6))
    mixer = adapter(call)
    assert isinstance(mixer, FrozenScans)
    torch.testing.assert_close(
        mixer.output().view_as(call.output), call.output, rtol=1e-4, atol=1e-5
    )


def test_a_convolution_that_looks_two_tokens_ahead_of_a_loop_is_part_of_the_hidden_map():
    adapter, call = found(LooksAhead(), tokens(1))
    maps = adapter(call).operator().matrix("mean")[0]
    assert torch.equal(maps != 0, torch.ones(7, 7).tril(2).bool())


class Residual(Block):
    def forward(self, x):
        return x + super().forward(x)


class ByTanh(Block):
    def gate(self, z):
        return torch.tanh(z)


class Reversed(Block):
    def forward(self, x):
        return super().forward(x.flip(1)).flip(1)


class ReversedBeyond(Block):
    def forward(self, x):
        return super().forward(torch.cat([x[:, :13], x[:, 13:].flip(1)], 1))


class Shifted(Block):
    def forward(self, x):
        return super().forward(F.pad(x, (0, 0, 1, 0))[:, :-1])


class LateB(Block):
    def projected(self, v):
        dt, B, C = super().projected(v)
        return dt, B.roll(1, 1), C


class SkipsItsInput(Block):
    def mixed(self, u):
        return super().mixed(u) - self.D * self.convolved(u) + self.D * u


class Noisy(Block):
    def forward(self, x):
        y = super().forward(x)
        size = y.abs().flatten(1).amax(1).view(-1, 1, 1)  # of each example
        return y + 1e-3 * size * torch.sin(37 * y)


class Attends(Block):
    def forward(self, x):
        return super().forward(x + F.scaled_dot_product_attention(x, x, x))


class AttendsInside(Block):
    def mixed(self, u):
        return super().mixed(u) + 0.01 * torch.softmax(u @ u.mT, -1) @ u


class StepOffset(Block):
    def step(self, low):
        return super().step(low) + 1e-2


class StepBiasThrice(Block):
    def step(self, low):
        return F.softplus(self.dt_proj(low) + 2 * self.dt_proj.bias)


class LateSSD(SSDBlock):
    def scanned(self, v, step):
        return super().scanned(v, step.roll(1, 1))


# Other orders, gates and steps than the adapters know.
VARIANTS = (Residual, ByTanh, Reversed, AttendsInside, StepOffset, StepBiasThrice)
# What is not a scan between projections, for each token.
LOOK_ALIKES = (ReversedBeyond, Shifted, SkipsItsInput, Noisy, Attends)


class FusedAlike(Fused):
    def inner(self, xz):
        return 1.001 * super().inner(xz)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_variant_that_nobody_wrote_down_is_explained(kind):
    module, x = kind().eval(), tokens(1, 15, 6)
    maps = hidden_attention(Model(module).eval(), x, formulation="unified", reduction="mean")
    assert_shows_what_is_read(maps["layers.0"][0], module, x)


@pytest.mark.parametrize("kind", [*LOOK_ALIKES, FusedAlike])
def test_a_loop_that_is_no_scan_is_refused(kind):
    with pytest.raises(UnsupportedModelError):
        hidden_attention(Model(kind()).eval(), tokens(2, 15), formulation="unified")


@pytest.mark.parametrize("kind", [LateB, LateSSD])
def test_keys_of_other_tokens_are_coefficients_like_all(kind):
    adapter, call = found(kind(), tokens(2, 15))
    torch.testing.assert_close(adapter(call).output(), call.output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("twice", [False, True])
def test_a_step_whose_recurrence_adds_next_to_nothing_is_told_apart(twice):
    module = (StepBiasTwice if twice else Block)().double()
    with torch.no_grad():
        module.in_proj.weight.mul_(0.5)
        module.dt_proj.bias.sub_(4 if twice else 8)
    adapter, call = found(module, tokens(2, 15).double())
    mixer = adapter(call)
    wrong = mixer.output() - call.output
    adds = mixer.recurrence_share(mixer.gated_output()).amin()
    assert float(adds) < 1e-2
    assert float(wrong.norm() / call.output.norm()) < 1e-6 * float(adds)


class Model(nn.Module):
    def __init__(self, *mixers):
        super().__init__()
        self.layers = nn.ModuleList(mixers)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


METHODS = (MambaRollout, MambaAttribution, MambaLRP, LaTIM)


@pytest.mark.parametrize("kind", [Block, Written, Fused, Bidirectional, LooksAhead, SSDBlock])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_explains_a_recognized_mixer(kind, method):
    model, x = Model(kind(), kind()).eval(), tokens(1, 9, 6)
    assert not list(find_mixers(model))
    options = {} if method is MambaRollout else {"target": (3, 1)}
    relevance = method(model).attribute(x, **options)
    assert relevance.shape == x.shape
    assert float(relevance.abs().max()) > 0


def test_a_recognized_mixer_is_explained_like_a_registered_one():
    mixer = randomize(BidirectionalMamba(6, state=3)).eval()
    model, x = Model(mixer).eval(), tokens(1)
    theirs = [hidden_attention(model, x)["layers.0"]]
    theirs += [m(model).attribute(x, target=(3, 1)) for m in METHODS[1:]]

    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [mixer]  # not a submodule: its class is registered
            for name, value in (*mixer.named_children(), *mixer.named_parameters(recurse=False)):
                setattr(self, name, value)
            self.act, self.if_divide_out = mixer.act, mixer.if_divide_out

        def forward(self, x):
            return Kernel.apply(x, self.held[0])

    model.layers[0] = Unknown()
    ours = [hidden_attention(model, x)["layers.0"]]
    assert find_adapter(model.layers[0]) is freeze_published
    ours += [m(model).attribute(x, target=(3, 1)) for m in METHODS[1:]]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class InPlace(Model):
    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            x += layer(x)
        return self.head(self.norm(x))


def test_tokens_that_are_changed_in_place():
    model, x = InPlace(Block(), Block()).eval(), tokens(1, 9, 6)
    assert MambaRollout(model).attribute(x).shape == x.shape
    assert [how_known(m) for m in model.layers] == ["measured"] * 2


class InTuples(nn.Module):
    """Is given its tokens in a tuple, which none of the library's adapters expects."""

    def __init__(self):
        super().__init__()
        self.mixer, self.norm = Block(), nn.LayerNorm(6)

    def forward(self, given):
        return self.mixer(self.norm(given[0]))


class GivesTuples(Model):
    def forward(self, x):
        return self.head(self.norm(x + self.layers[0]((x, x))))


def test_tokens_in_tuples():
    model, x = GivesTuples(InTuples()).eval(), tokens(1, 9, 6)
    assert MambaRollout(model).attribute(x).shape == x.shape
    assert how_known(model.layers[0].mixer) == "measured"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    adapter, call = found(Block().to(dtype), tokens(2, 15).to(dtype))
    rebuilt, wide = adapter(call).output(), dtype is torch.float64
    assert float((rebuilt - call.output).norm() / rebuilt.norm()) < (1e-6 if wide else 4e-2)
    with pytest.raises(UnsupportedModelError):
        hidden_attention(
            Model(Noisy()).to(dtype).eval(), tokens(2, 15).to(dtype), formulation="unified"
        )


def test_the_layers_of_an_image():
    model, x = Model(FourWays(), FourWays()).eval(), torch.randn(1, 3, 4, 6)
    maps = hidden_attention(model, x.requires_grad_())
    assert [m.shape for m in maps.values()] == [(1, 12, 12, 12)] * 2
    assert [find_adapter(m) for m in model.layers] == [freeze_ss2d] * 2


@pytest.mark.parametrize("kind", [Block, ByTanh, Fused])
def test_finding_takes_at_most_a_second(kind):
    module, x = kind(768, 1536, 16, 48).eval(), tokens(1, 200, 768)
    start = time.process_time()
    assert discover(module, lambda: module(x), _reproduces)
    # Twice what is asked for: a busy machine is slower, too.
    assert time.process_time() - start < 2


def refusal(model, x):
    with pytest.raises(UnsupportedModelError) as error:
        MambaRollout(model.eval()).attribute(x)
    return str(error.value)


def test_the_error_names_what_is_missing():
    why = r"layers.1 \(Noisy\).* a loop in Block.scanned mixes channels or tokens"
    with pytest.raises(UnsupportedModelError, match=why):
        LaTIM(Model(Noisy(), Noisy()).eval()).attribute(tokens(2, 15), target=(3, 1))


class LearnsInside(nn.Module):
    """Steps against the gradient of a loss, one per token, which autograd takes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        weight, out = self.weight.expand(len(x), 6, 6).clone().detach(), []
        for t in range(x.shape[1]):
            with torch.enable_grad():
                weight = weight.detach().requires_grad_()
                loss = (x[:, t, None] @ weight - x[:, t, None]).square().sum()
                (gradient,) = torch.autograd.grad(loss, weight)
            weight = weight - 0.1 * gradient
            out.append((x[:, t, None] @ weight)[:, 0])
        return torch.stack(out, 1)


def test_the_error_says_that_a_module_takes_gradients_of_what_is_cut():
    model, x = Model(LearnsInside(), LearnsInside()).eval(), tokens(2, 9, 6)
    with torch.no_grad():
        model(x)
    with pytest.raises(UnsupportedModelError, match=r"LearnsInside\) raises where .* are cut"):
        MambaRollout(model).attribute(x)


class Unread(nn.Module):
    """A loop over tokens that is no scan."""

    def forward(self, x):
        out, A, dt, B, C = [], -torch.ones(6, 3), x, x[..., :3], x[..., 3:]
        for t in range(x.shape[1]):
            out.append((dt * x)[:, : t + 1].sum(1).sin())
        return torch.stack(out, 1) * (A.sum() * B * C).sum()


def test_the_error_names_a_loop_that_is_no_scan():
    said = refusal(Model(Unread()), tokens(2, 15))
    assert "layers.0 (Unread) calls a loop in Unread.forward, which does not return" in said
    assert "docs/add_a_family.md" in said


class CallsNoScan(nn.Module):
    def forward(self, x):
        return running(x, x, -torch.ones(6, 3), x[..., :3], x[..., 3:])


def running(x, dt, A, B, C):
    return x.cumsum(1).sin()


def test_the_error_names_a_function_that_is_no_scan():
    said = refusal(Model(CallsNoScan()), tokens(2, 15))
    assert "layers.0 (CallsNoScan) calls running, which does not return" in said


def test_a_projection_of_images_by_another_name_for_linear():
    # A subclass of nn.Linear that is a 1 x 1 convolution, as in public models with channels first.
    class Pointwise(nn.Linear):
        def forward(self, x):
            return F.conv2d(x, self.weight[..., None, None], self.bias)

    class ChannelsFirst(Block):
        def __init__(self):
            super().__init__()
            self.out_proj = Pointwise(8, 6, bias=False)

        def forward(self, x):
            u, z = self.split(self.in_proj(x.flatten(2).mT))
            y = self.mixed(u) * self.gate(z)
            return self.out_proj(y.mT.unflatten(2, x.shape[2:]))

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer, self.head = ChannelsFirst(), nn.Linear(6, 5)

        def forward(self, x):
            return self.head((x + self.mixer(x)).mean((2, 3)))

    model, x = randomize(Images()).eval(), torch.randn(1, 6, 3, 4)
    maps = hidden_attention(model, x, formulation="unified", reduction="mean")["mixer"][0]
    x = x.requires_grad_()
    for i, y in enumerate(model.mixer(x).flatten(2).sum(1)[0]):
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(maps[i] != 0, (g[0] != 0).any(0).flatten())
    for method in METHODS[:3]:
        options = {} if method is MambaRollout else {"target": 1}
        assert method(model).attribute(x, **options).shape == x.shape
    with pytest.raises(UnsupportedModelError, match="does not add to a residual stream"):
        LaTIM(model).attribute(x, target=1)


class OfBlocks(TwoBranches):
    """Attention next to the scan, for texts of whole blocks alone."""

    def mixed(self, u):
        return super().mixed(u) if u.shape[1] >= 4 else Mixer.mixed(self, u)


class AttendsToBlocks(nn.Module):
    """Softmax attention, for texts of whole blocks alone."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if x.shape[1] >= 4:
            v = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(v.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kinds", [(OfBlocks, OfBlocks), (Mixer, AttendsToBlocks)])
@pytest.mark.parametrize("method", [LaTIM, MambaRollout, MambaLRP])
def test_what_a_short_text_does_not_show_is_looked_for_in_a_longer_one(kinds, method):
    torch.manual_seed(0)
    model, text = Stack(*(kind() for kind in kinds)).eval(), tokens(1, 9)
    expected = method(copy.deepcopy(model)).attribute(text, position=8, target=(8, 1))
    for length in (2, 9):
        last = length - 1
        found = method(model).attribute(text[:, :length], position=last, target=(last, 1))
    torch.testing.assert_close(found, expected)


def test_a_mixer_that_is_not_called_itself_is_told_so():
    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.mixer, self.head = nn.Embedding(9, 6), Mixer(), nn.Linear(6, 9)

        def forward(self, ids):
            return self.head(self.mixer.forward(self.table(ids)))

    with pytest.raises(UnsupportedModelError, match=r"calls scan, a scan, and .* itself"):
        hidden_attention(Bypassed().eval(), torch.arange(9)[None])
