"""The memory and time of one call, and their extrapolation to longer inputs."""

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

from captum_ssm.utils.nested import tensors_in

# Bytes of a tensor, its storage and its graph's nodes: more than its numbers in a loop of tokens.
OBJECTS = 2048


@dataclass(frozen=True)
class Measurement:
    """The most bytes of a call at a time, those it returned, and its time.

    The second of a pair, for the whole sequence, counts a tensor with two token axes accordingly.
    """

    peak: tuple[float, float]
    result: tuple[float, float]
    seconds: float


def measured(
    call: Callable[[], Any], owned: Iterable[Tensor], tokens: int = 0, stretch: float = 1.0
) -> Measurement:
    """Make a call for its memory, where ``owned`` is not counted, and once more for its time.

    It is made once before: the first look at a model is no part of what a call takes.

    A token axis has ``tokens`` entries, of a sequence that is ``stretch`` times longer.
    """
    ignored = {_storage(t) for t in owned}
    # Metered too: attention runs by other operations then, which are looked at anew.
    with _Meter(ignored, tokens, stretch):
        call()
    with _Meter(ignored, tokens, stretch) as meter:
        result = call()
    tensors = {_storage(t): t for t in tensors_in(result)}
    sizes = [meter.sizes(t, t.nbytes) for t in tensors.values()]
    returned = sum(size for size, _ in sizes), sum(stretched for _, stretched in sizes)
    start = _now()
    call()
    return Measurement((meter.peak[0], meter.peak[1]), returned, _now() - start)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


class _Meter(TorchDispatchMode):
    # The bytes of the storages that operations returned and that are still there, as they are and
    # as for the whole sequence. What a kernel allocates for itself and frees before it returns is
    # not seen.
    def __init__(self, ignored: set[int | None], tokens: int, stretch: float) -> None:
        super().__init__()
        self._live: dict[int, Any] = {}
        self._ignored, self._tokens, self._stretch = ignored, tokens, stretch
        self.now, self.peak = [0.0, 0.0], [0.0, 0.0]

    def sizes(self, value: Tensor, count: int) -> tuple[float, float]:
        is_map = sum(axis == self._tokens for axis in value.shape) > 1
        return count, count * (self._stretch if is_map else 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tensors_in(result):
            self._see(value)
        return result

    def _see(self, value: Tensor) -> None:
        key = _storage(value)
        if key is None or key in self._live or key in self._ignored or value.is_meta:
            return
        storage = value.untyped_storage()
        objects = OBJECTS * (value.device.type == "cpu")
        sizes = [size + objects for size in self.sizes(value, storage.nbytes())]
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key, sizes))
        for i, size in enumerate(sizes):
            self.now[i] += size
            self.peak[i] = max(self.peak[i], self.now[i])

    def _gone(self, key: int, sizes: list[float]) -> None:
        del self._live[key]
        for i, size in enumerate(sizes):
            self.now[i] -= size


def _storage(value: Tensor) -> int | None:
    with suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
        return value.untyped_storage()._cdata
    return None


def fitted(lengths: Sequence[int], values: Sequence[float], length: int) -> tuple[float, float]:
    """The fixed and the growing share, at ``length``, of a line that never falls."""
    if len(lengths) == 1:
        return 0.0, values[0] * length / lengths[0]
    slope = max(0.0, (values[1] - values[0]) / (lengths[1] - lengths[0]))
    fixed = max(0.0, values[1] - slope * lengths[1])
    return fixed, values[1] + slope * (length - lengths[1]) - fixed


def grown(lengths: Sequence[int], times: Sequence[float], length: int) -> float:
    """A time that grows between linearly and quadratically, from 0 at no tokens, at ``length``."""
    last, rates = lengths[-1], [time / n for time, n in zip(times, lengths, strict=True)]
    curve = (rates[-1] - rates[0]) / max(1, last - lengths[0])
    return (rates[-1] + min(max(0.0, curve), rates[-1] / last) * (length - last)) * length
