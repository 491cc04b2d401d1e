"""Against the outputs of the papers' published code, kept as data in ``golden/``."""

from functools import cache

import pytest
import torch
from models import golden
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from captum_ssm import hidden_attention

GOLDEN, WEIGHTS, CONFIG = golden("mamba_lm")
LAYERS = (0, 1, 2)
TOLERANCE = 5e-5
ABLATIONS = {
    "unified": None,
    "withoutConv": ("activation", "gate"),
    "withoutGate": ("conv", "activation"),
    "withoutAct": ("conv", "gate"),
}


@cache
def model() -> MambaForCausalLM:
    found = MambaForCausalLM(MambaConfig(**CONFIG)).eval()
    found.load_state_dict(WEIGHTS)
    return found


def maps(**options) -> list[Tensor]:
    found = hidden_attention(model(), GOLDEN["input_ids"], **options)
    assert list(found) == [f"backbone.layers.{n}.mixer" for n in LAYERS]
    return list(found.values())


def test_the_model_is_the_published_one():
    with torch.no_grad():
        logits = model()(GOLDEN["input_ids"]).logits
    torch.testing.assert_close(logits, GOLDEN["hf_logits"], atol=1e-5, rtol=0)


def test_hidden_attention():
    for n, ours in enumerate(maps()):
        torch.testing.assert_close(ours, GOLDEN[f"s6_L{n}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ABLATIONS)
def test_unified_attention_and_its_ablations(name):
    for n, ours in enumerate(maps(formulation="unified", components=ABLATIONS[name])):
        truth = GOLDEN[f"{name}_L{n}"]
        assert truth.abs().max() > 20 * TOLERANCE
        torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0)


def test_the_convolution_alone_is_what_unified_adds():
    both, without = (maps(formulation="unified", components=c) for c in (["conv"], []))
    for n in LAYERS:
        truth = without[n] @ GOLDEN[f"conv2Mat_T_L{n}"]
        torch.testing.assert_close(both[n], truth, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("formulation", ["hidden", "unified"])
def test_last_rows(formulation):
    name = {"hidden": "s6_vec_last", "unified": "unified_vec_last"}[formulation]
    for n, ours in enumerate(maps(formulation=formulation, rows=-1)):
        truth = GOLDEN[f"{name}_L{n}"].reshape(ours.shape)
        torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0)


def test_the_maps_add_up_to_the_mixers_output():
    g = GOLDEN
    # unified is taken with the skip here: gate * (s6 + D) * activation * conv.
    hidden, unified = maps(), maps(formulation="unified", components=("conv", "activation",
                                                                      "gate", "skip"))  # fmt: skip
    for n in LAYERS:
        mixer = model().backbone.layers[n].mixer
        with torch.no_grad():
            x = mixer.in_proj(g[f"mixer{n}_in"]).chunk(2, dim=-1)[0].transpose(1, 2)  # (B, D, L)
            gate, act = g[f"gate_L{n}"], g[f"act_L{n}"]
            bias = act * mixer.conv1d.bias[:, None]
            y = torch.einsum("bdij,bdj->bdi", unified[n], x)
            y = y + gate * torch.einsum("bdij,bdj->bdi", hidden[n], bias)
            y = y + gate * mixer.D[:, None] * bias
            out = mixer.out_proj(y.transpose(1, 2))
        torch.testing.assert_close(out, g[f"mixer{n}_out"], atol=1e-6, rtol=1e-5)
