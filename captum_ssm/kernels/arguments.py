"""How the operations check their arguments, and the dtype that they compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_error(name: str, x: Tensor, expected: str) -> ValueError:
    return ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def check_dims(**tensors: tuple[Tensor | None, int]) -> None:
    """Raise for tensors that have another number of dimensions, or that are not of one dtype."""
    present = {name: (x, dim) for name, (x, dim) in tensors.items() if x is not None}
    for name, (x, dim) in present.items():
        if x.dim() != dim:
            raise shape_error(name, x, f"{dim} dimensions")
    dtypes = {x.dtype for x, _ in present.values()}
    if len(dtypes) > 1:
        raise TypeError(f"the arguments are {sorted(map(str, dtypes))}; expected one dtype")


def promote(**tensors: Tensor | None) -> list[Any]:
    """All tensors in the dtype that is computed in; they must be on one device."""
    present = {name: x for name, x in tensors.items() if x is not None}
    for name, x in present.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}; expected float16, bfloat16, float32 or float64")
    devices = {name: x.device for name, x in present.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the arguments are on different devices: {devices}; expected one device")
    double = any(x.dtype == torch.float64 for x in present.values())
    dtype = torch.float64 if double else torch.float32
    return [None if x is None else x.to(dtype) for x in tensors.values()]


def row_index(index: Tensor, like: Tensor) -> Tensor:
    """Rows asked for, ``(B, R)`` or ``(R,)``, as ``(B, R)`` int64 for tensors ``(B, L, ...)``."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index is {index.dtype}; expected int64")
    if index.dim() == 1:
        index = index.expand(like.shape[0], -1)
    if index.dim() != 2 or index.shape[0] != like.shape[0]:
        raise shape_error("index", index, f"(B, R) with B = {like.shape[0]}, or (R,)")
    index = index.to(device=like.device, dtype=torch.int64)
    length = like.shape[1]
    # Reading values would break a compiled graph; the kernels check them too.
    if not torch.compiler.is_compiling() and index.numel():
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= length:
            raise IndexError(f"index has rows from {low} to {high}; expected rows in [0, {length})")
    return index


def row_range(start: int, stop: int | None, like: Tensor) -> tuple[int, int]:
    """The rows ``[start, stop)`` asked for, checked for tensors ``(B, L, ...)``."""
    length = like.shape[1]
    stop = length if stop is None else stop
    if not 0 <= start < stop <= length:
        raise ValueError(
            f"start and stop are {start} and {stop}; "
            f"expected 0 <= start < stop <= L with L = {length}"
        )
    return start, stop
