"""Running the user's model once under nnsight and recording its mixers at their boundaries.

The only file that imports nnsight, and that when a model is first run: the import gives every
object of the process a ``save`` attribute, at which packages imported later (anyio) stumble.
Mixers are never hooked inside: fused kernels and the scan functions of transformers bypass the
inner modules, so everything inside is recomputed from a mixer's parameters and its recorded input.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from captum_ssm._errors import UnsupportedModelError
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers, registered

if TYPE_CHECKING:
    from nnsight import Envoy


# A traced model carries the trace in its modules: one run at a time, whichever the thread.
ONE_RUN = threading.RLock()


@dataclass(frozen=True)
class Capture:
    """What one run of the model left behind.

    Args:
        output (Any): what ``forward_func`` returned.
        calls (list of MixerCall): the mixers' calls, in forward order.
        others (list of MixerCall): calls of further modules outside the mixers, in forward
            order, where they were asked for.
        arguments (dict): the arguments the model's own ``forward`` was called with, by name
            (empty where ``forward_func`` runs only a part of the model).
    """

    output: Any
    calls: list[MixerCall]
    others: list[MixerCall]
    arguments: dict[str, Any]

    def with_gradients(self, target: Tensor) -> Capture:
        """The same capture with each call's gradient of ``target`` (summed over the batch)."""
        require_graph(target)
        outputs = {call.order: call.output for call in (*self.calls, *self.others)}
        wanted = {order: output for order, output in outputs.items() if output.requires_grad}
        found = torch.autograd.grad(target.sum(), list(wanted.values()), allow_unused=True)
        return self.carrying(dict(zip(wanted, found, strict=True)))

    def carrying(self, gradients: Mapping[int, Tensor | None]) -> Capture:
        """The same capture with gradients at the calls' outputs, by the calls' order."""
        if all(gradients.get(call.order) is None for call in self.calls):
            # A score may have a graph of its own: that of a head behind a detached backbone.
            raise _no_graph()

        def one(call: MixerCall) -> MixerCall:
            found = gradients.get(call.order)
            return replace(call, gradient=torch.zeros_like(call.output) if found is None else found)

        return replace(
            self, calls=[one(call) for call in self.calls], others=[one(c) for c in self.others]
        )

    def detached(self) -> Capture:
        """The same capture without its autograd graph."""
        return Capture(
            _detach(self.output),
            [_detached(call) for call in self.calls],
            [_detached(call) for call in self.others],
            self.arguments,
        )


def require_graph(score: Tensor) -> None:
    """Raise unless a gradient of ``score`` can be taken."""
    if not score.requires_grad:
        raise _no_graph()


def gradient_at(leaf: Tensor, score: Tensor) -> Tensor:
    """The gradient of ``score`` (summed over the batch) at ``leaf``."""
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        (gradient,) = torch.autograd.grad(score.sum(), leaf, allow_unused=True)
    if gradient is None:
        raise _no_graph()
    return gradient


def _no_graph() -> ValueError:
    return ValueError(
        "the target does not depend differentiably on the mixers' outputs: forward_func "
        "detaches them or runs under torch.no_grad() itself. Let it return the model's "
        "own output."
    )


def unwrap(model: nn.Module | Envoy) -> nn.Module:
    """The torch module behind a model that may be wrapped by nnsight or by torch.compile."""
    if _is_wrapped(model):
        return model._module
    compiled = type(model).__name__ == "OptimizedModule"
    return model._modules.get("_orig_mod") or model if compiled else model


def is_model(value: Any) -> bool:
    """Whether ``value`` is a torch module or an nnsight-wrapped one."""
    return isinstance(value, nn.Module) or _is_wrapped(value)


def _is_wrapped(value: Any) -> TypeIs[Envoy]:
    nnsight = sys.modules.get("nnsight")
    return nnsight is not None and isinstance(value, nnsight.Envoy)


def capture(
    run: Callable[[], Any],
    model: nn.Module | Envoy,
    *,
    gradients: bool = False,
    also: Callable[[nn.Module], bool] | None = None,
    substitute: Callable[[MixerCall], Any] | None = None,
) -> Capture:
    """Run ``run`` once, with every known mixer of ``model`` recorded at each of its calls.

    Args:
        run (Callable): calls the model on its inputs and returns what the model returned.
        model (nn.Module or nnsight model): holds the mixers; wrapped by nnsight for the time
            of the call where it is not yet.
        gradients (bool, optional): keep the autograd graph, so that
            :meth:`Capture.with_gradients` can be asked. Default: False
        also (Callable, optional): says which modules outside the mixers to record too, such as
            the norms at which the residual stream can be read. Default: None
        substitute (Callable, optional): takes each recorded call, its tensors alive in the graph,
            and returns what the model goes on with in place of the call's result.
            Default: None

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows, or the run
            reached none.
    """
    if gradients and any(p.is_inference() for p in unwrap(model).parameters()):
        raise ValueError(
            f"the parameters of model={type(unwrap(model)).__name__} were made under "
            "torch.inference_mode(), so no gradient can be taken through it; make or load the "
            "model outside of it."
        )
    grad_mode = torch.enable_grad if gradients else torch.no_grad
    with (
        ONE_RUN,
        _without_compiler(),
        torch.inference_mode(False),
        grad_mode(),
        instrumented(model) as root,
    ):
        mixers, others = find_envoys(root, also)

        def put(envoy: Envoy, inputs: Any, value: Any) -> Any:
            if substitute is not None:
                args, kwargs = inputs
                value = substitute(MixerCall(envoy.path, envoy._module, args, kwargs, value))
            if gradients and not _first(value).requires_grad:
                # A frozen model fed with ids has no graph: it starts here.
                return _as_leaf(value)
            return value

        output, visits, root_visits = _trace(root, [*mixers, *others], run, put)
        # Read after the run: nnsight's lazily loaded models get their real modules in it.
        names = {module: path for path, module in root._module.named_modules()}
        calls = [
            MixerCall(names[envoy._module], envoy._module, args, kwargs, result, order=order)
            for order, (envoy, (args, kwargs), result) in enumerate(visits)
        ]
        arguments = _bind(root._module, *root_visits[0]) if root_visits else {}
    captured = Capture(output, *split_calls(model, calls), arguments)
    return captured if gradients else captured.detached()


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


