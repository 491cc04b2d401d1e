"""Running the user's model once under nnsight and recording its mixers at their boundaries.

Mixers are never hooked inside: fused kernels and the scan functions of transformers
bypass the inner modules, so everything inside is recomputed from a mixer's parameters and its
recorded input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from captum_ssm.capture.embedded_ids import check_tables, warn_of_derived
from captum_ssm.capture.filled_tokens import may_fill
from captum_ssm.capture.joined_examples import are_joined
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.recording import Recording, no_graph, split_calls
from captum_ssm.capture.request import Request
from captum_ssm.capture.session import find_points, instrumented, traced
from captum_ssm.capture.substitute import FrozenStandIns
from captum_ssm.capture.visits import Visits, is_table
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import bound_arguments
from captum_ssm.mixers.registry import known_of, nearest_misses
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.copies import original
from captum_ssm.utils.fingerprint import fingerprint
from captum_ssm.utils.nested import detached
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.utils.progress import Bar
from captum_ssm.utils.retry import retry_with_copies
from captum_ssm.utils.watch_modules import watch_modules
from captum_ssm.wiring.cuts import RunCuts
from captum_ssm.wiring.measure import measure


@repeated
def record(
    request: Request,
    *,
    score: Callable[[Recording], Tensor] | None = None,
    also: Callable[[nn.Module], bool] | None = None,
    substitute: FrozenStandIns | None = None,
    wiring: bool = False,
    through_mixers: bool = True,
    entry: Callable[[Recording], Tensor | None] | None = None,
) -> Recording:
    """Run a request here, with every known mixer of its model recorded at each of its calls.

    Args:
        request (Request): what to run.
        score (Callable, optional): reads what is explained off the recording, ``(B,)``. The
            autograd graph is then kept, so that :meth:`Recording.with_gradients` can be asked.
            Default: None
        also (Callable, optional): says which modules outside the mixers to record too, such as
            the norms at which the residual stream can be read. Default: None
        substitute (FrozenStandIns, optional): takes each recorded call, its tensors alive in the
            graph, and returns what the model goes on with in place of the call's result.
            Default: None
        wiring (bool, optional): measure what lies between the mixers. Default: False
        through_mixers (bool, optional): with a ``score``: let its graph go through the mixers. If
            not they run without a graph, and only :meth:`Recording.with_readout` can be asked.
            Default: True
        entry (Callable, optional): without a ``score``: reads off the recording the entry of the
            output, ``(B,)``, whose tokens are asked for; None for those of the whole output.
            Default: None

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
        return retry_with_copies(
            lambda: _record_once(request, score, also, substitute, None, whole, entry)
        )

    def once(cuts: RunCuts) -> Recording:
        try:
            return _record_once(request, score, also, substitute, cuts, whole, entry)
        finally:
            cuts.forget()

    # The model may switch gradients off, or change in place what they need. Then it is run once
    # more, with that undone.
    recording = retry_with_copies(lambda: once(RunCuts(whole=whole)))
    if recording.wiring is not None and recording.wiring.lacks_second:
        with sdpa_kernel(SDPBackend.MATH):  # attention in functions with second derivatives
            recording = retry_with_copies(lambda: once(RunCuts(whole=whole)))
    if recording.wiring is None and not gradients:
        with GradientsStayOn():
            recording = retry_with_copies(lambda: once(RunCuts(whole=False)))
    if gradients:
        return recording
    if recording.wiring is None:
        raise UnsupportedModelError(
            "what lies between the mixers is hidden from autograd (by detach(), by checkpointing, "
            "or by another library), so that it cannot be checked that every token stays in its "
            "place there; expected a forward_func whose mixers are connected by differentiable "
            "operations. torch.utils.checkpoint is switched off during the run; switch off a "
            "checkpoint of another library, or of your own."
        )
    return recording


