"""Sums over tokens that a module writes in line, as linear attention from the right.

``q @ (k.mT @ v)``, or ``(q * (k * v).cumsum(1)).sum(-1)``: first a *memory* is made, which adds up
keys and values of all tokens, or of all so far, and then each token reads it. Neither step is a
product of tokens with a matrix, but both together are. The first result that has the shape of what
the memory was made of may be a scan of that: the calls between are made again, with impulses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from captum_ssm.discovery.scans.form import Candidate
from captum_ssm.discovery.scans.forms.products import (
    PRODUCTS,
    frames_in_module,
    length_added_up,
    name_of,
)
from captum_ssm.discovery.scans.steps import (
    LARGEST,
    LoopRerun,
    LoopSteps,
    NotRead,
    Slot,
    before,
    in_double,
    is_number,
)
from captum_ssm.discovery.scans.trace import CallTrace, Traced, TracedCall
from captum_ssm.graph.relevance_rules import is_constant
from captum_ssm.operators import WeightsOperator

_CUMULATIVE = (torch.cumsum, Tensor.cumsum)
_NEAR = 12  # calls between a memory and what it is made of, and between it and what is read of it
_NEAR_LINEAR = 1e-3  # relative error of what is worth being measured

# Where a call reads a tensor: the call, and which of its arguments.
Reader = tuple[TracedCall, int]


@dataclass(frozen=True)
class TokenSum:
    """A site in a model's code where a sum over tokens is made, or read.

    Args:
        code (CodeType): of the function that it stands in.
        at (int): the instruction that calls.
        length (int, optional): how many tokens are added up, in one run. Default: 0
        result (Tensor, optional): what was returned there, in one run. Default: None
        made (Traced, optional): how that was made. Default: None
        reads (tuple, optional): where its values may be read. Default: ()
    """

    code: CodeType
    at: int
    length: int = field(default=0, compare=False)
    result: Tensor | None = field(default=None, compare=False, repr=False)
    made: Traced | None = field(default=None, compare=False, repr=False)
    reads: tuple[Reader, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"a sum over tokens in {name_of(self.code)}")

    def __call__(self) -> Tensor | None:
        return self.result

    @classmethod
    def called(cls, **of_run: Any) -> TokenSum | None:
        """The site that the model's code is at; None inside of an autograd function."""
        frames = frames_in_module(sys._getframe(2))
        return cls(frames[0].f_code, frames[0].f_lasti, **of_run) if frames else None

    def candidates(self) -> Iterator[Candidate]:
        """What it may compute: maps of tokens, measured with impulses in its values.

        Raises:
            NotRead: for maps of too many numbers.
        """
        for call, number in self.reads:
            assert self.made is not None
            assert self.result is not None
            values, result = call.values()[number], self.result.detach()
            if is_constant(values):  # as an exponential is, of keys
                continue
            values, calls = values.reshape(result.shape), before(self.made, since=call.order)
            slot = len(calls) - 1 - calls.index(call), number
            changes = partial(self._changes, LoopSteps((self.made,), (calls,)), slot)
            with torch.no_grad():
                whole = changes(values.detach())
            if float((whole - result).norm()) > _NEAR_LINEAR * float(result.norm()):
                continue
            tokens = [n for n in range(1, result.dim()) if result.shape[n] == self.length]
            for axis in sorted(tokens, key=lambda axis: axis == result.dim() - 1):
                yield from self._along(axis, values, changes)

    def _along(
        self, axis: int, values: Tensor, changes: Callable[[Tensor], Tensor]
    ) -> Iterator[Candidate]:
        # One map per head is tried first: its channels are the last axis but that of the tokens.
        assert self.result is not None
        B, *heads, L, P = values.movedim(axis, -2).shape
        dtype = torch.promote_types(values.dtype, torch.float32)

        def after(y: Tensor) -> Tensor:
            return y.view(B, L, *heads, P).movedim(1, axis)

        for width in {P: 0, 1: 0}:
            if values.numel() // width * L > LARGEST:
                raise NotRead(f"its maps of {L} tokens have more than 2^28 numbers")
            maps = torch.cat([*_columns(values.detach(), axis, width, changes)], -1).to(dtype)
            yield Candidate(
                operator=WeightsOperator(maps.reshape(B, -1, L, L), width=width),
                values=values.movedim(axis, 1).flatten(2),
                layouts=("BLD",),
                returned=self.result.movedim(axis, 1).flatten(2),
                after=after,
            )

    def _changes(self, steps: LoopSteps, slot: Slot, changed: Tensor) -> Tensor:
        # How the result changes with the values.
        def change(step: int, other: Slot, x: Tensor) -> Tensor | None:
            return in_double(changed).reshape(1, *x.shape) if other == slot else None

        y = LoopRerun(steps).changes(change, steps.results).get(steps.results[0])
        return torch.zeros_like(changed) if y is None else y.reshape(changed.shape)


