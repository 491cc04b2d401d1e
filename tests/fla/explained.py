"""The layers of fla that the census says are explained whole, and their scans."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import census
import pytest
from torch import nn

Arguments = dict[str, Any]

ROWS = census.load()["fla"]
KNOWN = ("registered", "recognized", "measured")
# The convolved tokens next to the scan are another input of its map than the scan's values: no
# single map of its inputs gives its output.
BRANCHED = ("RodimusAttention",)
WHOLE = sorted(name for name, row in ROWS.items() if row["known"] in KNOWN)
EXPLAINED = [name for name in WHOLE if name not in BRANCHED]
MEASURED = [name for name in EXPLAINED if ROWS[name]["known"] == "measured"]
# Path attention needs a cache where there is a mask; momentum DeltaNet takes no mask.
UNPADDED = ("PaTHAttention", "MomentumDeltaNet")
# One of each kind: a recurrence, two passes, several steps, a solve, softmax, impulses.
FAST = ("ABCAttention", "Attention", "DeltaFormerAttention", "GatedDeltaProduct")
FAST += ("KimiDeltaAttention", "MesaNet")


def some_fast(names: list[str]) -> list[object]:
    """Most to be left to slow runs: kernels take Triton's interpreter seconds."""
    slow = pytest.mark.slow
    return [n if n in FAST else pytest.param(n, marks=slow) for n in names]


def build(name: str) -> census.OneLayer:
    """A model of one layer, on fla's recurrences and naive forms: needs ``recurrences``."""
    modules = [m for path, m in sys.modules.items() if path.startswith("fla.layers.")]
    return census.fla_model(next(getattr(m, name) for m in modules if hasattr(m, name)))


@contextmanager
def scans_replaced(
    model: nn.Module, by: Callable[[Callable], Callable[[Arguments], Any]]
) -> Iterator[None]:
    """The scans that the layers' files call, each replaced by a function of its named arguments."""
    files = {type(m).__module__ for m in model.modules()}

    def replaced(function: Callable) -> Callable:
        other = by(function)

        def call(*args, **kwargs):
            named = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
            if next(iter(named), None) in ("q", "r") and "v" in named:
                return other(named)
            if named.keys() >= {"x", "g", "initial_state"}:  # HGRN
                return other(named)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for file in (sys.modules[name] for name in files if name.startswith("fla.layers.")):
            for key, value in list(vars(file).items()):
                if callable(value) and not isinstance(value, type):
                    patch.setattr(file, key, replaced(value))
        yield
