"""fla's layers that have no adapter: their scans are recorded, proven and measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import padded
from fla.ops.log_linear_attn.naive import naive_log_linear_attn
from fla.ops.stickbreaking_attn.naive import naive_stickbreaking_attn
from frozen import assert_reconstructs, frozen_layers
from models import ids

from captum_ssm import LaTIM, MambaLRP
from captum_ssm.scans import Scan, ScanCalls, intercepted

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import census

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # fla's advice on options
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of kernels that NumPy runs
]
ROWS = census.load()["fla"]
# Whose recurrences, unlike their kernels of chunks, have no backward pass.
NO_BACKWARD = ("Comba", "PrecondGatedDeltaNet")
MEASURED = sorted(name for name, row in ROWS.items() if row["known"] == "measured")


# One of each kind: a recurrence, two passes, several steps, a solve, softmax, impulses.
FAST = ("ABCAttention", "Attention", "DeltaFormerAttention", "GatedDeltaProduct")
FAST += ("KimiDeltaAttention", "MesaNet")


def some_fast(names: list[str]) -> list[object]:
    """Most to be left to slow runs: kernels take Triton's interpreter seconds."""
    slow = pytest.mark.slow
    return [n if n in FAST else pytest.param(n, marks=slow) for n in names]


@pytest.fixture(autouse=True, scope="module")
def recurrences():
    census.on_cpu()


def build(name: str) -> census.FlaModel:
    modules = [m for path, m in sys.modules.items() if path.startswith("fla.layers.")]
    return census.FlaModel(next(getattr(m, name) for m in modules if hasattr(m, name)))


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_layer_is_the_layer(name, length):
    for layer in frozen_layers(build(name), ids(2, length), check=True):
        assert_reconstructs(layer)


# Path attention needs a cache where there is a mask; momentum DeltaNet takes no mask.
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name", some_fast(sorted(set(MEASURED) - {"PaTHAttention", "MomentumDeltaNet"}))
)
def test_a_padded_batch(name, side):
    mask = padded(side)
    for layer in frozen_layers(build(name), ids(2, 9), mask, check=True):
        assert_reconstructs(layer, mask)


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("name", MEASURED)
def test_over_a_chunk_of_tokens(name, length):
    for layer in frozen_layers(build(name), ids(1, length), check=True):
        assert_reconstructs(layer)


@pytest.mark.parametrize("name", some_fast(MEASURED))
def test_relevance_sums_to_the_logit(name):
    model, tokens = build(name), ids(2, 9)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("bias") and "dt" not in path:
                parameter.zero_()
    methods = [(MambaLRP, {}), (LaTIM, {"activation": "gate"})]
    for method, options in methods[: 1 if name in NO_BACKWARD else 2]:
        relevance, delta = method(model).attribute(
            tokens, target=3, return_convergence_delta=True, **options
        )
        assert float(delta.abs().max()) < 1e-5
        assert float(relevance.abs().max()) > 1e-3


def test_the_table_names_every_layer():
    assert census.names_in("fla").keys() == ROWS.keys()
    explained = [r for r in ROWS.values() if r["known"] in ("registered", "measured", "recognized")]
    assert len(explained) >= 30


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("name", ["stickbreaking", "log_linear"])
def test_functions_of_layers_that_no_cpu_runs(name, length):
    torch.manual_seed(0)
    function = {"stickbreaking": naive_stickbreaking_attn, "log_linear": naive_log_linear_attn}[
        name
    ]
    q, k, v, other = torch.randn(4, 2, length, 2, 4)
    function, extra = naive_stickbreaking_attn, {"attend_current": True}
    if name == "log_linear":
        function, levels = naive_log_linear_attn, torch.rand(2, length, 2, 8)
        extra = {"g": -torch.rand(2, length, 2), "level_scales": levels}
    found: list[Scan] = []
    calls = ScanCalls(lambda call, scan, result: found.append(scan) or result)
    with intercepted(calls, [function]), torch.no_grad():
        function(q, k, v, **extra)
    (scan,) = found
    y = function(q, k, other, **extra)
    y = y[0] if isinstance(y, tuple) else y
    assert (scan.operator.matvec(other.flatten(2)) - y.flatten(2)).abs().max() <= 2e-5
