"""The scans of measured mixers, run with their coefficients held constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F

from captum_ssm.discovery.measure.unfused import fused_functions, unfuse
from captum_ssm.discovery.scans import FunctionCall, Scan, ScanCalls, intercepted
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.errors import ReconstructionError, UnsupportedModelError
from captum_ssm.graph.relevance_rules import is_constant
from captum_ssm.mixers.registry import find_adapter, find_mixers
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.watch_modules import watch_modules


@contextmanager
def scans_frozen(model: nn.Module, seen: Callable[[Scan], object] | None = None) -> Iterator[None]:
    """Let the scans of measured mixers run with their coefficients held constant.

    They return the very values that they return otherwise, linear in their values (and in their
    gate) on the graph. Fused norms run by their equations, whose nodes there are rules for.

    ``seen`` is given each scan, alive in the graph.

    Raises:
        ReconstructionError: from the run, for a scan that is none on the tokens of this run.
    """
    mixers = [(module, find_adapter(module)) for _, module in find_mixers(model)]
    measured = {m: a.functions for m, a in mixers if isinstance(a, MeasuredAdapter)}
    # The rule of PyTorch's softmax attention is attached to the graph.
    functions = frozenset().union(*measured.values()) - {F.scaled_dot_product_attention}
    fused = fused_functions() if measured else {}
    frozen = _FrozenCalls(measured, functions, fused, seen)
    for module in measured:
        unfuse(module)
    with (
        watch_modules(measured, before=frozen.enter, ended=frozen.leave),
        intercepted(frozen.handle, [*functions, *fused]) if functions else nullcontext(),
    ):
        yield


@dataclass(eq=False)
class _FrozenCalls:
    # Calls of scans inside of measured modules, in this thread.
    measured: Mapping[nn.Module, frozenset[Callable[..., Any]]]
    functions: frozenset[Callable[..., Any]]
    fused: Mapping[Callable[..., Any], Callable[[FunctionCall], Any]]
    seen: Callable[[Scan], object] | None

    def __post_init__(self) -> None:
        self.calls = ScanCalls(self._take)
        self.taken: list[int] = []  # before each module on the stack

    def handle(self, call: FunctionCall) -> Any:
        """What a function returns, its scan linear in its values."""
        if not self.taken:
            return call.run()
        if call.source in self.fused:
            return self.fused[call.source](call)
        before, result = self.calls.taken, self.calls(call)
        if self.calls.taken == before:
            raise ReconstructionError(
                f"{call.function.__qualname__} was called with the arguments of a scan and does "
                "not return what the scan returns, as it did when the model was first run; "
                "expected the same recurrence on all tokens. Register its form with "
                "captum_ssm.register_scan, or an adapter of the module with "
                "captum_ssm.register_mixer."
            )
        return result

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a measured module is called."""
        self.taken.append(self.calls.taken)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it returned, or raised."""
        none = self.taken.pop() == self.calls.taken
        if none and output is not None and self.functions & self.measured[module]:
            raise ReconstructionError(
                f"{type(module).__name__} called none of its scans, which it called when the model "
                "was first run; expected the same calls in every run. Register an adapter with "
                "captum_ssm.register_mixer(module_type, freeze)."
            )

    def _take(self, call: FunctionCall, scan: Scan, result: Any) -> Any:
        if is_constant(scan.values):
            raise UnsupportedModelError(
                f"{scan.name} is given the logarithms of its values; expected values, as an "
                "exponential counts as a constant and no relevance would go through. Use "
                "MambaRollout, or register an adapter with captum_ssm.register_mixer."
            )
        if self.seen is not None:
            self.seen(scan)
        return scan.result(scan.mixed, result)
