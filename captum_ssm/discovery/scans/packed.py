"""Calls of several sequences packed into one row, as flash-attn and fla take them.

``cu_seqlens`` says where each sequence begins. A padded batch is packed before such a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.scans.calls import FunctionCall
from captum_ssm.operators import PackedOperator


def sequences(call: FunctionCall) -> list[tuple[FunctionCall, slice]] | None:
    """A call for each of the packed sequences, and where its tokens are; None for one sequence."""
    arguments = call.arguments
    bounds = {name: value for name, value in arguments.items() if name.startswith("cu_seqlens")}
    bounds = {name: value for name, value in bounds.items() if torch.is_tensor(value)}
    if not bounds:
        return None
    first = next(iter(bounds.values()))
    ends = first.tolist()
    if first.dim() != 1 or len(ends) < 3 or any(not torch.equal(b, first) for b in bounds.values()):
        return None
    parts = []
    for start, stop in pairwise(ends):
        changed: dict[str, Any] = {
            name: value.new_tensor([0, stop - start]) for name, value in bounds.items()
        }
        for name, value in arguments.items():
            if name.startswith("max_seqlen"):
                changed[name] = stop - start
            elif torch.is_tensor(value) and name not in bounds:
                changed[name] = _part(value, start, stop, ends[-1])
        parts.append((call.with_arguments(changed), slice(start, stop)))
    return parts


def joined(operators: Sequence[Any], parts: Sequence[slice]) -> PackedOperator:
    """The operators of packed sequences as one over their row."""
    device = operators[0].device
    at = tuple(torch.arange(part.start, part.stop, device=device) for part in parts)
    return PackedOperator(tuple(operators), (0,) * len(parts), at, (1, parts[-1].stop))


def _part(value: Tensor, start: int, stop: int, total: int) -> Tensor:
    # The part of (1, T, ...), or (T, H, N), or, with several numbers per token, (1, n T, ...).
    if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] and value.shape[1] % total == 0:
        steps = value.shape[1] // total
        return value[:, start * steps : stop * steps]
    return value[start:stop] if value.dim() == 3 and value.shape[0] == total else value
