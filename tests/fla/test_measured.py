"""fla's layers that have no adapter: their scans are recorded, proven and measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from frozen import assert_reconstructs, frozen_layers
from models import ids

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import census

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fla's advice on options
ROWS = census.load()["fla"]
MEASURED = sorted(name for name, row in ROWS.items() if row["known"] == "measured")


@pytest.fixture(autouse=True, scope="module")
def recurrences():
    importlib.import_module("fla.layers.simple_gla")  # which fla.layers leaves out
    census.without_chunks()


def build(name: str) -> census.FlaModel:
    modules = [m for path, m in sys.modules.items() if path.startswith("fla.layers.")]
    return census.FlaModel(next(getattr(m, name) for m in modules if hasattr(m, name)))


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_layer_is_the_layer(name):
    for layer in frozen_layers(build(name), ids(2, 9), check=True):
        assert_reconstructs(layer)


def test_the_table_names_every_layer():
    assert census.names_in("fla").keys() == ROWS.keys()
    assert len(MEASURED) >= 9
