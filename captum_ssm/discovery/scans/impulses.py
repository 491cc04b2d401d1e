"""The map of a call that no form explains, measured with impulses.

Sparse attention, path attention, stick-breaking attention: whatever a function does of its queries
and keys, if it is linear in its values, head by head, then its maps are what it returns of one
impulse for each token. A head of P channels takes P impulses at a time, so the function runs L / P
times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.scans.calls import FunctionCall, not_intercepted
from captum_ssm.discovery.scans.form import Candidate
from captum_ssm.discovery.scans.steps import LARGEST
from captum_ssm.operators import WeightsOperator
from captum_ssm.utils.nested import first_of

_NAMES = (
    ("q", "query", "queries"),
    ("k", "key", "keys"),
    ("v", "value", "values"),
)
# For each number of axes, the layouts with the axes of tokens and heads.
_LAYOUTS: dict[int, tuple[tuple[str, int, int | None], ...]] = {
    3: (("BLD", 1, None),),
    4: (("BLHP", 1, 2), ("BHLP", 2, 1)),
}


def measurable_values(call: FunctionCall, returned: Tensor) -> str | None:
    """The name of a call's values, if it takes q, k and v and returns a result for each token.

    They have four axes each, or three, ``(B, L, N)``, where there is one head. None for another
    call, and where the maps would have more than 2^28 numbers (4096 tokens of 16 heads).
    """
    arguments = call.arguments
    names = [next((n for n in known if n in arguments), "") for known in _NAMES]
    tensors: list[Any] = [arguments.get(name) for name in names]
    if not all(torch.is_tensor(t) and t.dim() == returned.dim() for t in tensors):
        return None
    q, k, v = tensors
    if returned.dim() not in _LAYOUTS or not v.is_floating_point():
        return None
    if v.shape[-1] != returned.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        return None
    numbers = math.prod(returned.shape[:-1]) * max(returned.shape[1:-1])
    return names[2] if q.shape[:-1] == returned.shape[:-1] and numbers <= LARGEST else None


def candidates_by_impulses(call: FunctionCall, name: str, returned: Tensor) -> Iterator[Candidate]:
    """What a call computes if it is linear in its values, with heads last or before the tokens."""
    v = call.arguments[name]
    for layout, tokens, heads in _LAYOUTS[v.dim()]:
        groups = returned.shape[heads] // v.shape[heads] if heads else 1
        if v.shape[tokens] != returned.shape[tokens]:
            continue
        if heads and groups * v.shape[heads] != returned.shape[heads]:
            continue
        weights = _weights(call, name, tokens)
        if weights is None:
            continue
        values = v if tokens == 1 else v.transpose(1, 2)
        values = values.repeat_interleave(groups, 2).flatten(2) if heads else values
        operator = WeightsOperator(weights if heads else weights[:, None], width=v.shape[-1])
        yield Candidate(operator=operator, values=values, layouts=(layout,))


def _weights(call: FunctionCall, name: str, tokens: int) -> Tensor | None:
    # (B, H, L, L), or (B, L, L) of one head.
    v = call.arguments[name].detach()
    L, P = v.shape[tokens], v.shape[-1]
    columns = []
    for start in range(0, L, P):
        at = torch.arange(min(P, L - start), device=v.device)
        impulses = torch.zeros_like(v)
        impulses.movedim(tokens, -2)[..., start + at, at] = 1
        with torch.no_grad(), not_intercepted():
            y = first_of(call.with_arguments({name: impulses}).run())
        columns.append(y[..., : len(at)])
    maps = torch.cat(columns, -1)
    maps = maps.transpose(1, 2) if tokens == 1 and v.dim() == 4 else maps
    wide = torch.promote_types(maps.dtype, torch.float32)
    return maps.to(wide) if bool(maps.isfinite().all()) else None
