"""What was computed inside of the mixers while a model ran, for the frozen mixers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import nn

from captum_ssm.discovery.scans import KeptScans
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.mixers.linear_calls import LinearCalls
from captum_ssm.utils.blocks import contextmanager

# Results of all mixers together are kept up to so many bytes. Those of later mixers are computed
# again when they are frozen.
KEPT = 1 << 30


class InnerResults:
    """Keeps what mixers' outermost projections and scan functions compute while a model runs.

    Attributes:
        calls (list of tuple): ``(linears, scans)`` for each call of a mixer, in forward order. No
            results of linear layers where there was no room; of scan functions None for mixers
            that are not measured.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[LinearCalls | None, KeptScans | None]] = []
        self._room = KEPT
        self._linears: LinearCalls | None = None
        self._scans: KeptScans | None = None

    @contextmanager
    def running(self, module: nn.Module, *, linears: bool) -> Iterator[None]:
        """What a mixer's own forward runs in: without a graph where its ``linears`` are kept."""
        adapter = find_adapter(module)
        self._linears = self._scans = None  # an earlier call may have ended in an exception
        with ExitStack() as stack:
            if isinstance(adapter, MeasuredAdapter):
                self._scans = KeptScans(self._room)
                stack.enter_context(self._scans.running(adapter.functions))
            if linears:
                self._linears = LinearCalls()
                stack.enter_context(torch.no_grad())
                stack.enter_context(self._linears.of(module))
            yield

    def leave(self, call: MixerCall) -> None:
        """Keep what was computed in the call that has just ended."""
        linears, scans = self._linears, self._scans
        self._linears = self._scans = None
        if scans is not None:
            self._room = scans.room
        if linears is not None:
            # Later layers are given what the mixer computed, which a frozen one computes in
            # another order of operations.
            ends = call.given_tokens(), call.output
            linears.keep_only(*ends)
            size = linears.nbytes_without(*ends)
            # A frozen mixer of one in half precision computes in another dtype.
            if call.output.dtype == call.dtype and 0 < size <= self._room:
                self._room -= size
            else:
                linears.forget()
        self.calls.append((linears, scans))
