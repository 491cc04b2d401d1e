r"""The residual stream of a frozen model: what each layer of mixers receives and adds.

In a pre-norm model the stream before a layer is the input of the norm that feeds its mixers, and
the last norm leads from the stream to the score. What a mixer returns may be multiplied before it
is added (layer scale, ReZero, residual multipliers). What a layer adds beyond its mixers (an MLP,
experts) acts on one token at a time and stays with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor, nn

from captum_ssm.attr.latim_parts.chain import Decomposition, LayerStep, dot, output_of
from captum_ssm.attr.norms import FrozenNorm, first_input
from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.capture.recording import Recording
from captum_ssm.graph.points import Point
from captum_ssm.graph.relevance_rules import is_norm
from captum_ssm.mixers import MixerCall, find_mixers
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.copies import original
from captum_ssm.wiring.mixing_test import is_mixed
from captum_ssm.wiring.token_order import Orders

_ELSE = "pass layer= and another aggregation for a map of one layer."


class UnreadStreamError(ValueError):
    """It is not known in which direction the score is read from the residual stream."""


def stream_of(frozen: FrozenModel) -> Decomposition:
    """A score that a norm or a head reads from one residual stream, of a model frozen with those.

    All steps are read in one direction: the gradient of the score after the last norm (the
    unembedding row of the target token), taken through the norm with its denominator frozen. It is
    zero for tokens the score is not read from.

    Raises:
        UnreadStreamError: where no norm or head is known that reads it.
        ValueError: where a mixer does not add to it.
    """
    live, frozen = frozen.live, replace(frozen, live=None)
    groups = [list(group) for _, group in groupby(frozen.layers, lambda layer: layer.step)]
    final, direction = _read_out(frozen, groups[-1])
    if frozen.wiring.unknown is not None and _is_mixed(final, live):
        raise UnreadStreamError(
            "tokens are mixed by no known mixer between the last one and what the score is read "
            f"from, so the residual stream is not that of single tokens; {_ELSE}"
        )
    # A mixer that does not read the stream itself (Zamba's shared attention reads it with the
    # embeddings) is in no step; what comes of it is local to the tokens.
    read = [(group, _stream_before(group[0], frozen)) for group in groups]
    read = [(group, before) for group, before in read if before.shape == final.shape]
    streams = [*(before for _, before in read[1:]), final]
    steps: dict[int, LayerStep] = {}
    scaled: dict[int, FrozenCall] = {}
    for (mixers, before), following in zip(read, streams, strict=True):
        group = _multiplied(mixers, before, _stream_after(mixers, frozen.others, following), live)
        scaled |= dict(zip(map(id, mixers), group, strict=True))
        mixed = output_of(group).to(before.dtype)
        is_alone = frozen.wiring.steps[group[0].step].around == ()
        if is_alone or (following is not final and torch.equal(following, mixed)):
            raise ValueError(
                f"what {group[0].name} returned is given on with no residual stream around it; "
                "expected each mixer to add to one. Use MambaLRP or a rollout, or pass layer= "
                "and another aggregation for a map of one layer."
            )
        local = _local(following, before, mixed)
        steps[group[0].step] = LayerStep([(group, direction)], before, direction, local)
    layers = [scaled.get(id(layer), layer) for layer in frozen.layers]
    # What is read by a function without a rule is not the stream times the direction.
    score = frozen.require_score().to(direction) if frozen.unruled else dot(direction, final)
    return Decomposition(replace(frozen, layers=layers), steps, score)


def _is_mixed(final: Tensor, live: Recording | None) -> bool:
    # Whether the tokens of the stream depend on others of the last mixers, by the graph of the run.
    stream = _in_graph(final, live)
    if live is None or stream is None:
        return False
    exits = {i: port.exit for i, port in enumerate(live.ports)}
    end = {len(exits): Point.of(stream)}
    return is_mixed(end, exits, Orders(live.request.batch))


def _in_graph(x: Tensor, live: Recording | None) -> Tensor | None:
    # What a recorded module was given, in the graph of the run.
    recorded = () if live is None else map(first_input, live.others)
    return next((y for y in recorded if y.data_ptr() == x.data_ptr() and y.requires_grad), None)


def _stream_after(
    group: Sequence[FrozenCall], norms: Sequence[MixerCall], following: Tensor
) -> Tensor:
    # The stream straight after a layer's mixers: what the next norm is given, as that of an MLP.
    last = max(layer.call.order for layer in group)
    for call in norms:
        if call.order > last and first_input(call).shape == following.shape:
            return first_input(call)
    return following


def _multiplied(
    group: list[FrozenCall], before: Tensor, after: Tensor, live: Recording | None
) -> list[FrozenCall]:
    # The layers with what their outputs are multiplied by, a number per channel, if that makes up
    # for what is added to the stream.
    added = (after - before).flatten(0, 1).double()  # (B L, E)
    outputs = [layer.call.output.flatten(0, 1).to(added) for layer in group]
    # Rounding of the stream, and of what is added to it.
    eps = torch.finfo(before.dtype).eps
    allowed = 4 * eps * before.double().norm() + max(1e-3, 8 * eps) * added.norm()
    if bool((added - sum_of(outputs)).norm() <= allowed):
        return group
    x = torch.stack(outputs, -1)  # (B L, E, mixers)
    scales = _scales_of_graph(group, after, live)
    if scales is None and len(added) <= len(group):
        raise UnreadStreamError(
            f"what {group[0].name} returned is multiplied before it is added to the residual "
            f"stream, by what is not known of {len(added)} tokens without the graph of the run; "
            "pass more tokens."
        )
    if scales is None:  # by least squares over all tokens
        products = torch.einsum("nei,nej->eij", x, x), torch.einsum("nei,ne->ei", x, added)
        scales = (torch.linalg.pinv(products[0]) @ products[1][..., None])[..., 0]
    scales = scales.to(added)  # (E, mixers)
    if not bool((added - (x * scales).sum(-1)).norm() <= allowed):
        return group
    return [layer.times(scale) for layer, scale in zip(group, scales.unbind(1), strict=True)]


def _scales_of_graph(
    group: list[FrozenCall], after: Tensor, live: Recording | None
) -> Tensor | None:
    # How strongly each channel of the stream takes in each mixer's output, (E, mixers), at one
    # token. None unless the stream is in the graph of the run, as the input of a recorded module.
    stream = _in_graph(after, live)
    if live is None or stream is None or stream.shape != after.shape:
        return None
    ports = dict(zip((call.order for call in live.calls), live.ports, strict=True))
    exits = [ports[layer.source.order].exit for layer in group]
    if any(point.shape != stream.shape for point in exits):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        gradients = torch.autograd.grad(
            stream.sum(), [point.edge for point in exits], retain_graph=True, allow_unused=True
        )
    zero = torch.zeros_like(stream)
    return torch.stack([(zero if g is None else g)[0, -1] for g in gradients], -1).detach()


def _local(following: Tensor, before: Tensor, mixed: Tensor) -> Tensor:
    # Rounding of the stream's sum is not something that a layer adds.
    local = following - before - mixed
    rounding = 4 * torch.finfo(local.dtype).eps * (before.abs() + mixed.abs())
    return torch.where(local.abs() > rounding, local, 0)


def norms_and_head(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Says which modules of ``model`` to keep: norms, and its head where no norm precedes that."""
    mixers = [module for _, module in find_mixers(model)]
    inside = {part for mixer in mixers for part in mixer.modules()}
    after: list[nn.Module] = []
    for module in model.modules():
        after = [] if module in inside else [*after, module]
    linear = [module for module in after if isinstance(module, nn.Linear)]
    head = None if any(map(is_norm, after)) or not linear else linear[-1]
    return lambda module: is_norm(module) or original(module) is head


