"""What a module adds to its scans: skips, convolved tokens (as in xLSTM), a bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from captum_ssm.discovery.measure.convolution import Convolution
from captum_ssm.discovery.measure.cut_run import CutConv
from captum_ssm.discovery.measure.directions import Direction
from captum_ssm.discovery.measure.projection import Projection
from captum_ssm.discovery.measure.rerun import NotMeasured, Rerun, is_close, is_small, ruled_entries
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.reachability import before_view, dependencies
from captum_ssm.graph.readers import Entries, entries
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.mixers.families.vision import FrozenScans
from captum_ssm.mixers.frozen_mixer import FrozenMixer, mean_of_groups
from captum_ssm.operators import SkipOperator
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.blocks import contextmanager


def with_added_terms(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    sets: Sequence[Sequence[Direction]],
    convolutions: Sequence[Convolution | None],
    after: Tensor,
) -> FrozenMixer:
    """``mixer``, the scans alone, with all that the output projection is given.

    ``sets`` are the directions of each scan, next to one another; ``after (B, L, D)`` is the factor
    of what follows the norm: the gate.

    Raises:
        NotMeasured: something is added that depends on the tokens.
    """
    if is_small(_rest(projection, mixer), projection.gated):
        return mixer
    for completed in _completions(rerun, projection, mixer, sets, convolutions):
        with_bias = _with_bias(rerun, projection, completed, after)
        if with_bias is not None:
            return with_bias
    raise rerun.refused(
        "it adds something to its scans that depends on its tokens (a residual, a branch next to "
        "the scan)"
    )


def with_padding(mixer: FrozenMixer, directions: Sequence[Direction]) -> FrozenMixer:
    """``mixer`` with what its scans make of padding, which is no token of the module's."""
    pairs = zip(mixer.scans_in_order(), directions, strict=True)
    added = [scan.gated(y) for (scan, _, _), d in pairs if (y := d.padding) is not None]
    return replace(mixer, offset=sum_of(added)) if added else mixer


def _rest(projection: Projection, mixer: FrozenMixer) -> Tensor:
    # What the output projection is given, (B, L, D), and not by this mixer.
    return projection.gated - projection.added_up(mixer.gated_output().to(projection.gated))


def _with_bias(
    rerun: Rerun, projection: Projection, mixer: FrozenMixer, after: Tensor
) -> FrozenMixer | None:
    # With a bias as it is, or times the gate; None where that is not all that is missing.
    rest = _rest(projection, mixer)
    if is_small(rest, projection.gated):
        return mixer
    for factor in (torch.ones_like(rest), after.to(rest)):
        bias = (rest * factor).sum((0, 1)) / factor.square().sum((0, 1))
        if rerun.T > 1 and not projection.repeats and is_close(bias * factor, rest):
            return _with_offset(mixer, bias * factor)
    return None


def _with_offset(mixer: FrozenMixer, added: Tensor) -> FrozenMixer:
    return replace(mixer, offset=added if mixer.offset is None else mixer.offset + added)


def _completions(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    sets: Sequence[Sequence[Direction]],
    convolutions: Sequence[Convolution | None],
) -> Iterator[FrozenMixer]:
    # The mixer with what may be added to its scans, except a bias: skips read off the convolutions
    # before them or off their values, added before the norm or after it; then branches too.
    directions = list(chain(*sets))
    without = [None] * len(directions)
    read_off = [convolutions] if list(convolutions) == without else [convolutions, without]
    for sources in read_off:
        each = iter(_skips(rerun, projection.inputs, directions, sources))
        skips = [_next_to_each_other([*islice(each, len(some))], some) for some in sets]
        skipped = _with_skips(mixer, skips)
        norm_of_skips = _norm_of_skips(skipped, skips)
        branches: list[tuple[FrozenMixer, Tensor]] = []
        for with_branches in (False, True):
            if with_branches and not (branches := _branches(rerun, projection, convolutions)):
                continue
            whole = _with_branches(skipped, branches) if with_branches else skipped
            yield whole
            if norm_of_skips is not None:
                yield _with_offset(whole, norm_of_skips)


