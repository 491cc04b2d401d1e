"""The user's own run of the model, with the outputs of mixers edited.

Each call of a chosen mixer is frozen at the current input of its layer, so that an edit of an
earlier layer reaches it, and compared with what the module computed. The change by the edit is
the frozen mixer's value; where an edit changes nothing, the module's own go on, bit by bit.

A mixer's output projection is run once: where an earlier run showed that what it returns is the
mixer's result, the mixer is frozen, compared and edited just before. Elsewhere that happens when
the module has returned, and the change is projected by itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.session import IS_RECORDED
from captum_ssm.capture.substitute import without_autocast
from captum_ssm.capture.unknown_mixers import adapter_of
from captum_ssm.errors import ReconstructionError, UnsupportedModelError
from captum_ssm.interventions.open_mixer import OpenMixer, OwnProjection
from captum_ssm.interventions.selection import Layers, chosen_layers
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.mixers.call import bound_arguments, without_caches
from captum_ssm.mixers.linear_calls import LinearCalls
from captum_ssm.mixers.linear_layers import is_plain
from captum_ssm.mixers.registry import (
    known_of,
    layout_of,
    learn_projection,
    past_before,
    projection_of,
)
from captum_ssm.utils.allocator import MIB, workspace
from captum_ssm.utils.blocks import bound, contextmanager, undo
from captum_ssm.utils.clones import repeated, version_of
from captum_ssm.utils.copies import copied, original
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import detached, tensors_in, with_first
from captum_ssm.utils.offload import weights_loaded
from captum_ssm.utils.plain_graph import without_checkpoints
from captum_ssm.utils.uncompiled import without_compiler

Edit = Callable[[OpenMixer], Tensor]


@contextmanager
def edited(
    model: Any, layers: Layers, edit: Edit, *, check: bool = True, unedited: bool = False
) -> Iterator[None]:
    """Let ``edit`` compute what the chosen mixers return, in this thread, while the block runs.

    Args:
        model (nn.Module or nnsight model): runs its own forward inside the block.
        layers (int, str, slice or sequence, optional): mixers by index or path; None for all that
            the block runs.
        edit (Callable): takes an :class:`OpenMixer` and returns the output that replaces the
            module's.
        check (bool, optional): compare each frozen mixer with its module. Default: True
        unedited (bool, optional): before each run of the model, run it on the same input without
            the edits, and give ``edit`` its mixers too. Default: False

    Raises:
        ValueError: for a layer that is not there, or that is being edited already.
        UnsupportedModelError: no mixer is known, or the block did not reach a chosen one.
    """
    model = unwrap(resolve_model(model, None))
    chosen = chosen_layers(model, layers)
    around = _EDITS.get()
    twice = [p for p, m in chosen.items() if any(m in e.paths for e in around.get(m, ()))]
    if twice:
        raise ValueError(
            f"{', '.join(twice)} is edited by another intervention around this one; expected each "
            "layer in one intervention at a time. Name other layers, or join the two into one."
        )
    paths = {module: path for path, module in chosen.items()}
    edits = _Edits(model, paths, edit, check, _Unedited() if unedited else None)
    # A run of the user's model, whose memory is malloc's as far as malloc keeps it.
    with workspace(32 * MIB), without_checkpoints(), without_compiler(), _noticed(edits):
        yield
    missed = [path for path in chosen if path not in edits.reached]
    if missed and not (layers is None and edits.reached):
        raise UnsupportedModelError(
            f"the block did not reach {', '.join(missed)}, so nothing was changed there; expected "
            "it to run the model in this thread. Name the layers that it runs."
        )


@dataclass(eq=False)
class _Unedited:
    """The calls of the mixers in the run without the intervention, of the run that goes on now."""

    calls: dict[tuple[str, int], OpenMixer] = field(default_factory=dict)
    is_running: bool = False

    @repeated
    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Run a copy of the model, whose mixers are kept as they are."""
        self.calls.clear()
        self.is_running = True
        try:
            with copied(module) as copies:  # draws the random numbers that the edited run will
                copies.root.forward(*args, **without_caches(kwargs))
        finally:
            self.is_running = False

    def of(self, opened: OpenMixer) -> OpenMixer:
        """The call that ``opened`` is without the edits.

        Raises:
            UnsupportedModelError: the block runs a part of the model by itself.
        """
        call = self.calls.get((opened.path, opened.visit))
        if call is None:
            raise UnsupportedModelError(
                f"{opened.path} was called, but not by the model's own forward, so its "
                "coefficients in the run without the intervention are unknown; expected the block "
                "to call the model itself. Do so, or pass coefficients='run'."
            )
        return call


