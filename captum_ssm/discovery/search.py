"""Which modules of a model are mixers, found by what a run of it calls.

A mixer is the smallest module around a proven scan that takes tokens and returns as many, and that
holds the depthwise convolution of the scan too. Where no scan is called, as where a kernel is
fused, it is a module that computes what one of the library's own adapters says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from captum_ssm.discovery.measure import FrozenRecurrence, freeze_measured
from captum_ssm.discovery.mixing import note_unseen
from captum_ssm.discovery.other_calls import OtherCalls, why_scripted
from captum_ssm.discovery.scans import (
    FunctionCall,
    Scan,
    ScanCalls,
    TokenLoop,
    TokenSum,
    first_tensor,
    forms_of,
    intercepted,
    is_loop,
    is_product,
    is_sum,
)
from captum_ssm.discovery.trials import CalledScan, MeasuringTrial, MeasuringTrials
from captum_ssm.discovery.visited import ModuleVisit, has_parts, no_tokens, takes_tokens
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.registry import Adapter, channels_of, find_adapter, known_of, own_adapters
from captum_ssm.utils.blocks import bound, contextmanager
from captum_ssm.utils.nested import detached, map_tensors, same_values
from captum_ssm.utils.watch_modules import watch_modules


@dataclass(frozen=True)
class MeasuredAdapter:
    """Freezes the calls of one module by measuring them.

    Args:
        functions (frozenset of Callable): the scan functions that the module called.
        channels (int, optional): the axis of the channels in its tokens. Default: -1
        adds_input (bool, optional): whether it returns its tokens, too, added up. Default: False
        is_partly (bool, optional): whether only its scans and their orders could be measured.
            Default: False
    """

    functions: frozenset[Callable[..., Any]]
    channels: int = -1
    adds_input: bool = False
    is_partly: bool = False
    known: ClassVar[str] = "measured"

    def __call__(self, call: MixerCall) -> FrozenMixer:
        """The frozen mixer of a recorded call; of the same one again, inside of :func:`shared`."""
        mixers = _SHARED.get()
        if mixers is None:
            return self._measured(call)
        recorded = detached((call.args, call.kwargs, call.result))
        of_module = mixers.setdefault(call.module, [])
        mixer = next((mixer for known, mixer in of_module if same_values(known, recorded)), None)
        if mixer is None:
            mixer = self._measured(call)
            of_module.append((recorded, mixer))
        return mixer

    def _measured(self, call: MixerCall) -> FrozenMixer:
        # A module may call other scans for more tokens, such as those of whole blocks: where those
        # that it is known for do not explain it as they did, all functions are looked at.
        used: set[Callable[..., Any]] = set()
        try:
            return freeze_measured(call, self.functions, partly=self.is_partly)
        except UnsupportedModelError:
            mixer = freeze_measured(call, used=used)
        functions = self.functions.union(used)
        is_partly = isinstance(mixer, FrozenRecurrence)
        known_of(call.module).adapter = replace(self, functions=functions, is_partly=is_partly)
        return mixer


_SHARED: ContextVar[dict[nn.Module, list[tuple[Any, FrozenMixer]]] | None] = ContextVar(
    "shared", default=None
)


@contextmanager
def shared() -> Iterator[None]:
    """Measure a mixer once for all its calls that are given, and return, the very same."""
    with bound(_SHARED, {}):
        yield


@dataclass
class _Found:
    # The module calls around each scan, outermost first, and its function. Loops that no form
    # explains, and products with a matrix, may not be scans: these have their length, too.
    model: nn.Module
    scans: list[CalledScan] = field(default_factory=list)
    stack: list[ModuleVisit] = field(default_factory=list)
    known: int = 0  # registered mixers on the stack
    shapes: set[torch.Size] = field(default_factory=set)  # of theirs, their channels last
    # The first call of each class of modules; calls of functions that are no scan.
    firsts: dict[type[nn.Module], MixerCall] = field(default_factory=dict)
    unproven: dict[nn.Module, str] = field(default_factory=dict)

    def handle(self, calls: ScanCalls, call: FunctionCall) -> Any:
        if self.known:
            return call.run()
        before, inner = calls.taken, self.stack[-1].module if self.stack else None
        with torch.no_grad():
            result = calls(call)
        if torch.is_grad_enabled():  # the model itself takes a gradient
            result = call.run()
        if calls.taken > before or inner is None:
            return result
        if isinstance(call.function, TokenLoop | TokenSum):
            length = call.function.length
            self.scans.append((list(self.stack), call.source, length))
        if any(True for _ in forms_of([*call.arguments])):
            self.unproven[inner] = call.function.__qualname__  # the outermost call comes last
        return result

    def take(self, call: FunctionCall, scan: Scan, result: Any) -> Any:
        length = scan.values.shape[1] if is_product(call.source) else None
        self.scans.append((list(self.stack), call.source, length))
        return result

    def _convolved(self) -> None:
        for visit in self.stack:
            visit.convolutions += 1

    def _layered(self, why: str) -> None:
        if self.stack:
            known_of(self.stack[-1].module).miss = why

    @contextmanager
    def noting_modules(self) -> Iterator[None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.known += find_adapter(module) is not None
            self.stack.append(ModuleVisit(paths[module], module, args, kwargs))

        def leave(module: nn.Module, *_: Any) -> None:
            # A module that raised leaves its children on the stack.
            while self.stack.pop().module is not module:
                pass
            self.known -= find_adapter(module) is not None

        def returned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            visit = self.stack[-1]
            visit.result = output
            if find_adapter(module) is not None and channels_of(module) == -1:
                self.shapes.update(x.shape for x in [first_tensor(output)] if x is not None)
            is_first = not self.known and type(module) not in self.firsts
            if is_first and has_parts(module) and takes_tokens(visit.call()):
                # Clones, as the model may go on to change them in place.
                self.firsts[type(module)] = map_tensors(torch.clone, visit.call())

        # A whole model around known mixers is none: it may attend to what they return.
        start = int(any(map(find_adapter, self.model.modules())))
        paths = {module: path for path, module in [*self.model.named_modules()][start:]}
        with (
            watch_modules(paths, before=enter, after=returned, ended=leave),
            OtherCalls(self._convolved, self._layered),
        ):
            yield


def discover(
    model: nn.Module,
    run: Callable[[], Any],
    reproduces: Callable[[Adapter, MixerCall], bool] = lambda freeze, call: False,
) -> dict[nn.Module, Adapter]:
    """The mixers among the modules of a model that no adapter is registered for.

    ``reproduces`` tells whether an adapter computes what a call returned.
    """
    calls = _Found(model)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        calls.noting_modules(),
        intercepted(partial(calls.handle, ScanCalls(calls.take)), traced=False),
    ):
        run()
    for module in model.modules():
        if why := why_scripted(type(module)):
            known_of(module).miss = why
    for module, name in calls.unproven.items():
        why = f"calls {name}, which does not return what a scan of its arguments does"
        known_of(module).miss = why
    trials = MeasuringTrials(calls.scans, calls.shapes)
    around = _around_scans(calls.scans, trials)
    inside = _parts_of(around)
    measured: dict[nn.Module, Adapter] = {}
    whole: set[nn.Module] = set()  # mixers that are measured as a whole, and their parts
    for module, (trial, _) in around.items():
        if module not in inside:
            called = (around[part][1] for part in module.modules() if part in around)
            functions = trials.also.union(*called)
            measured[module] = MeasuredAdapter(
                functions, **trial.layout, is_partly=not trial.is_whole
            )
            whole.update(module.modules() if trial.is_whole else ())
    like = {
        kind: next((freeze for freeze in own_adapters() if reproduces(freeze, call)), None)
        for kind, call in calls.firsts.items()
        if whole.isdisjoint(call.module.modules())
    }
    alike = {
        module: freeze
        for module in model.modules()
        if (freeze := like.get(type(module))) is not None and whole.isdisjoint(module.modules())
    }
    inside = _parts_of(alike)
    adapters = measured | alike
    if not adapters:
        note_unseen(calls.firsts.values())
    return {module: freeze for module, freeze in adapters.items() if module not in inside}


def _parts_of(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for module in modules for part in module.modules() if part is not module}


def _around_scans(
    scans: list[CalledScan], trials: MeasuringTrials
) -> dict[nn.Module, tuple[MeasuringTrial, set[Callable[..., Any]]]]:
    # The mixers around scans: how each is measured, and the functions of its scans.
    mixers: dict[nn.Module, tuple[MeasuringTrial, set[Callable[..., Any]]]] = {}
    mixer_of: dict[nn.Module, nn.Module | None] = {}  # by the innermost module
    # After all scans, loops, and products with a matrix, which anything may compute.
    for stack, function, length in sorted(
        scans, key=lambda s: (s[2] is not None, not is_loop(s[1]))
    ):
        if not stack:
            continue
        inner, weak = stack[-1].module, length is not None
        if inner not in mixer_of:
            mixer_of[inner], trial = trials.around(stack, length)
            if (mixer := mixer_of[inner]) is not None:
                known = mixers.get(mixer, (trial, set()))[1]
                mixers[mixer] = trial, known | trial.weak
            else:
                miss = "which is in no module of as many tokens that can be measured"
                miss = miss if weak else f"a scan, and {no_tokens(stack[-1])}"
                is_told = not (is_loop(function) or is_sum(function))
                miss = f"calls {function.__qualname__}, {miss}" if is_told else ""
                known_of(inner).miss = trial.why or known_of(inner).miss or miss
        if (mixer := mixer_of[inner]) is not None and not weak:
            mixers[mixer][1].add(function)
    return mixers
