"""Scans over padded or chosen tokens, or whose results are rolled: where their values come from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.grad import conv1d_input, conv2d_input

from captum_ssm.discovery.measure.convolution import link_before, own_positions
from captum_ssm.discovery.measure.cut_run import CutConv
from captum_ssm.discovery.measure.directions import Direction
from captum_ssm.discovery.measure.rerun import Rerun
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.readers import Entries
from captum_ssm.operators.permuted import inverted


def entered(rerun: Rerun, direction: Direction) -> Direction:
    """A direction with the module's tokens that its values are made of.

    A value is made of the token that it reads; after a convolution of the token whose own position
    in the convolution that is.

    Raises:
        NotMeasured: values are made of several tokens, or padding depends on the tokens.
    """
    if direction.lands is None:
        factor = direction.factor[:, torch.argsort(direction.order)]
        direction = replace(direction, lands=direction.order, factor=factor)
    assert direction.lands is not None
    conv, link = link_before(rerun, direction) or (None, None)
    numbers = (
        direction.readers(rerun)
        if conv is None or link is None
        else _by_position(rerun, direction, conv, link)
    )
    if numbers is None:
        raise rerun.refused(f"what {direction.cut.scan.name} is given is made of several tokens")
    every, length = torch.arange(rerun.L, device=numbers.device), len(direction.lands)
    example = torch.arange(rerun.B, device=numbers.device)[:, None]
    if bool(((numbers // length != example) & (numbers >= 0)).any()):
        raise rerun.refused("a scan reads other examples of the batch")
    at = torch.where(numbers >= 0, numbers % length, -1)
    if bool((at != at[:1]).any()):
        raise rerun.refused("examples of the batch enter its scans in different orders")
    direction = replace(direction, enters=inverted(at[0], length))
    if direction.padding is not None and _padding_reads_tokens(rerun, direction):
        raise rerun.refused(
            f"what {direction.cut.scan.name} is given in addition to its tokens (padding) is made "
            "of them"
        )
    return replace(direction, order=every)


def _by_position(rerun: Rerun, direction: Direction, conv: CutConv, link: Entries) -> Tensor:
    # As :meth:`Direction.readers`, by the tokens' own positions in the convolution.
    number = direction.numbers[link.token.clamp(min=0)]
    return torch.where(link.token >= 0, number, -1).amax(1)[own_positions(rerun, conv)]


def _padding_reads_tokens(rerun: Rerun, direction: Direction) -> bool:
    # Whether what is no token, and does write to tokens, is made of them: by itself or by way of a
    # convolution.
    values, enters = direction.cut.values, direction.enters
    assert values is not None
    assert enters is not None
    padding = direction.positions[..., enters < 0].flatten()
    noise = values.noise()
    seed = torch.zeros_like(noise)
    channels = slice(direction.start, direction.stop)
    seed[padding, channels] = noise[padding, channels]
    convs = [conv for conv in rerun.run.convs if conv.point is not None]
    earlier = [rerun.tokens, *(Point.of(conv.leaf, 1) for conv in convs)]
    direct, *through = gradients([values], [seed], earlier)
    if direct is not None and bool(direct.any()):
        return True
    for conv, point, gradient in zip(convs, earlier[1:], through, strict=True):
        if gradient is None or conv.point is None or not bool(gradient.any()):
            continue
        (read,) = gradients(
            [conv.point], [conv.point.flat(_pulled(conv, point.unflat(gradient)))], [rerun.tokens]
        )
        if read is not None and bool(read.any()):
            return True
    return False


def _pulled(conv: CutConv, gradient: Tensor) -> Tensor:
    # The gradient at a convolution's input.
    pull = conv1d_input if conv.inputs.dim() == 3 else conv2d_input
    size, groups = conv.inputs.shape, conv.inputs.shape[1]
    return pull(size, conv.weight[:, None], gradient, padding=conv.padding, groups=groups)
