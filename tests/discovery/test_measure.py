"""Mixers without an adapter: found by a run, measured, and explained."""

import copy
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import wild
from families import TRANSFORMERS_4
from frozen import assert_shows_what_is_read, measured, recorded
from group_normed import ChannelsInBatch, gated_sum
from models import randomize, without_biases
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from wild import KINDS, tokens

import captum_ssm.interventions
import captum_ssm.models.vision_mamba
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.discovery.scans import FunctionCall, KeptScans
from captum_ssm.discovery.search import MeasuredAdapter, discover
from captum_ssm.mixers import find_adapter, find_mixers
from captum_ssm.mixers.families.vision import FrozenScans
from captum_ssm.mixers.registry import how_known
from captum_ssm.models import SS2D, BidirectionalMamba
from captum_ssm.models.ss2d import scan_orders


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_mixer_returns_what_its_module_returns(kind):
    mixer = measured(kind(), tokens())
    assert mixer.operator("unified").matrix("mean").shape == (2, 7, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_shows_every_token_that_the_output_reads_and_no_other(kind):
    module, x = kind().eval(), tokens(1)
    maps = freeze_measured(recorded(module, x)).operator("unified").matrix("mean")[0]
    assert_shows_what_is_read(maps, module, x)


def with_slow_convolution(monkeypatch):
    def causal_conv(x, taps):
        padded = F.pad(x.mT, (taps.shape[1] - 1, 0))
        return F.conv1d(padded, taps[:, None], groups=len(taps)).mT

    monkeypatch.setattr(captum_ssm.models.vision_mamba, "causal_conv", causal_conv)


MAMBA = dict(hidden_size=16, state_size=4, num_hidden_layers=1)
KNOWN = {
    "mamba": lambda: MambaMixer(MambaConfig(**MAMBA), 0),
    "mamba2": lambda: Mamba2Mixer(Mamba2Config(**MAMBA, num_heads=4, head_dim=8, n_groups=2), 0),
    "vim": lambda: BidirectionalMamba(16, state=4),
    "vim v1": lambda: BidirectionalMamba(16, state=4, bimamba_type="v1"),
    "ss2d": lambda: SS2D(16, (3, 4), state=4),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_measured_is_what_an_adapter_reads(name, monkeypatch):
    if TRANSFORMERS_4 and name in ("mamba", "mamba2"):
        pytest.skip("Mamba's forward of transformers 4 is one function, whose loop is not measured")
    with_slow_convolution(monkeypatch)
    call = recorded(randomize(KNOWN[name]()).eval(), tokens(2, 12, 16))
    ours, theirs = freeze_measured(call), find_adapter(call.module)(call)
    torch.testing.assert_close(ours.output(), theirs.output(), rtol=1e-4, atol=1e-5)
    every = ("conv", "activation", "gate", "norm", "skip")
    for options in (("hidden",), ("unified",), ("unified", every)):
        a, b = (mixer.operator(*options).matrix("mean") for mixer in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_four_directions_stacked_in_channels_come_apart():
    mixer = freeze_measured(recorded(wild.FourWays().eval(), torch.randn(2, 3, 4, 6)))
    assert isinstance(mixer, FrozenScans)
    for found, expected in zip(mixer.orders, scan_orders((3, 4)), strict=True):
        assert torch.equal(found, expected)
    conv = mixer.scans[0].image_conv
    assert all(scan.image_conv is conv for scan in mixer.scans)
    assert conv.taps.shape == (8, 3, 3)
    assert conv.grid == (3, 4)


@pytest.mark.parametrize("size", [(1, 2), (3, 1), (2, 3)])
def test_maps_are_those_of_impulses_where_directions_are_one_too(size):
    module, x = wild.FourWays().eval(), torch.randn(2, *size, 6)
    mixer = freeze_measured(recorded(module, x))
    torch.testing.assert_close(mixer.output().view_as(x), module(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        u = module.in_proj(x).chunk(2, -1)[0].permute(0, 3, 1, 2)
        ways = module.ways(F.silu(module.conv(u)))
        coefficients = torch.einsum("bkdl,kcd->bkcl", ways, module.projections)
        step, Bs, Cs = coefficients.split([8, 3, 3], 2)
        held = F.softplus(step).flatten(1, 2), -module.rates.exp(), Bs, Cs, 0 * module.D
        module.scans = lambda v: wild.last_scan(v.flatten(1, 2), *held).view(v.shape)
        tokens = torch.eye(size[0] * size[1]).view(-1, 1, 1, *size).expand(-1, 2, 8, *size)
        columns = [module.scanned(impulse) for impulse in tokens]
    maps = torch.stack(columns, -1)
    torch.testing.assert_close(mixer.operator().matrix(), maps, rtol=1e-4, atol=1e-5)


def test_directions_stacked_in_the_batch_come_apart():
    mixer = freeze_measured(recorded(wild.InBatch().eval(), tokens()))
    assert [order.tolist() for order in mixer.orders] == [[*range(7)], [*range(6, -1, -1)]]


def test_early_rows_of_two_scans_in_the_order_of_the_tokens():
    model, x = without_biases(wild.Stack(wild.TwoBranches(), wild.TwoBranches())), tokens(1)
    relevance = LaTIM(model).attribute(x, 2, position=3, activation="gate")
    torch.testing.assert_close(relevance.sum(), model(x)[0, 3, 2], rtol=1e-4, atol=1e-6)
    assert not relevance[:, 4:].any()


def test_a_convolution_that_looks_ahead_is_part_of_the_hidden_map():
    module = wild.LooksAhead().eval()
    maps = freeze_measured(recorded(module, tokens(1))).operator().matrix("mean")[0]
    read = torch.ones(7, 7).tril(1).bool()
    assert torch.equal(maps != 0, read)


class Residual(wild.Mixer):
    def forward(self, x):
        return x + super().forward(x)


class Attends(wild.Mixer):
    def mixed(self, u):
        return super().mixed(torch.softmax(u @ u.mT, -1) @ u)


class AttendsAfter(wild.Mixer):
    def mixed(self, u):
        return torch.softmax(u @ u.mT, -1) @ super().mixed(u)


class Branch(wild.Mixer):
    def mixed(self, u):
        return super().mixed(u) + torch.tanh(u)


class Again(wild.Mixer):
    def scanned(self, v):
        y = super().scanned(v)
        return y + super().scanned(y)


class Chain(wild.Mixer):
    def scanned(self, v):
        return super().scanned(super().scanned(v))


@pytest.mark.parametrize(
    "kind",
    [Residual, Attends, AttendsAfter, Branch, Again, Chain],
)
def test_a_mixer_with_more_than_a_scan_cannot_be_measured(kind):
    with pytest.raises(UnsupportedModelError, match="cannot be measured"):
        freeze_measured(recorded(kind().eval(), tokens()))


def test_a_scan_of_what_another_one_returned_has_no_map():
    model = wild.Stack(Again()).eval()
    with pytest.raises(UnsupportedModelError, match="given what another one returned"):
        hidden_attention(model, tokens(1))


class Grouped(wild.Mixer):
    """A group norm mixes channels in a way that is not measured."""

    def __init__(self):
        super().__init__()
        self.groups = nn.Linear(8, 8)

    def mixed(self, u):
        return self.groups(super().mixed(u))


def test_where_only_the_scan_can_be_measured_the_others_say_what_is_missing():
    model = wild.Stack(Grouped()).eval()
    x = tokens(1)
    (maps,) = hidden_attention(model, x).values()
    assert maps.shape == (1, 8, 7, 7)
    assert MambaRollout(model).attribute(x).shape == x.shape
    assert MambaLRP(model).attribute(x, target=(3, 1)).shape == x.shape
    with pytest.raises(UnsupportedModelError, match="mixes channels"):
        hidden_attention(model, x, formulation="unified")
    with pytest.raises(UnsupportedModelError, match="mixes channels"):
        LaTIM(model).interactions(x, 0)


def log_scan(log_values: Tensor, log_coeffs: Tensor) -> Tensor:
    return gated_sum(log_values.exp(), log_coeffs.exp())


class Flattens(wild.Mixer):
    """The output projection is given the tokens of all examples."""

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        y = self.mixed(u) * F.silu(z)
        return self.out_proj(y.flatten(0, 1)).view(*x.shape)


class NotWhole(wild.Mixer):
    """Is given its tokens twice, as attention is, and asserts their shape."""

    def forward(self, x: Tensor, again: Tensor | None = None) -> Tensor:
        again = x if again is None else again
        assert x.shape[-1] == again.shape[-1] == self.in_proj.in_features
        return super().forward(x) + again.cumsum(1)


class Twice(wild.Stack):
    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = norm(x)
            x = x + layer(h, h)
        return self.head(x)


def test_an_output_projection_may_be_given_all_examples_tokens():
    mixer = measured(Flattens(), tokens(3, 7, 6))
    assert mixer.out_weight.shape == (6, 8)


def test_what_a_module_asserts_of_its_axes_is_no_error_of_a_trial():
    model = Twice(NotWhole(), NotWhole()).eval()
    with pytest.raises(UnsupportedModelError, match="NotWhole"):
        RawAttention(model).attribute(tokens(1))


class LogSpace(ChannelsInBatch):
    def scanned(self, v: Tensor, a: Tensor) -> Tensor:
        return log_scan(v, a.log())


def test_channels_in_the_batch_of_a_scan():
    module, x = ChannelsInBatch(), tokens(2, 7, 6)
    mixer = freeze_measured(recorded(module, x))
    torch.testing.assert_close(mixer.output(), module(x))
    decay = module.into(x).chunk(3, -1)[2].sigmoid()
    matrix = mixer.operator("hidden").matrix()
    torch.testing.assert_close(matrix[..., 5, 3], decay[:, 4] * decay[:, 5])


def test_logarithms_of_values_have_maps_and_no_relevance():
    model, x = nn.Sequential(LogSpace(), LogSpace()), tokens(1)
    row = MambaRollout(model).attribute(x, position=4).abs()
    assert bool((row[:, :5] > 0).any(-1).all())
    assert not bool((row[:, 5:] > 0).any())
    with pytest.raises(UnsupportedModelError, match="logarithms of its values"):
        MambaLRP(model).attribute(x, target=(4, 0))


class ScanModule(nn.Module):
    def forward(self, x, delta, A, B, C, D):
        return wild.scan(x, delta, A, B, C, D)


class Parted(wild.Mixer):
    """The scan is a module of its own, the convolution is not."""

    def __init__(self):
        super().__init__()
        self.core = ScanModule()

    def scanned(self, v):
        step, B, C = self.x_proj(v).split([8, 3, 3], -1)
        return self.core(v, F.softplus(step), -self.rates.exp(), B, C, self.D)


def found_in(model, x):
    names = {module: path for path, module in model.named_modules()}
    return sorted(names[module] for module in discover(model, lambda: model(x)))


def test_the_smallest_module_with_the_convolution_is_the_mixer():
    assert found_in(wild.Stack(Parted(), wild.Backward()).eval(), tokens()) == [
        "layers.0",
        "layers.1",
    ]


def test_registered_classes_win_and_are_not_looked_into():
    mamba = KNOWN["mamba"]()
    model = wild.Stack(mamba, width=16).eval()
    assert found_in(model, tokens(1, 5, 16)) == []
    assert not isinstance(find_adapter(mamba), MeasuredAdapter)


def test_methods_find_unknown_mixers_by_themselves():
    model, x = wild.Stack(*(kind() for kind in KINDS)).eval(), tokens(1)
    assert not list(find_mixers(model))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert len(hidden_attention(model, x)) == len(KINDS)
    assert [type(find_adapter(m)) for _, m in find_mixers(model)] == [MeasuredAdapter] * len(KINDS)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert MambaRollout(model).attribute(x, position=3).shape == x.shape
    for layer in range(len(KINDS)):
        assert LaTIM(model).interactions(x, layer).shape == (1, 7, 7)


class Strided(wild.Stack):
    """Its stem is a convolution that is given its stride as a plain number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.conv1d(x.mT, torch.ones(6, 1, 2), stride=2, groups=6).mT)


def test_a_functional_convolution_with_a_plain_number():
    maps = hidden_attention(Strided(wild.Mixer()).eval(), tokens(2, 14, 6))
    assert maps["layers.0"].shape[-2:] == (7, 7)


def named(module: str, name: str) -> Callable[[type], type]:
    def rename(kind: type) -> type:
        kind.__module__, kind.__qualname__ = module, name
        return kind

    return rename


named_like_a_registered_class = named("fork.mamba_ssm.modules.mamba_simple", "Mamba")


@named_like_a_registered_class
class Fork(wild.Backward):
    """A class of another package, with a name that is registered."""


@named("mamba_ssm.modules.mamba_simple", "Mamba")
class Copy(wild.Backward):
    """A class in a copy of a package, under its very name."""

    use_fast_path = False


@named("mamba_ssm.modules.mamba2", "Mamba2")
class Half(wild.HalfScanned):
    """It has nothing of what the adapter of its name reads."""


class Derived(MambaMixer):
    """A subclass of a registered class that does something else."""

    def __init__(self) -> None:
        super().__init__(MambaConfig(hidden_size=6, state_size=3), 0)
        self.own = wild.BothWays()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


@pytest.mark.parametrize("kind", [Fork, Copy, Half, Derived])
def test_what_only_has_a_registered_name_is_measured(kind):
    model, x = wild.Stack(kind(), kind()).eval(), tokens(2, 7, 6)
    assert find_adapter(model.layers[0]) is not None
    before = model(x)
    with pytest.raises(RuntimeError):  # a first run that fails tells nothing of the model
        hidden_attention(model, tokens(2, 7, 5))
    maps = hidden_attention(model, x)
    if issubclass(kind, wild.Backward):  # it reads later tokens
        assert not any(bool(one.tril(-1).any()) for one in maps.values())
    assert {how_known(module) for _, module in find_mixers(model)} == {"measured"}
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("is_training", [False, True])
def test_what_only_has_a_registered_name_is_measured_in_a_knockout(is_training):
    model, x = wild.Stack(Copy(), Copy()).train(is_training), tokens(2, 7, 6)
    renamed = wild.Stack(wild.Backward(), wild.Backward())
    renamed.load_state_dict(model.state_dict())
    captum_ssm.supported(renamed, x)
    found = []
    for one in (model, renamed):
        with torch.no_grad(), captum_ssm.interventions.knockout(one, sources=5, targets=2):
            found.append(one(x))
    assert torch.equal(*found)
    with torch.no_grad():
        assert not torch.equal(found[0], model(x))


def test_what_cannot_be_measured_either_is_refused_in_words():
    model = wild.Stack(named_like_a_registered_class(type("Other", (nn.Linear,), {}))(6, 6)).eval()
    with pytest.raises(UnsupportedModelError, match=r"layers\.0 is a .* cannot be measured"):
        hidden_attention(model, tokens(2, 7, 6))


def test_relevance_is_that_of_the_adapter(monkeypatch):
    with_slow_convolution(monkeypatch)
    mixer = randomize(BidirectionalMamba(6, state=3))
    model, x = wild.Stack(mixer).eval(), tokens(1)
    theirs = MambaLRP(model).attribute(x, target=(3, 1))

    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [mixer]  # not a submodule: its class is registered

        def forward(self, x):
            return self.held[0](x)

    model.layers[0] = Unknown()
    ours = MambaLRP(model).attribute(x, target=(3, 1))
    assert isinstance(find_adapter(model.layers[0]), MeasuredAdapter)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_scan_that_is_none_any_more_is_found_out():
    class Changing(wild.Mixer):
        late = False

        def scanned(self, v):
            step, B, C = self.x_proj(v).split([8, 3, 3], -1)
            return changing(v, F.softplus(step), -self.rates.exp(), B, C, self.D, self.late)

    model, x = wild.Stack(Changing()).eval(), tokens(1)
    MambaLRP(model).attribute(x, target=(3, 1))
    model.layers[0].late = True
    code = changing.__code__
    with pytest.raises(ReconstructionError, match="changing"):
        MambaLRP(model).attribute(x, target=(3, 1))
    assert changing.__code__ is code
    # The scan inside of it is found, as in a model that was never explained before.
    fresh = copy.deepcopy(model)
    (found,), (expected,) = (hidden_attention(m, x).values() for m in (model, fresh))
    assert bool((expected.abs().amax() > 0).all())
    torch.testing.assert_close(found, expected)


def changing(x, delta, A, B, C, D, late):
    return wild.scan(x, delta, A, B.roll(1, 1) if late else B, C, D)


def test_half_precision():
    call = recorded(wild.Mixer().eval().bfloat16(), tokens().bfloat16())
    mixer = freeze_measured(call)
    error = mixer.output() - call.output.float()
    assert float(error.norm() / call.output.float().norm()) < 4e-2


def test_two_threads_explain_two_models():
    models = [wild.Stack(wild.Mixer(), wild.Backward()).eval() for _ in range(2)]
    x, found = tokens(1), [None, None]

    def explain(i):
        found[i] = MambaLRP(models[i]).attribute(x, target=(3, 1))

    threads = [threading.Thread(target=explain, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, relevance in zip(models, found, strict=True):
        torch.testing.assert_close(relevance, MambaLRP(model).attribute(x, target=(3, 1)))


def attention(q, k, v, causal=True, cu_seqlens=None):
    """Over each of the packed sequences, as a kernel that takes half precision or float64 only."""
    assert q.dtype != torch.float32
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [tuple(t[:, a:b].transpose(1, 2) for t in (q, k, v)) for a, b in pairwise(ends)]
    found = []
    for query, key, value in parts:
        scores = query @ key.mT * q.shape[-1] ** -0.5
        later = torch.ones_like(scores).triu(1) > 0
        found.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ value).transpose(1, 2))
    return torch.cat(found, 1)


class Unpadding(nn.Module):
    """Attention that removes padding and packs what is left into one row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(6, 24), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, attention_mask=None):
        real = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        at = real.flatten().nonzero()[:, 0]
        ends = F.pad(real.sum(1).cumsum(0), (1, 0)).long()
        packed = x.flatten(0, 1)[at][None]
        q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(packed).chunk(3, -1))
        y = attention(q, k, v, cu_seqlens=ends).flatten(2) * torch.sigmoid(self.gate(packed))
        flat = torch.zeros(real.numel(), 6, dtype=x.dtype)
        return flat.index_copy(0, at, self.out(y)[0]).view_as(x)


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_padded_batch_that_a_module_packs(side):
    torch.manual_seed(0)
    module, x = Unpadding().double().eval(), torch.randn(3, 7, 6).double()
    mask = torch.ones(3, 7)
    if side is not None:
        mask[1, slice(0, 4) if side == "left" else slice(3, 7)] = 0
    call = recorded(module, x, mask)
    mixer = freeze_measured(call, {attention})
    torch.testing.assert_close(mixer.output() * mask[..., None], call.output)
    maps = mixer.operator("hidden").matrix()
    assert not maps[:, :, mask[1] == 0][1].any()
    assert not maps[1][..., mask[1] == 0].any()
    assert (maps.sum(-1) - mask[:, None]).abs().max() <= 1e-12


def test_a_kernel_that_takes_half_precision_only():
    torch.manual_seed(0)
    module, x = Unpadding().bfloat16().eval(), torch.randn(1, 7, 6).bfloat16()
    call = recorded(module, x)
    mixer = freeze_measured(call, {attention})
    error = (mixer.output() - call.output.float()).abs().max()
    assert float(error) <= 2e-2 * float(call.output.abs().max())


class ByName(wild.Mixer):
    """Gives the scan its arguments by the names that it says it has."""

    def scanned(self, v):
        step, B, C = self.x_proj(v).split([8, 3, 3], -1)
        given = (v, F.softplus(step), -self.rates.exp(), B, C, self.D)
        return wild.scan(**dict(zip(inspect.signature(wild.scan).parameters, given, strict=True)))


def test_a_scan_function_says_which_arguments_it_takes_while_it_is_watched():
    model, x = wild.Stack(ByName()).eval(), tokens(1)
    assert len(hidden_attention(model, x)) == 1
    assert MambaRollout(model).attribute(x).shape == x.shape
    assert "__signature__" not in vars(wild.scan)


def counted_scan(x, delta, A, B, C, D):
    RAN.append(x)
    return wild.scan(x, delta, A, B, C, D)


RAN: list[Tensor] = []


class Counted(wild.Mixer):
    changes = False

    def scanned(self, v):
        step, B, C = self.x_proj(v).split([8, 3, 3], -1)
        y = counted_scan(v, F.softplus(step), -self.rates.exp(), B, C, self.D)
        return y.mul_(2) if self.changes else y


@pytest.mark.parametrize("method", [MambaRollout, MambaAttribution])
def test_a_scan_that_was_run_is_not_run_again(method, monkeypatch):
    model, x = wild.Stack(Counted(), Counted()).eval(), tokens(1)
    expected = method(model).attribute(x, target=(3, 1))  # the first call also looks for mixers
    RAN.clear()
    torch.testing.assert_close(method(model).attribute(x, target=(3, 1)), expected)
    assert len(RAN) == 2
    RAN.clear()
    monkeypatch.setattr("captum_ssm.capture.reuse.KEPT", 0)
    torch.testing.assert_close(method(model).attribute(x, target=(3, 1)), expected)
    assert len(RAN) == 4


def test_what_a_mixer_changes_in_place_is_run_again(monkeypatch):
    model, x = wild.Stack(Counted()).eval(), tokens(1)
    plain = MambaRollout(model).attribute(x, target=(3, 1))
    monkeypatch.setattr(Counted, "changes", True)
    RAN.clear()
    found = MambaRollout(model).attribute(x, target=(3, 1))
    assert len(RAN) == 2
    torch.testing.assert_close(found, plain)  # a map of a rollout has no scale


def test_kept_scans_are_those_of_equal_arguments():
    kept, given = KeptScans(1 << 20), torch.ones(2, 3)

    def twice(x, delta, A, B, C, n=2):
        return n * x

    call = FunctionCall(twice, (given, 1.0, None, "b", given), {"n": 2}, twice)
    result = kept._run(call)
    assert torch.equal(kept.find(call), result)
    same = replace(call, args=(given.clone(), 1.0, None, "b", given.clone()))
    assert torch.equal(kept.find(same), result)
    others = [
        replace(call, args=(2 * given, *call.args[1:])),
        replace(call, args=(given.double(), *call.args[1:])),
        replace(call, args=(given, 2.0, *call.args[2:])),
        replace(call, kwargs={"n": 3}),
        replace(call, kwargs={}),
        replace(call, source=counted_scan),
    ]
    assert [kept.find(other) for other in others] == [None] * len(others)
    result.add_(1)
    assert kept.find(call) is None
    # No room is left, or none at all.
    for room in (0, 2 * given.nbytes - 1):
        kept = KeptScans(room)
        kept._run(call)
        assert kept.find(call) is None
