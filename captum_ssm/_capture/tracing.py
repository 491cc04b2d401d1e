"""A model under nnsight for the time of a run, and left exactly as it was.

Only this file and :mod:`remote` import nnsight, and they do so when a model is first run.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from captum_ssm._capture.model import is_wrapped, refuse_scripted, unwrap
from captum_ssm._devices import reloaded_in_backward
from captum_ssm._errors import UnsupportedModelError
from captum_ssm.mixers import find_adapter
from captum_ssm.mixers._named import nearest_misses
from captum_ssm.mixers._registry import supported_classes

if TYPE_CHECKING:
    from nnsight import Envoy

# A traced model carries the trace in its modules: one run at a time, whichever the thread.
ONE_RUN = threading.RLock()
# Whether the model's current run, in this thread, is a recorded one.
IS_RECORDED: ContextVar[bool] = ContextVar("captum_ssm_recorded", default=False)


@contextmanager
def instrumented(model: nn.Module | Envoy) -> Iterator[Envoy]:
    """The model as nnsight's, for the time of a run; it leaves as it came."""
    _load_nnsight()
    modules = list(unwrap(model).modules())
    refuse_scripted(unwrap(model))
    for module in modules:
        # RWKV-4 divides its weights in its first run for inference, and has to remember that.
        rescale = getattr(module, "_rescale_layers", None)
        if callable(rescale):
            rescale()
    with unchanged(unwrap(model)):
        with _one_thread():
            root = model if is_wrapped(model) else _wrap(unwrap(model))
            for module in modules:
                _make_other_threads_wait(module)
        token = IS_RECORDED.set(True)
        try:
            with reloaded_in_backward(unwrap(model)):
                yield root
        finally:
            IS_RECORDED.reset(token)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put the attributes of a model's modules back after a run."""
    copies: dict[int, Any] = {}
    before = [_State(module, copies) for module in model.modules()]
    try:
        yield
    finally:
        for state in before:
            state.restore()


def _wrap(module: nn.Module) -> Envoy:
    from nnsight.modeling.base import NNsight

    with warnings.catch_warnings():
        # Where it mounts a submodule named "output" concerns those who navigate its tree.
        warnings.filterwarnings("ignore", message=".*nnsight already serves")
        return NNsight(module)


def _load_nnsight() -> None:
    # Importing nnsight gives every object of the process a `save` attribute. It is taken back, and
    # the package's name with it, so that a user's own import brings it as they know it.
    if "nnsight.modeling.base" in sys.modules:
        return
    import nnsight
    from nnsight._c import unmount

    if unmount is not None and hasattr(object, "save"):
        unmount("save")
    del sys.modules[nnsight.__name__]


class _State:
    # The attributes of a module: nnsight replaces its forward, and a run may count, cache, register
    # buffers, or write into them (a batch norm's means, a counter, the state of a stream).
    # Containers are put back in place, as others may hold them too; the run gets copies of tensors,
    # which share memory where these do.
    def __init__(self, module: nn.Module, copies: dict[int, Any]) -> None:
        self.contents: list[tuple[Any, Any]] = []
        self.copies = copies
        # A linear layer may keep quantized weights in buffers, too large to copy. Only in training
        # is anything else written there (a spectral norm's vectors).
        self.copies_tensors = module.training or not hasattr(module, "in_features")
        self._keep(module.__dict__, {id(module.__dict__)})

    def _keep(self, container: Any, seen: set[int]) -> None:
        # Most are empty, and copies of these would be thousands.
        self.contents.append((container, container.copy() if container else None))
        if not container or isinstance(container, set):
            return
        pairs = enumerate(container) if isinstance(container, list) else container.items()
        for key, value in [*pairs]:
            if isinstance(value, (dict, list, set)) and id(value) not in seen:
                seen.add(id(value))
                self._keep(value, seen)
            elif type(value) is torch.Tensor and self.copies_tensors and not value.requires_grad:
                container[key] = copy.deepcopy(value, self.copies)

    def restore(self) -> None:
        for value, content in self.contents:
            value.clear()
            if content:
                value.extend(content) if isinstance(value, list) else value.update(content)


