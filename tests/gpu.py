"""How tests ask for the same on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

DEVICE = "cuda"
Move = Callable[[Tensor], Tensor]
# The marks of a file of such tests.
ON_A_GPU = [
    pytest.mark.cuda,
    pytest.mark.every_case,
    pytest.mark.usefixtures("exact_convolutions"),
    pytest.mark.filterwarnings("ignore"),
]


def numbers(value: Any) -> Iterator[Tensor]:
    """The tensors and the numbers in a result, in order."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield torch.from_numpy(value)
    elif isinstance(value, (bool, int, float)):
        yield torch.tensor(value)
    elif isinstance(value, Mapping):
        yield from numbers([*value.values()])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from numbers(one)
    elif is_dataclass(value):
        yield from numbers([getattr(value, field.name) for field in fields(value)])


def assert_same(found: Any, truth: Any, tolerance: float = 1e-3) -> None:
    """Check that numbers agree, by ``tolerance`` of each tensor's largest entry, or of 0.1."""
    found, truth = [*numbers(found)], [*numbers(truth)]
    assert truth
    assert [x.shape for x in found] == [x.shape for x in truth]
    for ours, expected in zip(found, truth, strict=True):
        ours, expected = ours.cpu().double(), expected.cpu().double()
        known = expected.isfinite()
        assert torch.equal(ours[~known].nan_to_num(7), expected[~known].nan_to_num(7))
        error = (ours - expected)[known].abs()
        assert (error <= tolerance * max(0.1, *expected[known].abs().tolist())).all()


def devices_of(value: Any) -> set[str]:
    """The kinds of devices of the tensors in a result."""
    if is_dataclass(value) or isinstance(value, Mapping):
        value = [*value.values()] if isinstance(value, Mapping) else [*vars(value).values()]
    if isinstance(value, (list, tuple)):
        return set().union(*map(devices_of, value))
    return {value.device.type} if isinstance(value, Tensor) else set()


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions on the GPU are not rounded to TF32, as PyTorch does by itself."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_both(
    call: Callable[[nn.Module, Move], Any], make: Callable[[], nn.Module]
) -> tuple[Any, Any]:
    """What a call returns of a model on the GPU, and of a model on the CPU.

    ``call`` takes the model and what puts a tensor on the model's device; ``make`` makes the model,
    on the CPU.
    """
    there = make().to(DEVICE)
    return call(there, lambda x: x.to(DEVICE)), call(make(), lambda x: x)
