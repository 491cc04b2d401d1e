"""A run of a model under nnsight, on copies of its modules that are thrown away.

Only this file and :mod:`remote` import nnsight, and they do so when a model is first run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from captum_ssm.capture.model import is_wrapped, refuse_scripted
from captum_ssm.capture.request import Request
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers import find_adapter
from captum_ssm.mixers.registry import nearest_misses, outermost, supported_classes
from captum_ssm.utils.blocks import WhileOpen, bound, contextmanager, undo
from captum_ssm.utils.copies import Copies, original, running
from captum_ssm.utils.offload import reloaded_in_backward

if TYPE_CHECKING:
    from nnsight import Envoy

    from captum_ssm.capture.visits import Visits

# Whether the model's current run, in this thread, is a recorded one.
IS_RECORDED: ContextVar[bool] = ContextVar("captum_ssm_recorded", default=False)
# What a call returned that ended in an exception.
_RAISED = object()
# What each watched module does in a run, as nnsight runs it: a block of its own.
_BLOCK = compile("block()", "<captum_ssm>", "exec")


@contextmanager
def instrumented(request: Request) -> Iterator[tuple[Request, Copies]]:
    """A request that runs copies of its model's modules, and these copies.

    Raises:
        UnsupportedModelError: for a model that TorchScript compiled, or whose run this is a part
            of.
    """
    if is_wrapped(request.model) and not getattr(request.model, "dispatched", True):
        request.model.dispatch()  # nnsight loads the weights when the model first runs
    model = request.module
    refuse_scripted(model)
    if IS_RECORDED.get() and running(model) is not model:
        raise UnsupportedModelError(
            f"{type(model).__name__} is being explained, and its own run (its forward, or a hook "
            "of one of its modules) asks to explain it again; expected a call from outside. Take "
            "the hook away, or let it do nothing while it is called from within an explanation."
        )
    for module in model.modules():
        # RWKV-4 divides its weights in its first run for inference, and has to remember that.
        rescale = getattr(module, "_rescale_layers", None)
        if callable(rescale):
            rescale()
    with (
        on_thrown_away(request) as (of_copies, copies),
        reloaded_in_backward(copies.root),
        bound(IS_RECORDED, True),
    ):
        for module in copies.root.modules():
            _unwrapped(module)
        yield of_copies, copies


def _unwrapped(module: nn.Module) -> None:
    # A copy of a module that a user's nnsight model wraps, with a forward of its own again.
    state = module.__dict__.pop("__nnsight__", None)
    if state is not None:
        module.__dict__.pop("forward", None)
        if state.original is not type(module).forward:
            module.__dict__["forward"] = MethodType(state.original, module)


def find_points(
    model: nn.Module, also: Callable[[nn.Module], bool] | None
) -> tuple[dict[nn.Module, str], dict[nn.Module, str]]:
    """The mixers of a model, and what else ``also`` picks outside of them, with their paths.

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows.
    """
    paths = {module: path for path, module in outermost(model)}
    mixers = {m: path for m, path in paths.items() if find_adapter(m) is not None}
    if not mixers:
        raise _unsupported(model)
    others = {m: path for m, path in paths.items() if m not in mixers}
    picked = {m: path for m, path in others.items() if also and also(original(m))}
    return mixers, picked


def traced(
    points: dict[nn.Module, str],
    model: Any,
    copies: Copies,
    run: Callable[[], Any],
    visits: Visits,
) -> tuple[Any, list[tuple[nn.Module, Any, Any]], list[Any]]:
    """Run a model, with each call of some of its modules looked at and changed.

    Args:
        points (dict of nn.Module to str): copies of the modules, and names for them.
        model (nn.Module or nnsight model): the user's. Edits that nnsight keeps act in the run.
        copies (Copies): of its modules.
        run (Callable): runs the copies.
        visits (Visits): looks at each call, and changes it. What it raises ends the run, also of a
            model that catches it.

    Returns:
        tuple: what ``run`` returned; what was kept, in the order of the calls, each with the
        module and what it was given; and what the root was given, by call.
    """
    load_nnsight()
    from nnsight.intervention.interleaver import Interleaver

    root_visits: list[Any] = []
    looks, interleaver = _Looked(visits), Interleaver()
    names, edits = _edits_of(model, copies)

    def watch(module: nn.Module, path: str) -> Envoy:
        # nnsight reaches a module by one name in each run.
        return _watcher()(module, names.get(module, f"captum_ssm.{path}"), interleaver)

    def look_at_root(envoy: Envoy) -> None:
        root_visits.append(envoy.inputs)

    for module, path in names.items():
        watch(module, path)
    # The root may be a mixer itself, and is then reached by the name that it is given last.
    at_root = _mediator(partial(_visiting, watch(copies.root, "root"), look_at_root))
    watched = {module: watch(module, f"of.{path}") for module, path in points.items()}
    looking = {m: _mediator(partial(_visiting, e, looks)) for m, e in watched.items()}
    interleaver.mediators = [*edits, at_root, *looking.values()]
    for module, mediator in looking.items():
        _around(module, watched[module], mediator)
    with ExitStack() as stack, stack:
        undo(stack, interleaver.cancel)
        with interleaver:
            result = run()
        if looks.refused:
            raise looks.refused[0]
        interleaver.check_dangling_mediators()
    return result, looks.recorded, root_visits


@dataclass
class _Looked:
    # What was kept of the calls that were looked at, and what looking at them raised.
    visits: Visits
    recorded: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)

    def __call__(self, envoy: Envoy) -> None:
        module, arguments = envoy._module, envoy.inputs
        with self._noting():
            inputs = self.visits.enter(module, arguments)
        if inputs is not arguments:
            envoy.inputs = inputs
        result = envoy.output
        if result is _RAISED:
            self.visits.abandon(module)
            return
        with self._noting():
            value, passed = self.visits.leave(module, inputs, result)
        if passed is not result:
            envoy.output = passed
        if value is not None:
            self.recorded.append((module, inputs, value))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.refused.append(error)
            raise


def _around(module: nn.Module, envoy: Envoy, mediator: Any) -> None:
    # Run a module's hook of accelerate before it is looked at, and after: what it is given and
    # returns is then where its weights are. And a block that waits for what a call returns goes on
    # where the call raises: nnsight would give it what the next call of the module returns.
    forward, hook = module.forward, module.__dict__.pop("_hf_hook", None)

    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Any:
        if hook is not None:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        try:
            result = forward(*args, **kwargs)
        except Exception:
            output = f"{envoy.path}.output"
            if mediator.alive and mediator.pending.provider == output:
                mediator.handle(output, _RAISED)
                envoy.interleaver.reindex()
            raise
        return result if hook is None else hook.post_forward(module, result)

    module.__dict__["forward"] = around


def _visiting(envoy: Envoy, look: Callable[[Envoy], None]) -> None:
    # One turn a visit: a block of layers that several share is visited by each.
    from nnsight.intervention.interleaver import OutOfOrderError
    from nnsight.intervention.iterator import Iterations

    # An open loop ends by asking for a visit that the run did not make.
    with suppress(OutOfOrderError):
        for _ in Iterations():
            look(envoy)


def _mediator(block: Callable[[], None]) -> Any:
    from nnsight.intervention.interleaver import Mediator

    # A greenlet begins with no context variables: it is given those of this run.
    return Mediator(_BLOCK, {}, {"block": partial(copy_context().run, block)})


@cache
def _watcher() -> type[Envoy]:
    from nnsight.intervention.envoy import Envoy

    class Watcher(Envoy):
        """One module, without those inside of it, whose names may be those of nnsight's own."""

        def _add_envoy(self, name: str, module: nn.Module) -> Any:
            return None

    return Watcher


