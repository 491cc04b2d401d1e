"""The reconstruction check: each token, what was really returned, and rounding told from error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from families import build
from frozen import alter_a_head
from methods import each_method
from models import ids, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import (
    InputError,
    LaTIM,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    supported,
)
from captum_ssm.capture import tolerances
from captum_ssm.capture.wider_dtype import InWider
from captum_ssm.discovery.measure import rerun
from captum_ssm.discovery.scans import proof
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.precision import kernels_dtype


def asked(method: type) -> dict[str, int]:
    return {"target": 3} if method.needs_target() else {}


def out_projections(model: nn.Module) -> list[nn.Module]:
    names = ("out_proj", "linear_out", "o_proj")
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] in names]


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.ones(x.shape[1], 1)
        keep[5] = 0
        return super().forward(x) * keep


@each_method
@pytest.mark.parametrize("where", ["all", "last", "own class", "after"])
def test_zeros_at_an_output_projection(method, where):
    model, x = tiny("mamba"), ids(1, 40)
    for projection in out_projections(model):
        keep = torch.ones(40, 1)
        keep[slice(None) if where == "all" else slice(-1, None)] = 0
        if where == "own class":  # at one token of many
            projection.__class__ = Masked
        elif where == "after":
            projection.register_forward_hook(lambda module, args, y, k=keep: y * k)
        else:
            projection.register_forward_pre_hook(lambda module, args, k=keep: (args[0] * k,))
    with pytest.raises(ReconstructionError, match="does not reproduce its output"):
        method(model).attribute(x, **asked(method))


@pytest.mark.parametrize("family", ["mamba2", "jamba", "qwen3_next", "recurrent_gemma"])
def test_zeros_at_an_output_projection_of_families(family):
    model = build(family)
    out_projections(model)[0].register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    for method in (RawAttention, MambaLRP):
        with pytest.raises(ReconstructionError):
            method(model).attribute(ids(1, 9), **asked(method))


def leaking(model: nn.Module, share: float) -> nn.Module:
    """Mixers that add a part of the first token's output to all tokens."""
    for layer in model.backbone.layers:
        own = layer.mixer.forward

        def forward(*args, own=own, **kwargs):
            y = own(*args, **kwargs)
            return y + share * y[:, :1]

        layer.mixer.forward = forward
    return model


@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        (torch.float64, 1e-4),
        (torch.float32, 5e-4),
        (torch.float16, 1e-2),
        (torch.bfloat16, 3e-2),
    ],
)
def test_a_part_of_one_token_at_all_others(dtype, share):
    model, x = leaking(build("mamba").to(dtype), share), ids(2, 30)
    for method in (RawAttention, MambaLRP):
        with pytest.raises(ReconstructionError):
            method(model).attribute(x, **asked(method))


def test_a_massive_first_token_hides_nothing_in_half_precision():
    model, x = build("mamba", num_hidden_layers=1), torch.arange(5, 14)[None]
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[5], table[6:, 0] = 0, 0
        table[5, 0] = 3.0  # a channel that only the first token has
        mixer.in_proj.weight[:, 0] *= 30
    model = model.to(torch.bfloat16)
    RawAttention(model).attribute(x)  # right as it is
    R, N = mixer.time_step_rank, mixer.ssm_state_size

    def silent(module: nn.Module, args: object, found: Tensor) -> Tensor:
        found = found.clone()
        found[:, 3:, R : R + N] = 0
        return found

    mixer.x_proj.register_forward_hook(silent)
    for method in (RawAttention, MambaLRP):
        with pytest.raises(ReconstructionError):
            method(model).attribute(x, **asked(method))


def test_doubted_rounding_is_run_in_a_wider_dtype_and_remembered(monkeypatch):
    from captum_ssm.capture import check as checking

    model, x = build("recurrent_gemma", seed=1), ids(2, 9)
    with torch.no_grad():
        for _, mixer in find_mixers(model):
            for p in mixer.parameters():
                p.mul_(1.5)
    model = model.to(torch.bfloat16)
    runs: list[object] = []
    own = checking._again
    monkeypatch.setattr(checking, "_again", lambda *args: runs.append(args) or own(*args))
    first = RawAttention(model).attribute(x)
    assert runs
    del runs[:]
    assert torch.equal(RawAttention(model).attribute(x), first)
    assert not runs  # known to be right
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p)  # others may be wrong
    RawAttention(model).attribute(x)
    assert runs