def _skips(
    rerun: Rerun,
    later: Point,
    directions: Sequence[Direction],
    convolutions: Sequence[Convolution | None],
) -> list[Tensor | None]:
    # The factor of each direction's values that is added after its scan, (B, L, D) in the scan's
    # order: read off the convolution before it, or off the values where none is given. Directions
    # of one source have one sum of them, given to the first.
    seen = set[object]()

    def is_seen(source: object) -> bool:
        known = len(seen)
        seen.add(source)
        return len(seen) == known

    def skip_of(direction: Direction, convolution: Convolution | None) -> Tensor | None:
        if convolution is not None:
            if is_seen(convolution.conv):
                return None
            return _skip_of_convolution(rerun, later, direction, convolution)
        values = _read_values(later, direction)
        if values is None or is_seen((values.edge.node, values.edge.output_nr)):
            return None
        return _skip_of_values(later, direction, values)

    return list(map(skip_of, directions, convolutions))


def _next_to_each_other(
    skips: Sequence[Tensor | None], directions: Sequence[Direction]
) -> Tensor | None:
    if all(skip is None for skip in skips):
        return None
    values = [direction.values for direction in directions]
    pairs = zip(skips, values, strict=True)
    return torch.cat([torch.zeros_like(v) if skip is None else skip for skip, v in pairs], -1)


def _read_values(later: Point, direction: Direction) -> Point | None:
    # What the values of a scan are a view of, where it is read around the scan. The graph may lead
    # on by what a slice leaves out (transforms take twice as many tokens), so gradients decide.
    values = direction.cut.values
    noise = [later.noise()]
    while values is not None:
        with ruled([later.edge.node], [values.edge.node]):
            (gradient,) = gradients([later], noise, [values])
        if gradient is not None and bool(gradient.any()):
            break
        values = before_view(values)
    return values


def _skip_of_values(later: Point, direction: Direction, point: Point) -> Tensor | None:
    # A factor of what the scan is given: S4's D, or RWKV-7's bonus.
    values = direction.cut.values
    assert values is not None
    link = ruled_entries(later, point, centered=False)
    by_scan = None if link is None else entries(values, point)
    if link is None or by_scan is None:
        return None
    factor = torch.zeros(direction.cut.leaf.shape, dtype=torch.float64, device=values.device)
    both = (link.token >= 0) & (by_scan.token >= 0)
    at = by_scan.token[both], by_scan.channel[both]
    factor.flatten(0, 1)[at] = (link.factor / by_scan.factor)[both]
    return _over(direction.of(factor.to(direction.factor)), direction.factor)


def _skip_of_convolution(
    rerun: Rerun, later: Point, direction: Direction, convolution: Convolution
) -> Tensor | None:
    # The factor is that of what the convolution before the scan returned. Where a linear layer of
    # it multiplies it, as in Hydra, the layer counts as a coefficient: it has half the relevance.
    psi, times = Point.of(convolution.conv.leaf, 1), 1
    link = ruled_entries(later, psi, centered=False)
    if link is None:
        times = 2
        with _constant_layers(rerun, later, psi):
            link = ruled_entries(later, psi, centered=False)
    if link is None:
        return None
    factor, order = convolution.factor, direction.order
    at = times * link.factor.to(factor)[convolution.position][..., convolution.channels]
    return _over(at[:, order], factor[:, order] * direction.factor)


@contextmanager
def _constant_layers(rerun: Rerun, later: Point, earlier: Point) -> Iterator[None]:
    # No gradient goes through the linear layers between two points.
    def nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    ends = [linear.at_output for linear in rerun.run.linears]
    after = dependencies([later], ends)[0]
    depends = dependencies(ends, [earlier])
    with ExitStack() as stack:
        for k, end in enumerate(ends):
            if k in after and depends[k]:
                stack.callback(end.edge.node.register_prehook(nothing).remove)
        yield


def _over(a: Tensor, b: Tensor) -> Tensor:
    # Zero where both are, after an activation that is zero.
    return torch.where(a == 0, 0, a / torch.where(b == 0, 1, b))


