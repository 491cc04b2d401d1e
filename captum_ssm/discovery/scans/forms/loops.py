"""Scans that a module writes out: a loop over the tokens, whose results are gathered at its end.

``torch.stack(outputs, 1)``, ``torch.cat`` of single tokens, or a tensor whose last token was
written to, is then what a scan function returns, and the variables of the code around it, with the
tensors of the module it belongs to, are the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.discovery.scans.form import forms_of, names_of_module
from captum_ssm.discovery.scans.forms.products import frames_in_module, name_of

GATHERS = frozenset((torch.stack, torch.cat, torch.concat, Tensor.__setitem__))


@dataclass(frozen=True)
class TokenLoop:
    """A place in a model's code where the results of a loop are gathered.

    Args:
        code (CodeType): of the function that the loop stands in.
        at (int): the instruction that gathers.
        result (Tensor, optional): what it gathered, in one run: the loop as a function of the
            variables around it. Default: None
    """

    code: CodeType
    at: int
    result: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"a loop in {name_of(self.code)}")

    def __call__(self, **variables: Any) -> Tensor | None:
        return self.result


token_loop = TokenLoop((lambda: None).__code__, 0)


def run_gather(
    func: Any,
    args: Any,
    kwargs: Any,
    is_known: Callable[[TokenLoop], bool],
    handle: Callable[..., Any],
) -> Any:
    """What one of :data:`GATHERS` returns.

    Args:
        func, args, kwargs: the call.
        is_known (Callable): whether a loop may be a scan.
        handle (Callable): takes a known one with its result, the same without, and by name the
            variables around it; returns what takes the place of the result.
    """
    returned = func(*args, **kwargs)
    parts = args[0] if args else kwargs.get("tensors")
    is_written = func is Tensor.__setitem__
    gathered = parts if is_written else returned
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if gathered.dim() < 3:
        return returned
    is_whole = _ends(parts, axis) if is_written else 1 < gathered.shape[axis] == len(parts)
    if not is_whole:
        return returned
    frames = frames_in_module(sys._getframe(2))
    if not frames:
        return returned
    loop, variables = TokenLoop(frames[0].f_code, frames[0].f_lasti), _variables(frames[0])
    if not is_known(loop) or not any(True for _ in forms_of(list(variables))):
        return returned
    handled = handle(replace(loop, result=gathered), loop, **variables)
    if is_written and handled is not gathered:
        gathered.detach_().copy_(handled)
    return returned if is_written else handled


def _variables(frame: FrameType) -> dict[str, Tensor]:
    # The tensors that a frame has names for, and those that a loop may take from the module whose
    # method it is.
    owner, taken = frame.f_locals.get("self"), names_of_module()
    of_module = {**owner._buffers, **owner._parameters} if isinstance(owner, nn.Module) else {}
    variables = {**{name: x for name, x in of_module.items() if name in taken}, **frame.f_locals}
    return {name: x for name, x in variables.items() if torch.is_tensor(x)}


def _ends(written: Tensor, index: Any) -> bool:
    # Whether an index is that of the last entry along an axis, of a tensor that owns its numbers.
    if written._is_view():
        return False
    index = index if isinstance(index, tuple) else (index,)
    shape = written.shape
    if any(entry is Ellipsis for entry in index):
        shape, index = shape[::-1], index[::-1]
    pairs = zip(index, shape, strict=False)
    return any(type(entry) is int and 1 < size == entry + 1 for entry, size in pairs)
