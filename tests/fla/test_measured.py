"""fla's layers that have no adapter: their scans are recorded, proven and measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from frozen import assert_reconstructs, frozen_layers
from models import ids

from captum_ssm import ReconstructionError, UnsupportedModelError, hidden_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import census

ROWS = census.load()["fla"]
MEASURED = sorted(name for name, row in ROWS.items() if row["known"] == "measured")


@pytest.fixture(autouse=True, scope="module")
def recurrences():
    census.without_chunks()


def build(name: str) -> census.FlaModel:
    import fla.layers

    return census.FlaModel(getattr(fla.layers, name))


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_layer_is_the_layer(name):
    for layer in frozen_layers(build(name), ids(2, 9), check=True):
        assert_reconstructs(layer)


def test_another_recurrence_is_refused(monkeypatch):
    from fla.layers import kda

    def weaker(**given):
        y, state = scan(**given | {"beta": given["beta"] - 1})
        return y * torch.tensor([1.0, 1.2])[:, None], state

    scan = kda.fused_recurrent_kda
    monkeypatch.setattr(kda, "fused_recurrent_kda", weaker)
    monkeypatch.setattr(kda, "chunk_kda", weaker)
    with pytest.raises((ReconstructionError, UnsupportedModelError)):
        hidden_attention(build("KimiDeltaAttention"), ids(2, 9), formulation="unified")


def test_the_table_names_every_layer():
    assert census.names_in("fla").keys() == ROWS.keys()
    assert len(MEASURED) >= 9