@dataclass(eq=False)
class _Edits:
    # The edits of mixers by one intervention; a mixer inside of an edited one is left as it is.
    model: nn.Module
    paths: dict[nn.Module, str]
    edit: Edit
    check: bool
    unedited: _Unedited | None = None
    reached: set[str] = field(default_factory=set)
    visits: Counter[str] = field(default_factory=Counter)
    mask: Tensor | None = None
    busy: bool = False
    running: MixerCall | None = None  # the call of a mixer, before its result is known
    last: tuple[Tensor, int] | None = None  # what its edited output projection returned

    @cached_property
    def linears(self) -> set[nn.Module]:
        """The linear layers of the mixers."""
        return {layer for mixer in self.paths for layer in mixer.modules() if is_plain(layer)}

    def enter(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: its own padding mask, and the run without the edits."""
        module = forward.module
        if original(module) is not self.model:
            return
        mask = bound_arguments(module, args, kwargs).get("attention_mask")
        self.mask = mask if torch.is_tensor(mask) and mask.dim() == 2 else None
        self.visits.clear()
        if self.unedited is not None and not self.unedited.is_running:
            self.unedited.run(module, args, kwargs)
            self.visits.clear()

    def acts_on(self, module: nn.Module) -> bool:
        """Whether a call of a module is edited."""
        return original(module) in self.paths and not self.busy

    def keep(self, forward: _Forward, args: tuple[Any, ...], result: Any) -> None:
        """Keep what a linear layer computed, so that freezing its mixer does not compute it."""
        call, layer = self.running, forward.module
        linears = None if call is None or self.busy else call.linears
        if linears is None or original(layer) not in self.linears or len(args) != 1:
            return
        # Nothing says whether tensors made under inference mode were changed since. An offloaded
        # layer has let go of its weight by now.
        if not (result.is_inference() or layer.weight.is_meta):
            linears.add(layer if forward.is_instance else layer.weight, args[0], result)

    def run(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a mixer returns, edited."""
        module = forward.module
        path, layout = self.paths[original(module)], layout_of(module)
        if IS_RECORDED.get():
            raise UnsupportedModelError(
                f"{path} is edited by an intervention, and a method of frozen mixers was called "
                "inside of the block, where it would explain the unedited mixer; expected methods "
                "of gradients or perturbations there. Call this method outside of the block."
            )
        if any(map(is_batchedtensor, tensors_in((args, kwargs)))):
            raise UnsupportedModelError(
                f"{path} is called under torch.vmap, which hides an axis of its tokens; expected "
                "the block to call the model on a batch of examples."
            )
        call = MixerCall.of(path, module, args, kwargs, None, **layout)
        call = replace(call, linears=LinearCalls())
        _check_not_begun(call)  # before the mixer writes into its cache
        self.running, self.last = call, None
        try:
            result = forward.original(*args, **kwargs)
        finally:
            self.running = None
        self.reached.add(path)
        returned = MixerCall.of(path, module, args, kwargs, result, **layout)
        call = replace(returned, linears=call.linears)
        last, self.last = self.last, None
        if last is None:
            call = replace(call, result=with_first(call.result, self._output(call)))
        else:
            _check_last(call, *last)
        self.visits[path] += 1
        return call.own[2]

    def projected(self, forward: _Forward, args: tuple[Any, ...]) -> Tensor | None:
        """What a mixer's output projection returns, edited; None for another layer."""
        call, layer = self.running, forward.module
        if call is None or self.busy or self.last is not None or len(args) != 1:
            return None
        # A hook is shown what the layer returns without the edit, in any run.
        is_plainly_run = not (forward.is_instance or layer._forward_hooks)
        if layer is not projection_of(call.module) or not is_plainly_run:
            return None
        (inputs,) = args
        if inputs.dtype != layer.weight.dtype or torch.is_autocast_enabled(inputs.device.type):
            return None
        result = inputs.new_zeros(1).expand(*inputs.shape[:-1], layer.out_features)
        output = self._output(replace(call, result=result), OwnProjection(layer, inputs, False))
        self.last = None if output is None else (output, version_of(output))
        return output

    def _output(self, call: MixerCall, ahead: OwnProjection | None = None) -> Tensor | None:
        # What takes the place of a mixer's result. Of a projection that is still ahead, None where
        # the frozen mixer has another one.
        module = original(call.module)
        self.busy = True
        try:
            with without_autocast(), weights_loaded(call.module):
                plain = replace(call, result=detached(call.result))
                mixer = adapter_of(plain)(plain)
                projection = _seen(call, mixer) if ahead is None else ahead
                opened = OpenMixer(
                    call.path, call, mixer, self.visits[call.path], projection=projection
                )
                if not opened.has_own_projection:
                    if ahead is not None:
                        known_of(module).projection = None
                        return None
                    opened = replace(opened, projection=None)
                if self.check:
                    opened.check(self._mask_of(call))
                return self._edited(opened)
        finally:
            self.busy = False

    def _edited(self, opened: OpenMixer) -> Tensor:
        if self.unedited is None:
            return self.edit(opened)
        if self.unedited.is_running:
            self.unedited.calls[opened.path, opened.visit] = opened
            return opened.returned
        return self.edit(replace(opened, unedited=self.unedited.of(opened)))

    def _mask_of(self, call: MixerCall) -> Tensor | None:
        mask = call.token_mask() if self.mask is None else self.mask
        fits = mask is not None and mask.shape == call.output.shape[:2]
        return mask if fits else None


# The interventions of this thread, by the modules that they are about. Hooks would not do: a module
# that another thread is running must not lose one.
_EDITS: ContextVar[dict[nn.Module, tuple[_Edits, ...]]] = ContextVar("edits", default={})  # noqa: B039
_LOCK = threading.Lock()


@contextmanager
def _noticed(edits: _Edits) -> Iterator[None]:
    # Calls of the modules that an intervention is about go through it, in this thread.
    modules = {edits.model, *edits.paths, *edits.linears}
    around = {module: (*_EDITS.get().get(module, ()), edits) for module in modules}
    with ExitStack() as stack, stack:
        undo(stack, _leave, edits, modules)
        _enter(edits, modules)
        stack.enter_context(bound(_EDITS, _EDITS.get() | around))
        yield


def _enter(edits: _Edits, modules: set[nn.Module]) -> None:
    with _LOCK:
        for module in modules:
            forward = module.__dict__.get("forward")
            if not isinstance(forward, _Forward):
                forward = module.__dict__["forward"] = _Forward(module)
            forward.users.add(id(edits))


def _leave(edits: _Edits, modules: set[nn.Module]) -> None:
    with _LOCK:
        for module in modules:
            forward = module.__dict__.get("forward")
            if isinstance(forward, _Forward):
                forward.users.discard(id(edits))
                if forward.users:
                    continue
                if forward.is_instance:
                    module.__dict__["forward"] = forward.original
                else:
                    module.__dict__.pop("forward", None)


class _Forward:
    # A module's forward while interventions, of any thread, are about it.
    def __init__(self, module: nn.Module) -> None:
        self.original, self.is_instance = module.forward, "forward" in module.__dict__
        self.module = module
        self.users: set[int] = set()  # their ids, as a copy of the module does not need them
        update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, around = self.module, _EDITS.get().get(original(self.module), ())
        for edits in around:
            edits.enter(self, args, kwargs)
        for edits in around:
            if edits.acts_on(module):
                return edits.run(self, args, kwargs)
        for edits in around:
            if (result := edits.projected(self, args)) is not None:
                return result
        result = self.original(*args, **kwargs)
        for edits in around:
            edits.keep(self, args, result)
        return result


def _seen(call: MixerCall, mixer: FrozenMixer) -> OwnProjection | None:
    # The projection that returned a mixer's result.
    inputs = call.projected(mixer.out_weight)
    if inputs is None:
        return None
    learn_projection(call.module, mixer)
    layer = projection_of(call.module)
    return None if layer is None else OwnProjection(layer, inputs, True)


def _check_last(call: MixerCall, projected: Tensor, version: int) -> None:
    # That what the output projection returned is the mixer's result.
    if call.output.is_set_to(projected) and version_of(projected) == version:
        return
    known_of(call.module).projection = None
    raise ReconstructionError(
        f"{call.path} ({type(call.module).__name__}) changed what its output projection returned, "
        "which it did not do in an earlier run; expected one computation in all runs. The next run "
        "compares all of the mixer: run it again."
    )


def _check_not_begun(call: MixerCall) -> None:
    # Edges lead from token to token of one run, and a cache holds tokens of earlier ones.
    module = original(call.module)
    if past_before(replace(call, module=module)) is not None:
        raise UnsupportedModelError(
            f"{call.path} is called with a cache that is not empty, as by generate(), so "
            "its tokens read a state that no edge or token of this run shows; expected the whole "
            "text in each run. Write the text first, and run it inside of the block; to write in "
            "the block, pass generate(..., use_cache=False)."
        )
