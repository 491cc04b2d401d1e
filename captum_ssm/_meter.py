"""What a call takes in memory and time, measured at short inputs and carried to longer ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Bytes that a tensor of a graph takes beside its numbers: itself, its storage and its nodes. Where
# a model computes one token at a time that is more than the numbers.
OBJECTS = 2048

# Called once by what is measured, where its run of the model ends.
Mark = Callable[[], None]


@dataclass(frozen=True)
class Reading:
    """What one call took.

    Args:
        peak (int): the most bytes at a time while the model ran.
        kept (int): bytes that were left of the run.
        later_peak (int): the most bytes at a time behind the run, ``kept`` among them.
        seconds (float): of the run.
        later_seconds (float): behind the run.
    """

    peak: int
    kept: int
    later_peak: int
    seconds: float
    later_seconds: float


def measured(call: Callable[[Mark], Any], owned: Iterable[Tensor]) -> Reading:
    """Make a call for its time, again where that was short, and once more for its memory.

    Args:
        call (Callable): takes a `Mark`. Without a mark all of it is the run.
        owned (iterable of Tensor): exist anyway, and are not counted: parameters, inputs.
    """
    times = [_timed(call)]
    while len(times) < 3 and sum(map(sum, times)) < 0.2:
        times.append(_timed(call))
    with _Meter(owned) as meter:
        call(meter.mark)
    run, later = (min(column) for column in zip(*times, strict=True))
    if not meter.marked:
        return Reading(meter.peak, 0, 0, run, later)
    return Reading(meter.run_peak, meter.kept, meter.peak, run, later)


def _timed(call: Callable[[Mark], Any]) -> tuple[float, float]:
    marks = [_now()]
    call(lambda: marks.append(_now()))
    end = _now()
    middle = marks[1] if len(marks) > 1 else end
    return middle - marks[0], end - middle


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


class _Meter(TorchDispatchMode):
    # The bytes of the storages that operations returned and that are still there. What a kernel
    # takes for itself and gives back before it returns is not seen.
    def __init__(self, owned: Iterable[Tensor]) -> None:
        super().__init__()
        self._live: dict[int, Any] = {}
        self._owned = {_storage(t) for t in owned}
        self.now = self.peak = self.run_peak = self.kept = 0
        self.marked = False

    def mark(self) -> None:
        """The run of the model is over."""
        self.marked, self.run_peak, self.kept, self.peak = True, self.peak, self.now, self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if torch.is_tensor(value):
                self._see(value)
        return result

    def _see(self, value: Tensor) -> None:
        key = _storage(value)
        if key is None or key in self._live or key in self._owned or value.is_meta:
            return
        storage = value.untyped_storage()
        size = storage.nbytes() + (OBJECTS if value.device.type == "cpu" else 0)
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._live[key]
        self.now -= size


def _storage(value: Tensor) -> int | None:
    with suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
        return value.untyped_storage()._cdata
    return None


def fitted(
    lengths: Sequence[int], values: Sequence[float], length: int, curved: bool = False
) -> tuple[float, float]:
    """Carry a peak to another length: its fixed share, and the one that grows.

    Args:
        lengths (sequence of int): where it was measured, ascending.
        values (sequence of float): as many. Between the last two it is a line, which never falls.
        length (int): where it is wanted.
        curved (bool, optional): allow it a quadratic share, which takes three values.
            Default: False
    """
    if len(lengths) == 1:
        return 0.0, values[0] * length / lengths[0]
    x, y = lengths[-2:]
    slope, curve = (values[-1] - values[-2]) / (y - x), 0.0
    if curved and len(lengths) > 2:
        w = lengths[-3]
        curve = max(0.0, (slope - (values[-2] - values[-3]) / (x - w)) / (y - w))
    linear = max(0.0, slope - curve * (x + y))
    fixed = max(0.0, values[-1] - linear * y - curve * y * y)
    whole = values[-1] + linear * (length - y) + curve * (length * length - y * y)
    return min(fixed, whole), max(0.0, whole - fixed)


def grown(lengths: Sequence[int], values: Sequence[float], length: int) -> float:
    """Carry a time that grows between linearly and quadratically, from nothing at no tokens."""
    y, last = lengths[-1], values[-1]
    curve = last / y**2
    if len(lengths) > 1:
        x, first = lengths[-2], values[-2]
        curve = min(max(0.0, (last / y - first / x) / (y - x)), curve)
    return curve * length**2 + (last / y - curve * y) * length
