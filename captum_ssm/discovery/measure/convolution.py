"""The depthwise convolution before a scan: its taps, and which of them is the token itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.measure.cut_run import CutConv
from captum_ssm.discovery.measure.directions import Direction
from captum_ssm.discovery.measure.rerun import Rerun, is_small, ruled_entries
from captum_ssm.graph.points import Point
from captum_ssm.graph.readers import Entries, readers
from captum_ssm.mixers.parts import ImageConv, centered
from captum_ssm.utils.lazy import cached_property


@dataclass(frozen=True)
class Convolution:
    """A depthwise convolution of the module's tokens, and the factor of what reads it.

    Args:
        conv (CutConv): the call.
        position (Tensor): ``(B, L)``, where the module's tokens are in its output.
        channels (Tensor): ``(D,)``, those that are read.
        psi (Tensor): ``(B, L, D)``, its output and what is added to it, in the module's order.
        factor (Tensor): ``(B, L, D)``, an activation's or a gate's, in the module's order.
        bias (Tensor): ``(D,)``, of the convolution, and added after it.
        inputs (Tensor): ``(B, L, D)``, its input, in the module's order.
        taps (Tensor): ``(D, K)`` or ``(D, Kh, Kw)``.
        center (tuple of int): the tap of the token itself.
        order (Tensor): ``(L,)``, of the module's tokens in the convolution.
        grid (tuple of int, optional): (height, width) of an image.
    """

    conv: CutConv
    position: Tensor
    channels: Tensor
    psi: Tensor
    factor: Tensor
    bias: Tensor
    inputs: Tensor
    taps: Tensor
    center: tuple[int, ...]
    order: Tensor
    grid: tuple[int, int] | None

    @classmethod
    def at(
        cls,
        rerun: Rerun,
        conv: CutConv,
        position: Tensor,
        channels: Tensor,
        factor: Tensor,
        added: Tensor | None = None,
    ) -> Convolution:
        """The convolution whose output is read at some positions, with a bias added after it.

        Raises:
            NotMeasured: it does not run over the module's tokens, each at its position.
        """
        if conv.point is None:
            raise rerun.refused("a convolution's input has no graph")
        psi = Point.of(conv.leaf, 1).flat(conv.leaf.detach())[position][..., channels]
        bias = psi.new_zeros(len(channels)) if added is None else added
        psi = psi + bias
        bias = bias if conv.bias is None else bias + conv.bias[channels]
        enters = input_positions(rerun, conv.point, position // math.prod(conv.leaf.shape[2:]))
        inputs = conv.point.flat(conv.inputs)[enters][..., channels]
        order, center, grid = _geometry(rerun, conv, enters, position)
        return cls(
            conv, position, channels, psi, factor, bias,
            inputs, conv.weight[channels], center, order, grid,
        )  # fmt: skip

    @property
    def looks_back(self) -> bool:
        """Whether it reads no later tokens, in its order."""
        return self.grid is None and self.center[0] >= self.taps.shape[1] - 1

    def is_inside(self, direction: Direction) -> bool:
        """Whether it runs in the scan's own order and looks back only."""
        return self.looks_back and torch.equal(self.order, direction.order)

    def does_what(self, other: Convolution) -> bool:
        """Whether two calls compute the same of the same tokens."""
        if (self.center, self.grid) != (other.center, other.grid):
            return False
        names = ("order", "taps", "bias", "inputs")
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)

    @cached_property
    def over_the_tokens(self) -> ImageConv:
        """The convolution in its own order of the tokens: of an image, or of a text."""
        inputs, order = self.inputs, None
        if bool((self.order.diff() != 1).any()):
            inputs, order = inputs[:, self.order], self.order
        taps, grid = self.taps, self.grid
        if grid is None:
            taps, grid = centered(taps, taps.shape[1] - 1 - self.center[0]), (1, inputs.shape[1])
        return ImageConv(inputs, taps, grid, self.bias, order)

    @property
    def causal_taps(self) -> Tensor:
        """``(D, K)``, the last one that of the token itself."""
        return F.pad(self.taps, (0, self.center[0] - self.taps.shape[1] + 1))


def link_before(rerun: Rerun, direction: Direction) -> tuple[CutConv, Entries | None] | None:
    """The convolution before a direction's values, and which of its entries they read.

    None if there is none; no entries where channels are mixed.
    """
    values = direction.cut.values
    if values is None:
        raise rerun.refused(f"the values of {direction.cut.scan.name} have no graph")
    for conv in reversed(rerun.run.convs):
        link = ruled_entries(values, Point.of(conv.leaf, 1), where=direction.where())
        if link is None or bool((link.token >= 0).any()):
            return conv, link
    return None


def find_convolution(rerun: Rerun, direction: Direction) -> Convolution | None:
    """The convolution that a direction's values come from, if any.

    Raises:
        NotMeasured: they come from it by something else than an activation.
    """
    link_of_conv = link_before(rerun, direction)
    if link_of_conv is None:
        return None
    conv, link = link_of_conv
    if link is None:
        raise rerun.refused(f"what it does before {direction.cut.scan.name} mixes channels")
    return _through(rerun, direction, conv, link)