@contextmanager
def _one_thread() -> Iterator[None]:
    # Python does not turn to another thread, which would meet a model that is half wrapped.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _make_other_threads_wait(module: nn.Module) -> None:
    # nnsight follows one thread. Inference in another one waits until the model is whole again.
    owner, traced = threading.get_ident(), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == owner:
            return traced(*args, **kwargs)
        with ONE_RUN:
            return module.forward(*args, **kwargs)

    module.__dict__["forward"] = forward


@contextmanager
def without_compiler() -> Iterator[None]:
    # What torch.compile would trace, wherever forward_func calls a compiled model, is the
    # recording, anew for every run.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def find_envoys(
    root: Envoy, also: Callable[[nn.Module], bool] | None
) -> tuple[list[Envoy], list[Envoy]]:
    """The mixers of a wrapped model, and what else ``also`` picks outside of them.

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows.
    """
    mixers = [e for e in _outermost(root) if find_adapter(e._module) is not None]
    if not mixers:
        raise _unsupported(root._module)
    if also is None:
        return mixers, []
    known = set(mixers)
    return mixers, [e for e in _outermost(root) if e not in known and also(e._module)]


def traced(
    root: Envoy,
    envoys: list[Envoy],
    run: Callable[[], Any],
    enter: Callable[[Envoy, Any], Any],
    put: Callable[[Envoy, Any, Any], tuple[Any, Any]],
) -> tuple[Any, list[tuple[Envoy, Any, Any]], list[Any]]:
    from nnsight.intervention.interleaver import OutOfOrderError

    visits: list[tuple[Envoy, Any, Any]] = []
    root_visits: list[Any] = []
    results: list[Any] = []
    # nnsight's language models refuse to run without an input of their own; run() has its own.
    unused = torch.zeros(1, 1, dtype=torch.long)
    with root.trace(fn=lambda *_, **__: run()) as tracer:
        # nnsight takes the body of a block and runs it elsewhere: one context manager a block.
        with tracer.invoke(unused):  # noqa: SIM117
            # An open loop ends by asking for a visit that the run did not make.
            with suppress(OutOfOrderError):
                for _ in tracer.iter[:]:
                    root_visits.append(root.inputs)
        for envoy in envoys:
            with tracer.invoke():  # noqa: SIM117
                with suppress(OutOfOrderError):
                    # One turn a visit: a block that several layers share is visited by each.
                    for _ in tracer.iter[:]:
                        given = envoy.inputs
                        inputs = enter(envoy, given)
                        if inputs is not given:
                            envoy.inputs = inputs
                        found = envoy.output
                        value, passed = put(envoy, inputs, found)
                        if passed is not found:
                            envoy.output = passed
                        if value is not None:
                            visits.append((envoy, inputs, value))
                        # The loop waits for the next visit until the run ends.
                        given = inputs = found = value = passed = None
        with tracer.invoke():
            results.append(tracer.result)
    return results[0], visits, root_visits


def run_in(around: Callable[[nn.Module], AbstractContextManager[None]], module: nn.Module) -> None:
    forward = module.forward

    def within(*args: Any, **kwargs: Any) -> Any:
        with around(module):
            return forward(*args, **kwargs)

    module.__dict__["forward"] = within


def _outermost(root: Envoy) -> Iterator[Envoy]:
    # Envoys in module order, not looking inside a mixer that was found.
    yield root
    if find_adapter(root._module) is None:
        for child in root._children:
            yield from _outermost(child)


def _unsupported(model: nn.Module) -> UnsupportedModelError:
    kinds = sorted({type(m).__name__ for m in model.modules() if m is not model})
    shown = ", ".join(kinds[:30]) + (", ..." if len(kinds) > 30 else "")
    near = nearest_misses(model)
    return UnsupportedModelError(
        f"{type(model).__name__} holds no token mixer that captum_ssm knows. Found: "
        f"{shown or 'no submodules'}. "
        + (f"Nearest to a mixer: {near}. " if near else "")
        + f"Supported: {supported_classes()}. A new mixer is registered with "
        "captum_ssm.register_mixer(module_type, freeze); docs/add_a_family.md shows how."
    )