def _norm_of_skips(mixer: FrozenMixer, skips: Sequence[Tensor | None]) -> Tensor | None:
    # What a norm would subtract of skips that are added after it, (B, L, D).
    parts = []
    for (scan, order, _), skip in zip(mixer.scans_in_order(), skips, strict=True):
        if skip is not None and scan.centered:
            mean = mean_of_groups(skip * scan.values, scan.centered)
            mean = mean if scan.left is None else mean * scan.left
            parts.append(mean if order is None else mean[:, torch.argsort(order)])
    return sum_of(parts) if parts else None


def _with_skips(mixer: FrozenMixer, skips: Sequence[Tensor | None]) -> FrozenMixer:
    if isinstance(mixer, FrozenScans):
        scans = zip(mixer.scans, skips, strict=True)
        return replace(mixer, scans=tuple(_with_skips(scan, [skip]) for scan, skip in scans))
    (skip,) = skips
    if skip is None:
        return mixer
    total = skip if mixer.skip is None else mixer.skip + skip
    return replace(mixer, skip=total).with_values(mixer.values)


def _branches(
    rerun: Rerun, projection: Projection, convolutions: Sequence[Convolution | None]
) -> list[tuple[FrozenMixer, Tensor]]:
    # The convolutions that are added to the scans, except those of their values.
    known = {c.conv for c in convolutions if c is not None}
    branches = (_branch(rerun, projection, conv) for conv in rerun.run.convs if conv not in known)
    return [branch for branch in branches if branch is not None]


def _with_branches(
    mixer: FrozenMixer, branches: Sequence[tuple[FrozenMixer, Tensor]]
) -> FrozenMixer:
    mixers, orders = zip(*branches, strict=True)
    if isinstance(mixer, FrozenScans):
        return replace(mixer, scans=(*mixer.scans, *mixers), orders=(*mixer.orders, *orders))
    here = torch.arange(mixer.inputs.shape[1], device=mixer.inputs.device)
    whole = FrozenScans.of((mixer, *mixers), (here, *orders))
    return replace(whole, recurrence=mixer.recurrence)


def _branch(
    rerun: Rerun, projection: Projection, conv: CutConv
) -> tuple[FrozenMixer, Tensor] | None:
    # Convolved tokens times a gate, as a scan whose recurrence is zero and whose skip holds them:
    # part of a map where the skip is asked for, while hidden attention stays that of the scans. And
    # the order of its tokens.
    psi = Point.of(conv.leaf, 1)
    link = projection.entries(psi, centered=False)
    if link is None or not bool((link.token >= 0).any()):
        return None
    index = _read_index(link, projection, rerun.T)
    position, channels = index[:, 0] // psi.width, index[0] % psi.width
    expected = position[:, None] * psi.width + channels
    if bool((index < 0).any()) or not torch.equal(index, expected):
        return None
    position = position.view(rerun.B, rerun.L)
    factor = link.factor.to(conv.leaf.dtype)[position][..., channels]
    try:
        convolution = Convolution.at(rerun, conv, position, channels, factor)
    except NotMeasured:
        return None
    order, is_causal = convolution.order, convolution.looks_back
    branch = FrozenMixer(
        recurrence=SkipOperator(torch.zeros_like(factor)),
        inputs=(convolution.inputs if is_causal else convolution.psi)[:, order],
        out_proj=projection.apply,
        out_weight=projection.weight,
        out_gate=projection.gate,
        skip=torch.ones_like(factor),
        gate=factor[:, order],
    )
    if is_causal:
        return replace(branch, conv=convolution.causal_taps, conv_bias=convolution.bias), order
    return replace(branch, image_conv=convolution.over_the_tokens), order


def _read_index(link: Entries, projection: Projection, tokens: int) -> Tensor:
    # By token and channel of the projection, the position and channel that are read there, counted
    # through; -1 for none.
    count = torch.arange(link.token.numel(), device=link.token.device).view_as(link.token)
    is_read = link.token >= 0
    index = count.new_full((tokens, projection.inputs.width), -1)
    index[link.token[is_read], link.channel[is_read]] = count[is_read]
    channels = projection.channels
    return index[:, : projection.weight.shape[1]] if channels is None else index[:, channels]
