"""The memory and time of one call, and their extrapolation to longer inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.peak import PeakMemory, storage_of

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
    owned = list(owned)
    # Metered too: attention runs by other operations then, which are looked at anew.
    with _Meter(owned, tokens, stretch):
        call()
    with _Meter(owned, tokens, stretch) as meter:
        result = call()
    tensors = {storage_of(t): t for t in tensors_in(result)}
    sizes = [meter.stretched(t, t.nbytes) for t in tensors.values()]
    returned = sum(size for size, _ in sizes), sum(stretched for _, stretched in sizes)
    here, whole = meter.most or (0.0, 0.0)
    start = _now()
    call()
    return Measurement((here, whole), returned, _now() - start)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


class _Meter(PeakMemory):
    # Bytes as they are, and as for the whole sequence.
    def __init__(self, owned: Iterable[Tensor], tokens: int, stretch: float) -> None:
        super().__init__(owned)
        self._tokens, self._stretch = tokens, stretch

    def stretched(self, value: Tensor, count: int) -> tuple[float, float]:
        is_map = sum(axis == self._tokens for axis in value.shape) > 1
        return count, count * (self._stretch if is_map else 1)

    def sizes(self, value: Tensor, count: int) -> tuple[float, float]:
        objects = OBJECTS * (value.device.type == "cpu")
        here, whole = self.stretched(value, count)
        return here + objects, whole + objects


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
