"""Recording a model that runs on an nnsight server: its mixers' tensors travel, not the model.

One request brings back what entered and left each mixer, and the weights of the mixers that are
not loaded here. Freezing, the reconstruction check and the maps are then computed here, as for a
local run. Where gradients are needed the logits come back too, and a second request takes the
gradient of the score at them along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_ssm._blocks import undo
from captum_ssm._capture.model import unwrap
from captum_ssm._capture.recording import Recording, gradients_at, split_calls
from captum_ssm._capture.request import Remote, Request
from captum_ssm._capture.tracing import find_points
from captum_ssm._capture.wiring import Wiring, of_reads, sequence
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
        (at_logits,) = gradients_at([self.output], target)
        assert at_logits is not None
        places = at_logits.nonzero(as_tuple=True)
        return self.carrying(self.gradients_of(places, at_logits[places]))


def record_remotely(
    request: Request,
    *,
    score: Callable[[Recording], Tensor] | None = None,
    also: Callable[[nn.Module], bool] | None = None,
) -> Recording:
    """As :func:`~captum_ssm._capture.recording.record`, of a run on a server.

    The model's weights need not be loaded. With a ``score`` the logits come back too, so that
    :meth:`RemoteRecording.with_gradients` can be asked.

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows, or the run
            reached none.
        TypeError: for positional arguments that have no name.
    """
    model = request.model
    args, kwargs = request.arguments_by_name()
    mixers, others = find_points(unwrap(model), also)
    by_module = {envoy._module: envoy for envoy in model.modules()}
    envoys = [by_module[module] for module in (*mixers, *others)]
    names = {module: path for path, module in unwrap(model).named_modules()}
    absent = [i for i, envoy in enumerate(envoys) if _is_absent(envoy._module)]
    modules = {i: envoy._module for i, envoy in enumerate(envoys)}
    paths = {i: names[module] for i, module in modules.items()}

    def ask(**options: Any) -> tuple[list[Any], dict[int, dict[str, Tensor]], list[Any]]:
        with ExitStack() as stack, torch.inference_mode(False):
            undo(stack, _forget_names, unwrap(model))
            return _ask(model, request.remote, envoys, args, kwargs, **options)

    visits, weights, (output, between) = ask(
        mixers=len(mixers), absent=absent, whole=score is not None
    )
    for i in absent:
        modules[i] = _with_weights(modules[i], weights[i])
    calls = [
        MixerCall(paths[i], modules[i], inputs[0], inputs[1], result, order=order)
        for order, (i, inputs, result) in enumerate(visits)
    ]

    def gradients_of(places: Places, values: Tensor) -> dict[int, Tensor | None]:
        _, _, found = ask(at_logits=(places, values))
        return dict(enumerate(found))

    if score is not None:
        output.requires_grad_(True)
    mixing, other = split_calls(model, calls)
    recording = RemoteRecording(
        request,
        output,
        mixing,
        other,
        kwargs,
        _wiring(mixing, between),
        gradients_of=gradients_of,
    )
    return recording if score is None else replace(recording, score=score(recording))


def _wiring(calls: list[MixerCall], between: tuple[list[list[int]], float]) -> Wiring:
    # What was measured where the model ran. Orders are decoded here only.
    reads, leak = between
    count, shape = len(calls), calls[0].output.shape
    if leak == 0:
        return of_reads({i: set(one) for i, one in enumerate(reads)}, shape[1])
    return replace(
        sequence(count, shape[1]),
        refused="between the mixers of this model tokens are mixed or reordered, which is decoded "
        "only where the model runs here: leave remote at False.",
    )


def _ask(
    root: Any,
    remote: Remote,
    envoys: list[Envoy],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mixers: int = 0,
    absent: Sequence[int] = (),
    whole: bool = False,
    at_logits: tuple[Places, Tensor] | None = None,
) -> tuple[list[Any], dict[int, dict[str, Tensor]], list[Any]]:
    # Without at_logits the visits, the weights of absent modules, the logits (whole, or their
    # shape) and what lies between the first envoys, the mixers: what each and the logits depend
    # on, and how much goes from one token to another. With it the gradients at the visits' outputs.
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
        entries, exits = [], []
        for number, envoy in enumerate(envoys):
            with tracer.invoke():
                steps = tracer.iter[:]  # a block may not begin with try
                try:
                    for _ in steps:
                        inputs = envoy.inputs
                        if number < mixers:
                            tokens = inputs[1].get("hidden_states")
                            for value in [*inputs[0], *inputs[1].values()]:
                                if not torch.is_tensor(tokens) and torch.is_tensor(value):
                                    tokens = value
                            entries.append(tokens)
                            given, keywords = [], {}
                            for value in inputs[0]:
                                given.append(value.detach() if torch.is_tensor(value) else value)
                            for name, value in inputs[1].items():
                                keywords[name] = value.detach() if torch.is_tensor(value) else value
                            inputs = (tuple(given), keywords)
                            envoy.inputs = inputs
                        value = envoy.output
                        packed = isinstance(value, (tuple, list))
                        first = value[0] if packed else value
                        if at_logits is None:
                            visits.append(
                                tree_map(
                                    lambda x: x.detach().cpu() if torch.is_tensor(x) else x,
                                    (number, inputs, value),
                                )
                            )
                            if number < mixers:
                                first = first.detach().requires_grad_(True)
                                exits.append(first)
                                first = first.clone()
                                envoy.output = type(value)([first, *value[1:]]) if packed else first
                            continue
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
                reads, roots, seeds, leak = [], [], [], 0.0
                shape = exits[0].shape[:2]
                chosen = torch.randperm(shape[0] * shape[1]).view(shape) % 2
                for root in [*entries, logits]:
                    seen, stack, reached = set(), [], []
                    if root.requires_grad:
                        stack.append(root.grad_fn)
                        if root.dim() == 3 and root.shape[:2] == shape:
                            roots.append(root)
                            seed = torch.randn(root.shape[-1]) * chosen[..., None]
                            seeds.append(seed.to(root))
                    while stack:
                        node = stack.pop()
                        if node is None or node in seen:
                            continue
                        seen.add(node)
                        leaf = getattr(node, "variable", None)
                        for i, output in enumerate(exits):
                            if output is leaf:
                                reached.append(i)
                        for step in node.next_functions:
                            stack.append(step[0])
                    reads.append(reached)
                for output in exits:
                    if output.shape[:2] != shape:
                        leak = 1.0
                if roots and leak == 0:
                    for g in torch.autograd.grad(roots, exits, seeds, allow_unused=True):
                        if g is not None:
                            other = (1 - chosen)[..., None].to(g)
                            leak = max(leak, float((g * other).abs().max()))
                found.append((reads, leak))
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
