"""Keeping to a limit of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch

from captum_ssm.errors import brief
from captum_ssm.utils.blocks import bound, contextmanager
from captum_ssm.utils.clones import memory
from captum_ssm.utils.saved_tensors import Save, saving

_LIMIT: ContextVar[int | None] = ContextVar("captum_ssm_memory_limit", default=None)
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class MemoryLimitError(ValueError):
    """A request does not fit ``memory_limit``; the message says what would.

    Examples::

        >>> try:
        ...     hidden_attention(model, input_ids, memory_limit=100)
        ... except MemoryLimitError as error:
        ...     print("more than memory_limit=100 B" in str(error))
        True
    """


@contextmanager
def memory_limit(limit: int | None) -> Iterator[None]:
    """Keep the working memory of what runs inside to about ``limit`` bytes (None: no limit)."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"memory_limit is {brief(limit)}; expected a positive number of bytes, or None."
        )
    with bound(_LIMIT, limit):
        yield


def tile_entries(default: int) -> int:
    """The numbers a working tile may hold: ``default``, or less under a memory limit."""
    limit = _LIMIT.get()
    # A tile exists a few times over: what is read, what is made of it, and the sum.
    return default if limit is None else max(1, min(default, limit // 32))


@contextmanager
def limited_graph(model: torch.nn.Module, what: str) -> Iterator[None]:
    """Raise `MemoryLimitError` once the graph recorded inside keeps more bytes than the limit.

    The parameters and buffers of ``model`` are not counted.
    """
    limit = _LIMIT.get()
    if limit is None:
        yield
        return
    of_model = {memory(t) for t in (*model.parameters(), *model.buffers())}
    saved: Counter[int] = Counter()  # how often a storage is kept
    total = 0

    class Kept:
        # Stands in the graph for a tensor, and is counted for as long as it is there.
        def __init__(self, tensor: torch.Tensor, restore: Callable[[], torch.Tensor]) -> None:
            nonlocal total
            self.tensor, self.restore, self.storage = tensor, restore, memory(tensor)
            total += 0 if saved[self.storage] else tensor.untyped_storage().nbytes()
            saved[self.storage] += 1

        def __call__(self) -> torch.Tensor:
            return self.restore()

        def __del__(self) -> None:
            nonlocal total
            saved[self.storage] -= 1
            total -= 0 if saved[self.storage] else self.tensor.untyped_storage().nbytes()

    def keep(tensor: torch.Tensor, save: Save) -> Callable[[], torch.Tensor]:
        if memory(tensor) in of_model:
            return save(tensor)
        kept = Kept(tensor.detach(), save(tensor))
        if total > limit:
            raise MemoryLimitError(
                f"{what} keeps what every layer computes, which is more than memory_limit="
                f"{readable_bytes(limit)}. Explain fewer or shorter examples at a time, or raise "
                "memory_limit."
            )
        return kept

    with saving(keep):
        yield


def require(needed: int, what: str, would_fit: Sequence[tuple[str, int]] = ()) -> None:
    """Raise `MemoryLimitError` where ``what`` needs more bytes than the limit allows.

    Of ``would_fit``, other requests and their bytes, the message names those that fit.
    """
    limit = _LIMIT.get()
    if limit is None or needed <= limit:
        return
    fits = [f"{name} ({readable_bytes(size)})" for name, size in would_fit if size <= limit]
    advice = f"What would fit: {'; '.join(fits)}." if fits else "Raise memory_limit."
    raise MemoryLimitError(
        f"{what} needs {readable_bytes(needed)}, more than memory_limit="
        f"{readable_bytes(limit)}. {advice}"
    )


# PyTorch's allocator of a CPU has no error of its own. Those of oneDNN, and of what the extension
# allocates by the stable interface, also on a GPU, give no reason.
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    *(f'"aten::{function}"' for function in ("new_empty", "new_zeros", "contiguous")),
)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether less at a time may do: there was no memory, or ``memory_limit`` did not allow it."""
    if isinstance(error, (MemoryError, MemoryLimitError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def readable_bytes(count: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log2(count)) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"
