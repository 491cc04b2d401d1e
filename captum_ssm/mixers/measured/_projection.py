"""The output projection: the last linear layer whose output is the module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._graph import Entries, Point, entries, readers
from captum_ssm._rules import ruled
from captum_ssm.mixers._cut import CutLinear
from captum_ssm.mixers.measured._rerun import Rerun, is_close


@dataclass(frozen=True)
class Projection:
    """The output projection, and what it is given.

    Args:
        root (Point): its input.
        lands (Tensor): ``(B L,)``, the module's token that each of its tokens is.
        gated (Tensor): its input, ``(B, L, G)``, in the module's order.
        apply (Callable): takes ``(..., G)`` and returns ``(..., E)``.
        weight (Tensor): ``(E, G)``.
        channels (Tensor, optional): ``(G,)``, which of the input's these are, where they are some
            of them, or some of them several times: what is given there is added up. Default: None
    """

    root: Point
    lands: Tensor
    gated: Tensor
    apply: Callable[[Tensor], Tensor]
    weight: Tensor
    channels: Tensor | None = None

    def entries(self, leaf: Point) -> Entries | None:
        """The entries of its input that read those of an earlier point, by the module's tokens.

        None where one is read by several. The rules of relevance have to be attached.
        """
        found = entries(self.root, leaf)
        if found is None:
            return None
        token = torch.where(found.token >= 0, self.lands[found.token.clamp(min=0)], -1)
        return replace(found, token=token)

    @property
    def repeats(self) -> bool:
        """Whether several channels are added up."""
        return self.channels is not None and len(self.channels.unique()) < len(self.channels)

    def added_up(self, y: Tensor) -> Tensor:
        """``y (..., G)`` with what is given to one channel added up, at each place of it."""
        if not self.repeats or self.channels is None:
            return y
        total = y.new_zeros(*y.shape[:-1], int(self.channels.max()) + 1)
        return total.index_add(-1, self.channels, y)[..., self.channels]


def find_projection(rerun: Rerun) -> Projection:
    """The output projection; without one, the identity.

    Raises:
        NotMeasured: the output does not depend on the scans.
    """
    B, L, E = rerun.B, rerun.L, rerun.E
    output = rerun.run.output
    flat = output.detach().reshape(B, L, E)
    if not output.requires_grad:
        raise rerun.refused("its output does not depend on its scans")
    root = Point.of(output)
    for linear in reversed(rerun.run.linears):
        y, weight = linear.output, linear.weight
        if y.numel() != flat.numel() or y.shape[-1] != E or y.shape[0] != B:
            continue
        with ruled([root.edge.node], [linear.at_output.edge.node]):
            link = entries(root, linear.at_output)
        lands, scale = _places(link, rerun.T, E)
        if lands is None or scale is None:
            continue
        back = torch.argsort(lands)
        if not is_close(y.detach().reshape(rerun.T, E)[back].view_as(flat) * scale, flat):
            continue
        gated = linear.inputs.reshape(rerun.T, -1)[back].view(B, L, -1)
        weight = weight * scale[:, None]
        return Projection(linear.point, lands, gated, _scaled(linear, scale), weight)
    eye = torch.eye(E, dtype=flat.dtype, device=flat.device)
    return Projection(root, torch.arange(rerun.T, device=flat.device), flat, lambda x: x, eye)


def narrowed(rerun: Rerun, projection: Projection, channels: Tensor) -> Projection:
    """The projection of those channels that scans reach; the others keep what was recorded.

    Raises:
        NotMeasured: the others mix tokens.
    """
    gated = projection.gated
    G = gated.shape[-1]
    weight = projection.weight[:, channels]
    if torch.equal(channels, torch.arange(G, device=channels.device)):
        return replace(projection, weight=weight)
    side = torch.ones(G, dtype=torch.bool, device=channels.device)
    side[channels] = False
    found = readers(projection.root, rerun.tokens, side.nonzero()[:, 0])
    here = torch.arange(rerun.T, device=channels.device)
    lands = None if found is None else projection.lands[found.clamp(min=0)]
    if found is None or lands is None or bool(((lands != here) & (found >= 0)).any()):
        raise rerun.refused("a branch next to its scans mixes tokens")

    def apply(y: Tensor) -> Tensor:
        whole = gated.to(y).expand(*y.shape[:-1], G).clone()
        whole[..., channels] = 0
        return projection.apply(whole.index_add(-1, channels, y))

    return replace(
        projection, gated=gated[..., channels], apply=apply, weight=weight, channels=channels
    )


def _scaled(linear: CutLinear, scale: Tensor) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(x)
        return F.linear(x, linear.weight.to(x), bias) * scale.to(x)

    return apply


def _places(link: Entries | None, T: int, E: int) -> tuple[Tensor | None, Tensor | None]:
    # The token that each one lands on, and the factor per channel where all have the same; or None.
    if link is None:
        return None, None
    lands = link.token[:, 0]
    columns = torch.arange(E, device=link.token.device)
    if bool((link.token != lands[:, None]).any() | (link.channel != columns).any()):
        return None, None
    if not torch.equal(lands.sort().values, torch.arange(T, device=lands.device)):
        return None, None
    scale = link.factor[:1]
    same = is_close(scale.expand_as(link.factor), link.factor)
    return lands, scale[0].float() if same else None
