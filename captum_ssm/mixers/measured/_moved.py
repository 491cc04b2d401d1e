"""Scans over padded or chosen tokens, or whose results are rolled: where their values come from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._graph import Entries, Point, entries, gradients, readers
from captum_ssm._rules import ruled
from captum_ssm.mixers._cut import CutConv
from captum_ssm.mixers.measured._convolution import own_places
from captum_ssm.mixers.measured._directions import Direction
from captum_ssm.mixers.measured._rerun import Rerun


def entered(rerun: Rerun, direction: Direction) -> Direction:
    """A direction with the module's tokens that its values are made of.

    A value is made of the token that it reads; after a convolution of the token whose own place in
    the convolution that is.

    Raises:
        NotMeasured: values are made of several tokens, or padding depends on the tokens.
    """
    values = direction.cut.values
    if values is None:
        raise rerun.refused(f"the values of {direction.cut.scan.name} have no graph")
    if direction.lands is None:
        factor = direction.factor[:, torch.argsort(direction.order)]
        direction = replace(direction, lands=direction.order, factor=factor)
    lands = direction.lands
    assert lands is not None
    found = _of_convolution(rerun, direction, values)
    if found is None:
        found = _of_tokens(rerun, direction, values)
    length = len(lands)
    if bool((found != found[:1]).any()):
        raise rerun.refused("examples of the batch enter its scans in different orders")
    enters = torch.full((length + 1,), -1, device=lands.device)
    enters[found[0]] = torch.arange(rerun.L, device=lands.device)
    direction = replace(direction, enters=enters[:length])
    if direction.padding is not None and _padding_reads_tokens(rerun, direction, values):
        raise rerun.refused(
            f"what {direction.cut.scan.name} is given in addition to its tokens (padding) is made "
            "of them"
        )
    every = torch.arange(rerun.L, device=lands.device)
    return replace(direction, order=every)


def _labels(direction: Direction, values: Point, batch: int) -> tuple[Tensor, Tensor]:
    # The direction's tokens among those of the scan, in a row, and by token of the scan its number
    # in the direction, (b, W l) counted through. Rows that are laid side by side count as one.
    at = direction.places
    number = torch.arange(batch * direction.length, device=at.device)
    number = number.view(batch, 1, -1).expand_as(at)
    labels = torch.full((values.tokens,), -1, device=at.device)
    labels[at.flatten()] = number.flatten()
    return at.flatten(), labels


def _of_tokens(rerun: Rerun, direction: Direction, values: Point) -> Tensor:
    # By the module's tokens, the number of the direction's that each is read by, (B, L); that of
    # all of them for none.
    assert direction.lands is not None
    at, labels = _labels(direction, values, rerun.B)
    channels = torch.arange(direction.start, direction.stop, device=at.device)
    found = readers(values, rerun.tokens, channels, tokens=at, labels=labels.clamp(min=0))
    if found is None:
        raise rerun.refused(f"what {direction.cut.scan.name} is given is made of several tokens")
    length = len(direction.lands)
    return _within(rerun, found.view(rerun.B, rerun.L), length)


def _within(rerun: Rerun, found: Tensor, length: int) -> Tensor:
    # Numbers (B, L), counted through, by example; ``length`` for none.
    example = torch.arange(rerun.B, device=found.device)[:, None]
    if bool(((found // length != example) & (found >= 0)).any()):
        raise rerun.refused("a scan reads other examples of the batch")
    return torch.where(found >= 0, found % length, length)


def _of_convolution(rerun: Rerun, direction: Direction, values: Point) -> Tensor | None:
    # As :func:`_of_tokens`, by the tokens' own places in the convolution before the scan, if any.
    for conv in reversed(rerun.run.convs):
        psi = Point.of(conv.leaf, 1)
        with ruled([values.edge.node], [psi.edge.node]) as carries:
            if not carries[values.edge.node]:
                continue
            link = entries(values, psi, where=direction.where())
        if link is not None and bool((link.token >= 0).any()):
            return _by_place(rerun, direction, values, conv, link)
    return None


def _by_place(
    rerun: Rerun, direction: Direction, values: Point, conv: CutConv, link: Entries
) -> Tensor:
    assert direction.lands is not None
    length = len(direction.lands)
    _, labels = _labels(direction, values, rerun.B)
    own = own_places(rerun, conv)  # (B, L)
    number = torch.where(link.token >= 0, labels[link.token.clamp(min=0)], -1).amax(1)
    return _within(rerun, number[own], length)


def _padding_reads_tokens(rerun: Rerun, direction: Direction, values: Point) -> bool:
    # Whether what is no token, and does write to tokens, is made of them: by itself or by way of a
    # convolution.
    assert direction.enters is not None
    at, labels = _labels(direction, values, rerun.B)
    seed = torch.zeros(values.tokens, values.width, dtype=values.dtype, device=at.device)
    is_padding = direction.enters[labels[at] % len(direction.enters)] < 0
    noise = values.noise(torch.Generator().manual_seed(0))
    seed[at[is_padding]] = noise[at[is_padding]]
    seed[:, : direction.start] = seed[:, direction.stop :] = 0
    convs = [conv for conv in rerun.run.convs if conv.point is not None]
    leaves = [rerun.tokens, *(Point.of(conv.leaf, 1) for conv in convs)]
    direct, *through = gradients([values], [seed], leaves)
    if direct is not None and bool(direct.any()):
        return True
    for conv, leaf, gradient in zip(convs, leaves[1:], through, strict=True):
        if gradient is None or conv.point is None or not bool(gradient.any()):
            continue
        (read,) = gradients(
            [conv.point], [conv.point.flat(_pulled(conv, leaf.unflat(gradient)))], [rerun.tokens]
        )
        if read is not None and bool(read.any()):
            return True
    return False


def _pulled(conv: CutConv, gradient: Tensor) -> Tensor:
    # The gradient at a convolution's input.
    convolve = F.conv1d if conv.inputs.dim() == 3 else F.conv2d
    with torch.enable_grad():
        x = torch.zeros_like(conv.inputs).requires_grad_()
        y = convolve(x, conv.weight[:, None], padding=conv.padding, groups=x.shape[1])
        (found,) = torch.autograd.grad(y, x, gradient)
    return found
