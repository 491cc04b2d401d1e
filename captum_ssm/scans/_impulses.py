"""The map of a call that no form explains, measured with impulses.

Sparse attention, path attention, stick-breaking attention: whatever a function does of its queries
and keys, if it is linear in its values, head by head, then its maps are what it returns of one
impulse for each token. A head of P channels takes P impulses at a time, so the function runs L / P
times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm._nested import first_of
from captum_ssm.operators import WeightsOperator
from captum_ssm.scans._calls import FunctionCall, not_intercepted
from captum_ssm.scans._form import Candidate

_NAMES = (
    ("q", "query", "queries"),
    ("k", "key", "keys"),
    ("v", "value", "values"),
)
# By the number of axes, layouts with the axes of tokens and heads.
_LAYOUTS: dict[int, tuple[tuple[str, int, int | None], ...]] = {
    3: (("BLD", 1, None),),
    4: (("BLHP", 1, 2), ("BHLP", 2, 1)),
}
# The numbers of all maps together; those of longer sequences would not fit into memory.
_LARGEST = 1 << 28


def can_be_measured(call: FunctionCall, returned: Tensor) -> bool:
    """Whether a call takes q, k and v and returns a result for each token.

    They have four axes each, or three, ``(B, L, N)``, where there is one head.
    Not where the maps would have more than 2^28 numbers (4096 tokens of 16 heads).
    """
    names = _roles(call)
    if names is None:
        return False
    q, k, v = (call.arguments[name] for name in names)
    if not all(torch.is_tensor(t) and t.dim() in (3, 4) for t in (q, k, v, returned)):
        return False
    if len({t.dim() for t in (q, k, v, returned)}) > 1:
        return False
    if not v.is_floating_point() or v.shape[-1] != returned.shape[-1]:
        return False
    if returned.shape[:-1].numel() * max(returned.shape[1:-1]) > _LARGEST:
        return False
    return k.shape[:-1] == v.shape[:-1] and q.shape[:-1] == returned.shape[:-1]


def candidates_by_impulses(call: FunctionCall, returned: Tensor) -> list[Candidate]:
    """What a call computes if it is linear in its values, with heads last or before the tokens."""
    names = _roles(call)
    assert names is not None
    name = names[2]
    v, found = call.arguments[name], []
    for layout, tokens, heads in _LAYOUTS[v.dim()]:
        groups = returned.shape[heads] // v.shape[heads] if heads else 1
        if v.shape[tokens] != returned.shape[tokens]:
            continue
        if heads and groups * v.shape[heads] != returned.shape[heads]:
            continue
        weights = _weights(call, name, tokens)
        if weights is None:
            continue
        value = v if tokens == 1 else v.transpose(1, 2)
        value = value.repeat_interleave(groups, 2).flatten(2) if heads else value
        weights = weights if heads else weights[:, None]
        operator = WeightsOperator(weights, width=v.shape[-1])
        found.append(Candidate(operator=operator, values=value, layouts=(layout,)))
    return found


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
    found = torch.cat(columns, -1)
    found = found.transpose(1, 2) if tokens == 1 and v.dim() == 4 else found
    wide = torch.promote_types(found.dtype, torch.float32)
    return found.to(wide) if bool(found.isfinite().all()) else None


def _roles(call: FunctionCall) -> list[str] | None:
    given = call.arguments
    found = [next((n for n in names if n in given), None) for names in _NAMES]
    return None if None in found else [str(name) for name in found]
