"""RWKV's own code, which no adapter knows: flat kernels are proven, its mixers measured."""

from dataclasses import replace

import pytest
import torch
import wild
from methods import METHODS, OF_A_TARGET, each_method
from proofs import proven
from rwkv import (
    WIDTH,
    NormedByFunction,
    ReadFromItsSteps,
    SpatialMix,
    TimeMix,
    run_rwkv5,
    run_rwkv6,
    run_rwkv7,
    run_wkv,
    run_wkv_causal,
)
from torch import nn
from torch.nn import functional as F

from captum_ssm import (
    LaTIM,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnsupportedModelError,
    hidden_attention,
    supported,
)
from captum_ssm.discovery.measure import token_shift
from captum_ssm.discovery.scans import FunctionCall, prove

B, L, D = 2, 7, 2 * WIDTH


def stack(*mixers, width=D):
    return wild.Stack(*mixers, width=width).eval()


def flat(count):
    return torch.randn(count, B, L, D).unbind()


def arguments_of(function):
    if function is run_rwkv7:
        q, w, k, v, a = flat(5)
        a = F.normalize(a.unflatten(-1, (-1, WIDTH)), dim=-1).flatten(2)
        return dict(q=q, w=-F.softplus(w) - 0.5, k=k, v=v, a=-a, b=a * torch.rand(B, L, D))
    if function is run_rwkv6:
        r, k, v, w = flat(4)
        return dict(r=r, k=k, v=v, w=w, u=torch.randn(2, WIDTH))
    if function is run_rwkv5:
        r, k, v = flat(3)
        sizes = dict(B=B, T=L, C=D, H=2)
        return sizes | dict(r=r, k=k, v=v, w=torch.randn(D), u=torch.randn(2, WIDTH))
    k, v = flat(2)
    given = dict(w=torch.rand(D), u=torch.randn(D), k=k, v=v)
    return given if function is run_wkv else dict(B=B, T=L, C=D) | given


KERNELS = [run_rwkv5, run_rwkv6, run_rwkv7, run_wkv, run_wkv_causal]


