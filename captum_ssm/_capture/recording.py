"""Running the user's model once under nnsight and recording its mixers at their boundaries.

Mixers are never hooked inside: fused kernels and the scan functions of transformers
bypass the inner modules, so everything inside is recomputed from a mixer's parameters and its
recorded input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from captum_ssm._capture.checking import check_finite
from captum_ssm._capture.cuts import Cuts, Port
from captum_ssm._capture.embedded import entries_of, warn_of_derived
from captum_ssm._capture.kept import KeptLinears, KeptScansOfMixers
from captum_ssm._capture.measure import measure
from captum_ssm._capture.model import extract_logits, input_embeddings, unwrap
from captum_ssm._capture.request import Request
from captum_ssm._capture.substitution import Substitution
from captum_ssm._capture.tracing import (
    find_points,
    instrumented,
    run_in,
    traced,
    without_compiler,
)
from captum_ssm._capture.wiring import Wiring
from captum_ssm._checkpoints import without_checkpoints
from captum_ssm._clones import repeated
from captum_ssm._copies import original
from captum_ssm._errors import InputError, UnsupportedModelError
from captum_ssm._graph import Point, is_read_past, past_writes
from captum_ssm._grid import TokenGrid, find_token_grid
from captum_ssm._lazy import cached_property
from captum_ssm._nested import detached, first_of, map_tensors, tensors_in, with_first
from captum_ssm._progress import Bar
from captum_ssm._rules import goes_through_activation, ruled, without_rule
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.mixers._call import bound_arguments
from captum_ssm.mixers._registry import channels_of

if TYPE_CHECKING:
    from nnsight import Envoy


@dataclass(frozen=True)
class Recording:
    """What one run of a model left.

    Args:
        request (Request): what was run.
        output (Any): what ``forward_func`` returned.
        calls (list of MixerCall): the mixers' calls, in forward order.
        others (list of MixerCall): calls of further modules outside the mixers, in forward
            order, where they were asked for.
        arguments (dict): the arguments the model's own ``forward`` was called with, by name
            (empty where ``forward_func`` runs only a part of the model).
        wiring (Wiring, optional): what lies between the mixers, where it was measured.
            Default: None
        score (Tensor, optional): ``(B,)``, what is explained, where it was asked for.
            Default: None
        edges (sequence of GradientEdge, optional): by order, where the calls' outputs are in the
            graph; None where they are not. Default: ()
        unruled (frozenset of str, optional): functions without a rule of relevance by which the
            score reads what comes after the last mixer. Default: frozenset()
        ports (sequence of Port, optional): where the mixers were cut off, by call, if they were and
            there is a score. Default: ()
    """

    request: Request
    output: Any
    calls: list[MixerCall]
    others: list[MixerCall]
    arguments: dict[str, Any]
    wiring: Wiring | None = None
    score: Tensor | None = None
    edges: Sequence[GradientEdge | None] = ()
    unruled: frozenset[str] = frozenset()
    ports: Sequence[Port] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L), the tokens that the last mixer works on."""
        B = self.request.batch
        return B, self.calls[-1].output.shape[:-1].numel() // B

    @cached_property
    def mask(self) -> Tensor | None:
        """``(B, L)`` bool, False for padding; None where nothing was masked.

        Raises:
            InputError: for a mask of other values than 0 and 1, or an example of padding only.
        """
        inputs = self.request.inputs[0]
        B, L = inputs.shape[:2] if inputs.dim() < 4 else self.shape
        mask = self.arguments.get("attention_mask")
        if not torch.is_tensor(mask):
            masks = (call.token_mask() for call in self.calls)
            mask = next((m for m in masks if m is not None), None)
        if mask is None or tuple(mask.shape) not in ((B, L), (1, L)):
            return None
        mask = mask.expand(B, L)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise InputError(
                f"attention_mask holds values from {float(mask.min()):g} to "
                f"{float(mask.max()):g}; expected 1 for tokens and 0 for padding."
            )
        empty = (mask != 0).sum(1) == 0
        if bool(empty.any()):
            raise InputError(
                f"attention_mask marks no token in row {int(empty.nonzero()[0])}: an example of "
                "padding only has nothing to explain; remove it from the batch."
            )
        return (mask != 0).to(self.device)

    @cached_property
    def is_language(self) -> bool:
        """Whether the output is logits of tokens."""
        return self.request.speaks(extract_logits(self.output))

    @property
    def entry(self) -> Tensor | None:
        """A value per example that is read from tokens of its own: of a dense output, or a score.

        None for logits of a language model's tokens, which are asked for by a position instead.
        """
        output = extract_logits(self.output)
        if output.dim() == 1:
            return output
        return None if self.is_language else self.score

    @property
    def device(self) -> torch.device:
        """That of the first mixer. A model may be spread over devices; results are on this one."""
        return self.calls[0].output.device

    def grid(self, model: nn.Module) -> TokenGrid | None:
        """Which token of the last mixer is which patch of the input, where the model tells."""
        inputs = self.request.inputs
        if len(inputs) > 1:
            return None
        return find_token_grid(model, self.arguments, inputs[0], self.shape[1])

    def check_finite(self) -> None:
        """Raise `InputError` where a mixer returned NaN or Inf."""
        for call in self.calls:
            check_finite(call)

    def with_gradients(self, target: Tensor) -> Recording:
        """The same recording with each call's gradient of ``target`` (summed over the batch).

        Its wiring gets that of each series.
        """
        require_graph(target)
        reading, unruled = self._reading(target)
        ways = () if self.wiring is None else self.wiring.inputs
        starts = [way for k, way in enumerate(ways) if way.roots and self.request.has_variables(k)]
        edges = {call.order: self.edges[call.order] for call in (*self.calls, *self.others)}
        wanted = {order: edge for order, edge in edges.items() if edge is not None}
        ends: list[Any] = [*wanted.values(), *(way.leaf.edge for way in starts)]
        found = torch.autograd.grad(
            target.sum(),
            ends,
            allow_unused=True,
            retain_graph=self.wiring is not None and self.wiring.needs_graph,
        )
        count = len(wanted)
        carrying = replace(self, edges=()).carrying(dict(zip(wanted, found[:count], strict=True)))
        carrying = carrying._read_by(reading, unruled)
        if self.wiring is None:
            return carrying
        known = {
            way: replace(way, gradient=g) for way, g in zip(starts, found[count:], strict=True)
        }
        wiring = replace(self.wiring, inputs=tuple(known.get(way, way) for way in ways))
        return replace(carrying, wiring=wiring)

    def with_readout(self, target: Tensor) -> Recording:
        """The same recording with the gradient of ``target`` at the calls after the last mixer."""
        require_graph(target)
        last = self.calls[-1].order
        wanted = [c for c in self.others if c.order > last and c.output.requires_grad]
        if not wanted:
            return self
        reading, unruled = self._reading(target)
        keeps = bool(self.ports) or (self.wiring is not None and self.wiring.needs_graph)
        found = gradients_at([call.output for call in wanted], target, retain_graph=keeps)
        gradients = {
            call.order: torch.zeros_like(call.output) if gradient is None else gradient
            for call, gradient in zip(wanted, found, strict=True)
        }
        others = [replace(call, gradient=gradients.get(call.order)) for call in self.others]
        return replace(self, others=others)._read_by(reading, unruled)

    def _read_by(self, reading: Mapping[int, Tensor | None], unruled: frozenset[str]) -> Recording:
        others = [
            replace(call, gradient=reading.get(call.order, call.gradient)) for call in self.others
        ]
        return replace(self, others=others, unruled=unruled)

    def _reading(self, target: Tensor) -> tuple[dict[int, Tensor | None], frozenset[str]]:
        # How the target reads calls after the last mixer, where its plain gradient does not say so,
        # by order. None for what it reads past as well, such as an MLP's norm, or through an MLP.
        # Norms and soft caps in between count as constants, as in MambaLRP. And the functions in
        # between that there is no rule for.
        root, last = Point.of(target, None), self.calls[-1].order
        found: dict[int, Tensor | None] = {}
        unruled: set[str] = set()
        for call in self.others:
            given = next(tensors_in((call.args, call.kwargs)), None)
            if call.order <= last or given is None:
                continue
            if not (given.requires_grad and call.output.requires_grad):
                continue
            output = Point.of(call.output)
            is_past = is_read_past(root, Point.of(given), output)
            if is_past or goes_through_activation(root.edge.node, output.edge.node):
                found[call.order] = None
                continue
            with ruled([root.edge.node], [output.edge.node]) as carries:
                found[call.order] = None  # a probability
                if carries[root.edge.node]:
                    (gradient,) = gradients_at([call.output], target, retain_graph=True)
                    found[call.order] = gradient
                    unruled.update(without_rule(carries))
        return found, frozenset(unruled)

    def carrying(self, gradients: Mapping[int, Tensor | None]) -> Recording:
        """The same recording with gradients at the calls' outputs, by the calls' order."""
        if all(gradients.get(call.order) is None for call in self.calls):
            # A score may have a graph of its own: that of a head after a detached backbone.
            raise _no_graph()

        def one(call: MixerCall) -> MixerCall:
            found = gradients.get(call.order)
            return replace(call, gradient=torch.zeros_like(call.output) if found is None else found)

        return replace(
            self, calls=[one(call) for call in self.calls], others=[one(c) for c in self.others]
        )


