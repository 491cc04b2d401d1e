"""The tensors of a model for the time of a run: cloned, or shared and put back.

Small tensors that are no parameters (running means, caches, counters) are cloned. Parameters and
large tensors are shared, so that a run takes no memory for them, and a lazy clone of each keeps
their values: it takes memory only where the run writes to them. Then the tensor gets its own memory
back, with its values, and the run is repeated with a clone of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from captum_ssm.errors import UnsupportedModelError

P = ParamSpec("P")
V = TypeVar("V")

# Larger tensors, such as quantized weights that are buffers, are shared.
_LARGE = 16 << 20  # bytes
# Parameters and large tensors that a run wrote to, by their ids.
_WRITTEN: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


class _Repeated(RuntimeError):
    # A run wrote to tensors that it shared with the user's model; they have been put back.
    pass


def repeated(function: Callable[P, V]) -> Callable[P, V]:
    """A function that runs copies of a model, once more where they wrote to shared tensors."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> V:
        while True:
            try:
                return function(*args, **kwargs)
            except _Repeated:  # what was written to is cloned from now on
                continue

    return run


class Clones:
    """Clones of a model's tensors, which share memory as the tensors do."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._shared: list[_Shared] = []
        self._kept: dict[int, torch.UntypedStorage | None] = {}

    def of(self, x: Tensor) -> Tensor:
        """A clone of a tensor, or the tensor itself where it is shared."""
        if is_lazy(x):
            return copy.deepcopy(x)
        made = self._cloned(x)
        if made is None:
            if not x.is_inference():
                self._shared.append(_Shared.of(x, self._lazily(x)))
            return x
        if isinstance(x, nn.Parameter):
            made = nn.Parameter(made, x.requires_grad)
        else:
            made = made if type(x) is Tensor else made.as_subclass(type(x))
            made.requires_grad_(x.requires_grad)
        vars(made).update(vars(x))
        return made

    def put_back(self) -> list[Tensor]:
        """Give shared tensors their own memory back; returns those that were written to.

        Raises:
            UnsupportedModelError: for one whose values could not be kept.
        """
        written = [shared.tensor for shared in self._shared if shared.is_written]
        _WRITTEN.update({id(x): x for x in written})
        lost = [shared.tensor for shared in self._shared if not shared.put_back()]
        # A frame in the traceback of an error may hold these.
        for shared in self._shared:
            shared.kept, shared.alias = None, shared.tensor
        self._shared.clear()
        self._kept.clear()
        if lost:
            raise UnsupportedModelError(
                f"the model's forward writes in place to {len(lost)} of its tensors (the first of "
                f"shape {tuple(lost[0].shape)}) that lie in memory of another kind than PyTorch's "
                "own (a mapped file, shared memory) or have a graph, so they hold what it wrote; "
                "expected a forward that leaves them. Explain a copy: copy.deepcopy(model)."
            )
        return written

    def end(self, error: type[BaseException] | None) -> None:
        """After the run: put shared tensors back, and have it repeated where it wrote to any."""
        if self.put_back() and error is None:
            raise _Repeated("the run wrote to weights of the model")

    @torch.no_grad()
    def _cloned(self, x: Tensor) -> Tensor | None:
        # None for what is shared.
        is_large = isinstance(x, nn.Parameter) or x.nbytes > _LARGE
        if not is_plain(x) or (is_large and not (x.is_meta or _WRITTEN.get(id(x)) is x)):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            x = x.detach().as_subclass(Tensor)
            if x.is_meta:
                return torch.empty_like(x)
            if x.is_inference() or x.is_conj() or x.is_neg():
                return x.clone()
            storage = x.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage.clone()
            return _on(self._storages[storage._cdata], x)

    @torch.no_grad()
    def _lazily(self, x: Tensor) -> torch.UntypedStorage | None:
        if not is_plain(x) or x.is_meta:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            x = x.detach().as_subclass(Tensor)
            storage = x.untyped_storage()._cdata
            if storage not in self._kept:
                try:
                    self._kept[storage] = torch._lazy_clone(x).untyped_storage()
                except (AttributeError, RuntimeError):  # memory of another kind
                    self._kept[storage] = None
            return self._kept[storage]


@dataclass
class _Shared:
    # A shared tensor, another one on the same memory, which tells its form, where that memory
    # began, its version, what keeps its values, and what else a run may set of it.
    tensor: Tensor
    alias: Tensor
    start: int
    version: int
    kept: torch.UntypedStorage | None
    requires_grad: bool
    attributes: dict[str, Any]

    @classmethod
    def of(cls, x: Tensor, kept: torch.UntypedStorage | None) -> _Shared:
        alias = x if kept is None else x.detach()
        return cls(x, alias, memory(x), x._version, kept, x.requires_grad, dict(vars(x)))

    @property
    def is_written(self) -> bool:
        return self.tensor._version != self.version

    @property
    def is_exchanged(self) -> bool:
        # A run may convert a module that it calls (`self.layer.to(x.dtype)`).
        x, before = self.tensor, self.alias
        return memory(x) != self.start or _form(x) != _form(before)

    @torch.no_grad()
    def put_back(self) -> bool:
        """Give the tensor its own memory and values; False where they could not be kept."""
        if self.kept is not None and (self.is_written or self.is_exchanged):
            self.tensor.data = _on(self.kept, self.alias)
        x = self.tensor
        if x.is_leaf and x.requires_grad != self.requires_grad:
            x.requires_grad_(self.requires_grad)
        # Other threads may read them: what is as it was is left alone.
        for name in vars(x).keys() - self.attributes.keys():
            del vars(x)[name]
        for name, value in self.attributes.items():
            if vars(x).get(name) is not value:
                vars(x)[name] = value
        return self.kept is not None or not self.is_written


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.layout, x.device


def memory(x: Tensor) -> int:
    """Where the memory of a tensor begins. ``data_ptr()`` would copy what is cloned lazily."""
    return torch._C._data_address(x)  # type: ignore[attr-defined]


def address(x: Tensor) -> int:
    """Where a tensor's values begin in memory."""
    return memory(x) + int(x.storage_offset()) * x.itemsize


def is_same(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, as a detached one is."""
    same = x.shape == other.shape and x.stride() == other.stride()
    return same and x.dtype == other.dtype and address(x) == address(other)


def version_of(x: Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, where nobody counts."""
    return 0 if x.is_inference() else x._version


def is_plain(x: Tensor) -> bool:
    """Whether a tensor holds its values in memory as PyTorch's own do, and has no graph."""
    own_kind = isinstance(x, nn.Parameter) and type(x) is not nn.Parameter
    if own_kind or is_traceable_wrapper_subclass(x) or x.grad_fn is not None:
        return False
    return x.layout == torch.strided and not (x.is_nested or x.is_quantized)


def _on(storage: torch.UntypedStorage, x: Tensor) -> Any:
    # A tensor of the form of x in other memory.
    return x.new_empty(0).set_(storage, x.storage_offset(), x.size(), x.stride())