def _through(rerun: Rerun, direction: Direction, conv: CutConv, link: Entries) -> Convolution:
    shape, scan = conv.leaf.shape, direction.cut  # (B'', C, ...)
    row, channel = (link.token >= 0).nonzero().unbind(1)
    token, to = link.token[row, channel], link.channel[row, channel]
    # In the scan's order: the position and channel in the convolution of each entry. Where values
    # are products of two (Hyena's), the last one counts, and the other is its factor: by the rule
    # of products each has half of it.
    index = torch.full(scan.leaf.shape, -1, device=row.device).flatten(0, 1)
    at = token * index.shape[1] + to
    index.view(-1).scatter_reduce_(0, at, row * shape[1] + channel, "amax")
    factors = torch.zeros_like(index).index_put_((token, to), torch.ones_like(to), accumulate=True)
    index = direction.of(index.reshape(scan.leaf.shape), fill=-1)
    # An entry that an activation made zero, as ReLU does, is where others of its token and of its
    # channel are; a channel that is zero for all tokens, as far from its own number as the others.
    is_read = index >= 0
    position = torch.where(is_read, index // shape[1], -1).amax(-1)
    if direction.enters is not None:  # it may read some of the tokens only
        position = torch.where(position < 0, own_positions(rerun, conv), position)
    channels = torch.where(is_read, index % shape[1], -1).amax((0, 1))
    off = channels - torch.arange(len(channels), device=index.device)
    if len(offset := off[channels >= 0].unique()) == 1:
        channels = channels.where(channels >= 0, channels - off + offset)
    expected = position[..., None] * shape[1] + channels
    if bool((index != expected)[is_read].any() | (position < 0).any() | (channels < 0).any()):
        raise rerun.refused(f"a convolution reaches a part of {scan.scan.name} only")
    psi = Point.of(conv.leaf, 1).flat(conv.leaf.detach())[position][..., channels]
    factor = link.factor.to(psi)[position][..., channels]
    factor = factor * direction.of(factors.reshape(scan.leaf.shape))
    # A bias may be added after the convolution.
    added = direction.values - factor * psi
    bias = (added * factor).sum((0, 1)) / factor.square().sum((0, 1)).clamp(min=1e-300)
    if not is_small(added - bias * factor, direction.values):
        raise rerun.refused(
            f"what it does between a convolution and {scan.scan.name} is not an activation"
        )
    is_bare = is_small(added, direction.values)
    back = torch.argsort(direction.order)  # by the module's tokens
    return Convolution.at(
        rerun, conv, position[:, back], channels, factor[:, back], None if is_bare else bias
    )


def input_positions(rerun: Rerun, point: Point, example: Tensor) -> Tensor:
    """The position in a convolution's input that reads each of the module's tokens, ``(B, L)``."""
    size = point.tokens // point.shape[0]
    rows = example[:, 0]
    if bool((example != rows[:, None]).any()):
        raise rerun.refused("a convolution does not run over all tokens of one example")
    at = (rows[:, None] * size + torch.arange(size, device=rows.device)).flatten()
    positions = readers(point, rerun.tokens, tokens=at)
    if positions is None or bool((positions < 0).any()):
        raise rerun.refused(
            "before a convolution it mixes tokens by something that is neither a scan nor a "
            "depthwise convolution"
        )
    positions = positions.reshape(rerun.B, rerun.L)
    if bool((positions // size != rows[:, None]).any()):
        raise rerun.refused("a convolution reads other examples of the batch")
    return positions


def own_positions(rerun: Rerun, conv: CutConv) -> Tensor:
    """Which token of a convolution's output is each of the module's tokens' own, ``(B, L)``."""
    B, here, there = rerun.B, conv.inputs.shape[2:], conv.leaf.shape[2:]
    if conv.point is None or conv.inputs.shape[0] != B:
        raise rerun.refused("a convolution does not run over all tokens of one example")
    example = torch.arange(B, device=conv.leaf.device)[:, None]
    size = math.prod(here)
    enters = input_positions(rerun, conv.point, example.expand(B, rerun.L)) % size
    if here == there or (len(here) == 1 and there[0] != rerun.L and there[0] >= size):
        return example * math.prod(there) + enters
    if len(here) == 1 and there[0] == rerun.L:
        return example * rerun.L + enters - enters.amin(1, keepdim=True)
    raise rerun.refused("a convolution's tokens are not those of the scan")


def _geometry(
    rerun: Rerun, conv: CutConv, enters: Tensor, leaves: Tensor
) -> tuple[Tensor, tuple[int, ...], tuple[int, int] | None]:
    """The order, center and grid, of positions in its input and its output of one token each."""
    here, there, kernel = conv.inputs.shape[2:], conv.leaf.shape[2:], conv.weight.shape[1:]
    order = torch.argsort(enters[0])
    steps = enters.gather(1, order.expand_as(enters)).diff(dim=1)
    if bool((steps != 1).any()):
        raise rerun.refused("a convolution does not run over neighboring tokens")
    if len(here) == 1:
        offset = enters % here[0] + conv.padding[0] - leaves % there[0]
        if bool((offset != offset[0, 0]).any()):
            raise rerun.refused("a convolution's tokens are shifted against the scan's")
        return order, (int(offset[0, 0]),), None
    odd = all(k % 2 and pad == k // 2 for k, pad in zip(kernel, conv.padding, strict=True))
    same = torch.equal(enters, leaves) and here == there and math.prod(here) == rerun.L
    if not odd or not same:
        raise rerun.refused("a convolution over the image is not centered on its tokens")
    return order, (kernel[0] // 2, kernel[1] // 2), (int(here[0]), int(here[1]))