def require_graph(score: Tensor) -> None:
    """Raise unless a gradient of ``score`` can be taken."""
    if not score.requires_grad:
        raise _no_graph()


def gradients_at(
    leaves: Sequence[Tensor], score: Tensor, *, retain_graph: bool = False
) -> list[Tensor | None]:
    """The gradients of ``score`` (summed over the batch) at ``leaves``, not None for all."""
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        found = torch.autograd.grad(
            score.sum(), list(leaves), allow_unused=True, retain_graph=retain_graph
        )
    if all(gradient is None for gradient in found):
        raise _no_graph()
    return list(found)


def _no_graph() -> ValueError:
    return ValueError(
        "the target does not depend differentiably on the mixers' outputs: forward_func "
        "detaches them or runs under torch.no_grad() itself. Let it return the model's "
        "own output."
    )


@repeated
def record(
    request: Request,
    *,
    score: Callable[[Recording], Tensor] | None = None,
    also: Callable[[nn.Module], bool] | None = None,
    substitute: Substitution | None = None,
    wiring: bool = False,
    through_mixers: bool = True,
) -> Recording:
    """Run a request here, with every known mixer of its model recorded at each of its calls.

    Args:
        request (Request): what to run.
        score (Callable, optional): reads what is explained off the recording, ``(B,)``. The
            autograd graph is then kept, so that :meth:`Recording.with_gradients` can be asked.
            Default: None
        also (Callable, optional): says which modules outside the mixers to record too, such as
            the norms at which the residual stream can be read. Default: None
        substitute (Substitution, optional): takes each recorded call, its tensors alive in the
            graph, and returns what the model goes on with in place of the call's result.
            Default: None
        wiring (bool, optional): measure what lies between the mixers. Default: False
        through_mixers (bool, optional): with a ``score``: let its graph go through the mixers. If
            not they run without a graph, and only :meth:`Recording.with_readout` can be asked.
            Default: True

    Raises:
        UnsupportedModelError: the model holds no mixer that the registry knows, the run reached
            none, or tokens are mixed between the mixers.
    """
    gradients = score is not None
    if gradients and any(p.is_inference() for p in request.module.parameters()):
        raise ValueError(
            f"the parameters of model={type(request.module).__name__} were made under "
            "torch.inference_mode(), so no gradient can be taken through it; create or load the "
            "model outside of it."
        )

    whole = gradients and through_mixers
    if not wiring:
        return _record_once(request, score, also, substitute, None, whole)

    def once(cuts: Cuts) -> Recording:
        try:
            return _record_once(request, score, also, substitute, cuts, whole)
        finally:
            cuts.forget()

    # The run may hide from autograd what lies between the mixers, or change in place what that
    # needs. Then it is run once more, in a way that bears with it.
    recording = past_writes(lambda: once(Cuts(whole=whole)))
    if recording.wiring is None and not gradients:
        with _GradientsStayOn():
            recording = past_writes(lambda: once(Cuts(whole=False)))
    if gradients:
        return recording
    if recording.wiring is None:
        raise UnsupportedModelError(
            "what lies between the mixers is hidden from autograd (by detach(), by checkpointing, "
            "or by another library), so that it cannot be checked that every token stays in its "
            "place there; expected a forward_func whose mixers are connected by differentiable "
            "operations."
        )
    return recording


