"""mamba_ssm's own modules, against the same weights in transformers' model."""

import importlib.util
import sys

import pytest
import torch
from frozen import alter_a_head, assert_reconstructs, frozen_layers
from mamba_ssm_cpu import on_cpu
from models import VOCABULARY, ids, randomize, tiny
from torch import nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    hidden_attention,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is None,
    reason="mamba_ssm is not installed; without CUDA: MAMBA_SKIP_CUDA_BUILD=TRUE "
    "MAMBA_FORCE_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm",
)
METHODS = [RawAttention, MambaRollout, MambaAttribution, MambaLRP]


@pytest.fixture(scope="module")
def mamba_ssm():
    with on_cpu() as package:
        yield package


def language_model(mamba_ssm, **options):
    config = mamba_ssm.MambaConfig(
        d_model=16,
        n_layer=2,
        vocab_size=VOCABULARY,
        ssm_cfg={"layer": "Mamba1", "d_state": 4, "dt_rank": 3},
        **options,
    )
    return mamba_ssm.MambaLMHeadModel(config).eval()


@pytest.fixture(params=[True, False], ids=["fused_norm", "plain_norm"])
def pair(mamba_ssm, request):
    """One set of weights in mamba_ssm's language model and in transformers'."""
    theirs = tiny("mamba", use_bias=False)
    ours = language_model(mamba_ssm, fused_add_norm=request.param, pad_vocab_size_multiple=1)
    state = theirs.state_dict()
    ours.load_state_dict({k.replace("embeddings.", "embedding."): v for k, v in state.items()})
    return ours, theirs


