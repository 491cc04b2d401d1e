"""How strongly tokens read earlier ones, where no token is simply the one at its position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.fast_products import WithoutZeroKernels
from captum_ssm.graph.points import Point, closed
from captum_ssm.graph.readers import decoded, readers
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.lazy import cached_property

# Channels of tokens whose squared norms few passes tell.
WIDE = 64


@dataclass(frozen=True, eq=False)
class TokenWeights:
    r"""How strongly each token of ``root`` reads each token of ``leaf``: T, ``(T_root, T_leaf)``.

    :math:`T_{ts} \propto \|J_{ts}\|_F^2`, the squared Frobenius norm of the block of the Jacobian,
    rows adding up to one (zero where nothing is read). It is this library's choice for what no
    mixer's map describes, such as the merging of patches. The norms are estimated from random
    vectors; zeros are exact. Examples of a batch get the same vectors, and do not read one another.

    Args:
        root (Point): the reading tokens.
        leaf (Point): the tokens that are read.
        batch (int): B, the examples that both hold.
        around (tuple of GradientEdge, optional): the ways through these do not count. Default: ()
        kept (Tensor, optional): ``(T_leaf,)`` bool, which of the leaf's tokens count. Default: None
        values (Tensor, optional): of the leaf. J is then that of factors of them, J diag(x), norms
            and gates frozen: the size of what each token adds, rather than of its weights. What
            adds nothing is told apart by its weights. Default: None
    """

    root: Point
    leaf: Point
    batch: int
    around: tuple[GradientEdge, ...] = ()
    kept: Tensor | None = None
    values: Tensor | None = None

    @cached_property
    def factors(self) -> Tensor | None:
        """What columns of J are scaled by, in the leaf's shape; None for nothing."""
        if self.values is None:
            return None
        size = self.values.detach().abs().to(self.leaf.device, self.leaf.dtype)
        most = size.flatten(1).amax(1).view(-1, *[1] * (size.dim() - 1))  # of each example
        return torch.where(most > 0, torch.maximum(size, 1e-6 * most), 1)

    def rmatvec(self, w: Tensor, probes: int | None = None) -> Tensor:
        r"""w^T T for ``w (B, T)``: ``(B, S)``, without T, in ``probes`` backward passes.

        With independent r_t, the squared gradient of :math:`\sum_t \sqrt{w_t} r_t x_t` has the
        expectation :math:`\sum_t w_t \|J_{ts}\|^2`. Each example's weights of one
        sign get their share of the passes.
        """
        # A norm is estimated from as many squares as there are channels.
        probes = min(24, max(4, 512 // self.leaf.width)) if probes is None else probes
        parts = [(sign, part) for sign in (1, -1) if bool((part := (sign * w).clamp(min=0)).any())]
        size = w.abs().sum(1).clamp(min=torch.finfo(w.dtype).tiny)
        carried = [
            sign * self._carried(part, (part.sum(1) / size * probes).ceil()) for sign, part in parts
        ]
        total = w.new_zeros(self.batch, self.leaf.tokens // self.batch, dtype=torch.float64)
        return reduce(torch.add, carried, total).to(w)

    def matvec(self, values: Tensor, probes: int) -> Tensor:
        """T values for ``values (B, S, k)`` in [0, 1]: ``(B, T, k)``, from passes forward."""
        ones = torch.ones_like(values[..., 0])
        columns = values.unbind(-1)
        moved = [k for k, column in enumerate(columns) if not torch.equal(column, ones)]
        scales = [
            part.flatten()[:, None].sqrt().to(self.leaf.device, self.leaf.dtype)
            for part in (ones, *(columns[k] for k in moved))
        ]
        totals = torch.zeros(len(scales), self.root.tokens, dtype=torch.float64)
        for seed in orthogonal(self.leaf, self.batch, probes, seed=1):
            derivatives = pushed(self, *[self.leaf.unflat(seed * scale) for scale in scales])
            totals += torch.stack(
                [derivative.double().square().sum(-1) for derivative in derivatives]
            ).to(totals)
        means = (totals[:1] > 0).double().repeat(len(columns), 1)  # of ones
        means[moved] = totals[1:] / totals[0].clamp(min=1e-300)
        return means.T.unflatten(0, (self.batch, -1)).to(values)

    def matrix(self, probes: int | None = None) -> Tensor:
        """T, ``(B, T, S)``, in ``probes`` passes for each token of one example."""
        T, S, chunk = self.root.tokens // self.batch, self.leaf.tokens // self.batch, 32
        probes = min(64, max(8, 512 // self.leaf.width)) if probes is None else probes
        total = torch.zeros(self.batch, T, S, dtype=torch.float64, device=self.leaf.device)
        for seed in orthogonal(self.root, self.batch, probes):
            r = seed.unflatten(0, (self.batch, T))
            for first in range(0, T, chunk):
                at = torch.arange(first, min(T, first + chunk), device=self.root.device)
                seeds = r.new_zeros(len(at), *r.shape)
                seeds[torch.arange(len(at)), :, at] = r[:, at].transpose(0, 1)
                norms = self._norms(seeds.flatten(1, 2))  # (n, B S)
                total[:, at] += norms.unflatten(1, (self.batch, S)).transpose(0, 1)
        return total / total.sum(-1, keepdim=True).clamp(min=1e-300)

    def added(self, values: Tensor) -> Tensor:
        """What values of the leaf add to the tokens of the root, ``(B T, E)``: J x.

        What is data-dependent in between, such as a norm's denominator, is a constant: a norm alone
        would hide what points along the token itself.
        """
        with ruled([self.root.edge.node], [self.leaf.edge.node]):
            (added,) = pushed(replace(self, values=None), values)
        return added

    def energy(self, seeds: Iterable[Tensor]) -> Tensor:
        """The squared gradients at the leaf's tokens, ``(T_leaf,)``, of all ``seeds (T, E)``."""
        total = torch.zeros(self.leaf.tokens, dtype=torch.float64, device=self.leaf.device)
        with pulling(self) as pull:
            for seed in seeds:
                gradient = pull(self.root.unflat(seed))
                if gradient is not None:
                    total += self.leaf.flat(gradient).double().square().sum(-1)
        return total

    @cached_property
    def sizes(self) -> Tensor:
        """The squared norms of J's rows, ``(B T,)``, from a few passes forward."""
        # A product with a block of many rows and columns has nearly its norm.
        least = 1 if self.leaf.width >= WIDE else 2
        return self.row_norms(min(16, max(least, 256 // self.root.width)))

    def row_norms(self, probes: int) -> Tensor:
        """The squared norms of J's rows, ``(B T,)``, from as many passes forward at most.

        Exact for a token that reads one other, of no more channels than passes.
        """
        E = self.leaf.width
        count = probes if probes < E else probes // E * E
        seeds = orthogonal(self.leaf, self.batch, count, seed=1)
        derivatives = pushed(self, *[self.leaf.unflat(seed) for seed in seeds])
        return torch.stack(
            [derivative.double().square().sum(-1) for derivative in derivatives]
        ).sum(0)

    def _carried(self, w: Tensor, probes: Tensor) -> Tensor:
        # Weights that are not negative, with so many passes (B,) of each example.
        sizes, most = self.sizes, int(probes.amax())
        weights = (w.double() * (most / probes.clamp(min=1)[:, None])).flatten().to(sizes)
        scale = torch.where(sizes > 0, weights / sizes.clamp(min=1e-300), 0).sqrt()
        scale = scale.to(self.root.dtype).view(self.batch, -1)
        probes = probes.to(scale.device)
        seeds = enumerate(orthogonal(self.root, self.batch, most))
        weighted = (seed * (scale * (probes > k)[:, None]).view(-1, 1) for k, seed in seeds)
        total = self.energy(weighted).view(self.batch, -1)
        # The sums are known: each token hands on all of its weight.
        handed = torch.where(sizes.view(self.batch, -1) > 0, w.double().to(total.device), 0).sum(1)
        return total * (handed / total.sum(1).clamp(min=1e-300))[:, None]

    def _norms(self, seeds: Tensor) -> Tensor:
        # The squared norm at each token of the leaf, (n, T_leaf), for each of n seeds.
        batch = torch.stack([self.root.unflat(seed) for seed in seeds])
        with pulling(self) as pull:
            try:
                gradients = pull(batch, is_grads_batched=True)
            except RuntimeError:  # a node of the graph that cannot be batched
                rows = [row for shaped in batch if (row := pull(shaped)) is not None]
                gradients = torch.stack(rows) if rows else None
        if gradients is None:
            return seeds.new_zeros(len(seeds), self.leaf.tokens, dtype=torch.float64)
        return torch.stack(
            [self.leaf.flat(gradient).double().square().sum(-1) for gradient in gradients]
        )


@dataclass(frozen=True, eq=False)
class PatchWeights(TokenWeights):
    """A transport in which each token of the leaf is read by one of the root at most.

    It is measured once, in as many passes as there are channels (64 at most), and each token hands
    on all of its weight.

    Args:
        owner (Tensor): ``(T_leaf,)``, the reading token, -1 for none.
    """

    owner: Tensor = field(kw_only=True)

    @cached_property
    def shares(self) -> Tensor:
        """The entry of T of each token of the leaf, ``(T_leaf,)``."""
        energy = self.energy(orthogonal(self.root, self.batch, min(64, self.root.width)))
        return energy / self._summed(energy).clamp(min=1e-300)[self.owner.clamp(min=0)]

    def rmatvec(self, w: Tensor, probes: int | None = None) -> Tensor:
        """w^T T for ``w (B, T)``: ``(B, S)``."""
        weights = w.flatten()[self.owner.clamp(min=0).to(w.device)] * self.shares.to(w)
        return weights.view(self.batch, -1)

    def matvec(self, values: Tensor, probes: int) -> Tensor:
        """T values for ``values (B, S, k)``: ``(B, T, k)``."""
        shares = self.shares.to(values)[:, None]
        return self._summed(shares * values.flatten(0, 1)).unflatten(0, (self.batch, -1))

    def matrix(self, probes: int | None = None) -> Tensor:
        """T, ``(B, T, S)``."""
        T, S = self.root.tokens // self.batch, self.leaf.tokens // self.batch
        matrix = self.shares.new_zeros(self.batch, T, S)
        kept = (self.owner >= 0).nonzero()[:, 0]
        matrix[kept // S, self.owner[kept] % T, kept % S] = self.shares[kept]
        return matrix

    def _summed(self, values: Tensor) -> Tensor:
        # Over the tokens of the leaf that one of the root reads: (T_root, ...).
        kept = (self.owner >= 0).nonzero()[:, 0].to(values.device)
        out = values.new_zeros(self.root.tokens, *values.shape[1:])
        return out.index_add_(0, self.owner.to(values.device)[kept], values[kept])


@dataclass(frozen=True, eq=False)
class WeightsThroughStem(TokenWeights):
    r"""A transport by way of other tokens that all ways from the root to the leaf pass.

    T is then the product of the two, :math:`T_{tm} T_{ms}`. Tokens of many channels take few
    passes, and those that a leaf of few channels takes are short.
    """

    between: Point = field(kw_only=True)

    @cached_property
    def steps(self) -> tuple[TokenWeights, TokenWeights]:
        """From the root to the tokens between, and from there to the leaf."""
        first = TokenWeights(self.between, self.leaf, self.batch, values=self.values)
        values = None if self.values is None else self.between.unflat(first.added(self.values))
        return TokenWeights(self.root, self.between, self.batch, values=values), first

    def rmatvec(self, w: Tensor, probes: int | None = None) -> Tensor:
        """w^T T for ``w (B, T)``: ``(B, S)``, in ``probes`` backward passes on each part."""
        last, first = self.steps
        # At the same cost, fewer of the long passes and more of the short ones err less.
        return first.rmatvec(last.rmatvec(w, probes or 4), probes or 28)

    def matvec(self, values: Tensor, probes: int) -> Tensor:
        """T values for ``values (B, S, k)`` in [0, 1]: ``(B, T, k)``, from passes forward."""
        last, first = self.steps
        return last.matvec(first.matvec(values, probes), probes)

    def matrix(self, probes: int | None = None) -> Tensor:
        """T, ``(B, T, S)``, in ``probes`` passes for each token of one example."""
        last, first = self.steps
        return last.matrix(probes) @ first.matrix(probes)


@contextmanager
def pulling(way: TokenWeights) -> Iterator[Callable[..., Tensor | None]]:
    """Gives a function of a seed in the shape of the root: the gradient at the leaf, in its shape.

    It returns None where there is no gradient, and takes the options of
    :func:`torch.autograd.grad`. What is set up on the graph serves all seeds.
    """
    factors = way.factors

    def pull(seed: Tensor, **options: Any) -> Tensor | None:
        options = {"retain_graph": True, "allow_unused": True, **options}
        (gradient,) = torch.autograd.grad(way.root.edge, way.leaf.edge, seed, **options)
        if gradient is None:
            return None
        for some in (factors, kept):
            gradient = gradient if some is None else gradient * some
        return gradient

    kept = None
    if way.kept is not None:
        kept = way.leaf.unflat(way.kept[:, None].expand(-1, way.leaf.width).to(way.leaf.device))
    with torch.enable_grad(), ExitStack() as stack:
        if factors is not None:
            stack.enter_context(ruled([way.root.edge.node], [way.leaf.edge.node]))
        stack.enter_context(closed(way.around))
        yield pull


class NoSecondDerivativeError(UnsupportedModelError):
    """A function between mixers has no second derivative, as fused attention."""


def pushed(way: TokenWeights, *directions: Tensor) -> list[Tensor]:
    """The derivatives of the root along ``directions`` of the leaf's shape, ``(T, E)`` each."""
    root = way.root
    with torch.enable_grad():
        dual = torch.zeros(root.shape, dtype=root.dtype, device=root.device, requires_grad=True)
        with pulling(way) as pull:
            back = pull(dual, create_graph=True)
        if back is None:
            return [root.flat(torch.zeros_like(dual)) for _ in directions]
        try:
            with WithoutZeroKernels():
                return [
                    root.flat(torch.autograd.grad(back, dual, direction, retain_graph=True)[0])
                    for direction in directions
                ]
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise NoSecondDerivativeError(
                f"a function outside of the mixers cannot be differentiated twice ({error}), so it "
                "is not known how strongly tokens read one another there; expected functions with "
                "second derivatives, as torch.clamp(x / 6 + 0.5, 0, 1) for a hard sigmoid. Or use "
                "MambaLRP, which needs first derivatives only."
            ) from error


@dataclass(frozen=True)
class Pairs:
    """Which tokens of a root read which tokens of a leaf, where these are told apart.

    Args:
        root (Tensor): ``(n,)`` int64, the tokens that read.
        leaf (Tensor): ``(n,)`` int64, the one that each of them reads.
        reader (Tensor, optional): ``(T_leaf,)``, the one that reads each token of the leaf, -1 for
            none; None where several do. Default: None
    """

    root: Tensor
    leaf: Tensor
    reader: Tensor | None = None

    @classmethod
    def of_reader(cls, reader: Tensor) -> Pairs:
        """The pairs in which each token of the leaf has one reader, -1 for none, at most."""
        reader = reader.cpu()
        leaf = (reader >= 0).nonzero()[:, 0]
        return cls(reader[leaf], leaf, reader)

    @classmethod
    def of_source(cls, source: Tensor) -> Pairs:
        """The pairs in which each token of the root reads one, -1 for none, at most."""
        root = (source >= 0).nonzero()[:, 0]
        return cls(root, source[root])

    def source(self, tokens: int) -> Tensor | None:
        """The one token that each of so many reads, ``(T,)``, -1 for none; None for several."""
        if len(self.root.unique()) < len(self.root):
            return None
        source = torch.full((tokens,), -1)
        source[self.root] = self.leaf
        return source


def pairs(way: TokenWeights, *, repeated: bool = True) -> Pairs | None:
    """Which tokens read which by a way; None where tokens are mixed.

    Each token of the leaf is read by one at most, or, where they are ``repeated``, each of the root
    reads one at most. Two passes back, and then two passes forward, decoded alike.
    """
    root, leaf = way.root, way.leaf
    with pulling(way):
        reader = readers(root, leaf)
    if reader is not None:
        return Pairs.of_reader(reader if way.kept is None else torch.where(way.kept, reader, -1))
    if not repeated:
        return None
    r = leaf.noise()
    codes = 1 + torch.arange(leaf.tokens, device=leaf.device)[:, None] / leaf.tokens
    first, second = pushed(way, leaf.unflat(r), leaf.unflat(r * codes.to(r)))
    source, is_clear = decoded(first, second, leaf.tokens)
    return Pairs.of_source(source.cpu()) if source is not None and is_clear else None


def orthogonal(point: Point, batch: int, count: int, *, seed: int = 0) -> Iterator[Tensor]:
    """So many seeds ``(T, E)`` for the squared norms of a point's Jacobian.

    Token t of a seed holds a row of a random orthogonal matrix, with a sign of its own, such that
    the squares of what they pull back add up to the squared norm: exactly for a multiple of E
    seeds, in expectation for others, and with less variance than normal numbers. Tokens that read
    the same are told apart by their signs, in expectation. Examples of a batch get the same seeds.
    """
    generator, E = torch.Generator().manual_seed(seed), point.width
    rows: list[Tensor] = []
    for _ in range(count):
        # One by one: fewer seeds are the first of more.
        row = torch.randn(E, generator=generator, dtype=torch.float64)
        rows = rows if len(rows) < E else []
        for known in rows:
            row -= known * (known @ row)
        rows.append(row / row.norm())
        signs = torch.randint(0, 2, (point.tokens // batch, 1), generator=generator) * 2 - 1
        example = signs * rows[-1] * (E / count) ** 0.5
        yield example.repeat(batch, 1).to(point.device, point.dtype)