def _read_out(frozen: FrozenModel, last_group: list[FrozenCall]) -> tuple[Tensor, Tensor]:
    # The final stream and the direction in which the score is read from it.
    last = frozen.layers[-1].call
    width = last.output.shape[-1]
    following = [c for c in frozen.others if c.order > last.order and c.gradient is not None]
    after = [call for call in following if first_input(call).shape == (*frozen.shape, width)]
    pooled = [call for call in following if first_input(call).shape == (frozen.shape[0], width)]
    norms = [call for call in after if is_norm(call.module) and call.output.shape[-1] == width]
    heads = [call for call in after if isinstance(call.module, nn.Linear)]
    if norms or heads:
        call = [*heads, *norms][-1]
        return first_input(call), _pulled_back(call)
    if after or not pooled:
        raise UnreadStreamError(
            "neither a norm nor a linear head was found after the model's last mixer, so the "
            f"direction in which the score is read from the residual stream is not known; {_ELSE}"
        )
    # Tokens are pooled first: the mean of all, or one of them.
    norms = [call for call in pooled if is_norm(call.module)]
    call = [pooled[0], *norms][-1]
    final = _stream_before(last_group[0], frozen) + output_of(last_group)
    (query,) = frozen.require_query()
    read, given = torch.einsum("bl,ble->be", query, final), first_input(call).to(final.dtype)
    if not bool((read - given).norm() <= 1e-3 * given.norm()):
        is_read = query > 1 - 1e-6  # (B, L)
        is_one = bool(is_read.any(1).all())
        if not is_one or _stream_after(last_group, frozen.others, final) is final:
            raise UnreadStreamError(
                f"what {call.path} is given is not the mean of the tokens after the last mixer, "
                "nor one of them, so the direction in which the score is read from the residual "
                f"stream is not known; {_ELSE}"
            )
        # An MLP adds to the one token; what it adds to the others is not read.
        final = torch.where(is_read[..., None], given[:, None], final)
    return final, query[..., None] * _pulled_back(call)[:, None].to(final.dtype)


