"""Loops over tokens that a module writes out, whose results are gathered at their end.

``torch.stack(outputs, 1)``, ``torch.cat`` of single tokens or of all before and one more, or a
tensor whose tokens were all written to, is then what a scan function returns. The variables of the
code around it, with the tensors of the module it belongs to, are the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from captum_ssm.discovery.scans.form import names_of_module
from captum_ssm.discovery.scans.forms.products import frames_in_module, name_of
from captum_ssm.discovery.scans.trace import CallTrace, Traced

GATHERS = frozenset((torch.stack, torch.cat, torch.concat, Tensor.__setitem__))


@dataclass(frozen=True)
class TokenLoop:
    """A site in a model's code where the results of a loop are gathered.

    Args:
        code (CodeType): of the function that the loop stands in.
        at (int): the instruction that gathers.
        result (Tensor, optional): what it gathered, in one run: the loop as a function of the
            variables around it. Default: None
        axis (int, optional): that of the tokens in the result. Default: 0
        parts (tuple, optional): how the result of each token was made, None where that is not
            known. Default: ()
    """

    code: CodeType
    at: int
    result: Tensor | None = field(default=None, compare=False, repr=False)
    axis: int = field(default=0, compare=False)
    parts: tuple[Traced | None, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"a loop in {name_of(self.code)}")

    @property
    def length(self) -> int:
        """The tokens of the result."""
        return 0 if self.result is None else self.result.shape[self.axis]

    def __call__(self, **variables: Any) -> Tensor | None:
        return self.result


token_loop = TokenLoop((lambda: None).__code__, 0)


class Gathers:
    """The calls of :data:`GATHERS` in a run."""

    def __init__(self, trace: CallTrace | None = None) -> None:
        self.trace = trace
        self._written = WeakIdKeyDictionary()  # by tensor and axis, the tokens written to it
        self._grown = WeakIdKeyDictionary()  # by tensor, the tokens that it was put together of

    def run(
        self,
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
        is_written = func is Tensor.__setitem__
        gathered = args[0] if is_written else returned
        if gathered.dim() < 2:
            return returned
        put_together = self._written_to if is_written else partial(self._joined, returned)
        axis, parts, grows = put_together(*args, **kwargs)
        if not 1 < gathered.shape[axis] == len(parts):
            return returned
        frames = frames_in_module(sys._getframe(2))
        if not frames or (grows and not _is_whole(frames[0], gathered, axis)):
            return returned
        loop = TokenLoop(frames[0].f_code, frames[0].f_lasti)
        if not is_known(loop):
            return returned
        of_run = replace(loop, result=gathered, axis=axis, parts=tuple(parts))
        handled = handle(of_run, loop, **_variables(frames[0]))
        if is_written and handled is not gathered:
            gathered.detach_().copy_(handled)
        return returned if is_written else handled

    def _made(self, x: Any) -> Traced | None:
        return None if self.trace is None else self.trace.made(x)

    def _joined(
        self, returned: Tensor, tensors: Any, dim: int = 0
    ) -> tuple[int, list[Traced | None], bool]:
        # The axis of the tokens, how each was made, and whether others may follow, in what stack or
        # cat returned.
        axis, made = dim % returned.dim(), [self._made(x) for x in tensors]
        first, last = tensors[0], tensors[-1]
        if len(tensors) > 2 or last.dim() < returned.dim() or last.shape[axis] != 1:
            return axis, made, False
        length = first.shape[axis]
        before = self._grown.get(first, made[:length] if length <= 1 else None)
        if before is None or len(tensors) < 2:
            return axis, made, False
        made = [*before, made[1]]
        self._grown[returned] = made
        return axis, made, True

    def _written_to(
        self, written: Tensor, index: Any, value: Any
    ) -> tuple[int, list[Traced | None], bool]:
        # As above, for tokens written to a tensor that owns its numbers, once they all are.
        written_at = None if written._is_view() else _single_entry(written.shape, index)
        if written_at is None:
            return 0, [], False
        axis, at = written_at
        tokens = self._written.setdefault(written, {}).setdefault(axis, {})
        tokens[at] = self._made(value)
        if len(tokens) < written.shape[axis]:
            return axis, [], False
        del self._written[written]
        return axis, [tokens[n] for n in range(len(tokens))], False


def _is_whole(frame: FrameType, grown: Tensor, axis: int) -> bool:
    # Whether a tensor that grows is as long as another one that the code around it has.
    others = [x for x in frame.f_locals.values() if torch.is_tensor(x)]
    return any(x.dim() >= grown.dim() and x.shape[axis] == grown.shape[axis] for x in others)


def _variables(frame: FrameType) -> dict[str, Tensor]:
    # The tensors that a frame has names for, and those that a loop may take from the module whose
    # method it is.
    owner, taken = frame.f_locals.get("self"), names_of_module()
    of_module = {**owner._buffers, **owner._parameters} if isinstance(owner, nn.Module) else {}
    variables = {**{name: x for name, x in of_module.items() if name in taken}, **frame.f_locals}
    return {name: x for name, x in variables.items() if torch.is_tensor(x)}


def _single_entry(shape: Sequence[int], index: Any) -> tuple[int, int] | None:
    # The axis and the entry that an index names, if it is one entry of one axis longer than 1.
    index = list(index) if isinstance(index, tuple) else [index]
    if any(entry is Ellipsis for entry in index):
        at = next(n for n, entry in enumerate(index) if entry is Ellipsis)
        index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + 1)
    entries = [
        (axis, entry % size)
        for axis, (entry, size) in enumerate(zip(index, shape, strict=False))
        if type(entry) is int and size != 1
    ]
    others = [entry for entry in index if type(entry) is not int and entry != slice(None)]
    return entries[0] if len(entries) == 1 and not others else None
