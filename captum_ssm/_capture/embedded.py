"""Which of the ids of an input an embedding table was given."""

from __future__ import annotations

import torch
from torch import Tensor


def entries_of(given: Tensor, ids: Tensor) -> Tensor | None:
    """The entries of ``ids``, counted from 0 in their flat order, that ``given`` holds.

    None if it holds others. A view of ids, such as one column of a table, is known by its memory;
    a copy only if it holds all of them.

    Args:
        given (Tensor): what a table was given, of any shape.
        ids (Tensor): one of the model's inputs.
    """
    if is_view(given, ids):
        own, asked = _addresses(ids).flatten(), _addresses(given)
        entry = torch.full((int(max(own.max(), asked.max())) + 1,), -1)
        entry[own] = torch.arange(len(own))
        found = entry[asked]
        return None if bool((found < 0).any()) else found
    if given.shape == ids.shape and torch.equal(given.to(ids.device), ids):
        return torch.arange(ids.numel()).view(ids.shape)
    return None


def is_view(given: Tensor, ids: Tensor) -> bool:
    """Whether two tensors share their memory."""
    memory, other = given.untyped_storage().data_ptr(), ids.untyped_storage().data_ptr()
    return given.dtype == ids.dtype and memory == other


def _addresses(x: Tensor) -> Tensor:
    # Of each entry, in its storage.
    found = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found[..., None] + stride * torch.arange(size)
    return found