@pytest.mark.parametrize("function", KERNELS)
def test_a_flat_kernel_is_proven_and_its_map_is_what_impulses_return(function):
    given = arguments_of(function)
    scan = proven(function, **given)
    assert scan.error < 1e-5
    matrix = scan.operator.matrix()  # (B, M, L, L)
    heads = matrix.repeat_interleave(D // matrix.shape[1], 1)
    impulses = torch.eye(L)[:, None, :, None].expand(L, B, L, D)
    for j, v in enumerate(impulses):
        torch.testing.assert_close(
            heads[..., j].mT, function(**given | dict(v=v)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("function", KERNELS)
def test_what_is_not_quite_such_a_kernel_is_none(function):
    given = arguments_of(function)
    (values,) = (t for name, t in given.items() if name == "v")

    def returning(change):
        def other(**arguments):
            return change(function(**arguments))

        call = FunctionCall(function, (), given, function)
        return prove(call, other(**given))

    assert returning(lambda y: y + 0.01 * values) is None
    assert returning(lambda y: y.flip(1)) is None
    assert returning(lambda y: y.roll(1, -1)) is None
    assert returning(torch.tanh) is None


def test_keys_too_large_for_exponents_stay_finite():
    given = arguments_of(run_wkv)
    given["k"] = 300 * given["k"]
    scan = proven(run_wkv, **given)
    assert scan.error < 1e-4
    assert bool(scan.operator.matrix().isfinite().all())


@pytest.fixture
def time_mix():
    return stack(TimeMix(), TimeMix())


class Plain(nn.Module):
    """Blocks that add their tokens themselves, or a mixer's, and a head."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(D, 5, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Known(nn.Module):
    """What a :class:`ReadFromItsSteps` computes, of a mixer whose scan is known."""

    def __init__(self, block):
        super().__init__()
        self.before, self.mixer = block.before, TimeMix()
        parts = {k: v for k, v in block.state_dict().items() if not k.startswith("before")}
        self.mixer.load_state_dict(parts)

    def forward(self, x):
        return x + self.mixer(self.before(x))


def given(width=D, tokens=9):
    return torch.randn(1, tokens, width)


@pytest.mark.filterwarnings("ignore:.*token shift")
@each_method
def test_every_method_explains_a_mixer_of_rwkv7(time_mix, method):
    x = given()
    where = {} if method not in OF_A_TARGET else {"target": (6, 3)}
    found = method(time_mix).attribute(x, position=6, **where).abs().sum(-1)[0]
    assert found.isfinite().all()
    assert (found[:7] > 0).sum() >= 5  # gradients times maps are clamped at zero
    assert not found[7:].any()


@pytest.mark.filterwarnings("ignore:.*token shift")
def test_a_norm_that_is_called_as_a_function_is_a_norm():
    """What follows the norm tells its bias and the bonus after it apart."""
    torch.manual_seed(0)
    x, found = given(), []
    for kind in (TimeMix, NormedByFunction):
        torch.manual_seed(5)
        mixer = kind()
        nn.init.normal_(mixer.norm.weight)
        nn.init.normal_(mixer.norm.bias)
        whole = stack(mixer)
        (told,) = supported(whole, x, target=(6, 3)).mixers
        assert told.known == "measured"
        assert told.error < 1e-5
        found.append(LaTIM(whole).attribute(x, position=6, target=(6, 3)))
    assert torch.equal(*found)


def test_a_token_shift_before_the_scan_is_said(time_mix):
    x = given()
    with pytest.warns(UserWarning, match="TimeMix reads neighboring tokens before its scan"):
        MambaRollout(time_mix).attribute(x)
    with pytest.warns(UserWarning, match="token shift"):
        found = supported(time_mix, x, target=(6, 3))
    assert all(mixer.known == "measured" and mixer.error < 1e-5 for mixer in found.mixers)
    assert all(0.05 < mixer.neighbor_share < 0.95 for mixer in found.mixers)
    assert "is read from neighbors before the scan" in str(found)
    hardly = replace(found.mixers[0], neighbor_share=1e-4)
    assert "up to 1% is read from neighbors" in hardly.finding


def test_the_share_of_neighbors_is_that_of_the_values_weights():
    mixer = TimeMix()
    with pytest.warns(UserWarning, match="token shift"):
        (found,) = supported(stack(mixer), given(), target=(6, 3)).mixers
    weight, mix = mixer.v.weight.detach(), mixer.mix[3].detach()
    own, other = (((weight * share) ** 2).sum() for share in (1 - mix, mix))
    # One random direction of the values is measured.
    assert abs(found.neighbor_share - float(other / (own + other))) < 0.25
    still = stack(TimeMix(shares=0.0))
    assert supported(still, given(), target=(6, 3)).mixers[0].neighbor_share == 0


@pytest.mark.filterwarnings("ignore:.*token shift")
def test_maps_of_rwkv7_are_those_of_its_scan(time_mix):
    x, calls = given(), []
    scan = time_mix.layers[0].scan
    time_mix.layers[0].scan = lambda *args: (calls.append(args), scan(*args))[1]
    time_mix(x)
    del time_mix.layers[0].scan
    r, w, k, v, a, b = calls[0]
    (maps, _) = hidden_attention(time_mix, x).values()
    heads = maps.repeat_interleave(WIDTH, 1)
    for j in range(x.shape[1]):
        impulse = torch.zeros_like(v)
        impulse[:, j] = 1
        y = run_rwkv7(r, w, k, impulse, a, b)
        torch.testing.assert_close(heads[..., j].mT, y, rtol=1e-4, atol=1e-5)


class LooksEverywhere(TimeMix):
    def shifted(self, x):
        return x.mean(1, keepdim=True).expand_as(x)


def test_what_looks_at_all_tokens_before_the_scan_is_refused():
    with pytest.raises(UnsupportedModelError, match="a shift by a few tokens"):
        RawAttention(stack(LooksEverywhere())).attribute(given(tokens=30))


@pytest.mark.filterwarnings("ignore:.*token shift")
def test_vision_rwkv_looks_both_ways_and_shifts_patches():
    model, x = stack(SpatialMix(6), SpatialMix(6), width=8), given(8, 36)
    for method in METHODS:
        found = method(model).attribute(x, target=(14, 3))
        assert bool(found.abs().sum(-1).gt(0).all()), method
    (maps, _) = hidden_attention(model, x).values()
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))  # an average


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_mixer_is_refused_in_words():
    model = nn.Sequential(torch.jit.trace(nn.Linear(D, D), given()))
    with pytest.raises(UnsupportedModelError, match="PYTORCH_JIT=0"):
        MambaLRP(model).attribute(given(), target=(6, 3))


@pytest.mark.parametrize(
    ("offsets", "is_near"),
    [((0,), True), ((0, -1), True), ((0, 1, -1, 4, -4), True), (range(-16, 1), False)],
    ids=["itself", "RWKV", "Vision-RWKV", "a recurrence"],
)
def test_reads_neighbors(offsets, is_near):
    def strength_of(token):
        strength = torch.zeros(16)
        strength[[token + offset for offset in offsets if 0 <= token + offset < 16]] = 1
        return strength

    assert token_shift._reads_neighbors(strength_of, 16) is is_near


@pytest.mark.filterwarnings("ignore:.*token shift")
@each_method
def test_steps_are_read_where_values_are_added_after_a_norm(method):
    blocks = [ReadFromItsSteps(), ReadFromItsSteps()]
    model, known = Plain(*blocks).eval(), Plain(*map(Known, blocks)).eval()
    known.head = model.head
    x = given(tokens=6)
    torch.testing.assert_close(model(x), known(x))
    where = {} if method not in OF_A_TARGET else {"target": (5, 3)}
    found, expected = (method(m).attribute(x, position=5, **where) for m in (model, known))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
