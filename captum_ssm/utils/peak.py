"""What tensors take at most, counted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm.utils.nested import tensors_in


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations return inside, as long as they are there.

    On every device, and the same number in every run: it does not ask an allocator. What a kernel
    allocates for itself and frees before it returns is not seen.

    Args:
        owned (iterable of Tensor): those that are not counted, such as a model's parameters.

    Attributes:
        most (list of float): the most bytes at a time, for each of :meth:`sizes`.

    Examples::

        >>> with PeakMemory([]) as memory:
        ...     x = torch.zeros(256)
        ...     x = x + 1
        >>> memory.peak
        2048
    """

    def __init__(self, owned: Iterable[Tensor]) -> None:
        super().__init__()
        self._ignored = {storage_of(tensor) for tensor in owned}
        self._live: dict[int, Any] = {}
        self._now: list[float] = []
        self.most: list[float] = []

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return int(self.most[0]) if self.most else 0

    def sizes(self, value: Tensor, count: int) -> Sequence[float]:
        """What counts for a tensor whose storage has so many bytes: one number or several."""
        return (count,)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tensors_in(result):
            self._see(value)
        return result

    def _see(self, value: Tensor) -> None:
        key = storage_of(value)
        if key is None or key in self._live or key in self._ignored or value.is_meta:
            return
        storage = value.untyped_storage()
        sizes = self.sizes(value, storage.nbytes())
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key, sizes))
        self._now = [a + b for a, b in zip(self._now or [0.0] * len(sizes), sizes, strict=True)]
        self.most = list(map(max, self._now, self.most or self._now))

    def _gone(self, key: int, sizes: Sequence[float]) -> None:
        del self._live[key]
        self._now = [a - b for a, b in zip(self._now, sizes, strict=True)]


def storage_of(value: Tensor) -> int | None:
    """What tells a tensor's storage from others; None for one without, such as a sparse one."""
    with suppress(NotImplementedError, RuntimeError):
        return value.untyped_storage()._cdata
    return None
