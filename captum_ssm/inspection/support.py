"""What of a model can be explained, found out by running it, before anything is explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import TokenAttribution, methods
from captum_ssm.capture import FrozenCall, FrozenModel, Request, exact_arithmetic, freeze
from captum_ssm.capture.check import Deviation, Rebuilt
from captum_ssm.capture.model import extract_logits, is_hidden
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.target import balance
from captum_ssm.capture.tolerances import tolerances_of
from captum_ssm.discovery.mixing import tokens_act
from captum_ssm.discovery.search import shared
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.inspection.support_report import MixerSupport, Support
from captum_ssm.mixers import FrozenMixer, find_adapter, find_mixers
from captum_ssm.mixers.registry import how_known
from captum_ssm.utils.progress import progress
from captum_ssm.utils.quiet import quiet

# What an adapter, a method or a model raises where it does not fit the other.
ERRORS = (ValueError, TypeError, RuntimeError)


@shared()
def supported(
    forward_func: Callable[..., Any],
    inputs: Any,
    *,
    model: Any = None,
    target: Any = None,
    additional_forward_args: Any = None,
) -> Support:
    """Run a model and say what of it can be explained, and how that is known.

    Long texts are cut to 32 tokens for the trial of the methods.

    Args:
        forward_func, inputs, model, additional_forward_args: as for
            :class:`~captum_ssm.attr.TokenAttribution` and its ``attribute``.
        target (Any, optional): what the methods are tried on; None for the likeliest output.
            Default: None

    Returns:
        Support: its mixers, what lies between them, and which methods work.

    Raises:
        UnsupportedModelError: for a model without a mixer that is known or can be measured.
        ValueError, TypeError: for inputs that the model does not take.

    Examples::

        >>> found = captum_ssm.supported(model, input_ids)
        >>> [mixer.known for mixer in found.mixers]
        ['registered', 'registered']
        >>> found.methods["mamba-lrp"] is None  # it works
        True
    """
    owner = forward_func if model is None else model
    request = Request.of(forward_func, owner, inputs, additional_forward_args)
    short = request.shortened(32) or request
    others = list(outside(request.module))
    frozen = _frozen(short, others)
    if target is None and frozen.live is not None:
        target = likeliest(frozen.live)
    tried = {
        name: _problem(method(forward_func, owner), frozen, target)
        for name, method in progress(methods().items(), "methods")
    }
    mixing = _mixing(frozen)
    rest = list(outside(request.module))  # without the mixers that the run has measured
    return Support(
        [support_of(frozen, layer) for layer in frozen.layers],
        between(frozen),
        tried,
        1.0 if frozen.query is None else float(balance(frozen.query, frozen.wiring).mean()),
        kinds_of(rest),
        kinds_of(module for module in rest if module in mixing),
        target,
    )


def _frozen(request: Request, others: Sequence[nn.Module]) -> FrozenModel:
    # With the token that the model reads, where it can be told and reached.
    freezes = partial(
        freeze, request, also=lambda module: module in others, check=False, keep_graph=True
    )
    try:
        return freezes()
    except ERRORS:
        with quiet():  # the first run has warned
            return freezes(query=False)


def _problem(method: TokenAttribution, frozen: FrozenModel, target: Any) -> str | None:
    # Why a method does not explain the model at this input; None where it does.
    request = frozen.request
    if frozen.query is not None and not method.needs_target():
        layers = [replace(layer, check=method.check) for layer in frozen.layers]
        method = copy(method)
        method._frozen = replace(frozen, layers=layers)
    try:
        with quiet():  # the report says what methods would warn of
            method.attribute(
                request.given,
                target=target if method.needs_target() else None,
                additional_forward_args=request.named or request.positional or None,
            )
    except ERRORS as error:
        return first_line(error)
    return None


def outside(model: nn.Module) -> Iterator[nn.Module]:
    """The largest modules with weights that hold no mixer."""
    for child in model.children():
        if find_adapter(child) is not None or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList) or any(True for _ in find_mixers(child)):
            yield from outside(child)
        else:
            yield child


def kinds_of(modules: Iterable[nn.Module]) -> Counter[str]:
    """How many modules there are of each class, in their order."""
    return Counter(type(module).__name__ for module in modules)


def _mixing(frozen: FrozenModel) -> set[nn.Module]:
    # The recorded modules in which tokens act on one another, where the wiring says that some do.
    if not frozen.wiring.neighbor_share and not frozen.wiring.is_mixed:
        return set()
    return {call.module for call in frozen.others if tokens_act(call)}


def likeliest(recording: Recording) -> Any:
    """A target: the token, or class, that the model's output predicts for the first example."""
    logits = extract_logits(recording.output)
    if logits.dim() < 2:
        return None
    if logits.dim() == 3 and recording.is_language:
        best = int(logits[0, -1].argmax())
        return (logits.shape[1] - 1, best) if is_hidden(recording.output) else best
    indices = torch.unravel_index(logits[0].argmax(), logits.shape[1:])
    index = tuple(int(i) for i in indices)
    return index[0] if len(index) == 1 else index


