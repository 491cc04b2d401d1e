"""What tensors take at most, counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, and how many there were at most.

    On every device, and the same number in every run: it does not ask an allocator. What kernels
    work in is not counted.

    Args:
        known (iterable of Tensor): those that were there before, such as a model's parameters.

    Attributes:
        peak (int): bytes.

    Examples::

        >>> with PeakMemory([]) as memory:
        ...     x = torch.zeros(256)
        ...     x = x + 1
        >>> memory.peak
        2048
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._seen = {id(one): one for one in (tensor.untyped_storage() for tensor in known)}
        self._made: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if type(made) is Tensor:
                self._count(made)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._seen or key in self._made or storage.device.type == "meta":
            return
        self._made[key] = weakref.finalize(storage, self._freed, key, size)
        self._live += size
        self.peak = max(self.peak, self._live)

    def _freed(self, key: int, size: int) -> None:
        del self._made[key]
        self._live -= size
