"""Memory that is used again within a call, instead of being asked for anew for every tensor.

glibc gives the memory of every large tensor back to the operating system, and the next one costs a
page fault for each 4 KiB, which took as long as the computation from 16k tokens on. It learns from
tensors of less than 32 MiB to keep theirs, mostly: then its memory is the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import Any

import torch

from captum_ssm.kernels import extension_loaded
from captum_ssm.utils.blocks import contextmanager, undo

MIB = 1 << 20


@contextmanager
def workspace(smallest: int = 8 * MIB) -> Iterator[None]:
    """Keep the memory of tensors that are freed inside, for the next ones; also as a decorator.

    On a CPU, also that of the user's model and of autograd. Pages are asked for only where none are
    kept, so the peak does not grow. At the end of the outermost workspace all that is kept is given
    back; tensors that are still there stay valid. Without the compiled allocator nothing changes.

    Args:
        smallest (int, optional): bytes of the smallest tensors that it is for; a workspace within
            another one can only lower it. Default: 8 MiB
    """
    allocator = _allocator()
    if allocator is None:
        yield
        return
    with ExitStack() as stack, stack:
        entered: list[Any] = []
        undo(stack, lambda: entered and (entered.pop(), allocator.leave()))
        entered.append(allocator.enter(smallest))
        yield


@cache
def _allocator() -> Any:
    # PyTorch's allocators are no part of its stable ABI: built for one release, used with that one.
    if not extension_loaded():
        return None
    try:
        allocator = import_module("captum_ssm._C_allocator")
    except ImportError:
        return None
    return allocator if _release(allocator.TORCH) == _release(torch.__version__) else None


def _release(version: str) -> list[str]:
    return version.split(".")[:2]