def _edits_of(model: Any, copies: Copies) -> tuple[dict[nn.Module, str], list[Any]]:
    # The edits that a user's nnsight model keeps, which act on each of its runs, and the names by
    # which they reach its modules, if there are any.
    if not (is_wrapped(model) and model._edits):
        return {}, []
    from nnsight.intervention.interleaver import Mediator

    names = {copies.of(envoy._module): envoy.path for envoy in model.modules()}
    edits = [
        Mediator(e.code, e.glbls, dict(e.lcls), copy=True, shared=e.lcls.shared)
        for e in model._edits
    ]
    return names, edits


def load_nnsight() -> None:
    """Import nnsight, and leave the process as it was before.

    Its import gives every object a ``save`` attribute and replaces ``torch.Tensor.backward``. Both
    are taken back, and what put them there is forgotten, so that a user's own import brings them.
    Other threads wait meanwhile.
    """
    with _LOADED.block():
        pass


@cache
def _load_nnsight() -> None:
    if "nnsight" in sys.modules:
        return  # the user's
    with ExitStack() as stack, stack:
        undo(stack, _forget_nnsight, torch.Tensor.backward)
        import nnsight.intervention.envoy
        import nnsight.intervention.iterator  # noqa: F401


_LOADED = WhileOpen(_load_nnsight, lambda: None)


def _forget_nnsight(backward: Any) -> None:
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    sys.modules.pop("nnsight", None)
    # What patched it: to be imported again.
    sys.modules.pop("nnsight.intervention.backward", None)
    vars(sys.modules.get("nnsight.intervention", sys)).pop("backward", None)
    unmount = getattr(sys.modules.get("nnsight._c"), "unmount", None)
    if unmount is not None and hasattr(object, "save"):
        unmount("save")


def _unsupported(model: nn.Module) -> UnsupportedModelError:
    kinds = sorted({type(m).__name__ for m in model.modules() if m is not model})
    shown = ", ".join(kinds[:30]) + (", ..." if len(kinds) > 30 else "")
    near = nearest_misses(original(model))
    return UnsupportedModelError(
        f"{type(model).__name__} holds no token mixer that captum_ssm knows. Found: "
        f"{shown or 'no submodules'}. "
        + (f"Nearest to a mixer: {near}. " if near else "")
        + f"Supported: {supported_classes()}. A new mixer is registered with "
        "captum_ssm.register_mixer(module_type, freeze): help() of it has an example, and "
        "docs/add_a_family.md in the repository shows every step."
    )