def test_the_two_models_agree(pair):
    ours, theirs = pair
    with torch.no_grad():
        found, expected = (m(ids(2, 9)).logits for m in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_same_maps(pair, length, formulation):
    ours, theirs = (hidden_attention(m, ids(2, length), formulation=formulation) for m in pair)
    assert list(ours) == list(theirs)
    for path, truth in theirs.items():
        torch.testing.assert_close(ours[path], truth, atol=1e-5 * float(truth.abs().max()), rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_same_attributions(pair, method):
    ours, theirs = (method(m).attribute(ids(2, 9), target=[3, 4], position=7) for m in pair)
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_same_relevance_of_vectors(pair):
    ours, theirs = (
        LaTIM(m).attribute(ids(2, 9), target=[3, 4], position=7, activation="gate") for m in pair
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_fused_layer_norm_conserves_what_a_plain_one_does(mamba_ssm):
    found = []
    for fused in (True, False):
        model = randomize(language_model(mamba_ssm, rms_norm=False, fused_add_norm=fused))
        found.append(MambaLRP(model).attribute(ids(2, 9), 3, return_convergence_delta=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_logits_of_the_last_tokens_only(pair):
    ours, _ = pair
    explain = MambaAttribution(ours)
    full = explain.attribute(ids(2, 9), target=3)
    last = explain.attribute(ids(2, 9), target=3, additional_forward_args={"num_last_tokens": 2})
    torch.testing.assert_close(last, full)
    with pytest.raises(ValueError, match="last 2 of 9"):
        explain.attribute(
            ids(2, 9), target=3, position=4, additional_forward_args={"num_last_tokens": 2}
        )


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_bare_mixer_is_a_model(mamba_ssm, fast_path):
    mixer = mamba_ssm.Mamba(16, d_state=4, dt_rank=3, bias=True, use_fast_path=fast_path)
    model = nn.Sequential(nn.Linear(16, 16), randomize(mixer), nn.Linear(16, 5))
    x = torch.randn(2, 9, 16)
    (path,) = hidden_attention(model, x)
    assert path == "1"
    with torch.no_grad():
        u = mixer.in_proj(model[0](x)).chunk(2, -1)[0].transpose(1, 2)
        expected = torch.nn.functional.silu(mixer.conv1d(u)[..., :9])
        z = mixer.in_proj(model[0](x)).chunk(2, -1)[1]
        y = torch.einsum("bdij,bdj->bid", hidden_attention(model, x)[path], expected)
        y = (y + mixer.D * expected.transpose(1, 2)) * torch.nn.functional.silu(z)
        torch.testing.assert_close(mixer.out_proj(y), mixer(model[0](x)), atol=1e-5, rtol=1e-4)
    relevance = MambaAttribution(model).attribute(x, target=(-1, 2))
    assert relevance.shape == x.shape


SSD = {"d_state": 4, "headdim": 8, "ngroups": 2, "chunk_size": 64}
# By name: the mixer's class and its options; mamba2_fused is one kernel from in_proj to out_proj.
MIXERS = {
    # One group: unlike the kernel, its reference has one norm for all groups.
    "mamba2_fused": ("Mamba2", SSD | {"ngroups": 1}),
    "mamba2": (
        "Mamba2",
        SSD | {"use_mem_eff_path": False, "d_ssm": 16, "D_has_hdim": True, "rmsnorm": False},
    ),
    "mamba2_simple": ("Mamba2Simple", SSD | {"use_mem_eff_path": False}),
    "mamba3": ("Mamba3", {}),
    "mamba3_norm": ("Mamba3", {"is_outproj_norm": True}),
    "mamba3_groups": ("Mamba3", {"ngroups": 2, "rope_fraction": 1.0}),
    "mimo": ("Mamba3", {"is_mimo": True, "mimo_rank": 2, "ngroups": 2}),
    "mimo_norm": ("Mamba3", {"is_mimo": True, "mimo_rank": 3, "is_outproj_norm": True}),
}
# The scan that each class calls, its values, and what is no part of the map.
SCANS = {
    "mamba2": ("mamba_chunk_scan_combined", "x", ("D", "z")),
    "mamba3": ("mamba3_siso_combined", "V", ("D", "Z")),
    "mimo": ("mamba3_mimo_combined", "V", ("D", "Z", "MIMO_Out")),
}


def model_of(mamba_ssm, variant):
    model = language_model(mamba_ssm, fused_add_norm=False)  # of which Mamba3 is no option yet
    name, options = MIXERS[variant]
    for block in model.backbone.layers:
        block.mixer = getattr(mamba_ssm, name)(16, **{"d_state": 8, "headdim": 8} | options)
        if name == "Mamba2Simple":  # which takes tokens alone
            block.mixer.register_forward_pre_hook(lambda m, args, _: (args, {}), with_kwargs=True)
    return randomize(model).eval()


@pytest.mark.parametrize("variant", [name for name in MIXERS if name != "mamba2_fused"])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
def test_a_mixer_is_what_impulses_through_its_scan_measure(mamba_ssm, variant, length, monkeypatch):
    model, tokens, calls = model_of(mamba_ssm, variant), ids(2, length), []
    name, values, others = SCANS[variant.partition("_")[0]]
    modeling = sys.modules[type(model.backbone.layers[0].mixer).__module__]
    scan = getattr(modeling, name)

    def spy(*args, **kwargs):
        calls.append(dict(zip(("x", "dt", "A", "B", "C"), args, strict=False)) | kwargs)
        return scan(*args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, name, spy)
        model(tokens)
    with torch.no_grad():
        maps = hidden_attention(model, tokens)
        assert len(maps) == len(calls) == 2
        for call, found in zip(calls, maps.values(), strict=True):
            some = range(length) if length < 10 else (0, 1, length // 2, length - 2, length - 1)
            for j in some:
                impulse = torch.zeros_like(call[values])
                impulse[:, j] = 1
                alone = {values: impulse} | dict.fromkeys(others)
                column = scan(**(call | alone)).flatten(2)  # (B, L, channels)
                width = column.shape[-1] // found.shape[1]
                column = column.unflatten(-1, (-1, width))
                torch.testing.assert_close(column, column[..., :1].expand_as(column))
                error = (found[..., j] - column[..., 0].mT).abs().max()
                assert error <= 2e-5 * found.abs().max()


@pytest.mark.parametrize("variant", MIXERS)
@pytest.mark.parametrize("length", [1, 2, 7, 65])
def test_a_mixer_is_exact(mamba_ssm, variant, length):
    layers = frozen_layers(model_of(mamba_ssm, variant), ids(2, length), check=True)
    assert len(layers) == 2
    for layer in layers:
        assert_reconstructs(layer)


@pytest.mark.parametrize("variant", MIXERS)
def test_methods_on_a_mixer(mamba_ssm, variant):
    model, tokens = model_of(mamba_ssm, variant), ids(2, 9)
    relevance, delta = LaTIM(model).attribute(
        tokens, target=3, activation="gate", return_convergence_delta=True
    )
    assert float(delta.abs().max()) <= 1e-5 * float(relevance.abs().sum(1).min())
    relevance, delta = MambaLRP(model).attribute(tokens, target=3, return_convergence_delta=True)
    assert bool(relevance.isfinite().all())
    assert bool(delta.isfinite().all())
    for method in METHODS[:3]:
        assert float(method(model).attribute(tokens, target=3).abs().max()) > 0
    alter_a_head(model.backbone.layers[1].mixer.out_proj)
    if variant == "mamba2_fused":  # whose kernel is handed the projection's weight
        model.backbone.layers[1].mixer.use_mem_eff_path = False
    with pytest.raises(ReconstructionError, match=r"layers\.1\.mixer"):
        hidden_attention(model, tokens)
