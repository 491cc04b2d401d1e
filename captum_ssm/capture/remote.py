"""Recording a model that runs on an nnsight server: its mixers' tensors travel, not the model.

One request brings back what entered and left each mixer, and the weights of the mixers that are
not loaded here. Mixers are then frozen and checked here, each by itself: what lies between them,
and the gradient of a score, take a run of the model here.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_ssm.capture.model import unwrap
from captum_ssm.capture.recording import Recording, split_calls
from captum_ssm.capture.request import Remote, Request
from captum_ssm.capture.session import find_points
from captum_ssm.errors import brief
from captum_ssm.mixers import MixerCall
from captum_ssm.utils.blocks import undo
from captum_ssm.wiring.wiring import sequence

if TYPE_CHECKING:
    from nnsight import Envoy

Answer = tuple[list[Any], dict[int, dict[str, Tensor]]]

ONLY_LAYERS = (
    "the model runs on a server, which returns what each of its mixers was given and returned: "
    "nothing there tells what lies between the mixers, or how a score depends on them. Expected "
    "what is said of single layers (hidden_attention, LaTIM's contributions, interactions and "
    "layer_errors); leave remote at False for all else."
)


def check_remote(remote: Any, forward_func: Any, model: Any) -> None:
    """Raise unless this model can run where ``remote`` says."""
    if not isinstance(remote, (bool, str)) or remote == "":
        raise TypeError(
            f"remote is {brief(remote)}; expected False, True (the server of nnsight's "
            "configuration) or a str, the address of another server."
        )
    if remote == "local":
        raise ValueError(
            "remote is 'local', nnsight's rehearsal of a request in this process, which does not "
            "run blocks within blocks; expected False, True or the address of a server."
        )
    if not remote:
        return
    from nnsight.modeling.mixins.remotable import Remotable

    asked = forward_func if model is None else model
    if forward_func is not asked or not isinstance(asked, Remotable):
        raise TypeError(
            f"remote is {brief(remote)}, and forward_func is a {type(forward_func).__name__}; what "
            "runs on a server is an nnsight model that has a name there, such as "
            "nnsight.LanguageModel: pass it as forward_func, and no other model."
        )


def record_remotely(request: Request) -> Recording:
    """A recording of a run on a server. The model's weights need not be loaded.

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows, or the run
            reached none.
        TypeError: for positional arguments that have no name.
    """
    model, root = request.model, unwrap(request.model)
    arguments = request.arguments_by_name()
    mixers, _ = find_points(root, None)
    by_module = {envoy._module: envoy for envoy in model.modules()}
    envoys = [by_module[module] for module in mixers]
    modules: list[nn.Module] = list(mixers)
    absent = [i for i, module in enumerate(modules) if _is_absent(module)]
    with ExitStack() as stack, stack, torch.inference_mode(False):
        undo(stack, _forget_names, root)
        visits, weights = _ask(model, request.remote, envoys, arguments, absent)
    paths = list(mixers.values())
    for i in absent:
        modules[i] = _with_weights(modules[i], weights[i])
    calls = [
        MixerCall(paths[i], modules[i], inputs[0], inputs[1], result, order=order)
        for order, (i, inputs, result) in enumerate(visits)
    ]
    calls, _ = split_calls(model, calls)
    # The logits stay there.
    output = calls[-1].output
    wiring = replace(sequence(len(calls), output.shape[1]), refused=ONLY_LAYERS)
    return Recording(request, output, calls, [], arguments, wiring)


def _ask(
    root: Any,
    remote: Remote,
    envoys: list[Envoy],
    arguments: dict[str, Any],
    absent: list[int],
) -> Answer:
    # The visits in forward order, and the weights of absent modules. The block names nothing but
    # torch and nnsight: this package is not installed where it runs, and a server may refuse other
    # modules, Python's own among them.
    from nnsight import save
    from nnsight.intervention.interleaver import OutOfOrderError

    visits: list[Any] = []
    weights: dict[int, dict[str, Tensor]] = {}
    with root.trace(remote=remote) as tracer:
        visits, weights = save([]), save({})
        for number, envoy in enumerate(envoys):
            with tracer.invoke():
                steps = tracer.iter[:]  # a block may not begin with try
                try:
                    for _ in steps:
                        visits.append(
                            tree_map(
                                lambda x: x.detach().cpu() if torch.is_tensor(x) else x,
                                (number, envoy.inputs, envoy.output),
                            )
                        )
                except OutOfOrderError:  # a visit that the run did not make
                    pass
        with tracer.invoke(**arguments):
            for number in absent:
                part = envoys[number]._module
                named = [*part.named_parameters(), *part.named_buffers()]
                weights[number] = {name: value.detach().cpu() for name, value in named}
    return visits, weights


def _forget_names(model: nn.Module) -> None:
    # What nnsight calls modules on a server, which it notes in their attributes.
    for module in model.modules():
        module.__dict__.pop("_persistent_id", None)


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
