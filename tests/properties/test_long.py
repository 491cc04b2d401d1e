"""A row of rollout at 65,536 tokens of a layer of Mamba-130m's shape: no matrix, little memory."""

import gc
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from families import modeling_of
from folders import ROOT
from peak_memory import resident
from transformers import MambaConfig, MambaModel

from captum_ssm import MambaRollout, kernels
from captum_ssm.operators import DiagonalOperator

# Last, so that files of the same name here come first.
sys.path.append(str(ROOT / "benchmarks"))
from end_to_end import fast_scan

# Peak resident memory of the process, in bytes, since :func:`reset_peak`.
peak = partial(resident, "VmHWM")
LENGTH, CHANNELS, STATES = 65_536, 1536, 16
GIB = 1024**3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not kernels.extension_loaded(),
        reason="the compiled kernels are missing; the PyTorch forms need minutes at this length",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory as Linux reports it"),
]


@pytest.fixture(autouse=True)
def all_threads(one_thread):
    torch.set_num_threads(os.cpu_count() or 1)


def reset_peak() -> None:
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def test_a_row_of_the_operator():
    shape = (1, LENGTH, CHANNELS)
    dt = torch.rand(shape) * 0.1
    A = -torch.arange(1.0, STATES + 1).expand(CHANNELS, -1)
    B, C = (torch.randn(1, LENGTH, 1, STATES) for _ in range(2))
    operator = DiagonalOperator(dt, dt, A, B, C)
    query = torch.zeros(1, LENGTH)
    query[:, -1] = 1
    reset_peak()
    before = peak()
    row = query + operator.rmatvec(query, "mean")
    assert peak() - before < GIB
    assert torch.isfinite(row).all()

    # Its last entries, from the last tokens alone, whose matrices are small enough to exist.
    tail = slice(LENGTH - 64, None)
    near = DiagonalOperator(dt[:, tail], dt[:, tail], A, B[:, tail], C[:, tail])
    truth = near.matrix("mean")[:, -1]
    truth[:, -1] += 1
    torch.testing.assert_close(row[:, tail], truth, atol=1e-5, rtol=1e-4)
    # And all of it, against the recurrence run forwards.
    values = torch.randn(1, LENGTH, 1)
    forwards = operator.matvec(values.expand(shape))[:, -1].mean(-1) + values[:, -1, 0]
    torch.testing.assert_close((row * values[..., 0]).sum(1), forwards, atol=1e-4, rtol=1e-3)


def test_a_row_of_a_model(monkeypatch):
    config = MambaConfig(num_hidden_layers=1, vocab_size=64, state_size=STATES, use_cache=False)
    model = MambaModel(config).eval()
    assert model.layers[0].mixer.intermediate_size == CHANNELS
    # transformers' own scan on a CPU makes several tensors (B, D, L, N), of 6 GiB each. This
    # library's in its place is proved elsewhere to compute the same; here memory is measured.
    modeling = modeling_of(model, "mamba_selective_scan")
    scanned, forward = [], []

    def scan(u: Any, *args: Any, **kwargs: Any) -> Any:
        scanned.append(u.shape[-1])
        return fast_scan(u, *args, **kwargs)

    monkeypatch.setattr(modeling, "mamba_selective_scan", scan)
    tokens = torch.randint(0, 64, (1, LENGTH))

    def note(_: Any, args: Any, output: Any) -> None:
        if output[0].shape[1] == LENGTH:  # not the few tokens on which the wiring is measured
            forward.append(peak())

    model.register_forward_hook(note)
    reset_peak()
    row = MambaRollout(model).attribute(tokens)
    assert row.shape == (1, LENGTH)
    assert torch.isfinite(row).all()
    assert (row != 0).sum() > 1000
    # What the model itself needs are its weights and activations; the explanation needs little
    # more, though it recomputes the mixer and checks it.
    # Its mixer runs once; twice the model runs without it, whether tokens far apart are mixed.
    assert (scanned.count(LENGTH), len(forward)) == (1, 3)
    assert peak() - forward[0] < GIB


def test_the_peak_is_measured():
    reset_peak()
    before = peak()
    x = torch.ones(GIB // 4)  # 1 GiB
    assert peak() - before > 0.9 * GIB
    del x
    reset_peak()
    assert peak() - before < 0.1 * GIB
