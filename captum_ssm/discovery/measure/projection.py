"""The output projection: the last linear layer whose output is the module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.measure.cut_run import CutLinear
from captum_ssm.discovery.measure.rerun import Rerun, is_close, is_small, ruled_entries
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.readers import Entries, readers


@dataclass(frozen=True)
class Projection:
    """The output projection, and what it is given.

    Args:
        inputs (Point): its input.
        lands (Tensor): the module's token that each of its tokens is, -1 for none: ``(B L,)``, or
            more where some are cropped.
        gated (Tensor): its input, ``(B, L, G)``, in the module's order.
        apply (Callable): takes ``(..., G)`` and returns ``(..., E)``.
        weight (Tensor): ``(E, G)``.
        gate (Tensor, optional): ``(B, L, E)``, a factor after it that differs by token.
            Default: None
        channels (Tensor, optional): ``(G,)``, which of the input's these are, where they are some
            of them, or some of them several times: what is given there is added up. Default: None
        skip (Tensor, optional): ``(B, L, E)``, what each token adds past it. Default: None
    """

    inputs: Point
    lands: Tensor
    gated: Tensor
    apply: Callable[[Tensor], Tensor]
    weight: Tensor
    gate: Tensor | None = None
    channels: Tensor | None = None
    skip: Tensor | None = None

    def entries(self, earlier: Point, *, centered: bool = True) -> Entries | None:
        """The entries of its input that read those of an earlier point, by the module's tokens.

        None where one is read by several.
        """
        link = ruled_entries(self.inputs, earlier, centered=centered)
        if link is None:
            return None
        token = torch.where(link.token >= 0, self.lands[link.token.clamp(min=0)], -1)
        return replace(link, token=token)

    @property
    def repeats(self) -> bool:
        """Whether several channels are added up."""
        return self.channels is not None and len(self.channels.unique()) < len(self.channels)

    def added_up(self, y: Tensor) -> Tensor:
        """``y (..., G)`` with what is given to one channel added up, at each position of it."""
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
    later = Point.of(output)
    scans = [Point.of(cut.leaf) for cut in rerun.run.scans]
    for linear in reversed(rerun.run.linears):
        y, width = linear.output, linear.output.shape[-1]
        if y.numel() // width < rerun.T:
            continue
        link = ruled_entries(later, linear.at_output)
        matches = None if link is None else _columns(link, rerun.T, E)
        if matches is None:
            continue
        lands, columns, factor = matches
        not_cropped = (lands >= 0).nonzero()[:, 0]
        back = not_cropped[torch.argsort(lands[not_cropped])]
        factor = factor[back].float().view(B, L, E)
        projected = y.detach().reshape(-1, width)[back][:, columns].view_as(flat)
        if not is_close(projected * factor, flat):
            continue
        scale, gate = factor[0, 0], None
        if not is_close(scale.expand_as(factor), factor):
            # Not the gate's own projection, where there is none after the scans.
            if not any(dependencies([linear.point], scans)):
                continue
            scale, gate = torch.ones_like(scale), factor
        gated = linear.inputs.flatten(0, -2)[back].view(B, L, -1)
        weight = linear.weight[columns] * scale[:, None]
        apply = _scaled(linear, columns, scale)
        return Projection(linear.point, lands, gated, apply, weight, gate)
    eye = torch.eye(E, dtype=flat.dtype, device=flat.device)
    return Projection(later, torch.arange(rerun.T, device=flat.device), flat, lambda x: x, eye)


def find_matrix(rerun: Rerun) -> Projection | None:
    """The matrix by which a module's output reads each token of its scan, whatever computes that.

    The output projection may be called in each step of a loop, and past it a module may add its
    tokens times a matrix of its own, as the D of S5 and LRU. None where that, and a bias, is not
    all, and where that matrix is the identity: what adds its own tokens is no mixer.
    """
    output, leaf, *others = Point.of(rerun.run.output), *(cut.leaf for cut in rerun.run.scans)
    of_scan = None if others else shared_matrix(output, Point.of(leaf))
    of_tokens = None if of_scan is None else shared_matrix(output, rerun.tokens)
    if of_scan is None or of_tokens is None:
        return None
    (weight, lands), (skip, order) = of_scan, of_tokens
    same = torch.eye(*skip.shape, dtype=skip.dtype, device=skip.device)
    is_residual = skip.shape[0] == skip.shape[1] and is_close(same * skip.diagonal().mean(), skip)
    if bool((order.diff() != 1).any()) or (is_residual and bool(skip.any())):
        return None
    gated = leaf.detach().flatten(0, 1)[torch.argsort(lands)]
    added = rerun.tokens.flat(rerun.run.tokens.detach()) @ skip.mT
    flat = output.flat(rerun.run.output.detach())
    rest = flat - gated @ weight.mT - added
    bias, shape = rest.mean(0), (rerun.B, rerun.L, -1)
    if not is_small(rest - bias, flat):
        return None
    return Projection(
        Point.of(leaf),
        lands,
        gated.view(shape),
        lambda y: F.linear(y, weight.to(y), bias.to(y)),
        weight,
        skip=added.view(shape) if bool(skip.any()) else None,
    )


def shared_matrix(later: Point, earlier: Point) -> tuple[Tensor, Tensor] | None:
    """The matrix ``(E, D)`` that all tokens of a point have in those of a later one.

    And the token ``(T,)`` of the later point that reads each. None where there is no such matrix,
    or where tokens and their readers are not as many; zeros where nothing is read.
    """
    T, E = later.tokens, later.width
    if earlier.tokens != T:
        return None
    every = torch.arange(T, device=later.device)
    lands = readers(later, earlier)
    if lands is None:
        return None
    if bool((lands < 0).all()):
        nothing = torch.zeros(E, earlier.width, dtype=earlier.dtype, device=earlier.device)
        return nothing, every
    if not torch.equal(lands.sort().values, every):
        return None
    rows = []
    for first in range(0, E, T):
        # Each token is asked for a row of its own.
        at = every[: E - first]
        seed = torch.zeros(T, E, dtype=later.dtype, device=later.device)
        seed[at, first + at] = 1
        (gradient,) = gradients([later], [seed], [earlier])
        assert gradient is not None
        rows.append(gradient[torch.argsort(lands)[at]])
    matrix, noise = torch.cat(rows), later.noise()
    (gradient,) = gradients([later], [noise], [earlier])
    assert gradient is not None
    return (matrix, lands) if is_close((noise @ matrix)[lands], gradient) else None


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
    read_by = readers(projection.inputs, rerun.tokens, side.nonzero()[:, 0])
    here = torch.arange(rerun.T, device=channels.device)
    lands = None if read_by is None else projection.lands[read_by.clamp(min=0)]
    if read_by is None or lands is None or bool(((lands != here) & (read_by >= 0)).any()):
        raise rerun.refused("a branch next to its scans mixes tokens")

    def apply(y: Tensor) -> Tensor:
        whole = gated.to(y).expand(*y.shape[:-1], G).clone()
        whole[..., channels] = 0
        return projection.apply(whole.index_add(-1, channels, y))

    return replace(
        projection, gated=gated[..., channels], apply=apply, weight=weight, channels=channels
    )


def _scaled(linear: CutLinear, columns: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    weight, bias = linear.weight[columns], linear.bias
    bias = None if bias is None else bias[columns]

    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight.to(x), None if bias is None else bias.to(x)) * scale.to(x)

    return apply


def _columns(link: Entries, T: int, E: int) -> tuple[Tensor, Tensor, Tensor] | None:
    # The token that each one lands on, the channel that is read by each of the module's (E,), and
    # the factor of each token; None where they are not read so.
    is_read = link.token >= 0
    is_landed = is_read.any(1)
    columns = is_read[is_landed].all(0).nonzero()[:, 0]
    if len(columns) != E or int(is_landed.sum()) != T or int(is_read.sum()) != T * E:
        return None
    lands, to = link.token[:, columns[0]], link.channel[is_landed][0, columns]
    at = columns[torch.argsort(to)]
    channels = torch.arange(E, device=at.device)
    differs = (link.token[:, at] != lands[:, None]) | (link.channel[:, at] != channels)
    if bool(differs[is_landed].any()):
        return None
    if not torch.equal(lands[is_landed].sort().values, torch.arange(T, device=lands.device)):
        return None
    return lands, at, link.factor[:, at]
