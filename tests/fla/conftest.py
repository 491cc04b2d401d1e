"""flash-linear-attention on a CPU: Triton's interpreter, and naive forms of its ops.

Collected only where fla can be imported, which the main environment's tests avoid (run.sh).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch

if importlib.util.find_spec("fla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before Triton is imported: its kernels then run in Python, on any tensor.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.driver import driver

    class _NoDriver:
        """Stands for a GPU's driver: takes the first of a kernel's configurations, untimed."""

        def get_benchmarker(self):
            return lambda function, quantiles=None, **_: [0.0] * len(quantiles or (0,))

        def get_current_target(self):
            raise RuntimeError("no GPU")

        def get_current_device(self) -> int:
            return 0

    driver.set_active(_NoDriver())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        importlib.import_module("fla.layers")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors cost a hundred times more where idle threads wait for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def naive(monkeypatch) -> None:
    """The layers on fla's naive recurrences, for the time of a test."""
    import naive as ops
    from fla.modules.activations import ACT2FN

    for key in ("silu", "swish", "sigmoid"):
        monkeypatch.setitem(ACT2FN, key, ACT2FN[key])
    ops.enable(monkeypatch.setattr)


@pytest.fixture
def recurrences(monkeypatch) -> None:
    """The layers where kernels of chunks do not run: on fla's recurrences, or naive forms."""
    import census

    census.on_cpu(partial(monkeypatch.setattr, raising=False))
