"""From the tokens of the first mixers to the entries of the model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm._graph import Point, gradients
from captum_ssm._transport import Transport, orthogonal, pushed

# Backward passes through the first layers, at most, for the shares of features.
_PROBES, _COARSE = 64, 8


@dataclass(frozen=True, eq=False)
class Way:
    """How the entries of one input make up the tokens that the first mixers are given.

    Entries are places times features: steps times variables, pixels times colors. Of an input of
    ids the features are those of its embedding.

    Args:
        leaf (Point): the input, or the embeddings of its ids.
        values (Tensor): its values.
        roots (tuple of Point): tokens of mixers that are made of it.
        batch (int): B.
    """

    leaf: Point
    values: Tensor
    roots: tuple[Point, ...]
    batch: int

    def features(self) -> Tensor:
        r"""Which part of a place's relevance each of its features gets: ``(B, S, F)``.

        :math:`\propto \|\partial h / \partial x_e\| |x_e|`, where h are all tokens: the size of
        what the feature adds to them, by the layer's own linear map. A place that adds nothing is
        shared evenly.
        """
        F = self.leaf.width
        even = self.values.new_ones(self.batch, 1, F, dtype=torch.float64) / F
        if F == 1 or not self.roots:
            return even
        x = self.leaf.flat(self.values).double()
        total = torch.zeros_like(x)
        generator = torch.Generator().manual_seed(0)
        # Tokens of many places are wide, and each place is read by several of them.
        is_coarse = max(root.tokens for root in self.roots) < self.leaf.tokens
        probes = min(_COARSE if is_coarse else _PROBES, max(root.width for root in self.roots))
        bases = [orthogonal(root, probes, generator) for root in self.roots]
        for k in range(probes):
            (found,) = gradients(self.roots, [basis[k] for basis in bases], [self.leaf])
            if found is not None:
                total += (found.double() * x).square()
        size = total.sqrt().unflatten(0, (self.batch, -1))
        sums = size.sum(-1, keepdim=True)
        return torch.where(sums > 0, size / sums.clamp(min=1e-300), even)

    def added(self, root: Point) -> Tensor:
        r"""The size of what it adds to each token of ``root``, :math:`\|J x\|`: ``(B, T)``."""
        (found,) = pushed(Transport(root, self.leaf, self.batch), self.values)
        return found.double().norm(dim=-1).view(self.batch, -1)

    def shaped(self, entries: Tensor) -> Tensor:
        """``entries (B, S, F)`` in the shape of the input."""
        return self.leaf.unflat(entries.flatten(0, 1)).contiguous()


def feature_axis(root: Point, leaf: Point, batch: int) -> int | None:
    """The axis of ``leaf`` that holds features: one token is made of all of them.

    Of the axes after the first, that along which a token of ``root`` reads most; where it reads
    all of several, the last of a sequence and the second of an image. None for ``(B, L)``.
    """
    axes = range(1, len(leaf.shape))
    if len(axes) < 2:
        return None
    usual = 1 if len(axes) > 2 else 2
    T = root.tokens // batch
    seed = root.noise(torch.Generator().manual_seed(0))
    here = torch.zeros(root.tokens, 1, dtype=seed.dtype, device=seed.device)
    here[T // 2] = 1
    (found,) = gradients([root], [seed * here], [leaf])
    if found is None:
        return usual
    read = leaf.unflat(found)[0] != 0
    seen = {
        axis: float(
            read.any(tuple(a - 1 for a in axes if a != axis), keepdim=False).double().mean()
        )
        for axis in axes
    }
    if len(read.shape) == 1:
        return usual
    best = max(seen.values())
    return usual if seen[usual] == best else max(seen, key=lambda axis: seen[axis])


def portions(sizes: Sequence[Tensor]) -> list[Tensor]:
    """The parts ``(B, T)`` in which tokens are made of several, by the size that each adds."""
    total = torch.stack(list(sizes)).sum(0)
    even = 1 / len(sizes)
    return [torch.where(total > 0, one / total.clamp(min=1e-300), even) for one in sizes]