def split_calls(
    model: nn.Module | Envoy, calls: list[MixerCall]
) -> tuple[list[MixerCall], list[MixerCall]]:
    """The calls of mixers, and those of what else was recorded.

    Raises:
        UnsupportedModelError: there are none of mixers.
    """
    mixers = [call for call in calls if find_adapter(call.module) is not None]
    if not mixers:
        known = sum(1 for _ in find_mixers(unwrap(model)))
        raise UnsupportedModelError(
            f"forward_func did not reach any of the {known} mixers of model="
            f"{type(unwrap(model)).__name__}; pass the model that forward_func runs."
        )
    return mixers, [call for call in calls if find_adapter(call.module) is None]


def _trace(
    root: Envoy,
    envoys: list[Envoy],
    run: Callable[[], Any],
    put: Callable[[Envoy, Any, Any], Any],
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
                        inputs = envoy.inputs
                        found = envoy.output
                        value = put(envoy, inputs, found)
                        if value is not found:
                            envoy.output = value
                        visits.append((envoy, inputs, value))
        with tracer.invoke():
            results.append(tracer.result)
    return results[0], visits, root_visits


@contextmanager
def instrumented(model: nn.Module | Envoy) -> Iterator[Envoy]:
    # nnsight replaces the forward of every module it wraps, for good, and some models keep
    # recurrent states in plain attributes. A model leaves with the attributes it came with.
    for module in unwrap(model).modules():
        # RWKV-4 divides its weights in its first run for inference, and has to remember that.
        rescale = getattr(module, "_rescale_layers", None)
        if callable(rescale):
            rescale()
    before = [(module, dict(module.__dict__)) for module in unwrap(model).modules()]
    for module, attributes in before:
        # A checkpointed block has no graph, or one that is not of what was recorded.
        if attributes.get("gradient_checkpointing"):
            module.__dict__["gradient_checkpointing"] = False
    try:
        if _is_wrapped(model):
            yield model
        else:
            from nnsight import NNsight

            with warnings.catch_warnings():
                # Where it mounts a submodule named "output" concerns those who navigate its tree.
                warnings.filterwarnings("ignore", message=".*nnsight already serves")
                root = NNsight(unwrap(model))
            yield root
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextmanager
def _without_compiler() -> Iterator[None]:
    # What torch.compile would trace, wherever forward_func calls a compiled model, is the
    # recording, anew for every run.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _outermost(root: Envoy) -> Iterator[Envoy]:
    # Envoys in module order, not looking inside a mixer that was found.
    yield root
    if find_adapter(root._module) is None:
        for child in root._children:
            yield from _outermost(child)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its class's name."""
    return isinstance(module, nn.LayerNorm) or "norm" in type(module).__name__.lower()


def _unsupported(model: nn.Module) -> UnsupportedModelError:
    kinds = sorted({type(m).__name__ for m in model.modules() if m is not model})
    shown = ", ".join(kinds[:30]) + (", ..." if len(kinds) > 30 else "")
    return UnsupportedModelError(
        f"{type(model).__name__} holds no token mixer that captum_ssm knows. Found: "
        f"{shown or 'no submodules'}. Supported: {', '.join(registered())}. A new mixer is "
        "taught with captum_ssm.register_mixer(module_type, freeze)."
    )


def _bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except TypeError:  # a forward that hides its signature
        return dict(kwargs)
    named = dict(bound.arguments)
    named.update(named.pop("kwargs", {}))
    return named


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value


def _as_leaf(value: Any) -> Any:
    leaf = _first(value).detach().clone().requires_grad_(True)
    return type(value)([leaf, *value[1:]]) if isinstance(value, (tuple, list)) else leaf


def _detached(call: MixerCall) -> MixerCall:
    return replace(
        call, args=_detach(call.args), kwargs=_detach(call.kwargs), result=_detach(call.result)
    )


def _detach(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detach(v) for v in value)
    if type(value) is dict:
        return {k: _detach(v) for k, v in value.items()}
    return value