@pytest.fixture
def coarse_products(monkeypatch) -> Iterator[None]:
    """Products of float32 as some processors make them: those of linear layers in bfloat16."""
    linear = F.linear

    def coarse(x, weight, bias=None):
        if x.dtype == torch.float32:
            x, weight = x.bfloat16().float(), weight.bfloat16().float()
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", coarse)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("coarse_products")
def test_products_may_be_as_coarse_as_pytorch_was_allowed_to_make_them():
    model, tokens = build("mamba"), ids(2, 9)
    with pytest.raises(ReconstructionError, match="relative error"):
        MambaRollout(model).attribute(tokens)
    torch.set_float32_matmul_precision("medium")
    assert MambaRollout(model).attribute(tokens).isfinite().all()
    assert MambaLRP(model).attribute(tokens, target=3).isfinite().all()
    # What is wrong by as little is found, in float64.
    _, mixer = next(iter(find_mixers(model)))
    mixer.register_forward_hook(lambda module, args, output: output * 1.004)
    with pytest.raises(ReconstructionError, match="float64"):
        MambaRollout(model).attribute(tokens)


@pytest.mark.usefixtures("coarse_products")
@pytest.mark.filterwarnings("ignore:.* a kernel on this GPU has rounded")
def test_kernels_of_a_gpu_may_round_what_pytorch_does_not(monkeypatch):
    model, tokens = build("mamba"), ids(2, 9)
    with pytest.raises(ReconstructionError, match=r"1e-04 for torch\.float32"):
        MambaRollout(model).attribute(tokens)
    assert "not reproduced" in str(supported(model, tokens))
    for file in (tolerances, proof, rerun):
        monkeypatch.setattr(file, "kernels_dtype", lambda device: torch.float16)
    with pytest.warns(UserWarning, match="a kernel on this GPU has rounded"):
        assert MambaRollout(model).attribute(tokens).isfinite().all()
    assert "not reproduced" not in str(supported(model, tokens))
    _, (_, last) = find_mixers(model)
    alter_a_head(last.out_proj)
    with pytest.raises(ReconstructionError, match=r"1e-02 for torch\.float32"):
        MambaRollout(model).attribute(tokens)


def test_a_gpu_may_round_products_in_kernels():
    assert kernels_dtype(torch.device("cuda", 1)) == torch.float16
    assert kernels_dtype(torch.device("cpu")) == torch.float32


SETTINGS = {
    "torch.set_float32_matmul_precision('medium')": torch.bfloat16,
    "torch.set_float32_matmul_precision('high')": torch.float16,
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": torch.bfloat16,
    "torch.backends.cuda.matmul.allow_tf32 = True": torch.float32,
    "": torch.float32,
}


def test_each_way_to_ask_for_coarse_products_is_read():
    # The settings of backends cannot be taken back in a process: each is made in a fork of one.
    code = f"""import os, torch
from captum_ssm.utils.precision import products_dtype
for setting in {[*SETTINGS]}:
    if os.fork() == 0:
        exec(setting)
        print(products_dtype(torch.device("cpu")), flush=True)
        os._exit(0)
    os.wait()"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [*map(str, SETTINGS.values())]


def test_a_module_runs_in_a_wider_dtype_and_is_left_as_it_is():
    layer = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.LayerNorm(4)).bfloat16()
    before = [p.clone() for p in layer.parameters()]
    x = torch.randn(2, 3).bfloat16()
    with torch.no_grad(), InWider(torch.bfloat16):
        y = layer(x.bfloat16())
        assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.float32
    expected = layer.float()(x.float())
    torch.testing.assert_close(y, expected)
    for p, value in zip(layer.parameters(), before, strict=True):
        assert torch.equal(p.bfloat16(), value)


@pytest.mark.parametrize("where", ["backbone.layers.1.mixer.A_log", "lm_head.weight"])
def test_relevance_that_is_not_finite_names_the_weights(where):
    model = tiny("mamba")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        # A rate of -inf, and a row of the head that no target reads.
        model.get_parameter(where)[0] = torch.inf if "A_log" in where else torch.nan
    for method in (MambaLRP, LaTIM):
        with pytest.raises(InputError, match=where):
            method(model).attribute(ids(1, 7), target=3)
    if "A_log" in where:
        with pytest.raises(InputError, match=where):
            MambaRollout(model).attribute(ids(1, 7))
