"""How strongly tokens read earlier ones, where no token is simply the one in its place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm._graph import Point


@dataclass(frozen=True, eq=False)
class Transport:
    r"""How strongly each token of ``root`` reads each token of ``leaf``: T, ``(T_root, T_leaf)``.

    :math:`T_{ts} \propto \|J_{ts}\|_F^2`, the squared Frobenius norm of the block of the Jacobian,
    rows adding up to one (zero where nothing is read). It is this library's choice for what no
    mixer's map describes, such as the merging of patches. The norms are estimated from random
    vectors; zeros are exact. Examples of a batch get the same vectors, and do not read one another.

    Args:
        root (Point): the reading tokens.
        leaf (Point): the tokens that are read.
        batch (int): B, the examples that both hold.
        around (tuple of GradientEdge, optional): the way through these is left out. Default: ()
    """

    root: Point
    leaf: Point
    batch: int
    around: tuple[GradientEdge, ...] = ()

    def rmatvec(self, w: Tensor, probes: int | None = None) -> Tensor:
        r"""w^T T for ``w (B, T)``: ``(B, S)``, without T, in ``probes`` backward passes.

        With independent r_t, the squared gradient of :math:`\sum_t \sqrt{w_t} r_t x_t` has the
        expectation :math:`\sum_t w_t \|J_{ts}\|^2`.
        """
        # A norm is estimated from as many squares as there are channels.
        probes = min(24, max(12, 512 // self.leaf.width)) if probes is None else probes
        parts = [(sign, part) for sign in (1, -1) if bool((part := (sign * w).clamp(min=0)).any())]
        with torch.enable_grad():
            found = [sign * self._carried(part, probes // len(parts)) for sign, part in parts]
        total = w.new_zeros(self.batch, self.leaf.tokens // self.batch, dtype=torch.float64)
        return reduce(torch.add, found, total).to(w)

    def matvec(self, values: Tensor, probes: int = 8) -> Tensor:
        """T values for ``values (B, S, k)`` in [0, 1]: ``(B, T, k)``, from passes forward."""
        generator = torch.Generator().manual_seed(1)
        parts = [torch.ones_like(values[..., 0]), *values.unbind(-1)]
        scales = [
            part.flatten()[:, None].sqrt().to(self.leaf.device, self.leaf.dtype) for part in parts
        ]
        totals = torch.zeros(len(parts), self.root.tokens, dtype=torch.float64)
        for _ in range(probes):
            r = self._noise(self.leaf, generator)
            found = pushed(self, *[self.leaf.unflat(r * scale) for scale in scales])
            totals += torch.stack([one.double().square().sum(-1) for one in found]).to(totals)
        means = (totals[1:] / totals[0].clamp(min=1e-300)).T
        return means.unflatten(0, (self.batch, -1)).to(values)

    def matrix(self, probes: int | None = None) -> Tensor:
        """T, ``(B, T, S)``, in ``probes`` passes for each token of one example."""
        T, S, chunk = self.root.tokens // self.batch, self.leaf.tokens // self.batch, 32
        probes = min(64, max(8, 512 // self.leaf.width)) if probes is None else probes
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros(self.batch, T, S, dtype=torch.float64, device=self.leaf.device)
        for _ in range(probes):
            r = self._noise(self.root, generator).unflatten(0, (self.batch, T))
            for first in range(0, T, chunk):
                at = torch.arange(first, min(T, first + chunk), device=self.root.device)
                seeds = r.new_zeros(len(at), *r.shape)
                seeds[torch.arange(len(at)), :, at] = r[:, at].transpose(0, 1)
                found = self._norms(seeds.flatten(1, 2))  # (n, B S)
                total[:, at] += found.unflatten(1, (self.batch, S)).transpose(0, 1)
        return total / total.sum(-1, keepdim=True).clamp(min=1e-300)

    def _noise(self, point: Point, generator: torch.Generator) -> Tensor:
        r = torch.randn(point.tokens // self.batch, point.width, generator=generator)
        return r.repeat(self.batch, 1).to(point.device, point.dtype)

    @cached_property
    def sizes(self) -> Tensor:
        """The squared norms of J's rows, ``(B T,)``, from a few passes forward."""
        generator = torch.Generator().manual_seed(1)
        probes = min(8, max(3, 1024 // self.root.width))
        noise = [self.leaf.unflat(self._noise(self.leaf, generator)) for _ in range(probes)]
        found = pushed(self, *noise)
        return torch.stack([one.double().square().sum(-1) for one in found]).mean(0)

    def _carried(self, w: Tensor, probes: int) -> Tensor:
        generator, sizes = torch.Generator().manual_seed(0), self.sizes
        weights = w.flatten().double().to(sizes) / sizes.clamp(min=1e-300)
        scale = torch.where(sizes > 0, weights, 0).sqrt().to(self.root.dtype)[:, None]
        total = torch.zeros(self.leaf.tokens, dtype=torch.float64, device=self.leaf.device)
        for _ in range(probes):
            seed = self._noise(self.root, generator) * scale
            found = pulled(self, self.root.unflat(seed))
            if found is not None:
                total += self.leaf.flat(found).double().square().sum(-1) / probes
        total = total.view(self.batch, -1)
        # The sums are known: each token hands on all of its weight.
        given = torch.where(sizes.view(self.batch, -1) > 0, w.double().to(total.device), 0).sum(1)
        return total * (given / total.sum(1).clamp(min=1e-300))[:, None]

    def _norms(self, seeds: Tensor) -> Tensor:
        # The squared norm at each token of the leaf, (n, T_leaf), for each of n seeds.
        batch = torch.stack([self.root.unflat(seed) for seed in seeds])
        try:
            found = pulled(self, batch, is_grads_batched=True)
        except RuntimeError:  # a node of the graph that cannot be batched
            rows = [pulled(self, one) for one in batch]
            found = (
                None if rows[0] is None else torch.stack([row for row in rows if row is not None])
            )
        if found is None:
            return seeds.new_zeros(len(seeds), self.leaf.tokens, dtype=torch.float64)
        return torch.stack([self.leaf.flat(one).double().square().sum(-1) for one in found])


def pulled(way: Transport, seed: Tensor, **options: Any) -> Tensor | None:
    """The gradient at the leaf, in its shape, of a seed in the shape of the root.

    None if there is none. ``options`` are those of :func:`torch.autograd.grad`.
    """
    options = {"retain_graph": True, "allow_unused": True, **options}
    ends = [way.leaf.edge, *way.around]
    total, *at_joints = torch.autograd.grad(way.root.edge, ends, seed, **options)
    for edge, gradient in zip(way.around, at_joints, strict=True):
        if gradient is not None and total is not None:
            (through,) = torch.autograd.grad(edge, way.leaf.edge, gradient, **options)
            total = total if through is None else total - through
    return total


def pushed(way: Transport, *directions: Tensor) -> list[Tensor]:
    """The derivatives of the root along ``directions`` of the leaf's shape, ``(T, E)`` each."""
    root = way.root
    with torch.enable_grad():
        dual = torch.zeros(root.shape, dtype=root.dtype, device=root.device, requires_grad=True)
        back = pulled(way, dual, create_graph=True)
        if back is None:
            return [root.flat(torch.zeros_like(dual)) for _ in directions]
        return [
            root.flat(torch.autograd.grad(back, dual, one, retain_graph=True)[0])
            for one in directions
        ]


def orthogonal(point: Point, count: int, generator: torch.Generator) -> list[Tensor]:
    """Seeds ``(T, E)`` for the squared norms of a point's Jacobian: exact where ``count`` is E.

    Token t of seed k holds a row of a random orthogonal matrix, with a sign of its own, such that
    the squares of what they pull back add up to the squared norm. Tokens that read the same are
    told apart by their signs, in expectation.
    """
    E = point.width
    basis = torch.linalg.qr(torch.randn(E, E, generator=generator, dtype=torch.float64))[0]
    seeds = []
    for k in range(count):
        row = basis[k] * max(1.0, E / count) ** 0.5 if k < E else torch.zeros(E)
        signs = torch.randint(0, 2, (point.tokens, 1), generator=generator) * 2 - 1
        seeds.append((signs * row).to(point.device, point.dtype))
    return seeds