def first_line(value: object) -> str:
    """The first line of a message, or the name of what has none."""
    text = str(value).strip()
    return text.splitlines()[0] if text else type(value).__name__


def support_of(frozen: FrozenModel, layer: FrozenCall) -> MixerSupport:
    """What of one mixer can be explained."""
    grid = frozen.grids[layer.step]
    module = layer.source.module
    support = MixerSupport(
        layer.name,
        type(module).__name__,
        how_known(module),
        layer.step,
        layer.shape[1],
        None if grid is None else grid.shape,
        _order(layer.order),
        0,
        float("nan"),
        float("nan"),
    )
    try:
        with exact_arithmetic():
            mixer = layer.mixer
            deviation = Deviation.of(layer.call, Rebuilt.of(mixer))
            error, of_recurrence, _ = deviation.errors(layer.mask)
    except ERRORS as problem:
        return replace(support, problem=first_line(problem))
    support = replace(
        support,
        order=_orders(layer, mixer),
        maps=mixer.recurrence.maps,
        error=error,
        recurrence_error=of_recurrence,
        neighbor_share=mixer.neighbor_share,
    )
    fits = error <= tolerances_of(layer.source, mixer.rounding).kernels
    return (
        support if fits else replace(support, problem=f"not reproduced: relative error {error:.0e}")
    )


def _orders(layer: FrozenCall, mixer: FrozenMixer) -> str:
    # The orders in which the mixer itself, or the scans in it, read tokens.
    if layer.order is not None and layer.order.shape[0] > 1:
        return f"{layer.order.shape[0]} windows"
    try:
        scans = mixer.scans_in_order()
    except UnsupportedModelError:  # only its scans could be measured, as one operator
        return _order(layer.order) if mixer.recurrence.is_causal else "both ways"
    orders = {
        _order(order) if scan.recurrence.is_causal else "both ways" for scan, order, _ in scans
    }
    several = "its own" in orders and len(scans) > 1
    return f"{len(scans)} orders" if several else " + ".join(sorted(orders))


def _order(order: Tensor | None) -> str:
    if order is None:
        return "forward"
    flat = order.flatten().cpu()
    forward = torch.arange(len(flat))
    if torch.equal(flat, forward):
        return "forward"
    return "backward" if torch.equal(flat, forward.flip(0)) else "its own"


def between(frozen: FrozenModel) -> str:
    """What lies between the mixers, in words."""
    wiring = frozen.wiring
    if wiring.refused is not None:
        return wiring.refused
    notes = []
    for step in wiring.steps:
        for _, link in step.reads:
            if link.transport is not None:
                T, S = step.tokens, link.count
                notes.append(f"{T} tokens made of {S}, by a measured transport")
            elif link.source is not None:
                notes.append(f"{step.tokens} tokens chosen of {link.count}")
    if wiring.gates:
        notes.append(f"what {wiring.gates} returned is only a gate of what others hold")
    if wiring.unheld:
        notes.append(wiring.unheld)
    if wiring.neighbor_share:
        share = wiring.neighbor_percent
        notes.append(f"tokens read up to {share} from one another, which no map shows")
    if not wiring.steps[0].reads and frozen.grid is None:
        notes.append("the way from the input to the first mixer was not measured")
    return "; ".join(notes) or "each token is processed by itself and keeps its position"
