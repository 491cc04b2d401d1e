"""flash-linear-attention's layers against its naive recurrences."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from families import padded
from frozen import alter_a_head, assert_reconstructs, frozen_layers
from layers import LAYERS, SPECS, build
from models import ids
from torch import Tensor, nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    ReconstructionError,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.mixers import find_mixers

pytestmark = [
    pytest.mark.usefixtures("naive"),
    pytest.mark.filterwarnings("ignore:According to Bo"),
    pytest.mark.filterwarnings("ignore:ShortConvolution is crucial"),
]


@pytest.mark.parametrize(
    ("length", "side"), [(1, None), (2, None), (9, None), (70, None), (9, "left"), (9, "right")]
)
@pytest.mark.parametrize("name", LAYERS)
def test_the_unified_operator_and_the_biases_are_the_layer(name, length, side):
    mask = padded(side) if side else None
    layers = frozen_layers(build(name), ids(2, length), mask)
    assert len(layers) == 2
    for layer in layers:
        assert_reconstructs(layer, mask)


# The recurrence each layer calls at these lengths, and its value argument.
SCANS = {
    "multiscale_retention": ("fused_recurrent_retention", "v"),
    "hgrn": ("fused_recurrent_hgrn", "x"),
    "hgrn2": ("fused_recurrent_gla", "v"),
    "gla": ("fused_recurrent_gla", "v"),
    "rwkv6": ("fused_recurrent_rwkv6", "v"),
    "rwkv7": ("fused_mul_recurrent_rwkv7", "v"),
    "delta_net": ("fused_recurrent_delta_rule", "v"),
    "gated_deltanet": ("fused_recurrent_gated_delta_rule", "v"),
}
PROBED = tuple(name for name in LAYERS if SPECS[name][0] in SCANS)


def recorded(
    name: str, model: nn.Module, tokens: Tensor, monkeypatch
) -> list[tuple[Callable, dict]]:
    """The recurrences of a forward pass with their arguments."""
    module = importlib.import_module(f"fla.layers.{SPECS[name][0]}")
    scan = getattr(module, SCANS[SPECS[name][0]][0])
    calls = []
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, scan_name(name), lambda **kw: calls.append(kw) or scan(**kw))
        model(tokens)
    return [(scan, kwargs) for kwargs in calls]


def scan_name(name: str) -> str:
    return SCANS[SPECS[name][0]][0]


@pytest.mark.parametrize("length", [1, 2, 3, 19])
@pytest.mark.parametrize("name", PROBED)
def test_hidden_attention_is_what_impulses_measure(name, length, monkeypatch):
    model, tokens = build(name), ids(2, length)
    maps = hidden_attention(model, tokens)
    calls = recorded(name, model, tokens, monkeypatch)
    argument = SCANS[SPECS[name][0]][1]
    for ours, (scan, kwargs), layer in zip(
        maps.values(), calls, frozen_layers(model, tokens), strict=True
    ):
        values = kwargs[argument]
        columns = []
        for j in range(length):
            impulse = torch.zeros_like(values)
            # HGRN's values have the input gate in them already: the impulse carries it.
            impulse[:, j] = values[:, j] / layer.mixer.values[:, j] if values.dim() == 3 else 1
            out = scan(**(kwargs | {argument: impulse}))[0]
            columns.append(out if values.dim() == 3 else out[..., 0])
        truth = torch.stack(columns, -1).transpose(1, 2)
        assert ours.shape == truth.shape
        assert (ours - truth).abs().max() <= 2e-5 * truth.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_an_altered_layer_is_caught(name):
    model = build(name)
    (_, layer), *_ = find_mixers(model)
    # HGRN-2 hands its output projection's weight to a fused function: there it is the queries.
    names = ("q_proj",) if SPECS[name][0] == "hgrn2" else ("o_proj", "out_proj")
    alter_a_head(next(getattr(layer, n) for n in names if hasattr(layer, n)))
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
