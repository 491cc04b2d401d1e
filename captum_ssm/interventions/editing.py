"""The user's own run of the model, with the outputs of mixers edited.

Each call of a chosen mixer is frozen at the current input of its layer, so that an edit of an
earlier layer reaches it, and compared with what the module returned. The change by the edit is
added to the module's output, so that where an edit changes nothing, the module's own values go on,
bit by bit.
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
from torch.nn import functional as F

from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.check import Rebuilt, check_reconstruction
from captum_ssm.capture.session import IS_RECORDED
from captum_ssm.capture.substitute import without_autocast
from captum_ssm.capture.unknown_mixers import adapter_of
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.interventions.selection import Layers, chosen_layers
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.mixers.call import LinearCalls, bound_arguments, without_caches
from captum_ssm.mixers.linear_layers import is_plain
from captum_ssm.mixers.registry import channels_of, past_before
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.blocks import bound, contextmanager, undo
from captum_ssm.utils.copies import original
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import detached, with_first
from captum_ssm.utils.offload import weights_loaded
from captum_ssm.utils.plain_graph import without_checkpoints


@dataclass(frozen=True)
class OpenMixer:
    """A mixer frozen in the middle of a run, taken apart after its scans.

    Args:
        path (str): the module's.
        call (MixerCall): the call, at the current input of the layer.
        mixer (FrozenMixer): the same, frozen, with its graph.
        visit (int, optional): how often the module was called before in this run. Default: 0
        unedited (OpenMixer, optional): the call in the run without the intervention, if that was
            asked for. Default: None
    """

    path: str
    call: MixerCall
    mixer: FrozenMixer
    visit: int = 0
    unedited: OpenMixer | None = None

    @cached_property
    def mixed(self) -> list[Tensor]:
        """What each of the mixer's scans returns, ``(B, L, D)``, in the scan's order."""
        return [scan.mixed for scan, _, _ in self.mixer.scans_in_order()]

    @cached_property
    def gated(self) -> Tensor:
        """The input of the output projection, ``(B, L, D)``."""
        mixer = self.mixer
        return mixer.gated_output_of(self.mixed) if mixer.is_readable else mixer.gated_output()

    @cached_property
    def output(self) -> Tensor:
        """What the frozen mixer returns, ``(B, L, E)``."""
        return self.mixer.projected(self.gated)

    @cached_property
    def projected(self) -> Tensor | None:
        """What the module's output projection was given, ``(B, L, D)``, where that was kept."""
        recorded = self.call.projected(self.mixer.out_weight)
        return recorded if recorded is None or recorded.shape == self.gated.shape else None

    def check(self, mask: Tensor | None) -> None:
        """Raise `ReconstructionError` unless this is what the module computed."""
        gated, recorded = self.gated.detach(), self.projected
        # The output is kept for the edit, which needs the run's graph of it.
        output = self.output.detach() if recorded is None else self.call.output
        with torch.no_grad():
            share = self.mixer.recurrence_share(gated)
            projected = None if recorded is None else (gated, recorded)
            rebuilt = Rebuilt(output, share, self.mixer.rounding, projected)
            check_reconstruction(self.path, self.call, rebuilt, mask)

    def returning_mixed(self, mixed: list[Tensor]) -> Tensor:
        """The module's output if its scans returned ``mixed`` instead of :attr:`mixed`."""
        return self.returning(self.mixer.gated_output_of(mixed))

    def returning(self, gated: Tensor) -> Tensor:
        """The module's output for another input of its output projection, ``(B, L, D)``."""
        output = self.call.output
        mixer = self.mixer if self.unedited is None else self.unedited.mixer
        if self.projected is None or mixer.out_gate is not None:
            change = mixer.projected(gated) - self.output
        else:
            change = F.linear(gated - self.gated, self.mixer.out_weight)
        if output.requires_grad and not change.requires_grad and torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"{self.path} ({type(self.call.module).__name__}) was frozen without the graph of "
                "its coefficients, as all measured mixers are, so no gradient goes through the "
                "intervention's change; expected torch.no_grad(). Or register an adapter with "
                "captum_ssm.register_mixer(module_type, freeze)."
            )
        return output + change.reshape(output.shape).to(output.dtype)


Edit = Callable[[OpenMixer], Tensor]


