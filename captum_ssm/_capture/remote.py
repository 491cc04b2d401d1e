"""Recording a model that runs on an nnsight server: its mixers' tensors travel, not the model.

One request brings back what entered and left each mixer, and the weights of the mixers that are
not loaded here. Freezing, the reconstruction check and the maps are then computed here, as for a
local run. Where gradients are needed the logits come back too, and a second request takes the
gradient of the score at them along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_ssm._capture.model import unwrap
from captum_ssm._capture.recording import (
    ONE_RUN,
    Recording,
    find_envoys,
    gradient_at,
    instrumented,
    split_calls,
)
from captum_ssm._capture.request import Remote, Request
from captum_ssm.mixers import MixerCall

if TYPE_CHECKING:
    from nnsight import Envoy

Places: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class RemoteRecording(Recording):
    """A recording of a run elsewhere, where gradients are asked for too.

    Args:
        gradients_of (Callable): takes the indices and values of a gradient at the logits that is
            zero elsewhere, and returns that at the output of each call, by the calls' order.
    """

    gradients_of: Callable[[Places, Tensor], dict[int, Tensor | None]] = field(kw_only=True)

    def with_gradients(self, target: Tensor) -> Recording:
        at_logits = gradient_at(self.output, target)
        places = at_logits.nonzero(as_tuple=True)
        return self.carrying(self.gradients_of(places, at_logits[places]))


def record_remotely(
    request: Request,
    *,
    gradients: bool = False,
    also: Callable[[nn.Module], bool] | None = None,
) -> Recording:
    """As :func:`~captum_ssm._capture.recording.record`, of a run on a server.

    The model's weights need not be loaded. With ``gradients`` the logits come back too, so that
    :meth:`RemoteRecording.with_gradients` can be asked.

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows, or the run
            reached none.
        TypeError: for positional arguments that have no name.
    """
    model = request.model
    args, kwargs = request.arguments_by_name()
    mixers, others = find_envoys(model, also)
    envoys = [*mixers, *others]
    names = {module: path for path, module in unwrap(model).named_modules()}
    absent = [i for i, envoy in enumerate(envoys) if _is_absent(envoy._module)]
    modules = {i: envoy._module for i, envoy in enumerate(envoys)}
    paths = {i: names[module] for i, module in modules.items()}

    def ask(**options: Any) -> tuple[list[Any], dict[int, dict[str, Tensor]], list[Any]]:
        with ONE_RUN, instrumented(model), torch.inference_mode(False):
            return _ask(model, request.remote, envoys, args, kwargs, **options)

    visits, weights, (output,) = ask(absent=absent, whole=gradients)
    for i in absent:
        modules[i] = _with_weights(modules[i], weights[i])
    calls = [
        MixerCall(paths[i], modules[i], inputs[0], inputs[1], result, order=order)
        for order, (i, inputs, result) in enumerate(visits)
    ]

    def gradients_of(places: Places, values: Tensor) -> dict[int, Tensor | None]:
        _, _, found = ask(at_logits=(places, values))
        return dict(enumerate(found))

    if gradients:
        output.requires_grad_(True)
    split = split_calls(model, calls)
    return RemoteRecording(request.inputs, output, *split, kwargs, gradients_of=gradients_of)


def _ask(
    root: Any,
    remote: Remote,
    envoys: list[Envoy],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    absent: Sequence[int] = (),
    whole: bool = False,
    at_logits: tuple[Places, Tensor] | None = None,
) -> tuple[list[Any], dict[int, dict[str, Tensor]], list[Any]]:
    # Without at_logits the visits, the weights of absent modules and the logits (whole, or their
    # shape); with it the gradients at the visits' outputs, in place of the logits.
    # The block names nothing but torch and nnsight: this package is not installed where it runs,
    # and a server may refuse other modules, Python's own among them. And it is one block for both,
    # as a server keeps the text of the first that it got from a file.
    from nnsight import save
    from nnsight.intervention.interleaver import OutOfOrderError

    visits: list[Any] = []
    weights: dict[int, dict[str, Tensor]] = {}
    found: list[Any] = []
    with root.trace(remote=remote) as tracer:
        visits, weights, found, outputs = save([]), save({}), save([]), []
        for number, envoy in enumerate(envoys):
            with tracer.invoke():
                steps = tracer.iter[:]  # a block may not begin with try
                try:
                    for _ in steps:
                        visit = (number, envoy.inputs, envoy.output)
                        if at_logits is None:
                            visits.append(
                                tree_map(
                                    lambda x: x.detach().cpu() if torch.is_tensor(x) else x, visit
                                )
                            )
                            continue
                        value = visit[2]
                        packed = isinstance(value, (tuple, list))
                        first = value[0] if packed else value
                        if not first.requires_grad:
                            # A frozen model fed with ids has no graph: it starts here.
                            first = first.detach().clone().requires_grad_(True)
                            envoy.output = type(value)([first, *value[1:]]) if packed else first
                        outputs.append(first)
                except OutOfOrderError:  # a visit that the run did not make
                    pass
        with tracer.invoke(*args, **kwargs):
            result = tracer.result
            logits = result if torch.is_tensor(result) else getattr(result, "logits", None)
            if logits is None:
                values = result.values() if isinstance(result, dict) else result
                logits = next(value for value in values if torch.is_tensor(value))
            if at_logits is None:
                found.append(logits.detach().cpu() if whole else logits.detach().to("meta"))
            else:
                places, factors = at_logits
                score = (logits[places] * factors.to(logits)).sum()
                if score.requires_grad:
                    gradients = torch.autograd.grad(score, outputs, allow_unused=True)
                    found.extend(None if g is None else g.cpu() for g in gradients)
            for number in absent:
                part = envoys[number]._module
                named = [*part.named_parameters(), *part.named_buffers()]
                weights[number] = {name: value.detach().cpu() for name, value in named}
    return visits, weights, found


def _is_absent(module: nn.Module) -> bool:
    return any(t.is_meta for t in chain(module.parameters(), module.buffers()))


def _with_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    # A copy of a module without weights that has them; the user's stays as it is.
    module = copy.deepcopy(module)
    for name, value in weights.items():
        path, _, leaf = name.rpartition(".")
        part = module.get_submodule(path)
        if leaf in part._parameters:
            part._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            part._buffers[leaf] = value
    return module