def _pulled_back(call: MixerCall) -> Tensor:
    # The gradient before a norm, its denominator frozen, or before a linear head.
    assert call.gradient is not None
    gradient = call.gradient.to(call.dtype)
    if isinstance(call.module, nn.Linear):
        return gradient @ call.weight(call.module)
    norm = FrozenNorm.of(call) if is_norm(call.module) else None
    if norm is None:
        raise UnreadStreamError(
            f"the model's last norm, {call.path} ({type(call.module).__name__}), is neither an RMS "
            f"norm nor a layer norm; {_ELSE}"
        )
    return norm.pull_back(gradient)


def _stream_before(layer: FrozenCall, frozen: FrozenModel) -> Tensor:
    call, is_given = layer.call, frozen.wiring.steps[layer.step].is_given_stream
    norm = feeding_norm(call, [other for other in frozen.others if other.order < call.order])
    if norm is not None and not is_given:
        return first_input(norm)
    if is_given is False:
        raise UnreadStreamError(
            f"{layer.name} is given what is made of the residual stream by a function, so the "
            f"stream before it was not recorded; {_ELSE}"
        )
    return call.tokens()


def feeding_norm(call: MixerCall, norms: Sequence[MixerCall]) -> MixerCall | None:
    """The last of some earlier norms whose output went into the mixer.

    They may differ by a multiplier, or by the zeroing of padding.
    """
    tokens = call.tokens()
    for norm in reversed(norms):
        if norm.output.shape == tokens.shape:
            x, y = norm.output.to(tokens), tokens
            keep = (y != 0).any(-1, keepdim=True)
            x = x * keep
            inner = (x * y).sum() ** 2
            if bool(inner >= (1 - 1e-3) * x.square().sum() * y.square().sum()):
                return norm
    return None