def _columns(
    like: Tensor, axis: int, width: int, changes: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    # What tokens read of some of them, (B, ..., L, n) of heads so wide, by head or by channel. With
    # an impulse in a channel of its own for each token, that is where the result is looked at.
    moved = like.movedim(axis, -2)
    L, P = moved.shape[-2:]
    for first in range(0, L, width):
        at = torch.arange(min(width, L - first), device=like.device)
        impulses = torch.zeros_like(moved)
        impulses[..., first + at, at if width == P else slice(None)] = 1
        y = changes(impulses.movedim(-2, axis)).movedim(axis, -2)
        yield y[..., : len(at)] if width == P else y.mT[..., None]


token_sum = TokenSum((lambda: None).__code__, 0)


class Memories:
    """The sums over tokens of a run, and what is read of them.

    Args:
        trace (CallTrace, optional): the calls of the run; without it, what adds up tokens is all
            that is told. Default: None
    """

    def __init__(self, trace: CallTrace | None = None) -> None:
        self.trace = trace
        # By tensor, the memories it is made of, how many tokens they are of, and how many calls
        # were made since.
        self._since = WeakIdKeyDictionary()

    def run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        is_known: Callable[[TokenSum], bool],
        handle: Callable[..., Any],
    ) -> Any:
        """What takes the place of what a call returned.

        Args:
            func, args, kwargs, result: the call.
            is_known (Callable): whether a sum may be a scan.
            handle (Callable): takes a known one with its result, and the same without; returns what
                takes the place of the result.
        """
        if not torch.is_tensor(result) or not result.is_floating_point() or result.dim() < 3:
            return result
        length = _added_up(func, args, kwargs)
        if self.trace is None:
            site = TokenSum.called(length=length, result=result) if length > 1 else None
            return result if site is None else handle(site, site)
        made = self.trace.made(result)
        if made is None:
            return result
        since = self._before(made.call)
        for (memory, count), _ in since.items():
            reads = _reads(memory, result) if count in result.shape else ()
            site = TokenSum.called(length=count, result=result, made=made, reads=reads)
            if reads and site is not None and is_known(site):
                handled = handle(site, site)
                if handled is not result:
                    return handled
        if length > 1:
            since[made, length] = 0
        if since:
            self._since[result] = since
        return result

    def _before(self, call: TracedCall) -> dict[tuple[Traced, int], int]:
        since = dict[tuple[Traced, int], int]()
        for x in filter(torch.is_tensor, call.leaves):
            for memory, count in self._since.get(x, {}).items():
                if count < _NEAR:
                    since[memory] = max(count + 1, since.get(memory, 0))
        return since


def _reads(memory: Traced, like: Tensor) -> tuple[Reader, ...]:
    # Where what a memory is made of is read that has the shape of a tensor, the last one first.
    # What is summed up to each token is a product of keys and values, which is not one of these.
    shape = [size for size in like.shape if size > 1]
    near = [*reversed(before(memory, most=_NEAR))]
    return tuple(
        (call, n)
        for call in near[memory.call.function in _CUMULATIVE :]
        for n, x in reversed([*enumerate(call.leaves)])
        if is_number(x) and [size for size in x.shape if size > 1] == shape
    )


def _added_up(func: Any, args: Any, kwargs: Any) -> int:
    # How many tokens a call may add up; 0 for others.
    if func in _CUMULATIVE:
        x, axis = args[0] if args else kwargs["input"], kwargs.get("dim", args[-1])
        return int(x.shape[axis])
    return length_added_up(func, args) if func in PRODUCTS else 0
