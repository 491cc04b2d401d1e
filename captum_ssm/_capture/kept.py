"""What was computed inside of the mixers while a model ran, for the frozen mixers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.mixers._call import LinearCalls
from captum_ssm.mixers.discovery import MeasuredAdapter
from captum_ssm.scans import KeptScans

# Results are kept, of all mixers together, up to so many bytes. Those of later mixers are computed
# again when they are frozen.
KEPT = 1 << 29


class KeptLinears:
    """Runs mixers without a graph and keeps what their outermost projections computed.

    Attributes:
        kept (list of LinearCalls or None): one per call of a mixer, in forward order; None where
            there was nothing to keep, or no room.
    """

    def __init__(self) -> None:
        self.kept: list[LinearCalls | None] = []
        self._room = KEPT
        self._running: LinearCalls | None = None

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """What a mixer's own forward runs in."""
        self._running = LinearCalls()
        with torch.no_grad(), self._running.of(module):
            yield

    def leave(self, call: MixerCall) -> None:
        """Keep what was computed in the call that has just ended."""
        found, self._running = self._running, None
        if found is not None:
            # Later layers are given what the mixer computed, which a frozen one computes in
            # another order of operations.
            ends = call.given_tokens(), call.output
            found.keep_only(*ends)
            size = found.nbytes_without(*ends)
            # A frozen mixer of one in half precision computes in another dtype.
            if call.output.dtype == call.dtype and 0 < size <= self._room:
                self._room -= size
            else:
                found = None
        self.kept.append(found)


class KeptScansOfMixers:
    """Runs mixers that are measured, and keeps what their scan functions return.

    Attributes:
        kept (list of KeptScans or None): one per call of a mixer, in forward order; None for those
            that are not measured.
    """

    def __init__(self) -> None:
        self.kept: list[KeptScans | None] = []
        self._room = KEPT
        self._running: KeptScans | None = None

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """What a mixer's own forward runs in."""
        adapter = find_adapter(module)
        if not isinstance(adapter, MeasuredAdapter):
            yield
            return
        self._running = KeptScans(self._room)
        with self._running.running(adapter.functions):
            yield

    def leave(self) -> None:
        """Keep what was returned in the call that has just ended."""
        found, self._running = self._running, None
        self._room = self._room if found is None else found.room
        self.kept.append(found)
