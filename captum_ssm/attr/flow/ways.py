"""What reaches the input of a block by no edge: biases, shifts between tokens, tensors beside.

The edges of a block's mixers, what stays, and what the gates take is relevance that is to be found
at what the block was given. One backward pass from all of these at once reads how much of it is.
What is missing was given by biases of norms and MLPs. Where tokens are mixed outside of the scans,
as by a token shift, or by the short convolution before ``"hidden"`` edges, one pass each propagates
tokens that lie far enough apart, and a pass with a random sign for each token says if they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from captum_ssm.attr.flow.activations import Activations, BlockStream, PropagatedRun
from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.attr.flow.stream import BlockNodes, Ways, shared_tensors
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.relevance_rules import ruled

# A block's tokens are out of balance where they miss so much of its largest relevance, or so many
# roundings of its numbers.
_BALANCED, _ROUNDINGS = 1e-5, 4
# How far before and after a token those lie that it is mixed with outside of the scans: by a token
# shift, by a convolution of four tokens, by one around the token, and by wider ones.
_REACHES = ((1, 0), (3, 0), (3, 3), (7, 7))


def with_ways(
    blocks: Sequence[BlockNodes],
    run: PropagatedRun,
    coefficients: Sequence[Activations],
    layers: Sequence[LayerEdges],
    orders: Sequence[Tensor | None],
) -> list[BlockNodes]:
    """Blocks with what reaches their inputs by no edge, where their books do not balance.

    Args:
        blocks (sequence of BlockNodes): by block of the run.
        run (PropagatedRun): with its graph.
        coefficients (sequence of Activations): by mixer, of the score.
        layers (sequence of LayerEdges): by mixer.
        orders (sequence of Tensor): by mixer, ``(L,)``, the token that each of its tokens is; None
            where it works on them in the model's order.
    """
    shared = shared_tensors(run.streams)
    found = []
    for block in blocks:
        inside = [_Mixer(run.kept[k], coefficients[k], layers[k], orders[k]) for k in block.mixers]
        one = _Block(block, run.streams[block.index], inside, run)
        found.append(replace(block, ways=one.ways(run.streams, shared)) if one.is_off else block)
    return found


@dataclass(frozen=True)
class _Mixer:
    # A mixer of a block, what was kept of it, and the edges in the model's order of the tokens.
    kept: Activations
    coefficients: Activations
    edges: LayerEdges
    order: Tensor | None

    def starts(self) -> list[tuple[Tensor, Tensor, Tensor | None]] | None:
        """Where its edges start: tensors with their coefficients and their tokens' order."""
        is_hidden = self.edges.formulation == "hidden"
        has_inputs = all(x.requires_grad for x in self.kept.inputs)
        if not (is_hidden or has_inputs or self.kept.mixer.conv is None):
            return None  # behind a convolution, which is not in the graph
        name = "inputs" if has_inputs and not is_hidden else "values"
        tensors, coefficients = getattr(self.kept, name), getattr(self.coefficients, name)
        scans = self.kept.mixer.scans_in_order()
        found = {
            id(x): (x, g, _composed(self.order, order))  # scans may share one tensor
            for x, g, (_, order, _) in zip(tensors, coefficients, scans, strict=True)
            if x.requires_grad
        }
        return list(found.values())


@dataclass(frozen=True)
class _Block:
    # A block of the run, and what its books are kept from.
    nodes: BlockNodes
    stream: BlockStream
    mixers: Sequence[_Mixer]
    run: PropagatedRun

    @cached_property
    def sunk(self) -> Tensor:
        """What is to be found at what the block was given and its mixers returned, ``(B, L)``."""
        return self.nodes.after + sum(one.edges.drawn + one.edges.gate for one in self.mixers)

    @cached_property
    def tolerance(self) -> float:
        """The relevance at a token that rounding explains."""
        outs = [one.edges.out for one in self.mixers]
        sizes = [x.abs().amax() for x in (self.nodes.before, self.nodes.after, self.sunk, *outs)]
        eps = max(torch.finfo(x.dtype).eps for x in (*self.stream.before, *self.stream.after))
        return max(_BALANCED, _ROUNDINGS * eps) * float(max(sizes))

    @property
    def is_off(self) -> bool:
        """Whether relevance is missing from the books."""
        out = sum(one.edges.out for one in self.mixers)
        return bool((self.nodes.before - self.sunk + out).abs().amax() > self.tolerance)

    def ways(self, streams: Sequence[BlockStream], shared: set[int]) -> Ways | None:
        """What balances them; None where tokens are mixed in a way that was not found."""
        given = [x for x, _ in self.run.with_coefficients(self.stream.before)]
        starts = [one.starts() for one in self.mixers]
        if any(one is None for one in starts):
            return None
        pull = _Pull.of(self, given, [start for one in starts for start in one or []])
        L, device = self.sunk.shape[1], self.sunk.device
        # Without a draw from the user's generator.
        random = torch.randint(2, (L,), generator=torch.Generator().manual_seed(L))
        signs = (2.0 * random - 1).to(device)
        with torch.enable_grad(), pull.ruled():
            whole, mixed = pull.of_tokens(torch.ones(L, device=device)), pull.of_tokens(signs)
            is_apart = (mixed.sum(0) - signs * whole.sum(0)).abs().amax() <= self.tolerance
            moved = {0: whole.sum(0)} if bool(is_apart) else self._moved(pull, signs, mixed.sum(0))
        if moved is None:
            return None
        beside = [k for k, x in enumerate(given) if id(x) in shared]
        constant = self.sunk - sum(moved.values())
        del moved[0]
        return Ways(
            constant,
            moved,
            whole[beside].sum(0),
            _made_of([given[k] for k in beside], streams),
        )

    def _moved(self, pull: _Pull, signs: Tensor, mixed: Tensor) -> dict[int, Tensor] | None:
        # By offset, what each token's sinks find at the token so far before it, (B, L).
        t = torch.arange(len(signs), device=signs.device)
        for back, ahead in _REACHES:
            count = back + ahead + 1
            offsets = range(-ahead, back + 1)
            moved = {o: torch.zeros_like(mixed) for o in offsets}
            for color in range(count):
                found = pull.of_tokens((t % count == color).float()).sum(0)
                for o in offsets:
                    moved[o] += torch.where(t % count == color, earlier(found, o), 0)
            told = sum(earlier(signs * part, -o) for o, part in moved.items())
            if bool((told - mixed).abs().amax() <= self.tolerance):
                return moved
        return None