def _record_once(
    request: Request,
    score: Callable[[Recording], Tensor] | None,
    also: Callable[[nn.Module], bool] | None,
    substitute: Substitution | None,
    cuts: Cuts | None,
    whole: bool,
) -> Recording:
    # Whole: gradients of the score go through the mixers.
    gradients = score is not None
    grad_mode = torch.no_grad if cuts is None and not gradients else torch.enable_grad
    with (
        without_compiler(),
        without_checkpoints(),
        torch.inference_mode(False),
        grad_mode(),
        instrumented(request) as (of_copies, copies),
        ExitStack() as stack,
    ):
        ids = {k: one for k, one in enumerate(request.inputs) if not one.is_floating_point()}
        picks = also
        if cuts is not None and ids:

            def picks(module: nn.Module) -> bool:
                return _is_table(module) or bool(also and also(module))

        mixers, others = find_points(copies.root, picks)
        bar = stack.enter_context(Bar("mixers", len(mixers)))
        if substitute is not None:
            substitute.begin()
            stack.enter_context(substitute.around(copies.root))
        if cuts is not None and not gradients:
            _differentiable(copies.root)
        visits = _Visits(request, of_copies.module, mixers, substitute, cuts, bar, whole=whole)
        visits.gradients, visits.ids = gradients, ids
        inputs = list(request.inputs)
        for k, one in enumerate(inputs):
            if cuts is not None and k not in ids:
                inputs[k] = cuts.begin(k, one, embedded=request.is_embedded(k))
        run = partial(of_copies.run, tuple(inputs))
        points = {**mixers, **others}
        output, found, root_visits = traced(
            points, request.model, copies, run, visits.enter, visits.leave
        )
        if cuts is not None:
            for k, one in ids.items():
                known = cuts.embedded.get(k)
                _check_embedded(visits.embedded, one, known, len(inputs) == 1)
        calls, other = split_calls(request.model, visits.calls(found, points))
        other = [call for call in other if also is not None and also(call.module)]
        arguments = bound_arguments(copies.root, *root_visits[0]) if root_visits else {}
        recording = Recording(request, output, calls, other, arguments, edges=visits.edges)
        if score is not None:
            ports = () if cuts is None or whole else tuple(cuts.ports)
            recording = replace(recording, score=score(recording), ports=ports)
            if cuts is not None and not (whole or cuts.are_read_by(recording.score)):
                raise _no_graph()
        if cuts is not None:
            logits = extract_logits(output)
            if cuts.is_connected(logits):
                wiring = measure(
                    cuts,
                    logits,
                    request.batch,
                    score=recording.entry,
                    in_grid=recording.grid(request.module) is not None,
                )
                recording = replace(recording, wiring=wiring)
        tables = [
            (points[module], original(module), next(tensors_in(given)))
            for module, given, _ in found
            if _is_table(module)
        ]
    warn_of_derived(request, tables)
    return recording if gradients else detached(recording)


