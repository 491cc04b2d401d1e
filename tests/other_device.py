"""A second device in memory, for machines that have none: importing this file registers it.

Its tensors hold one of the CPU's, and refuse to meet one that is not theirs, as a GPU's do. To be
imported before any backward pass, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("other")
torch.__future__.set_overwrite_module_params_on_conversion(True)
torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes them on the CPU first

DEVICE = torch.device("other", 0)
aten: Any = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)


class OtherTensor(Tensor):
    """A tensor on the second device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OtherTensor:
        made: OtherTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.detach().held.tolist()


class OtherDevice(TorchDispatchMode):
    """While it is active, tensors can be made on the second device, and moved there and back."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function returns, on the device of its tensors, or the one that it is asked for.

    Raises:
        RuntimeError: for tensors of both devices.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    others = [x for x in tensors if isinstance(x, OtherTensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if others and len(others) < len(tensors) and not _may_meet(function, args, tensors):
        shapes = [(tuple(x.shape), x.device.type) for x in tensors]
        raise RuntimeError(f"{function} is given tensors of two devices: {shapes}")
    is_other = bool(others) if asked is None else asked.type == DEVICE.type
    if not others and not is_other:
        return function(*args, **kwargs)
    if is_other and asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if others and torch.Tag.inplace_view in function.tags:  # such as squeeze_
        function(_held(args[0]), *args[1:], **kwargs)
        with no_dispatch():
            return function(*args, **kwargs)
    args, kwargs = tree_map(_held, (args, kwargs))
    found = function(*args, **kwargs)
    given = {id(_held(x)): x for x in tensors}  # what is written in place is returned as it is

    def one(x: Any) -> Any:
        if not (torch.is_tensor(x) and is_other):
            return x
        return given[id(x)] if id(x) in given else OtherTensor(x)

    return tree_map(one, found)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OtherTensor) else x


def _may_meet(function: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    # As on a GPU: in copies, numbers on the CPU, and indices on the CPU.
    if function in COPIES:
        return True
    here = [x for x in tensors if not isinstance(x, OtherTensor)]
    if torch.Tag.pointwise in function.tags or function is aten.where.self:
        return all(x.dim() == 0 for x in here)
    is_indexed = function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
    is_here = not isinstance(args[0], OtherTensor)
    return is_indexed and not is_here and not any(x.is_floating_point() for x in here)
