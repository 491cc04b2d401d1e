"""flash-linear-attention's layers against its naive recurrences."""

import sys

import pytest
import torch
from families import padded
from frozen import alter_a_head, with_a_head_altered
from layers import LAYERS, SPECS, build
from models import ids

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    Readout,
    ReconstructionError,
    RelevanceFlow,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.interventions import knockout, scaled_features, states
from captum_ssm.mixers import find_mixers

pytestmark = [
    pytest.mark.usefixtures("naive"),
    pytest.mark.filterwarnings("ignore:According to Bo"),
    pytest.mark.filterwarnings("ignore:ShortConvolution is crucial"),
]


@pytest.mark.parametrize("name", LAYERS)
def test_an_altered_layer_is_caught(name, monkeypatch):
    model = build(name)
    (_, layer), *_ = find_mixers(model)
    if SPECS[name][0] == "hgrn2":  # it hands its output projection's weight to a fused function
        file = sys.modules[type(layer).__module__]
        monkeypatch.setattr(file, "rms_norm_linear", with_a_head_altered(file.rms_norm_linear))
    else:
        alter_a_head(layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj)
    with pytest.raises(ReconstructionError, match=r"layers\.0"):
        hidden_attention(model, ids(2, 9))


def test_groups_that_the_layer_mixes_up_are_not_explained_wrongly(monkeypatch):
    options = SPECS["mamba2"][2] | {"n_groups": 2}
    monkeypatch.setitem(SPECS, "mamba2", ("mamba2", "Mamba2", options))
    with pytest.raises(ReconstructionError):
        hidden_attention(build("mamba2"), ids(2, 9))


@pytest.mark.parametrize("name", LAYERS)
def test_every_method_runs(name):
    model, tokens = build(name), ids(2, 9)
    for method, options in (
        (MambaRollout(model), {}),
        (MambaAttribution(model), {"target": 3}),
        (UnifiedImplicitAttention(model), {"target": 3}),
        (UnifiedImplicitAttention(model), {"aggregation": "raw"}),
        (LaTIM(model), {"target": 3}),
        (MambaLRP(model), {"target": 3}),
    ):
        relevance = method.attribute(tokens, **options)
        assert relevance.shape == tokens.shape
        assert bool(torch.isfinite(relevance).all())
        assert float(relevance.abs().max()) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_rollout_is_the_product_of_the_layers_matrices(name):
    model, tokens = build(name), ids(2, 9)
    first, second = hidden_attention(model, tokens, reduction="mean").values()
    eye = torch.eye(9)
    rho = (eye + second) @ (eye + first)
    torch.testing.assert_close(MambaRollout(model).rollout(tokens), rho, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_padded_row_is_explained_like_the_row_alone(name, side):
    model, tokens, mask = build(name), ids(2, 9), padded(side)
    real = mask[1].bool()
    with torch.no_grad():
        together = model(tokens, attention_mask=mask)[1:, real]
        alone = model(tokens[1:, real])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    explain = UnifiedImplicitAttention(model)
    batch = explain.attribute(tokens, target=3, additional_forward_args={"attention_mask": mask})
    single = explain.attribute(tokens[1:, real], target=3)
    scale = float(single.abs().max())
    torch.testing.assert_close(batch[1:, real], single, atol=1e-4 * scale, rtol=0)
    assert float(batch[1, ~real].abs().max()) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_relevance_begins_at_states_of_every_layer(name):
    model, tokens, t = build(name), ids(2, 9), 4
    path, state = list(states(model, tokens, positions=None).items())[-1]
    each = torch.eye(state.values[0, 0].numel()).unflatten(1, state.values.shape[2:])
    readout = Readout(model, path, each, decoder=each, side="state")
    found = RelevanceFlow(model).features(tokens, 3, readout=readout)
    edges = RelevanceFlow(model).edges(tokens, 3)[path].matrix()
    # RWKV-6 reads its state before it writes.
    later = int(getattr(state.mixer.recurrence, "bonus", None) is not None)
    assert later == (name == "rwkv6")
    over = torch.stack([edges[:, i + later :, : i + 1].sum((1, 2)) for i in range(9)], 1)
    scale = float(over.abs().max())
    torch.testing.assert_close(found.relevance.sum(-1), over, rtol=1e-3, atol=1e-4 * scale)
    assert scale > 0
    with torch.no_grad():
        with knockout(model, sources=slice(t + 1), targets=slice(t + later, None), layers=path):
            expected = model(tokens)
        with scaled_features(readout, range(len(each)), tokens=t):
            found = model(tokens)
    # Token t itself reads nothing, and a norm of next to nothing is rounding.
    change = (found - expected)[:, torch.arange(9) != t]
    assert change.abs().max() <= 1e-4 * expected.abs().max()
    assert (found - model(tokens))[:, t + 1 :].abs().max() > 1e-3