class _Visits:
    # The calls of a run, as they are entered and left: what is kept of each, and what the model
    # goes on with. Modules are copies of the user's.
    gradients = False

    def __init__(
        self,
        request: Request,
        root: nn.Module,
        mixers: Mapping[nn.Module, str],
        substitute: Substitution | None,
        cuts: Cuts | None,
        bar: Bar,
        *,
        whole: bool,
    ) -> None:
        self.request, self.mixers, self.bar = request, mixers, bar
        self.substitute, self.cuts, self.whole = substitute, cuts, whole
        self.ids: Mapping[int, Tensor] = {}
        self.embedded: list[Tensor] = []  # the ids that the table was given
        self.edges: list[GradientEdge | None] = []  # of the recorded calls' outputs
        self.linears, self.scans = KeptLinears(), KeptScansOfMixers()
        # Some mixer has its channels first, so other modules may have them first too.
        self.channels_first = any(channels_of(module) == 1 for module in mixers)
        self.table = input_embeddings(root)
        widths = [m.embedding_dim for m in root.modules() if isinstance(m, nn.Embedding)]
        self.width = max(widths, default=0)
        self.grad_mode = torch.is_grad_enabled()
        if substitute is not None or not whole:
            # What is inside a mixer is recomputed; only what is outside needs its graph.
            around = self.linears.running if substitute is None else substitute.running
            for module in mixers:
                run_in(around, module)
        if substitute is None or substitute.keeps_mixers:
            for module in mixers:
                run_in(self.scans.running, module)

    def enter(self, module: nn.Module, inputs: Any) -> Any:
        """What a module is to be given, in place of ``inputs``."""
        if self.cuts is None or module not in self.mixers:
            return inputs
        # A mixer's forward may run without a graph.
        with torch.set_grad_enabled(self.grad_mode):
            call = self._call(module, inputs, None)
            tokens = call.given_tokens()
            given = self.cuts.enter(tokens)

            def one(value: Any) -> Any:
                if value is tokens:
                    return given
                return value if self.whole or not torch.is_tensor(value) else value.detach()

            args = tuple(map(one, call.args))
            kwargs = {name: one(value) for name, value in call.kwargs.items()}
            return replace(call, args=args, kwargs=kwargs).own[:2]

    def leave(self, module: nn.Module, inputs: Any, value: Any) -> tuple[Any, Any]:
        """The call that is recorded, if any, and what the model goes on with."""
        with torch.set_grad_enabled(self.grad_mode):
            call = self._call(module, inputs, value)
            is_mixer = module in self.mixers
            if is_mixer:
                self.linears.leave(call)
                self.scans.leave()
            self.bar.advance(is_mixer)
            visit, value = self._recorded(call, is_mixer)
            if self.cuts is not None and is_mixer:
                value = with_first(value, self.cuts.leave(self.mixers[module], first_of(value)))
            elif self.cuts is not None and _is_table(module) and self.table in (None, module):
                value = self._embedded(next(tensors_in(inputs)), value)
                visit = None if visit is None else replace(call, result=value)
            return visit, replace(call, result=value).own[2]

    def calls(
        self, visits: Sequence[tuple[nn.Module, Any, Any]], paths: Mapping[nn.Module, str]
    ) -> list[MixerCall]:
        """The recorded calls, in forward order, with what was kept of them."""
        of_mixers = zip(self.linears.kept, self.scans.kept, strict=True)
        calls = []
        for order, (module, _, call) in enumerate(visits):
            linears, scans = next(of_mixers) if module in self.mixers else (None, None)
            kept = {"path": paths[module], "order": order, "linears": linears, "scans": scans}
            calls.append(replace(call, **kept))
        return calls

    def _call(self, module: nn.Module, inputs: Any, value: Any) -> MixerCall:
        channels = channels_of(module)
        if self.channels_first and module not in self.mixers and _has_channels_first(module, value):
            channels = 1
        args, kwargs = inputs
        path = self.mixers.get(module, "")
        return MixerCall.of(path, original(module), args, kwargs, value, channels=channels)

    def _recorded(self, call: MixerCall, is_mixer: bool) -> tuple[MixerCall | None, Any]:
        substitute, value = self.substitute, call.result
        if substitute is not None:
            value = substitute(call)
        is_own = value is call.result
        is_recorded = is_own or is_mixer
        if self.gradients and not first_of(value).requires_grad:
            # A frozen model fed with ids has no graph: it starts here.
            value = with_first(value, first_of(value).detach().clone().requires_grad_(True))
        if not is_recorded:
            return None, value
        visit = replace(call, result=value)
        has_graph = first_of(value).requires_grad
        self.edges.append(get_gradient_edge(first_of(value)) if has_graph else None)
        # What is measured after the run is compared with what the mixer returned.
        own_graph = substitute is not None and is_mixer and substitute.made[-1] is None
        if not (is_own or own_graph or substitute is None or substitute.keeps_outputs):
            visit = replace(visit, result=map_tensors(_form, value))
        return visit, value

    def _embedded(self, given: Tensor, value: Any) -> Any:
        assert self.cuts is not None
        self.embedded.append(given)
        for k, one in self.ids.items():
            entries = entries_of(given, one)
            if entries is not None:
                return self.cuts.embed(k, one, entries, value, self.width)
        return value


