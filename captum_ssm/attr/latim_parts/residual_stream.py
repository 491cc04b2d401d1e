r"""The residual stream of a frozen model: what each layer of mixers receives and adds.

In a pre-norm model the stream before a layer is the input of the norm that feeds its mixers, and
the last norm leads from the stream to the score. What a mixer returns may be multiplied before it
is added (layer scale, ReZero, residual multipliers, a norm). What a layer adds beyond its mixers
(an MLP, experts) acts on one token at a time and stays with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from captum_ssm.attr.latim_parts.chain import Decomposition, LayerStep, dot, output_of
from captum_ssm.attr.norms import FrozenNorm, first_input
from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.capture.recording import Recording
from captum_ssm.graph.factors import TokenOrders, before_casts, factors, is_kept, projections
from captum_ssm.graph.kinds import MATRICES, kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies, meetings
from captum_ssm.graph.relevance_rules import is_norm
from captum_ssm.mixers import MixerCall, find_mixers
from captum_ssm.utils.copies import original
from captum_ssm.utils.nested import tensors_in
from captum_ssm.wiring.mixing_test import is_mixed
from captum_ssm.wiring.token_order import Orders

_ELSE = "pass layer= and another aggregation for a map of one layer."


class UnreadStreamError(ValueError):
    """It is not known in which direction the score is read from the residual stream."""


@dataclass(frozen=True)
class _Stream:
    # The residual stream at one point, (B, L, E), and where it is in the graph of the run.
    values: Tensor
    point: Point | None = None

    @classmethod
    def before(cls, call: MixerCall, live: Recording | None) -> _Stream:
        """What a recorded module was given. A fused norm makes a sum that no graph holds."""
        values = first_input(call)
        calls = () if live is None else live.others
        source = next((other for other in calls if other.order == call.order), None)
        x = None if source is None else next(tensors_in((source.args, source.kwargs)), None)
        is_sum = torch.is_tensor(call.arguments.get("residual"))
        if source is None or x is None or is_sum or not x.requires_grad or x.shape != values.shape:
            return cls(values)
        return cls(values, before_casts(Point.of(x).before_move(source.channels)))


def stream_of(frozen: FrozenModel) -> Decomposition:
    """A score that a norm or a head reads from one residual stream, of a model frozen with those.

    All steps are read in one direction: the gradient of the score after the last norm (the
    unembedding row of the target token), taken through the norm with its denominator frozen, times
    what the stream itself is multiplied by. It is zero for tokens the score is not read from.

    Raises:
        UnreadStreamError: where no norm or head is known that reads it, or a mixer or an earlier
            stream is in it by more than a factor.
        ValueError: where a mixer does not add to it.
    """
    live, frozen = frozen.live, replace(frozen, live=None)
    groups = [list(group) for _, group in groupby(frozen.layers, lambda layer: layer.step)]
    last, at_last = _read_out(frozen, groups[-1], live)
    final = last.values
    if frozen.wiring.unknown is not None and _is_mixed(last.point, live):
        raise UnreadStreamError(
            "tokens are mixed by no known mixer between the last one and what the score is read "
            f"from, so the residual stream is not that of single tokens; {_ELSE}"
        )
    # A mixer that does not read the stream itself (Zamba's shared attention reads it with the
    # embeddings) is in no step; what comes of it is local to the tokens.
    before_groups = [(group, _stream_before(group[0], frozen, live)) for group in groups]
    before_groups = [
        (group, before) for group, before in before_groups if before.values.shape == final.shape
    ]
    for group, _ in before_groups:
        if frozen.wiring.steps[group[0].step].around == ():
            raise _without_stream(group[0].name)
    streams = [*(before for _, before in before_groups[1:]), last]
    steps: dict[int, LayerStep] = {}
    scaled: dict[int, FrozenCall] = {}
    direction = at_last
    for (mixers, preceding), following in reversed([*zip(before_groups, streams, strict=True)]):
        group, of_stream = _as_added(mixers, preceding, following, frozen.others, live)
        scaled |= dict(zip(map(id, mixers), group, strict=True))
        mixed, before = output_of(group).to(final.dtype), of_stream * preceding.values
        if following is not last and torch.equal(following.values, mixed):
            raise _without_stream(group[0].name)
        local = _local(following.values, before, mixed)
        steps[group[0].step] = LayerStep([(group, direction)], before, direction, local)
        direction = direction * of_stream
    steps = dict(sorted(steps.items()))
    layers = [scaled.get(id(layer), layer) for layer in frozen.layers]
    # What is read by a function without a rule is not the stream times the direction.
    score = frozen.require_score().to(at_last) if frozen.unruled else dot(at_last, final)
    return Decomposition(replace(frozen, layers=layers), steps, score)


def _without_stream(name: str) -> ValueError:
    return ValueError(
        f"what {name} returned is given on with no residual stream around it; expected each mixer "
        "to add to one. Use MambaLRP or a rollout, or pass layer= and another aggregation for a "
        "map of one layer."
    )


def _is_mixed(stream: Point | None, live: Recording | None) -> bool:
    # Whether the tokens of the stream depend on others of the last mixers, by the graph of the run.
    if live is None or stream is None:
        return False
    exits = {i: port.exit for i, port in enumerate(live.ports)}
    return is_mixed({len(exits): stream}, exits, Orders(live.request.batch))


def _as_added(
    group: list[FrozenCall],
    before: _Stream,
    following: _Stream,
    norms: Sequence[MixerCall],
    live: Recording | None,
) -> tuple[list[FrozenCall], Tensor]:
    """The layers of a step, and the factor of the stream before them, as they are in the next one.

    Layers hold what their outputs are multiplied by before they are added: a number per channel
    (layer scale, ReZero), a factor that differs by token, as that of a norm after the mixer, or a
    matrix, as of a layer that joins two directions. What an MLP makes of the sum does not count.

    Raises:
        UnreadStreamError: where an output is there by none of these, or the stream by no factor.
    """
    unit = before.values.new_ones(())
    after = _stream_after(group, norms, before.values, following.values)
    is_sum = _is_sum(group, before.values, after)
    points = [following.point, before.point, *_exits(group, live)]
    known = [point for point in points if point is not None and _is_of(point, after)]
    if len(known) < len(points):
        return (group if is_sum else _fitted(group, before.values, after)), unit
    later, stream, *exits = known
    # The sum alone may be that within the rounding of a few large tokens.
    if is_sum and all(is_kept(later, point) for point in (stream, *exits)):
        return group, unit
    orders = [None if layer.order is None else layer.order.flatten() for layer in group]
    of_stream, *scales = factors(later, [stream, *exits], [None, *orders])
    # A mixer may be given something else than the stream, such as a sum with the embeddings.
    of_stream = of_stream if dependencies([later], [stream])[0] else unit
    if any(scale is None for scale in scales):
        group, scales = _projected(group, later, exits, orders)
    known_scales = [scale for scale in scales if scale is not None]
    is_by_token = any(scale.dim() > 1 for scale in known_scales)
    if of_stream is None or len(known_scales) < len(group) or (is_by_token and len(group) > 1):
        raise UnreadStreamError(
            f"what {group[0].name} returned is added to the residual stream neither by a factor "
            "nor through one matrix for all tokens, or the stream before it is more than "
            f"multiplied; {_ELSE}"
        )
    pairs = zip(group, known_scales, strict=True)
    layers = [layer if is_one(scale) else layer.times(scale) for layer, scale in pairs]
    return layers, unit if is_one(of_stream) else of_stream.to(unit)


def _is_of(point: Point, stream: Tensor) -> bool:
    # Whether a point is of the tokens of a stream; what mixers return may be of another width.
    return point.shape[:-1] == stream.shape[:-1] and point.channels in (-1, stream.dim() - 1)


def _projected(
    group: list[FrozenCall], later: Point, exits: Sequence[Point], orders: TokenOrders
) -> tuple[list[FrozenCall], list[Tensor | None]]:
    """The layers of a step through a matrix after them, and its factor in the stream, by layer.

    It is the last matrix that all they are read by goes through: an MLP's has the stream around it.
    No factor where there is none, or mixers hold what differs by token before it.
    """
    none: list[Tensor | None] = [None for _ in group]
    joined = [edge for edge in meetings([later], exits) if kind_of(edge.node) in MATRICES][-1:]
    after = [
        p for edge in joined for axis in (-1, 1) if _is_alike(p := Point.at(edge, axis), later)
    ]
    if not after:
        return group, none
    matrices = projections(after[0], exits, orders)
    known = [matrix for matrix in matrices if matrix is not None]
    if len(known) < len(group) or any(layer.mixer.out_gate is not None for layer in group):
        return group, none
    pairs = zip(group, known, strict=True)
    scales = factors(later, after[:1]) * len(group)
    return [layer.through(matrix) for layer, matrix in pairs], scales


def _is_alike(point: Point, other: Point) -> bool:
    return (point.tokens, point.width) == (other.tokens, other.width)


def _exits(group: Sequence[FrozenCall], live: Recording | None) -> list[Point | None]:
    # Where what the mixers returned is in the graph of the run.
    if live is None or not live.ports:
        return [None for _ in group]
    ports = dict(zip((call.order for call in live.calls), live.ports, strict=True))
    return [ports[layer.source.order].exit for layer in group]


def is_one(factor: Tensor) -> bool:
    """Whether a factor changes nothing, as far as it is rounded."""
    return bool((factor - 1).abs().max() <= 4 * torch.finfo(factor.dtype).eps)


def _stream_after(
    group: Sequence[FrozenCall], norms: Sequence[MixerCall], before: Tensor, following: Tensor
) -> Tensor:
    # The stream straight after a layer's mixers: what the next norm is given, as that of an MLP. A
    # norm of a parallel branch is given the stream before it.
    last = max(layer.call.order for layer in group)
    later = (first_input(call) for call in norms if call.order > last)
    alike = (x for x in later if x.shape == before.shape and not torch.equal(x, before))
    return next(alike, following)


def _is_sum(group: Sequence[FrozenCall], before: Tensor, after: Tensor) -> bool:
    # Whether a stream is that before it and what mixers returned, as far as it is rounded.
    added = (after - before).double()
    if any(layer.call.output.shape != added.shape for layer in group):
        return False
    rest = added - output_of(group).to(added)
    return bool(rest.norm() <= _rounding(added, before))


def _rounding(added: Tensor, before: Tensor) -> Tensor:
    # What may be rounding of the stream, and of what is added to it.
    eps = torch.finfo(before.dtype).eps
    return 4 * eps * before.double().norm() + max(1e-3, 8 * eps) * added.norm()


def _fitted(group: list[FrozenCall], before: Tensor, after: Tensor) -> list[FrozenCall]:
    # The layers with numbers per channel that make up for what is added, without a graph.
    added = (after - before).flatten(0, 1).double()  # (B L, E)
    outputs = [layer.call.output.flatten(0, 1).to(added) for layer in group]
    is_alike = all(output.shape == added.shape for output in outputs)
    if is_alike and len(added) > len(group):  # by least squares over all tokens
        x = torch.stack(outputs, -1)
        products = torch.einsum("nei,nej->eij", x, x), torch.einsum("nei,ne->ei", x, added)
        scales = (torch.linalg.pinv(products[0]) @ products[1][..., None])[..., 0]  # (E, mixers)
        if bool((added - (x * scales).sum(-1)).norm() <= _rounding(added, before)):
            return [
                layer.times(scale) for layer, scale in zip(group, scales.unbind(1), strict=True)
            ]
    raise UnreadStreamError(
        f"what {group[0].name} returned is multiplied before it is added to the residual stream, "
        f"by what is not known of {len(added)} tokens without the graph of the run; {_ELSE}"
    )


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


def _read_out(
    frozen: FrozenModel, last_group: list[FrozenCall], live: Recording | None
) -> tuple[_Stream, Tensor]:
    # The final stream and the direction in which the score is read from it.
    last, before = frozen.layers[-1].call, _stream_before(last_group[0], frozen, live).values
    width = before.shape[-1]
    following = [c for c in frozen.others if c.order > last.order and c.gradient is not None]
    after = [call for call in following if first_input(call).shape == (*frozen.shape, width)]
    pooled = [call for call in following if first_input(call).shape == (frozen.shape[0], width)]
    norms = [call for call in after if is_norm(call.module) and call.output.shape[-1] == width]
    heads = [call for call in after if isinstance(call.module, nn.Linear)]
    if norms or heads:
        call = [*heads, *norms][-1]
        return _Stream.before(call, live), _pulled_back(call)
    if after or not pooled:
        raise UnreadStreamError(
            "neither a norm nor a linear head was found after the model's last mixer, so the "
            f"direction in which the score is read from the residual stream is not known; {_ELSE}"
        )
    # Tokens are pooled first: the mean of all, or one of them.
    norms = [call for call in pooled if is_norm(call.module)]
    call = [pooled[0], *norms][-1]
    if last.output.shape != before.shape:
        raise UnreadStreamError(
            f"what {last_group[0].name} returned is not added to the residual stream as it is, so "
            f"the last stream is not known; {_ELSE}"
        )
    final = before + output_of(last_group)
    (query,) = frozen.require_query()
    read, pooled_input = torch.einsum("bl,ble->be", query, final), first_input(call).to(final.dtype)
    if not bool((read - pooled_input).norm() <= 1e-3 * pooled_input.norm()):
        is_read = query > 1 - 1e-6  # (B, L)
        is_one = bool(is_read.any(1).all())
        if not is_one or _stream_after(last_group, frozen.others, before, final) is final:
            raise UnreadStreamError(
                f"what {call.path} is given is not the mean of the tokens after the last mixer, "
                "nor one of them, so the direction in which the score is read from the residual "
                f"stream is not known; {_ELSE}"
            )
        # An MLP adds to the one token; what it adds to the others is not read.
        final = torch.where(is_read[..., None], pooled_input[:, None], final)
    return _Stream(final), query[..., None] * _pulled_back(call)[:, None].to(final.dtype)


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


def _stream_before(layer: FrozenCall, frozen: FrozenModel, live: Recording | None) -> _Stream:
    call, is_given = layer.call, frozen.wiring.steps[layer.step].is_given_stream
    norm = feeding_norm(call, [other for other in frozen.others if other.order < call.order])
    if norm is not None and not is_given:
        return _Stream.before(norm, live)
    if is_given is False:
        raise UnreadStreamError(
            f"{layer.name} is given what is made of the residual stream by a function, so the "
            f"stream before it was not recorded; {_ELSE}"
        )
    pairs = () if live is None else zip(live.calls, live.ports, strict=bool(live.ports))
    entries = [port.entry for recorded, port in pairs if recorded.order == layer.source.order]
    entry = entries[0].before_move(call.channels) if entries and entries[0] else None
    return _Stream(call.tokens(), None if entry is None else before_casts(entry))


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
