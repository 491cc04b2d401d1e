"""What a module adds to its scans: a skip from a convolution, a bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm._graph import Point, gradients
from captum_ssm._reachability import before_view, dependencies
from captum_ssm._readers import entries
from captum_ssm._rules import ruled
from captum_ssm.mixers._frozen_mixer import FrozenMixer, mean_of_groups
from captum_ssm.mixers.measured._branch import with_branches
from captum_ssm.mixers.measured._convolution import Convolution
from captum_ssm.mixers.measured._directions import Direction
from captum_ssm.mixers.measured._projection import Projection
from captum_ssm.mixers.measured._rerun import Rerun, is_close, is_small
from captum_ssm.mixers.vision import FrozenScans
from captum_ssm.operators.composed import sum_of


def with_offset(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    directions: Sequence[Direction],
    found: Sequence[Convolution | None],
    after: Tensor,
) -> FrozenMixer:
    """``mixer``, the scans alone, with all that the output projection is given.

    ``after (B, L, D)`` is the factor of what follows the norm: the gate.

    Raises:
        NotMeasured: something is added that depends on the tokens.
    """
    want = projection.gated
    if is_small(_rest(projection, mixer), want):
        return mixer
    for whole in _completions(rerun, projection, mixer, directions, found):
        complete = _with_bias(rerun, projection, whole, after)
        if complete is not None:
            return complete
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
            added = bias * factor
            return replace(mixer, offset=added if mixer.offset is None else mixer.offset + added)
    return None


def _completions(
    rerun: Rerun,
    projection: Projection,
    mixer: FrozenMixer,
    directions: Sequence[Direction],
    found: Sequence[Convolution | None],
) -> Iterator[FrozenMixer]:
    # The mixer with what may be added to its scans, except a bias: skips read off the convolutions
    # before them or off their values, added before the norm or after it; then branches too.
    nothing = [None] * len(found)
    for sources in [found] if list(found) == nothing else [found, nothing]:
        skips = _skips(rerun, projection.root, directions, sources)
        skipped = _with_skips(mixer, skips)
        past_norm = _past_norm(skipped, skips)
        offsets = [mixer.offset]
        if past_norm is not None:
            offsets.append(past_norm if mixer.offset is None else mixer.offset + past_norm)
        yield from (replace(skipped, offset=offset) for offset in offsets)
        branched = with_branches(rerun, projection, skipped, found)
        if branched is not skipped:
            yield from (replace(branched, offset=offset) for offset in offsets)


def _skips(
    rerun: Rerun, root: Point, directions: Sequence[Direction], found: Sequence[Convolution | None]
) -> list[Tensor | None]:
    # The factor of each direction's values that is added after its scan, (B, L, D) in the scan's
    # order: read off the convolution before it, or off the values where none is given. Directions
    # of one source have one sum of them, given to the first.
    skips: list[Tensor | None] = []
    seen: list[object] = []
    for direction, one in zip(directions, found, strict=True):
        skip, read = None, None if one is not None else _read_values(root, direction)
        source = one.conv if one is not None else read and (read.edge.node, read.edge.output_nr)
        if source is not None and source not in seen:
            seen.append(source)
            if one is not None:
                skip = _of_convolution(rerun, root, direction, one)
            elif read is not None:
                skip = _of_values(root, direction, read)
        skips.append(skip)
    return skips


def _read_values(root: Point, direction: Direction) -> Point | None:
    # What the values of a scan are a view of, where it is read past the scan.
    values = direction.cut.values
    while values is not None:
        with ruled([root.edge.node], [values.edge.node]) as carries:
            if carries[root.edge.node] and _is_read(root, values):
                break
        values = before_view(values)
    return values


def _is_read(root: Point, values: Point) -> bool:
    # The graph may lead on by what a slice leaves out: of twice as many tokens, as transforms take.
    noise = root.noise(torch.Generator().manual_seed(0))
    (gradient,) = gradients([root], [noise], [values])
    return gradient is not None and bool(gradient.any())


def _of_values(root: Point, direction: Direction, read: Point) -> Tensor | None:
    # Of what the scan is given: S4's D, or RWKV-7's bonus.
    given = direction.cut.values
    assert given is not None
    with ruled([root.edge.node], [read.edge.node], centered=False):
        link = entries(root, read)
    own = None if link is None else entries(given, read)
    if link is None or own is None:
        return None
    factor = torch.zeros(direction.cut.leaf.shape, dtype=torch.float64, device=given.device)
    both = (link.token >= 0) & (own.token >= 0)
    factor.flatten(0, 1)[own.token[both], own.channel[both]] = (link.factor / own.factor)[both]
    return _over(direction.of(factor.to(direction.factor)), direction.factor)


def _of_convolution(
    rerun: Rerun, root: Point, direction: Direction, one: Convolution
) -> Tensor | None:
    # The factor is that of what the convolution before the scan returned. Where a linear layer of
    # it multiplies it, as in Hydra, the layer counts as a coefficient: it has half the relevance.
    psi, times = Point.of(one.conv.leaf, 1), 1
    with ruled([root.edge.node], [psi.edge.node], centered=False):
        link = entries(root, psi)
        if link is None:
            times = 2
            with _constant_layers(rerun, root, psi):
                link = entries(root, psi)
    if link is None:
        return None
    at = times * link.factor.to(one.factor)[one.position][..., one.channels]
    return _over(at[:, direction.order], one.factor[:, direction.order] * direction.factor)


@contextmanager
def _constant_layers(rerun: Rerun, root: Point, leaf: Point) -> Iterator[None]:
    # No gradient goes through the linear layers between two points.
    def nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    ends = [linear.at_output for linear in rerun.run.linears]
    after = dependencies([root], ends)[0]
    read = dependencies(ends, [leaf])
    with ExitStack() as stack:
        for k, end in enumerate(ends):
            if k in after and read[k]:
                stack.callback(end.edge.node.register_prehook(nothing).remove)
        yield


def _over(a: Tensor, b: Tensor) -> Tensor:
    # Zero where both are, after an activation that is zero.
    return torch.where(a == 0, 0, a / torch.where(b == 0, 1, b))


def _past_norm(mixer: FrozenMixer, skips: Sequence[Tensor | None]) -> Tensor | None:
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
