"""A measured layer that does not do what was measured is caught: an error, and no map."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from explained import MEASURED, Arguments, build, scans_replaced, some_fast
from models import ids
from torch import Tensor, nn

from captum_ssm import ReconstructionError, UnsupportedModelError, hidden_attention

pytestmark = [
    pytest.mark.usefixtures("recurrences"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # fla's advice on options
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of kernels that NumPy runs
]


class Drifting:
    """Scales every second entry along an axis, with each call by more.

    A norm after the scan would take a factor of all entries away.
    """

    def __init__(self, axis: int) -> None:
        self.axis, self.calls = axis, itertools.count(1)

    def __call__(self, x: Tensor) -> Tensor:
        factor = torch.ones(x.shape[self.axis])
        factor[::2] += 0.1 * next(self.calls)
        return (x.movedim(self.axis, -1) * factor).movedim(-1, self.axis)


def mixed_after(y: Tensor) -> Tensor:
    """Each token also gets some of what the scan returned for the one before."""
    return y + 0.3 * y.roll(1, -3)


def changed(scan: Callable, values: Callable, result: Callable) -> Callable[[Arguments], Any]:
    """A scan whose values and result are changed."""

    def call(named: Arguments) -> Any:
        y = scan(**named | {"v": values(named["v"])})
        return (result(y[0]), *y[1:]) if isinstance(y, tuple) else result(y)

    return call


def same(x: Tensor) -> Tensor:
    return x


def projection_of(layer: nn.Module) -> nn.Module:
    # These hand their output projection's weight to a fused function: there it is the queries.
    fused = ("GatedSlotAttention", "LightNetAttention", "Raven")
    return layer.q_proj if type(layer).__name__ in fused else layer.o_proj


@pytest.mark.parametrize("name", some_fast(MEASURED))
@pytest.mark.parametrize("altered", ["values", "result", "gate", "after"])
def test_an_altered_layer_is_caught(name, altered):
    model = build(name)
    projection = projection_of(model.layer)
    values, result = same, same
    if altered == "values":
        values = Drifting(-3)
    elif altered == "result":
        result = Drifting(-1)
    elif altered == "after":
        result = mixed_after
    else:
        forward, gate = projection.forward, Drifting(-1)
        projection.forward = lambda x: forward(gate(x))
    with (
        scans_replaced(model, lambda scan: changed(scan, values, result)),
        pytest.raises((ReconstructionError, UnsupportedModelError), match="layer"),
    ):
        hidden_attention(model, ids(1, 4), formulation="unified")