def _check_embedded(given: list[Tensor], ids: Tensor, known: Tensor | None, is_alone: bool) -> None:
    # Known is, for each id, whether a table was given it. Of several inputs all have to be found,
    # as nothing else tells whose the tokens are.
    if known is None and not is_alone:
        known = torch.zeros(1, dtype=torch.bool)
    if known is not None:
        if not bool(known.all()):
            raise InputError(
                f"the model embeds {int(known.sum())} of the {ids.numel()} ids of inputs, of shape "
                f"{tuple(ids.shape)}, by torch.nn.Embedding; expected all, as a whole or in views "
                "of them, such as columns. Pass what is no ids in additional_forward_args."
            )
        return
    for one in given:
        if one.shape == ids.shape and torch.equal(
            one.sort(-1).values.to(ids.device), ids.sort(-1).values
        ):
            raise UnsupportedModelError(
                "the model embeds the ids of inputs in another order than that of inputs, so its "
                "tokens are not those that were given; expected a forward_func that passes the "
                "ids on as they are."
            )


class _GradientsStayOn(TorchFunctionMode):
    # Takes torch.no_grad() for a wish that is not granted.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            return None
        return func(*args, **(kwargs or {}))


def _differentiable(model: nn.Module) -> None:
    # Autograd does not save tensors that were made under inference mode: copies stand for them.
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None and value.is_inference():
                    values[name] = value.clone().detach()  # type: ignore[assignment]


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


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


def _has_channels_first(module: nn.Module, value: Any) -> bool:
    # Of a norm or another module with a weight per channel. Where the axes are of one size, those
    # of a series are (B, L, E).
    weight = getattr(module, "weight", None)
    if not (torch.is_tensor(value) and torch.is_tensor(weight) and value.dim() >= 3):
        return False
    is_last = value.dim() == 3 and weight.shape == value.shape[-1:]
    return weight.shape == value.shape[1:2] and not is_last


def _form(x: Tensor) -> Tensor:
    # Its shape and dtype, without its numbers.
    return x.new_zeros(()).expand(x.shape)
