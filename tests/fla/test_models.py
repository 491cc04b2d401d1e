"""flash-linear-attention's language models: relevance and contributions add up to the logit."""

from __future__ import annotations

import fla.models
import pytest
from models import VOCABULARY, ids, randomize, without_biases
from proofs import assert_adds_up
from torch import nn

MODELS = ("RetNet", "HGRN", "GLA", "RWKV6", "DeltaNet", "GatedDeltaNet")


def build(name: str, **options: object) -> nn.Module:
    config = getattr(fla.models, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        intermediate_size=48,
        fuse_cross_entropy=False,
        **options,
    )
    model = randomize(getattr(fla.models, f"{name}ForCausalLM")(config)).eval()
    return without_biases(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_relevance_sums_to_the_logit(name, naive):
    assert_adds_up(build(name, fuse_norm=False), ids(2, 9))


@pytest.mark.parametrize("fused", [False, True])
def test_with_norms_that_add_the_residual_stream(fused):
    # On the real kernels, run by Triton's interpreter: few tokens.
    assert_adds_up(build("GLA", fuse_norm=fused, fuse_swiglu=fused), ids(2, 3))
