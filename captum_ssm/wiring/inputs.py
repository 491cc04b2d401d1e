"""From the tokens of the first mixers to the entries of the model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.reachability import meetings
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.graph.token_weights import WIDE, TokenWeights, WeightsThroughStem, orthogonal

# Backward passes through the first layers, at most, for the shares of features.
_PROBES, _COARSE = 64, 8
# Passes for the shares in which tokens are read around one another.
_PASSES = 32


@dataclass(frozen=True, eq=False)
class InputMap:
    """How the entries of one input make up the tokens that the first mixers are given.

    Entries are places times features: steps times variables, pixels times colors. Of an input of
    ids the features are those of its embedding.

    Args:
        leaf (Point): the input, or the embeddings of its ids.
        values (Tensor): its values.
        roots (tuple of Point): tokens of mixers that are made of it.
        batch (int): B.
        stem (Point, optional): finer tokens of many channels that all of these are made of, such
            as those of an image after its first convolutions. Default: None
        gradient (Tensor, optional): of the explained score, at a series, where gradients were
            asked. Default: None
    """

    leaf: Point
    values: Tensor
    roots: tuple[Point, ...]
    batch: int
    stem: Point | None = None
    gradient: Tensor | None = None

    def features(self) -> Tensor:
        r"""Which part of a place's relevance each of its features gets: ``(B, S, F)``.

        :math:`\propto |\partial s / \partial x_e| |x_e|`, input times gradient of the explained
        score s, where that is known. Else :math:`\propto \|\partial h / \partial x_e\| |x_e|`,
        where h are all tokens: the size of what the feature adds to them by the layers' own linear
        map, norms and gates frozen as in MambaLRP. A place that adds nothing is shared evenly.
        """
        F = self.leaf.width
        even = self.values.new_ones(self.batch, 1, F, dtype=torch.float64) / F
        if F == 1 or not self.roots:
            return even
        x = self.leaf.flat(self.values).double()
        if self.gradient is None:
            size = self._sizes(x)
        else:
            size = (self.leaf.flat(self.gradient).double() * x).abs()
        size = size.unflatten(0, (self.batch, -1))
        sums = size.sum(-1, keepdim=True)
        return torch.where(sums > 0, size / sums.clamp(min=1e-300), even)

    def _sizes(self, x: Tensor) -> Tensor:
        # The energy of what entries add to the tokens, (B S, F).
        total = torch.zeros_like(x)
        # So many that they are exact; fewer for wide tokens, which are made of many places each.
        points = self.roots if self.stem is None else (self.stem,)
        is_wide = max(point.width for point in points) > _PROBES
        is_coarse = max(point.tokens for point in points) < self.leaf.tokens
        most = _COARSE if is_wide and is_coarse else _PROBES
        seeds = [orthogonal(point, self.batch, min(point.width, most)) for point in points]
        # What is data-dependent in between is a constant, as in `TokenWeights.added`.
        with ruled([point.edge.node for point in points], [self.leaf.edge.node]):
            for some in zip_longest(*seeds):
                seeded = [
                    (point, s) for point, s in zip(points, some, strict=True) if s is not None
                ]
                roots, some_seeds = zip(*seeded, strict=True)
                (gradient,) = gradients(roots, some_seeds, [self.leaf])
                if gradient is not None:
                    total += (gradient.double() * x).square()
        return total.sqrt()

    def added(self, root: Point) -> Tensor:
        r"""The size of what it adds to each token of ``root``, :math:`\|J x\|`: ``(B, T)``."""
        added = TokenWeights(root, self.leaf, self.batch).added(self.values)
        return added.double().norm(dim=-1).view(self.batch, -1)

    def transport(self, root: Point) -> TokenWeights:
        """How strongly tokens of mixers read this input, by way of the stem where there is one."""
        if self.stem is None:
            return TokenWeights(root, self.leaf, self.batch, values=self.values)
        return WeightsThroughStem(
            root, self.leaf, self.batch, values=self.values, between=self.stem
        )

    def shaped(self, entries: Tensor) -> Tensor:
        """``entries (B, S, F)`` in the shape of the input."""
        return self.leaf.unflat(entries.flatten(0, 1)).contiguous()


def stem_of(roots: Sequence[Point], leaf: Point, batch: int) -> Point | None:
    """The first tokens that all ways from ``roots`` to ``leaf`` pass, wide and finer than those."""
    for edge in meetings(roots, [leaf]):
        point = Point.at(edge, None)
        if len(point.shape) < 3 or point.shape[0] != batch or point.dtype != leaf.dtype:
            continue
        wide = [axis for axis in range(1, len(point.shape)) if point.shape[axis] >= WIDE]
        if not wide:
            continue
        channels = _channels(point, leaf)
        if channels in wide:
            point = replace(point, channels=channels)
            if point.tokens > max(root.tokens for root in roots):
                return point
    return None


def _channels(point: Point, leaf: Point) -> int | None:
    # The axis of which a single channel reads more of the leaf than any place; None for none.
    noise, seen = point.unflat(point.noise()), {}
    for axis, size in enumerate(point.shape[1:], 1):
        seed = torch.zeros_like(noise)
        seed.select(axis, size // 2).copy_(noise.select(axis, size // 2))
        (gradient,) = gradients([point], [point.flat(seed)], [leaf])
        seen[axis] = 0 if gradient is None else int(gradient.count_nonzero())
    most = max(seen.values())
    best = [axis for axis, count in seen.items() if count == most]
    return best[0] if len(best) == 1 else None


def feature_axis(root: Point, leaf: Point, batch: int) -> int | None:
    """The axis of ``leaf`` that holds features: one token is made of all that any is made of.

    Where that holds for several axes, the last of a sequence and the second of an image. None for
    ``(B, L)``, and where tokens are made of parts of every axis, as the patches of a spectrogram
    ``(B, T, F)`` or of each variable of a series: each entry is then a place of its own.
    """
    axes = range(1, len(leaf.shape))
    if len(axes) < 2:
        return None
    usual = 1 if len(axes) > 2 else 2
    T = root.tokens // batch
    seed = root.noise()

    def read_by(tokens: int | slice) -> Tensor | None:
        here = torch.zeros(root.tokens, 1, dtype=seed.dtype, device=seed.device)
        here[tokens] = 1
        (gradient,) = gradients([root], [seed * here], [leaf])
        read = None if gradient is None else leaf.unflat(gradient)[0] != 0
        return None if read is None or not bool(read.any()) else read

    def along(axis: int, read: Tensor) -> int:
        return int(read.any(tuple(a - 1 for a in axes if a != axis)).sum())

    every = read_by(slice(T))
    if every is None:
        return usual
    # One from the middle, except those that are learned.
    single = next(read for t in range(T) if (read := read_by((T // 2 + t) % T)) is not None)
    whole = [axis for axis in axes if along(axis, single) == along(axis, every)]
    return usual if usual in whole else next(iter(whole), None)


def shares(ways: Sequence[TokenWeights]) -> list[Tensor]:
    """The parts ``(B, T)`` in which tokens are read by these ways, by the norms of their rows."""
    return portions([way.row_norms(_PASSES).view(way.batch, -1) for way in ways])


def portions(sizes: Sequence[Tensor]) -> list[Tensor]:
    """The parts ``(B, T)`` in which tokens are made of several, by the size that each adds."""
    total = torch.stack(list(sizes)).sum(0)
    even = 1 / len(sizes)
    return [torch.where(total > 0, size / total.clamp(min=1e-300), even) for size in sizes]
