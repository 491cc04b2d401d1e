"""Forms of scans of heads, which take queries, keys and values.

A form says what is special about a function: its other arguments, and the coefficients that it
makes of them. How heads are laid out is the same for all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.scans.form import Build, Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import QKV, working_dtype
from captum_ssm.mixers.parts import unit as unit_length
from captum_ssm.operators import LinearAttentionOperator, TokenOperator

# The largest share of a result that may not be explained by one factor per head.
_UNEXPLAINED = 0.05
_NAMES = QKV | {
    "heads": ("H", "num_heads", "n_head", "n_heads"),
    "unit": ("use_qk_l2norm_in_kernel",),
}


@dataclass(frozen=True)
class Heads:
    """What a call is given for each head.

    Args:
        q, k (Tensor): queries and keys, ``(B, L, H, N)``, in the operator's dtype.
        v (Tensor): values, ``(B, L, H, P)``, with their graph.
        layouts (tuple of str): those in which the function may return its result.
        scale (float, optional): that of the queries, if the function takes one.
        unit (bool): whether queries and keys were scaled to unit length.
        returned (Tensor, optional): what the function returned, ``(B, L, H, P)``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layouts: tuple[str, ...]
    scale: float | None
    unit: bool
    returned: Tensor | None

    @property
    def query(self) -> Tensor:
        """The queries, scaled."""
        return self.q * (self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def candidate(self, operator: TokenOperator) -> Candidate:
        """An operator that the function may have applied to the values."""
        return Candidate(operator=operator, values=self.v.flatten(2), layouts=self.layouts)

    def linear(
        self, query: Tensor, key: Tensor, log_decay: Tensor, **others: Tensor | None
    ) -> Candidate:
        """Linear attention; the decay is one per head, ``(B, L, H)``, or ``(B, L, H, 1 or N)``."""
        log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None]
        coefficients = {"query": query, "key": key, "log_decay": log_decay} | others
        tensors: Any = {name: t if t is None else t.to(self.q) for name, t in coefficients.items()}
        return self.candidate(LinearAttentionOperator(**tensors, width=self.v.shape[-1]))

    def delta(self, log_decay: Tensor, *, write: Tensor, probe: Tensor) -> Candidate:
        """The delta rule: what the state holds at ``probe`` is subtracted before a write."""
        return self.linear(self.query, write, log_decay, erase=write, probe=probe)


def register_heads(
    names: Mapping[str, Sequence[str]] | None = None,
    *,
    enlarge: Sequence[str] = (),
    layouts: Sequence[tuple[str, ...]] = (("BLHP",),),
) -> Callable[[Build], Build]:
    """Register a form of scans: a function of :class:`Heads` and of the other arguments.

    Args:
        names, enlarge: as for :func:`register_scan`; roles of all these forms are q, k, v, their
            scale, whether they are scaled to unit length, and the number of heads.
        layouts (sequence of tuple, optional): by layout of the arguments, ``"BLHP"`` or ``"BHLP"``,
            that one and others of the result. With both, heads may also stand side by side,
            ``(B, L, H P)``, as in RWKV's kernels. Default: tokens before heads
    """

    def register(build: Build) -> Build:
        _, *others = inspect.signature(build).parameters.values()

        @functools.wraps(build)
        def form(**arguments: Any) -> Iterator[Candidate]:
            apart = _taken_apart(**arguments) if len(layouts) > 1 else None
            for candidate in () if apart is None else form(**apart):
                if candidate.layouts[0] == "BLHP":
                    yield replace(candidate, layouts=("BLD",))
            for axes in layouts:
                moved = {
                    role: _tokens_first(t, axes[0], arguments["q"]) for role, t in arguments.items()
                }
                heads = _heads(axes, **moved)
                if heads is not None:
                    yield from build(
                        heads, **{p.name: moved.get(p.name, p.default) for p in others}
                    )

        roles = [*inspect.signature(_heads).parameters.values()][1:-1]
        roles = sorted([*roles, *others], key=lambda p: p.default is not p.empty)
        form.__signature__ = inspect.Signature(roles)  # type: ignore[attr-defined]
        register_scan(form, names=_NAMES | dict(names or {}), enlarge=enlarge)
        return form

    return register


def _heads(
    layouts: tuple[str, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    unit: bool = False,
    heads: int | None = None,
    returned: Tensor | None = None,
    **others: Any,
) -> Heads | None:
    # None for what are not heads of the same tokens. Several heads of values may share a query and
    # a key, or several queries a key and a value.
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[-1] != k.shape[-1]:
        return None
    H = max(t.shape[2] for t in (q, k, v))
    if not q.shape[:2] == k.shape[:2] == v.shape[:2] or any(H % t.shape[2] for t in (q, k, v)):
        return None
    returned = None if returned is None or returned.shape != v.shape else returned
    dtype = working_dtype(q, k, v)
    q, k = (unit_length(t.to(dtype)) if unit else t.to(dtype) for t in (q, k))
    q, k, v = (t.repeat_interleave(H // t.shape[2], 2) if t.shape[2] < H else t for t in (q, k, v))
    return Heads(q, k, v, layouts, scale, unit, returned)


def _tokens_first(t: Any, layout: str, like: Tensor) -> Any:
    is_moved = layout == "BHLP" and torch.is_tensor(t) and t.shape[:3] == like.shape[:3]
    return t.transpose(1, 2) if is_moved and t.dim() > 2 else t


def _taken_apart(
    *, v: Tensor, heads: int | None = None, returned: Tensor | None = None, **others: Any
) -> dict[str, Any] | None:
    # What has the shape of values whose heads stand side by side, taken apart. The result says how
    # many heads there are where no argument does.
    if v.dim() != 3 or returned is None or returned.shape != v.shape:
        return None
    if heads and v.shape[-1] % heads:
        return None
    width = v.shape[-1] // heads if heads else _head_width(v[:, 0], returned[:, 0])
    arguments = others | {"v": v}
    same = [role for role, t in arguments.items() if torch.is_tensor(t) and t.shape == v.shape]
    return arguments | {role: arguments[role].unflatten(-1, (-1, width)) for role in same}


def _head_width(v: Tensor, y: Tensor) -> int:
    # A recurrence returns the value (B, D) of the first token, by one factor per head: the widest
    # heads for which that holds are taken. Made for RWKV-5 and 6, whose kernels take heads side by
    # side and say nowhere how wide they are.
    def share_left(width: int) -> float:
        value, result = (t.detach().double().unflatten(-1, (-1, width)) for t in (v, y))
        factor = (value * result).sum(-1, True) / value.square().sum(-1, True).clamp(min=1e-300)
        return float((result - factor * value).norm() / result.norm().clamp(min=1e-300))

    D = v.shape[-1]
    widths = (width for width in range(D, 0, -1) if D % width == 0)
    return next(width for width in widths if width == 1 or share_left(width) < _UNEXPLAINED)
