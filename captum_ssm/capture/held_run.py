"""A run between a model's mixers alone: what they return is held, and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.embedded_ids import entries_of, rows_of
from captum_ssm.capture.model import extract_logits, input_embeddings
from captum_ssm.capture.request import Request
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.mixers import MixerCall, find_mixers
from captum_ssm.mixers.registry import layout_of
from captum_ssm.utils.nested import map_tensors, tensors_in, with_first
from captum_ssm.utils.offload import reloaded_in_backward
from captum_ssm.utils.random_state import random_state_kept
from captum_ssm.utils.watch_modules import watch_modules

# What a model raises when moved tokens choose otherwise, as by a router, than those that the held
# results of its mixers belong to: other shapes, or calls that were not made before.
OTHER_CHOICE = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError)


@dataclass
class HeldRun:
    """One run whose inputs, and the results of whose mixers, may be held.

    Args:
        request (Request): what is run. Each run begins with the model as it is.
        copies (ExitStack): closes the copies that are run.
        with_output (bool): the output is an end, too.
        held (sequence of Tensor, optional): the starts; none are held in a first run. Default: ()
        results (dict, optional): by path, what the mixers returned in the first run.
            Default: ``{}``

    Attributes:
        starts (list of Tensor): the inputs, and what mixers returned.
        ends (list of tuple): what mixers are given, and the output, by name.
    """

    request: Request
    copies: ExitStack
    with_output: bool
    held: Sequence[Tensor] = ()
    results: dict[str, list[Any]] = field(default_factory=dict)
    starts: list[Tensor] = field(default_factory=list, init=False)
    ends: list[tuple[str, Tensor]] = field(default_factory=list, init=False)
    _paths: dict[nn.Module, str] = field(default_factory=dict, init=False)
    _table: nn.Module | None = field(default=None, init=False)
    _is_first: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._is_first = not self.results
        inputs = [self._start(x) if x.is_floating_point() else x for x in self.request.inputs]
        request, copies = self.copies.enter_context(on_thrown_away(self.request))
        self.copies.enter_context(reloaded_in_backward(copies.root))
        self._table = input_embeddings(request.module)
        self._paths = {module: path for path, module in find_mixers(request.module)}
        for module, path in self._paths.items():
            # What mixers returned before is exchanged all the same, and what they raised.
            seen = self.results.setdefault(path, [])
            run = partial(_or_error, seen) if self._is_first else partial(_next, iter(seen))
            module.__dict__["forward"] = partial(run, module.forward)
        tables = [m for m in request.module.modules() if isinstance(m, nn.Embedding)]
        with (
            watch_modules(self._paths, after=self._after_mixer),
            watch_modules(tables, after=self._embedded),
            random_state_kept(),
        ):
            output = extract_logits(request.run(tuple(inputs)))
        if self.with_output:
            self._end("the output", output)

    def moved(self, steps: Sequence[Tensor]) -> list[Tensor] | str:
        """The ends after steps of the starts; why they cannot be compared, in words."""
        held = [start.detach() + step for start, step in zip(self.starts, steps, strict=True)]
        try:
            again = HeldRun(self.request, self.copies, self.with_output, held, self.results)
        except OTHER_CHOICE as error:
            return f"{type(error).__name__}: {error}"
        if [end.shape for _, end in again.ends] != [end.shape for _, end in self.ends]:
            return "other mixers ran, or on other numbers of tokens"
        return [end for _, end in again.ends]

    def is_repeated(self) -> bool:
        """Whether the same starts lead to the same ends again."""
        again = self.moved([torch.zeros_like(start) for start in self.starts])
        return not isinstance(again, str) and all(
            torch.equal(a, b) for a, (_, b) in zip(again, self.ends, strict=True)
        )

    def _end(self, name: str, value: Tensor) -> None:
        if value.is_floating_point():
            self.ends.append((name, value))

    def _start(self, value: Tensor) -> Tensor:
        k = len(self.starts)
        start = self.held[k] if k < len(self.held) else value.detach().clone().requires_grad_()
        self.starts.append(start)
        return start.clone()  # a model may write into it

    def _after_mixer(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        path = self._paths.get(module)
        if path is None:  # a copy that the model itself makes in its run
            return None
        call = MixerCall.of(path, module, args, kwargs, result, **layout_of(module))
        self._end(f"what {path} is given", call.given_tokens().clone())
        if self._is_first:
            # A result with its graph would keep the mixer's weights and activations.
            detached = map_tensors(torch.Tensor.detach, result)
            self.results[path].append(detached)
        call = replace(call, result=with_first(call.result, self._start(call.output)))
        return call.own[2]

    def _embedded(self, module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Any:
        looked_up, rows = next(tensors_in((args, kwargs))), rows_of(module, self._table)
        ids = [x for x in self.request.inputs if not x.is_floating_point()]
        is_input = any(entries_of(looked_up, tokens, rows) is not None for tokens in ids)
        return self._start(result) if is_input else None


def _next(results: Iterator[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What a mixer returned in the first run; it runs itself where it was not called so often.
    outcome = next(results, None)
    if isinstance(outcome, Exception):
        raise outcome
    return forward(*args, **kwargs) if outcome is None else outcome


def _or_error(results: list[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What a mixer returns, whose exceptions are kept: a model may catch them.
    try:
        return _run(forward, args, kwargs)
    except Exception as error:
        results.append(error)
        raise


def _run(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # What a mixer returns; without a graph where it has none, as it writes into what a function
    # with a backward pass of its own returned as a view. Its first result is a start all the same.
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        if "view was created inside a custom Function" not in str(error):
            raise
    with torch.no_grad():
        return forward(*args, **kwargs)
