"""flash-linear-attention's language models: relevance and contributions add up to the logit."""

from __future__ import annotations

import fla.models
import pytest
from layers import RWKV7
from models import VOCABULARY, ids, randomize, without_biases
from proofs import assert_adds_up
from torch import nn

import captum_ssm

MODELS = ("RetNet", "HGRN", "GLA", "RWKV6", "RWKV7", "DeltaNet", "GatedDeltaNet")
# RWKV-7 is told the width of a head, and its ranks are never below 32 unless it is told them.
OPTIONS = {"RWKV7": {"num_heads": None} | RWKV7}


def build(name: str, **options: object) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
    config = getattr(fla.models, f"{name}Config")(
        vocab_size=VOCABULARY,
        fuse_cross_entropy=False,
        **sizes | OPTIONS.get(name, {}) | options,
    )
    model = randomize(getattr(fla.models, f"{name}ForCausalLM")(config)).eval()
    return without_biases(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_relevance_sums_to_the_logit(name, naive):
    assert_adds_up(build(name, fuse_norm=False), ids(2, 9))


@pytest.mark.filterwarnings("ignore")
def test_edges_of_a_layer_whose_values_later_layers_read_add_up(naive):
    # The first layer of RWKV-7 returns its values beside its output.
    flow = captum_ssm.RelevanceFlow(build("RWKV7", fuse_norm=False))
    for formulation in ("hidden", "unified"):
        for layer in flow.edges(ids(2, 9), 5, formulation=formulation).values():
            assert max(layer.relative_errors) < 2e-6
            assert layer.out.abs().max() > 0


@pytest.mark.parametrize("fused", [False, True])
def test_with_norms_that_add_the_residual_stream(fused):
    # On the real kernels, run by Triton's interpreter: few tokens.
    assert_adds_up(build("GLA", fuse_norm=fused, fuse_swiglu=fused), ids(2, 3))
