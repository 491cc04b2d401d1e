"""What takes the mixers' place while a model runs under a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from captum_ssm.capture.check import Deviation, Rebuilt
from captum_ssm.capture.finite import check_finite
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.graph.reachability import is_closed
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.linear_calls import LinearCalls
from captum_ssm.mixers.registry import Adapter, frozen_by, is_own
from captum_ssm.operators import DiagonalOperator, LinearAttentionOperator
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.copies import running
from captum_ssm.utils.nested import detached, first_of, map_tensors, tensors_in, with_first
from captum_ssm.utils.offload import is_offloaded, weights_loaded
from captum_ssm.utils.progress import Bar

# The graphs of frozen mixers are kept up to so many bytes. Later ones, and those of mixers whose
# weights are offloaded, are made anew in the backward pass, one at a time.
KEPT = 4 << 30
# The graph of a mixer in bytes, in those of its output in its working dtype: an S6 mixer keeps
# about eleven tensors of twice the width.
_OUTPUTS = 24

# The operators whose graph is ours: linear time and memory.
_SCANS = (DiagonalOperator, LinearAttentionOperator)


@dataclass(frozen=True)
class FrozenDuringRun:
    """A mixer frozen while the model ran, None if not kept, and how far it is from the module."""

    mixer: FrozenMixer | None
    deviation: Deviation


class FrozenStandIns:
    """Frozen mixers that stand in for a model's own, which then run without a graph.

    Without compiled kernels a recurrence runs in Python, and its backward pass may cost quadratic
    time. The adapter computes the same from the same tokens by our scan, so the graph is ours and
    the values stay the model's own, which ours are compared with. Attention keeps its own graph,
    which takes less memory than ours. What was frozen is kept, in the order of the mixers' calls.

    Attributes:
        keeps_mixers (bool): whether the frozen mixers are needed after the run.
        hides_graphs (bool): whether the own graph of a mixer that is measured may be one node.
        takes_pasts (bool): whether mixers may begin with what a cache holds.
        keeps_outputs (bool): whether what the mixers returned is. Default: False
        kept_bytes (float): of graphs, before they are made anew in the backward pass.
    """

    keeps_mixers: ClassVar[bool] = True
    hides_graphs: ClassVar[bool] = True
    takes_pasts: ClassVar[bool] = False

    def __init__(self, *, keeps_outputs: bool = False) -> None:
        self.keeps_outputs = keeps_outputs
        self.made: list[FrozenDuringRun | None] = []
        self.kept_bytes: float = KEPT
        self._linears = LinearCalls()
        # How many mixers wait for their graph, which is made in the backward pass.
        self._waiting = 0
        self._bar: Bar | None = None
        # Adapters of recurrences: known once the first of their mixers was frozen.
        self._of_scans: set[Adapter] = set()

    def begin(self) -> None:
        """Forget an earlier run of the model, which has to be repeated."""
        self.made.clear()
        self._waiting = 0

    @torch.enable_grad()
    def __call__(self, call: MixerCall) -> Any:
        """What the model goes on with in place of ``call.result``."""
        adapter = find_adapter(call.module)
        if adapter is None:
            return _as_result(call, self.other(call))
        if not (self.replaces(adapter) and self.takes(call)):
            self.made.append(None)
            is_hidden = self.hides_graphs and isinstance(adapter, MeasuredAdapter)
            return self._hidden(call) if is_hidden else call.result
        check_finite(call)
        # A frozen mixer may hold the call it was read from, and is kept: without the graph of the
        # model's own result, which nothing needs.
        # What the mixer's linear layers computed is not computed again.
        detached_call = replace(call, result=detached(call.result), linears=self._linears)
        is_kept = self._keeps(call)
        with without_autocast(), weights_loaded(call.module), torch.set_grad_enabled(is_kept):
            mixer = frozen_by(adapter, detached_call)
            if isinstance(mixer.recurrence, _SCANS):
                self._of_scans.add(adapter)
            stands_in = not (call.output.requires_grad and self.needs_graph(call.module))
            with torch.set_grad_enabled(is_kept and stands_in):
                rebuilt = self.rebuilt(mixer, detached_call)
        self._linears.forget()  # a frozen mixer may hold its call
        deviation = Deviation.of(detached_call, rebuilt)
        is_needed = self.keeps_mixers and is_kept
        self.made.append(FrozenDuringRun(detached(mixer) if is_needed else None, deviation))
        if not stands_in:
            return call.result
        if is_kept:
            return _as_result(call, rebuilt.output)
        return with_first(call.result, self._recomputed(call, adapter))

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """What a mixer's own forward runs in."""
        self._linears = LinearCalls()
        hands_on = getattr(find_adapter(module), "hands_on", None)
        needed = self.needs_graph(module) or (hands_on is not None and hands_on(module))
        with torch.set_grad_enabled(needed), self._linears.of(module):
            yield

    def prepare(self, module: nn.Module) -> None:
        """Change the copy of a mixer before the model runs."""

    def looked_up(self, ids: Tensor, rows: Tensor) -> Tensor:
        """What the model goes on with at rows of a table that is no module.

        Args:
            ids (Tensor): a view of an input's.
            rows (Tensor): of the table, in the shape of ``ids`` and further axes.
        """
        return rows

    def filled(self, tokens: Tensor) -> Tensor:
        """What the model goes on with at tokens that it filled from its other arguments.

        Args:
            tokens (Tensor): all tokens ``(B, L, E)``, without a graph.
        """
        return tokens

    def around(self, root: nn.Module) -> AbstractContextManager[None]:
        """What the whole run of the model's copies happens in, of which ``root`` is the first."""
        return nullcontext()

    def needs_graph(self, module: nn.Module) -> bool:
        """Whether gradients go through the graph of a mixer's own forward."""
        adapter = find_adapter(module)
        if adapter is None or not self.replaces(adapter):
            return True
        return adapter not in self._of_scans

    def replaces(self, adapter: Adapter) -> bool:
        """Whether an adapter's mixers may be frozen while the model runs."""
        # Registered by others, an adapter may well read its coefficients without a graph.
        # A measured mixer is run once more to be frozen, which cannot be done within its own run.
        return is_own(adapter) and not isinstance(adapter, MeasuredAdapter)

    def takes(self, call: MixerCall) -> bool:
        """Whether this call's mixer is frozen while the model runs."""
        # Known kinds run without a graph, also on a GPU where the first of a kind was on the CPU.
        is_needed = call.output.device.type == "cpu" or not call.output.requires_grad
        return is_needed and call.given_tokens().requires_grad

    def rebuilt(self, mixer: FrozenMixer, call: MixerCall) -> Rebuilt:
        """What a frozen mixer computes, with the graph that gradients go through."""
        return Rebuilt.of(mixer, call)

    def pulled(self, output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> Any:
        """The gradients at ``leaves`` of a frozen mixer's output, from that at the output."""
        return torch.autograd.grad(output, leaves, gradient, allow_unused=True)

    def other(self, call: MixerCall) -> Tensor | None:
        """What takes the place of another module's output, if anything."""
        return None

    def _hidden(self, call: MixerCall) -> Any:
        # What a mixer returned, with its own graph in one node: what is measured between mixers
        # takes many backward passes, which would walk through it with nothing to carry.
        output = first_of(call.result)
        inputs = {id(x): x for x in tensors_in((call.args, call.kwargs)) if x.requires_grad}
        if not output.requires_grad or not inputs:
            return call.result
        parameters = {id(p) for p in running(call.module).parameters()}
        if not is_closed(output, list(inputs.values()), parameters):
            return call.result

        def pull(gradient: Tensor) -> Any:
            leaves = list(inputs.values())
            return torch.autograd.grad(
                output, leaves, gradient, retain_graph=True, allow_unused=True
            )

        hidden = _Recomputed.apply(output.detach(), pull, *inputs.values())
        return with_first(call.result, hidden)

    def _keeps(self, call: MixerCall) -> bool:
        # A graph of a frozen mixer may keep its weights in another dtype.
        if is_offloaded(call.module):
            return False
        self.kept_bytes -= _OUTPUTS * call.output.numel() * call.dtype.itemsize
        return self.kept_bytes >= 0

    def _recomputed(self, call: MixerCall, adapter: Adapter) -> Tensor:
        # The mixer's own output, with a graph that is made in the backward pass.
        inputs: list[Tensor] = []

        def collect(x: Tensor) -> Tensor:
            if x.requires_grad and all(x is not other for other in inputs):
                inputs.append(x)
            return x.detach()

        self._waiting += 1
        value = call.output.detach()
        # Only the form of the result is asked for; its numbers would be held for nothing.
        result = map_tensors(lambda x: x.new_zeros(()).expand(x.shape), call.result)
        call = replace(call, result=result)
        states = [] if call.past is None else call.past.tensors
        map_tensors(collect, (call.args, call.kwargs, states))
        numbers = {id(x): k for k, x in enumerate(inputs)}

        def pull(gradient: Tensor) -> Sequence[Tensor | None]:
            leaves = [x.detach().requires_grad_() for x in inputs]

            def leaf_of(x: Tensor) -> Tensor:
                return leaves[numbers[id(x)]] if id(x) in numbers else x

            args, kwargs, past = map_tensors(leaf_of, (call.args, call.kwargs, states))
            again = replace(call, args=args, kwargs=kwargs)
            if call.past is not None:
                again = replace(again, past=call.past.of(past))
            with torch.enable_grad(), without_autocast(), weights_loaded(call.module):
                output = self.rebuilt(frozen_by(adapter, again), again).output
            shaped = gradient.reshape(output.shape).to(output.dtype)
            self._count()
            return self.pulled(output, leaves, shaped)

        return _Recomputed.apply(value, pull, *inputs)

    def _count(self) -> None:
        if self._bar is None:
            self._bar = Bar("gradients", self._waiting)
        self._bar.advance()
        if self._bar.done == self._waiting:
            self._bar.close()


class _Recomputed(torch.autograd.Function):
    # Values, whose gradients are computed by a function of the gradient after them.
    @staticmethod
    def forward(ctx: Any, value: Tensor, pull: Callable[..., Any], *inputs: Tensor) -> Tensor:
        ctx.pull, ctx.count = pull, len(inputs)
        ctx.set_materialize_grads(False)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        gradients = [None] * ctx.count if gradient is None else ctx.pull(gradient)
        return None, None, *gradients


@contextmanager
def without_autocast() -> Iterator[None]:
    """In the operators' own dtype, wherever the caller's autocast is on."""
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _as_result(call: MixerCall, output: Tensor | None) -> Any:
    if output is None:
        return call.result
    value = call.output
    output = output.to(value.dtype)
    # The very values that the model computed.
    return with_first(call.result, output + (value - output).detach())
