"""How calls of modules around a scan are measured: which of them is the mixer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from captum_ssm.discovery.measure import FrozenRecurrence, freeze_measured
from captum_ssm.discovery.measure.cut_run import run_cut, token_argument
from captum_ssm.discovery.measure.rerun import NotMeasured, Rerun
from captum_ssm.discovery.scans import (
    first_tensor,
    is_hidden,
    is_loop,
    is_product,
    is_sum,
    token_product,
    token_sum,
)
from captum_ssm.discovery.visited import (
    CHANNELS_LAST,
    LAYOUTS,
    ModuleVisit,
    ends_in_channels,
    given_first,
    may_have,
    takes_tokens,
)
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.layout import TOKENS_FIRST
from captum_ssm.utils.memory import is_lack_of_memory
from captum_ssm.utils.nested import tensors_in

# The calls around a scan, outermost first, its function, and the length of what may be none.
CalledScan = tuple[list[ModuleVisit], Callable[..., Any], int | None]
_EVERYWHERE: dict[Any, Any] = {token_product: is_product, token_sum: is_sum}  # in any module


@dataclass(frozen=True)
class MeasuringTrial:
    """How a module is measured.

    Args:
        layout (mapping, optional): how its tokens stand, an entry of :data:`LAYOUTS`. Default: none
        is_whole (bool, optional): whether it is measured as a whole. Default: False
        is_partly (bool, optional): whether its scans are, and their orders. Default: False
        is_none (bool, optional): whether it is no mixer whichever axis holds the channels.
            Default: False
        weak (frozenset of Callable, optional): which of its loops, sums and products with a matrix
            are scans. Default: none
        why (str, optional): why it is not measured. Default: ""
    """

    layout: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    is_partly: bool = False
    is_none: bool = False
    weak: frozenset[Callable[..., Any]] = frozenset()
    why: str = ""


class MeasuringTrials:
    """Which module calls can be measured; of modules that look alike, one is tried.

    Args:
        scans (sequence of CalledScan): the calls of a run that may be scans.
        shapes (iterable of torch.Size): of tokens of known mixers, ``(B, L, E)``.
    """

    def __init__(self, scans: Sequence[CalledScan], shapes: Iterable[torch.Size]) -> None:
        self.shapes = {*shapes}
        self.stacks = [stack for stack, _, _ in scans]
        functions = {function for _, function, _ in scans}
        also = {f for f, is_one in _EVERYWHERE.items() if any(map(is_one, functions))}
        plain = {f for f in functions if not (is_product(f) or is_sum(f))}
        self.functions = frozenset(plain | also)
        self.used = plain
        self.known: dict[tuple[str, bool], MeasuringTrial] = {}

    @property
    def also(self) -> frozenset[Callable[..., Any]]:
        """Functions that modules call only when they are measured."""
        return frozenset(self.used - self.functions)

    def around(
        self, stack: list[ModuleVisit], length: int | None = None
    ) -> tuple[nn.Module | None, MeasuringTrial]:
        """The mixer: measured as a whole, else partly, else the smallest that takes tokens.

        Args:
            stack (list): the calls around a scan.
            length (int, optional): of what may not be a scan: without a module of as many tokens
                that can be measured, there is no mixer. Default: None
        """
        best: tuple[ModuleVisit, MeasuringTrial] | None = None
        partly: tuple[ModuleVisit, MeasuringTrial] | None = None
        why = ""
        for n, visit in reversed([*enumerate(stack)]):
            if length is not None and not may_have(visit, length):
                continue
            holds_more = best is None or visit.convolutions > best[0].convolutions
            if not holds_more and not self._holds_others(stack[: n + 2]):
                continue
            trial = self._measured(visit, partly=best is None and partly is None)
            why = why or trial.why
            if trial.is_whole:
                best = visit, trial
            elif best is not None:
                break
            elif trial.is_partly:
                partly = visit, trial
        if (chosen := best or partly) is not None:
            visit, trial = chosen
            if length is None and trial.layout["channels"] == -1:
                self.shapes.add(visit.call().output.shape)
            return visit.module, trial
        if length is not None:
            return None, MeasuringTrial(why=why)
        takes = (visit.module for visit in reversed(stack) if takes_tokens(visit.call()))
        return next(takes, None), MeasuringTrial()

    def _holds_others(self, stack: Sequence[ModuleVisit]) -> bool:
        # Whether the last call's module is one of several of a class that the call around it gives
        # the same tokens, and that hold scans each: the heads of one mixer.
        n, last = len(stack) - 1, stack[-1]
        tokens, kind = given_first(last), type(last.module)
        others = [s[n] for s in self.stacks if len(s) > n and s[n - 1] is stack[n - 1]]
        others = [other for other in others if type(other.module) is kind and other is not last]
        return tokens is not None and any(given_first(other) == tokens for other in others)

    def _measured(self, visit: ModuleVisit, *, partly: bool) -> MeasuringTrial:
        look = f"{type(visit.module).__qualname__}: {visit.module}", partly
        if look not in self.known:
            best, is_last = (
                MeasuringTrial(),
                ends_in_channels(first_tensor(visit.result), self.shapes),
            )
            for layout in CHANNELS_LAST if is_last else LAYOUTS:
                trial = self._tried(visit, layout, partly=partly)
                trial = replace(trial, why=best.why or trial.why)  # the likeliest layout is first
                if trial.is_whole or not best.is_partly:
                    best = trial
                if best.is_whole or trial.is_none:
                    break
            self.known[look] = best
        return self.known[look]

    def _tried(self, visit: ModuleVisit, layout: dict[str, Any], *, partly: bool) -> MeasuringTrial:
        try:
            if layout == CHANNELS_LAST[1] and not self._may_add_input(visit.call()):
                return MeasuringTrial(is_none=True)
            return self._measured_as(visit.call(**layout), layout, partly=partly)
        except RuntimeError as error:  # as of a gradient that the module takes of what is cut
            if is_lack_of_memory(error):
                raise
            return MeasuringTrial(why=f"raises where its scans are cut: {str(error).rstrip('.')}")

    def _measured_as(
        self, call: MixerCall, layout: dict[str, Any], *, partly: bool
    ) -> MeasuringTrial:
        if any(map(is_hidden, tensors_in((call.args, call.kwargs)))) or not takes_tokens(call):
            return MeasuringTrial()
        if call.channels == TOKENS_FIRST and token_argument(call).dim() != 3:
            return MeasuringTrial()
        used: set[Callable[..., Any]] = set()
        try:
            frozen = freeze_measured(call, self.functions, partly=partly, used=used)
        except UnsupportedModelError as error:
            # A scan of no mixer is none however the tokens stand; products depend on that.
            is_none = isinstance(error, NotMeasured) and self.functions.isdisjoint(_EVERYWHERE)
            why = getattr(error, "unread", "") or getattr(error.__context__, "why", "")
            return MeasuringTrial(is_none=is_none, why=why)
        finally:
            self.used.update(f for f in used if not (is_product(f) or is_sum(f)))
        is_part = isinstance(frozen, FrozenRecurrence)
        weak = frozenset(f for f in used if is_product(f) or is_loop(f) or is_sum(f))
        return MeasuringTrial(layout, is_whole=not is_part, is_partly=is_part, weak=weak)

    def _may_add_input(self, call: MixerCall) -> bool:
        return takes_tokens(call) and Rerun(call, run_cut(call, self.functions)).may_add_input