@dataclass(frozen=True)
class _Pull:
    # A backward pass through a block, from all sinks of its books to what it was given. It ends at
    # what mixers returned, and goes on from there with that mixer's own coefficients, by no scan.
    roots: list[tuple[Tensor, Tensor, Tensor | None]]
    outs: list[tuple[Tensor, Tensor, Tensor | None]]
    scans: list[Tensor]
    given: list[Tensor]

    @classmethod
    def of(
        cls,
        block: _Block,
        given: list[Tensor],
        starts: list[tuple[Tensor, Tensor, Tensor | None]],
    ) -> _Pull:
        after = [(x, g, None) for x, g in block.run.with_coefficients(block.stream.after)]
        outs = [
            (one.kept.output, g, one.order)
            for one in block.mixers
            if (g := block.run.coefficient_at(one.kept.output)) is not None
        ]
        scans = [y for one in block.mixers for y in one.kept.mixed if y.requires_grad]
        return cls([*after, *starts], outs, scans, given)

    @contextmanager
    def ruled(self) -> Iterator[None]:
        """Gradients obey the rules of relevance while the block is open."""
        roots = [x.grad_fn for x, _, _ in (*self.roots, *self.outs) if x.grad_fn is not None]
        with ruled(roots, [get_gradient_edge(x).node for x in self.given]):
            yield

    def of_tokens(self, weights: Tensor) -> Tensor:
        """What is found at each tensor given, and at last at all outputs: ``(N + 1, B, L)``.

        Args:
            weights (Tensor): ``(L,)``, of the tokens' sinks.
        """
        with ExitStack() as stack:
            for out, g, order in self.outs:
                stack.callback(_hooked(out, _weighted(g, weights, order)).remove)
            for y in self.scans:
                stack.callback(_hooked(y, torch.zeros_like(y)).remove)
            roots = [*self.roots, *((x, torch.zeros_like(x), None) for x, _, _ in self.outs)]
            ends = [*self.given, *(x for x, _, _ in self.outs)]
            found = torch.autograd.grad(
                [x for x, _, _ in roots],
                ends,
                [_weighted(g, weights, order) for _, g, order in roots],
                retain_graph=True,
                allow_unused=True,
            )
        orders = [None] * len(self.given) + [order for _, _, order in self.outs]
        totals = [
            _total(g, x, order, weights) for g, x, order in zip(found, ends, orders, strict=True)
        ]
        n = len(self.given)
        return torch.stack([*totals[:n], torch.stack(totals[n:]).sum(0)] if totals[n:] else totals)


def earlier(x: Tensor, offset: int) -> Tensor:
    """``(..., L)``: at token t what is at token t - offset, zero where there is none."""
    L = x.shape[-1]
    found = torch.zeros_like(x)
    if abs(offset) < L:
        to = slice(max(0, offset), L + min(0, offset))
        found[..., to] = x[..., max(0, -offset) : L - max(0, offset)]
    return found


def _hooked(x: Tensor, gradient: Tensor):
    # The gradient that goes on from a tensor is another one than what arrives there.
    edge = get_gradient_edge(x)

    def instead(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(gradient if n == edge.output_nr else g for n, g in enumerate(gradients))

    return edge.node.register_prehook(instead)


def _weighted(g: Tensor, weights: Tensor, order: Tensor | None) -> Tensor:
    w = weights if order is None else weights[order.to(weights.device)]
    rows = g.reshape(len(g), len(w), -1) * w.to(g.device, g.dtype)[:, None]
    return rows.reshape(g.shape)


def _total(g: Tensor | None, x: Tensor, order: Tensor | None, like: Tensor) -> Tensor:
    # The relevance of a tensor's tokens, (B, L), in the model's order.
    if g is None:
        return torch.zeros(len(x), len(like), device=like.device)
    rows = (g.float() * x.detach().float()).reshape(len(x), len(like), -1).sum(-1)
    rows = rows if order is None else rows[:, torch.argsort(order).to(rows.device)]
    return rows.to(like.device)


def _composed(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    return inner if outer is None else outer if inner is None else outer[inner.to(outer.device)]


def _made_of(tensors: Sequence[Tensor], streams: Sequence[BlockStream]) -> frozenset[int]:
    # The blocks whose own part of the stream such tensors were made of.
    found = set()
    for k, stream in enumerate(streams):
        leaves = [Point.of(x) for x in stream.before if x.requires_grad]
        if any(dependencies([Point.of(x) for x in tensors], leaves)):
            found.add(k)
    return frozenset(found)
