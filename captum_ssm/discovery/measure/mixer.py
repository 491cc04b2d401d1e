"""The frozen mixer, put together from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from captum_ssm.discovery.measure.added_terms import with_added_terms, with_padding
from captum_ssm.discovery.measure.convolution import Convolution, find_convolution
from captum_ssm.discovery.measure.cut_run import CutScan, run_cut
from captum_ssm.discovery.measure.directions import Direction, find_directions
from captum_ssm.discovery.measure.examples import freeze_examples
from captum_ssm.discovery.measure.moved import entered
from captum_ssm.discovery.measure.projection import (
    Projection,
    find_matrix,
    find_projection,
    narrowed,
)
from captum_ssm.discovery.measure.recurrence import find_recurrence, is_silent
from captum_ssm.discovery.measure.rerun import NotMeasured, Rerun
from captum_ssm.discovery.measure.side_by_side import side_by_side, whole_sets
from captum_ssm.discovery.measure.token_shift import share_of_neighbors
from captum_ssm.discovery.scans import is_product
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.mixers.call import MISFITS, MixerCall
from captum_ssm.mixers.families.vision import FrozenScans
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import ShortConv
from captum_ssm.utils.uncompiled import without_compiler


def freeze_measured(
    call: MixerCall,
    functions: Iterable[Callable[..., Any]] | None = None,
    *,
    partly: bool = True,
    used: set[Callable[..., Any]] | None = None,
    without: frozenset[Callable[..., Any]] = frozenset(),
) -> FrozenMixer:
    """The mixer of a recorded call of any module that holds scans.

    Args:
        call (MixerCall): the recorded call.
        functions (iterable of Callable, optional): those whose calls may be scans; None for all
            of the process, and so are others where none of these is called. Default: None
        partly (bool, optional): whether the scans and their orders will do. Default: True
        used (set of Callable, optional): those whose calls are scans are added. Default: None
        without (frozenset of Callable, optional): products with a matrix that are not of tokens.
            Default: none that are known

    Returns:
        FrozenMixer: its tokens flattened to ``(B, L, E)``. With ``partly``, where only the scans
        and their orders could be measured, one that has ``"hidden"`` maps alone, and says what is
        missing when it is asked for more.

    Raises:
        UnsupportedModelError: saying what could not be measured.
    """
    with torch.inference_mode(False), torch.no_grad(), without_compiler():
        rerun = Rerun(call, run_cut(call, functions, without=without))
        if not rerun.run.called and functions is not None:
            # A module may call others with gradients, or without padding.
            functions = None
            rerun = Rerun(call, run_cut(call, without=without))
        if used is not None:
            used.update(cut.function for cut in rerun.run.scans)
        seen = (rerun.run.tokens, rerun.run.output, *(cut.leaf for cut in rerun.run.scans))
        if len({x.device for x in seen}) > 1:
            raise rerun.refused(
                "it, or a hook of it, moves tokens between devices; move them outside of it"
            )
        try:
            if not rerun.run.scans:
                raise rerun.refused("none of the functions that it calls proved to be a scan")
            if _is_chain(rerun.run.scans):
                raise rerun.refused("one of its scans is given what another one returned")
            return _measured(rerun)
        except NotMeasured as error:
            alone = _of_examples(rerun, functions)
            if alone is not None:
                return alone
            if not rerun.run.scans or _is_chain(rerun.run.scans):
                raise
            products = {cut.function for cut in rerun.run.scans if is_product(cut.function)}
            if products and not all(cut.function in products for cut in rerun.run.scans):
                # They may make coefficients of the scans beside them.
                without = rerun.run.without | products
                used = set() if used is None else used
                used -= products
                return freeze_measured(call, functions, partly=partly, used=used, without=without)
            scans = find_recurrence(rerun, error.why) if partly else None
            if scans is None or not is_silent(
                run_cut(call, functions, silent=True, without=rerun.run.without)
            ):
                raise UnsupportedModelError(str(error)) from None
            return scans


def _of_examples(
    rerun: Rerun, functions: Iterable[Callable[..., Any]] | None
) -> FrozenMixer | None:
    # One example at a time, of a batch that is padded or packed into one row.
    mask = rerun.call.token_mask()
    padded = mask is not None and not bool(mask.all())
    packed = rerun.B > 1 and any(len(cut.leaf) == 1 for cut in rerun.run.scans)
    if not padded and not packed:
        return None
    try:
        return freeze_examples(
            rerun.call, lambda alone: freeze_measured(alone, functions, partly=False)
        )
    except MISFITS:  # it may take no example alone
        return None


def _is_chain(scans: Sequence[CutScan]) -> bool:
    # As in a module that holds several mixers, one after another.
    results = [Point.of(cut.leaf) for cut in scans]
    return any(dependencies([cut.values for cut in scans], results))


def _measured(rerun: Rerun) -> FrozenMixer:
    try:
        return _mixer(rerun, find_projection(rerun))
    except NotMeasured:
        projection = find_matrix(rerun)
        if projection is None:
            raise
        return replace(_mixer(rerun, projection), dense_skip=projection.skip)


def _mixer(rerun: Rerun, projection: Projection) -> FrozenMixer:
    scans = rerun.run.scans
    directions = [d for cut in scans for d in find_directions(rerun, projection, cut)]
    refused: NotMeasured | None = None
    if all(direction.lands is None for direction in directions):
        try:
            return _of_directions(rerun, projection, directions)
        except NotMeasured as error:
            refused = error
    # What scans return may land on other tokens than those that they are given.
    try:
        moved = [entered(rerun, direction) for direction in directions]
    except NotMeasured as error:
        raise refused or error from None
    if refused is not None and all(direction.lands_back for direction in moved):
        raise refused
    return _of_directions(rerun, projection, moved)


def _of_directions(
    rerun: Rerun, projection: Projection, directions: Sequence[Direction]
) -> FrozenMixer:
    sets = whole_sets(rerun, directions)
    directions, channels = list(chain(*sets)), torch.cat([d.channels for d in sets[0]])
    convolutions = [find_convolution(rerun, direction) for direction in directions]
    neighbor_share = share_of_neighbors(rerun, directions, convolutions)
    # Directions of one scan share a norm; each of several scans may have its own.
    norm_of = {
        (d.cut, d.lands is None or n): _norm(rerun, projection, d, len(channels))
        for n, d in reversed([*enumerate(directions)])
    }
    norms = [norm_of[d.cut, d.lands is None or n] for n, d in enumerate(directions)]
    projection = narrowed(rerun, projection, channels)
    mixer = _assembled(rerun, projection, sets, convolutions, norms)
    if len(sets) == len(directions):
        mixer = with_padding(mixer, directions)
    after = torch.cat([after for _, after in norms[: len(sets[0])]], -1)
    mixer = with_added_terms(rerun, projection, mixer, sets, convolutions, after)
    return replace(mixer, neighbor_share=neighbor_share)


def _norm(
    rerun: Rerun, projection: Projection, direction: Direction, width: int
) -> tuple[Tensor | None, Tensor]:
    # The factor of a norm after the scans, and that of what follows it, in the module's order;
    # without such a norm, None and the whole factor. The scans next to one another are so wide.
    channels = direction.channels
    steps = len(channels) // len(channels.unique())
    channels = channels[: len(channels) // steps]  # the same for each step of a token
    if not torch.equal(channels.repeat(steps), direction.channels):
        raise rerun.refused("some of what its scans return is added up, and some is not")
    whole = direction.factor[:, torch.argsort(direction.order)]
    earlier = Point.of(direction.cut.leaf)
    axes = sorted({rerun.call.channels, -1}, reverse=True)  # those of channels, the call's first
    for norm in (norm.along(axis) for norm in reversed(rerun.run.norms) for axis in axes):
        if norm.output.tokens * norm.output.width != rerun.T * width:
            continue
        with ruled([norm.inputs.edge.node], [earlier.edge.node]) as carries:
            if not carries[norm.inputs.edge.node]:
                continue
        link = projection.entries(norm.output)
        if link is None:
            continue
        is_read = link.token >= 0
        after = whole.new_full((rerun.T, projection.inputs.width), torch.nan)
        after[link.token[is_read], link.channel[is_read]] = link.factor[is_read].to(whole)
        after = after[:, channels].reshape(*whole.shape[:2], -1).repeat(1, 1, steps)
        if not bool(after.isnan().any()):
            return whole / after, after
    return None, whole


def _assembled(
    rerun: Rerun,
    projection: Projection,
    sets: Sequence[Sequence[Direction]],
    convolutions: Sequence[Convolution | None],
    norms: Sequence[tuple[Tensor | None, Tensor]],
) -> FrozenMixer:
    # A convolution belongs to its scan where it looks back in the scan's order, unless all scans
    # read one that does not for each of them.
    directions = list(chain(*sets))
    pairs = list(zip(directions, convolutions, strict=True))
    inside = [conv is not None and conv.is_inside(direction) for direction, conv in pairs]
    first = convolutions[0]
    is_one = all(first and conv and conv.does_what(first) for conv in convolutions)
    shared = first if is_one and not all(inside) else None
    # The groups of channels that a norm centers.
    size, D = max(d.centered for d in directions), sum(d.values.shape[-1] for d in sets[0])
    groups = 0 if size == 0 else max(1, D // size)
    scans = []
    for (direction, conv), (norm, after), is_inside in zip(pairs, norms, inside, strict=True):
        gate = direction.factor if norm is None else after[:, direction.order]
        scan = FrozenMixer(
            recurrence=direction.operator,
            inputs=direction.values if conv is None else conv.psi[:, direction.order],
            out_proj=projection.apply,
            out_weight=projection.weight,
            out_gate=projection.gate,
            skip=direction.skip,
            activation=None if conv is None else conv.factor[:, direction.order],
            gate=None if bool((gate == 1).all()) else gate,
            norm=None if norm is None else norm[:, direction.order],
            centered=groups,
        )
        if conv is not None and is_inside and shared is None:
            inputs, taps, bias = conv.inputs[:, direction.order], conv.causal_taps, conv.bias
            if direction.enters is not None:  # with what it reads of padding
                bias = scan.inputs - ShortConv(inputs, taps).output
            scan = replace(scan, inputs=inputs, conv=taps, conv_bias=bias)
        elif conv is not None:
            scan = replace(scan, image_conv=(shared or conv).over_the_tokens)
        scans.append(scan.with_values(direction.values))
    each = iter(scans)
    scans = [side_by_side(rerun, [next(each) for _ in of_set]) for of_set in sets]
    orders = [first.order for first, *_ in sets]
    if len(scans) == 1 and bool((orders[0].diff() == 1).all()) and scans[0].image_conv is None:
        return scans[0]
    return FrozenScans.of(scans, orders)