def _record_once(
    request: Request,
    score: Callable[[Recording], Tensor] | None,
    also: Callable[[nn.Module], bool] | None,
    substitute: FrozenStandIns | None,
    cuts: RunCuts | None,
    whole: bool,
    entry: Callable[[Recording], Tensor | None] | None,
) -> Recording:
    # Whole: gradients of the score go through the mixers.
    gradients = score is not None
    grad_mode = torch.no_grad if cuts is None and not gradients else torch.enable_grad
    with (
        plain_graph(),
        torch.inference_mode(False),
        grad_mode(),
        instrumented(request) as (of_copies, copies),
        ExitStack() as stack,
    ):
        mixers, others = find_points(copies.root, _picks(request, also, cuts))
        bar = stack.enter_context(Bar("mixers", len(mixers)))
        if substitute is not None:
            substitute.begin()
            stack.enter_context(substitute.around(copies.root))
        if cuts is not None and not gradients:
            _differentiable(copies.root)
        module, points = of_copies.module, {**mixers, **others}
        visits = Visits(request, module, mixers, substitute, cuts, bar, gradients, whole)
        noted = visits.operations.noted(visits.looked_up)
        run = partial(of_copies.run, visits.inputs(), noted)
        if may_fill(request) and (cuts is not None or substitute is not None):
            stack.enter_context(watch_modules(copies.root.modules(), before=visits.fill))
        output, visited, root_visits = traced(points, request.model, copies, run, visits)
        visits.check()
        calls, other = split_calls(request.model, visits.calls(visited, points))
        recording = Recording(
            request,
            output,
            calls,
            others=[call for call in other if also is not None and also(call.module)],
            arguments=bound_arguments(copies.root, *root_visits[0]) if root_visits else {},
            edges=visits.edges,
            operations=frozenset({*visits.operations.pairs, fingerprint(request.module)}),
        )
        if score is not None:
            recording = _with_score(recording, score, cuts)
        if cuts is not None:
            recording = _with_wiring(recording, cuts, entry)
        tables = [(points[table], original(table), ids) for table, ids in visits.tables]
    check_tables(request, tables, recording.operations)
    warn_of_derived(request, tables)
    visits.filled.warn_of_added()
    return recording if gradients else detached(recording)


def _picks(
    request: Request, also: Callable[[nn.Module], bool] | None, cuts: RunCuts | None
) -> Callable[[nn.Module], bool] | None:
    # Which modules outside the mixers are recorded: tables tell which ids they are given.
    if cuts is None or all(x.is_floating_point() for x in request.inputs):
        return also
    return lambda module: is_table(module) or bool(also and also(module))


def _with_score(
    recording: Recording, score: Callable[[Recording], Tensor], cuts: RunCuts | None
) -> Recording:
    recording = replace(recording, score=score(recording))
    if cuts is None or cuts.whole:
        if not recording.reads_mixers:
            raise no_graph()
        return recording
    if not cuts.are_read_by(recording.score):
        raise no_graph()
    return replace(recording, ports=tuple(cuts.ports))


def _with_wiring(
    recording: Recording, cuts: RunCuts, entry: Callable[[Recording], Tensor | None] | None
) -> Recording:
    # As it is where autograd did not see what lies between the mixers.
    logits, request = extract_logits(recording.output), recording.request
    if not cuts.is_connected(logits):
        return recording
    score = recording.entry
    if score is None and entry is not None:
        score = entry(recording)
    wiring = measure(
        cuts,
        logits,
        request.batch,
        score=score,
        grid=recording.grid,
        mask=recording.mask,
        decodes=recording.decodes,
    )
    if wiring.refused is not None and recording.may_decode:
        decoded = _with_wiring(replace(recording, is_decoder=True), cuts, entry)
        if decoded.wiring is not None and (
            not decoded.wiring.refused or decoded.wiring.lacks_second
        ):
            return decoded
    if wiring.refused is not None and (near := nearest_misses(original(request.module))):
        wiring = replace(wiring, refused=f"{wiring.refused} Nearest to another mixer: {near}.")
    wiring = replace(wiring, structure=wiring.structure | recording.operations)
    # With a score they are looked at by its own gradients.
    known = known_of(request.module)
    if request.batch > 1 and recording.score is None and not wiring.structure <= known.apart:
        wiring = replace(wiring, joins_examples=are_joined(cuts, logits, request.batch))
        known.apart |= frozenset() if wiring.joins_examples else wiring.structure
    return replace(recording, wiring=wiring)


class GradientsStayOn(TorchFunctionMode):
    """Ignores ``torch.no_grad()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        return func(*args, **(kwargs or {}))


def _differentiable(model: nn.Module) -> None:
    # Autograd does not save tensors that were made under inference mode: copies stand for them.
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None and value.is_inference():
                    values[name] = value.clone().detach()  # type: ignore[assignment]