@contextmanager
def edited(
    model: Any, layers: Layers, edit: Edit, *, check: bool = True, unedited: bool = False
) -> Iterator[None]:
    """Let ``edit`` compute what the chosen mixers return, in this thread, while the block runs.

    Args:
        model (nn.Module or nnsight model): runs its own forward inside the block.
        layers (int, str, slice or sequence, optional): mixers by index or path; None for all.
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
    with workspace(), without_checkpoints(), _noticed(edits):
        yield
    missed = [path for path in chosen if path not in edits.reached]
    if missed:
        raise UnsupportedModelError(
            f"the block did not reach {', '.join(missed)}, so nothing was changed there; expected "
            "it to run the model in this thread. Name the layers that it runs, and leave models "
            "uncompiled (torch.compile does not see changes that come later)."
        )


@dataclass(eq=False)
class _Unedited:
    """The calls of the mixers in the run without the intervention, of the run that goes on now."""

    calls: dict[tuple[str, int], OpenMixer] = field(default_factory=dict)
    is_running: bool = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """Run the model, whose mixers are kept as they are."""
        self.calls.clear()
        self.is_running = True
        try:
            forward(*args, **without_caches(kwargs))
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
    calls: LinearCalls | None = None  # of the mixer that is running

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
            self.unedited.run(forward, args, kwargs)
            self.visits.clear()

    def acts_on(self, module: nn.Module) -> bool:
        """Whether a call of a module is edited."""
        return original(module) in self.paths and not self.busy

    def keep(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Keep what a linear layer computed, so that freezing its mixer does not compute it."""
        is_kept = self.calls is not None and original(module) in self.linears and len(args) == 1
        # Nothing says whether tensors made under inference mode were changed since. An offloaded
        # layer has let go of its weight by now.
        if is_kept and not result.is_inference() and not module.weight.is_meta:
            self.calls.add(module, args[0], result)  # type: ignore[union-attr]

    def leave(self, call: MixerCall) -> MixerCall:
        """A call with what takes the place of its result."""
        if not self.acts_on(call.module):
            return call
        module, result = original(call.module), call.result
        path = self.paths[module]
        if IS_RECORDED.get():
            raise UnsupportedModelError(
                f"{path} is edited by an intervention, and a method of frozen mixers was called "
                "inside of the block, where it would explain the unedited mixer; expected methods "
                "of gradients or perturbations there. Call this method outside of the block."
            )
        self.reached.add(path)
        call = replace(call, path=path)
        self.busy = True
        try:
            with without_autocast(), weights_loaded(module):
                plain = replace(call, result=detached(result))
                opened = OpenMixer(path, call, adapter_of(plain)(plain), self.visits[path])
                self.visits[path] += 1
                if self.check:
                    opened.check(self._mask_of(call))
                output = self._edited(opened)
        finally:
            self.busy = False
        return replace(call, result=with_first(result, output))

    def _edited(self, opened: OpenMixer) -> Tensor:
        if self.unedited is None:
            return self.edit(opened)
        if self.unedited.is_running:
            self.unedited.calls[opened.path, opened.visit] = opened
            return opened.call.output
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
            forward.users.add(edits)


def _leave(edits: _Edits, modules: set[nn.Module]) -> None:
    with _LOCK:
        for module in modules:
            forward = module.__dict__.get("forward")
            if isinstance(forward, _Forward):
                forward.users.discard(edits)
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
        self.users: set[_Edits] = set()
        update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, around = self.module, _EDITS.get().get(original(self.module), ())
        for edits in around:
            edits.enter(self, args, kwargs)
        editing = [edits for edits in around if edits.acts_on(module)]
        linears = LinearCalls()
        if editing:  # before the mixer writes into its cache
            _check_not_begun(
                MixerCall.of("", module, args, kwargs, None, channels=channels_of(module)),
                editing[0],
            )
        for edits in editing:
            edits.calls = linears
        try:
            result = self.original(*args, **kwargs)
        finally:
            for edits in editing:
                edits.calls = None
        for edits in around:
            edits.keep(module, args, result)
        if not editing:
            return result
        call = MixerCall.of("", module, args, kwargs, result, channels=channels_of(module))
        call = replace(call, linears=linears)
        for edits in around:
            call = edits.leave(call)
        return call.own[2]


def _check_not_begun(call: MixerCall, edits: _Edits) -> None:
    # Edges lead from token to token of one run, and a cache holds tokens of earlier ones.
    module = original(call.module)
    if past_before(replace(call, module=module)) is not None:
        raise UnsupportedModelError(
            f"{edits.paths[module]} is called with a cache that is not empty, as by generate(), so "
            "its tokens read a state that no edge or token of this run shows; expected the whole "
            "text in each run. Write the text first, and run it inside of the block; to write in "
            "the block, pass generate(..., use_cache=False)."
        )
