"""What reaches the input of a block by no edge: biases, shifts between tokens, shared tensors.

The edges of a block's mixers, what stays, and what the gates take is relevance that is to be found
at what the block was given. One backward pass from all of these at once reads how much of it is.
What is missing was given by biases of norms and MLPs. Where tokens are mixed outside of the scans,
as by a token shift, or by the short convolution before ``"hidden"`` edges, one pass each propagates
tokens that lie far enough apart, and a pass with a random sign for each token says if they did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from captum_ssm.attr.flow.activations import Activations, BlockStream, PropagatedRun
from captum_ssm.attr.flow.layer_edges import LayerEdges, order_of
from captum_ssm.attr.flow.stream import BlockNodes, Ways, shared_tensors, total_of
from captum_ssm.capture import FrozenCall
from captum_ssm.graph.points import Point, passing
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.mixers.linear_calls import random_signs
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.blocks import contextmanager

# A block's tokens are out of balance where they miss so much of its largest relevance, or so many
# roundings of its numbers.
_BALANCED, _ROUNDINGS = 1e-5, 4
# How far before and after a token those lie that it is mixed with outside of the scans: none, the
# one before by a token shift, those of a convolution of four tokens, of one around it, or a wider.
_DISTANCES = ((0, 0), (1, 0), (3, 0), (3, 3), (7, 7))


def with_ways(
    blocks: Sequence[BlockNodes],
    run: PropagatedRun,
    coefficients: Sequence[Activations],
    layers: Sequence[LayerEdges],
    calls: Sequence[FrozenCall],
) -> list[BlockNodes]:
    """Blocks with what reaches their inputs by no edge, where their books do not balance."""
    shared = shared_tensors(run.streams)
    nodes = []
    for block in blocks:
        inside = [_Mixer(run.inside[k], coefficients[k], layers[k], calls[k]) for k in block.mixers]
        books = _BlockOfStream(block, run.streams[block.index], inside, run)
        nodes.append(
            replace(block, ways=books.ways(run.streams, shared)) if books.is_off else block
        )
    return nodes


@dataclass(frozen=True)
class _Sink:
    # A tensor of tokens with its coefficients, and the model's token that each of its tokens is.
    x: Tensor
    g: Tensor | None
    order: Tensor | None

    def weighted(self, weights: Tensor) -> Tensor:
        """The coefficients times a weight for each token, ``(L,)``."""
        assert self.g is not None
        w = weights if self.order is None else weights[self.order.to(weights.device)]
        rows = self.g.reshape(len(self.g), len(w), -1) * w.to(self.g.device, self.g.dtype)[:, None]
        return rows.reshape(self.g.shape)

    def total(self, g: Tensor | None, like: Tensor) -> Tensor:
        """The relevance of each token, ``(B, L)``, with other coefficients."""
        x = self.x.reshape(len(self.x), len(like), -1)
        rows = total_of(None if g is None else g.reshape(x.shape), x, like.device)
        if rows is None:
            return torch.zeros(*x.shape[:2], device=like.device)
        return rows if self.order is None else rows[:, torch.argsort(self.order).to(rows.device)]


@dataclass(frozen=True)
class _Mixer:
    # A mixer of a block, what was kept of it, and the edges in the model's order of the tokens.
    activations: Activations
    coefficients: Activations
    edges: LayerEdges
    frozen: FrozenCall

    @property
    def order(self) -> Tensor | None:
        """The model's token that each of its tokens is."""
        return order_of(self.frozen, self.activations.mixer)

    def starts(self) -> list[_Sink] | None:
        """Where its edges start.

        None where the graph does not hold these: after the convolution of a mixer that was
        measured, or where a token shift gives more than its edges say.
        """
        is_hidden, mixer = self.edges.formulation == "hidden", self.activations.mixer
        has_inputs = all(x.requires_grad for x in self.activations.inputs)
        is_held = mixer.conv is None or (has_inputs and not mixer.has_token_shift)
        if not (is_hidden or is_held):
            return None
        name = "inputs" if has_inputs and not is_hidden else "values"
        tensors, coefficients = getattr(self.activations, name), getattr(self.coefficients, name)
        scans = mixer.scans_in_order()
        sinks = {
            id(x): _Sink(x, g, _composed(self.order, order))  # scans may share one tensor
            for x, g, (_, order, _) in zip(tensors, coefficients, scans, strict=True)
            if x.requires_grad
        }
        return list(sinks.values())


@dataclass(frozen=True)
class _BlockOfStream:
    # A block of the run, and what its books are kept from.
    nodes: BlockNodes
    stream: BlockStream
    mixers: Sequence[_Mixer]
    run: PropagatedRun

    @cached_property
    def sunk(self) -> Tensor:
        """What is to be found at what the block was given and its mixers returned, ``(B, L)``."""
        return self.nodes.after + sum(mixer.edges.drawn + mixer.edges.gate for mixer in self.mixers)

    @cached_property
    def tolerances(self) -> tuple[float, float]:
        """What surely is rounding of the relevance at a token, and what may be."""
        outs = [mixer.edges.out for mixer in self.mixers]
        sums = [x.abs().amax() for x in (self.nodes.before, self.nodes.after, self.sunk, *outs)]
        surely = _BALANCED * float(max(sums))
        tensors = self.run.with_coefficients([*self.stream.before, *self.stream.after])
        returned = [mixer.frozen.call.output for mixer in self.mixers]
        eps = max(torch.finfo(x.dtype).eps for x in (*returned, *(x for x, _ in tensors)))
        sizes = [float((g * x.detach()).abs().flatten(2).sum(-1).amax()) for x, g in tensors]
        return surely, max(surely, _ROUNDINGS * eps * max(sizes))

    @property
    def is_off(self) -> bool:
        """Whether relevance is missing from the books of a block of one row of tokens."""
        rows = [self.nodes.before, self.nodes.after, *(mixer.edges.out for mixer in self.mixers)]
        if len({row.shape for row in rows}) > 1:
            return False
        out = sum(mixer.edges.out for mixer in self.mixers)
        missing = self.nodes.before - self.sunk + out
        return bool(missing.abs().amax() > self.tolerances[0])

    def ways(self, streams: Sequence[BlockStream], shared: set[int]) -> Ways | None:
        """What balances them; None where tokens are mixed in a way that was not found."""
        inputs = [x for x, _ in self.run.with_coefficients(self.stream.before)]
        starts = [mixer.starts() for mixer in self.mixers]
        if any(sinks is None for sinks in starts):
            return None
        pull = _Pull.of(self, inputs, [start for sinks in starts for start in sinks or []])
        with torch.enable_grad(), pull.ruled():
            whole = pull.of_tokens(torch.ones_like(self.sunk[0]))
            moved = self._moved(pull, whole.sum(0))
        if moved is None:
            return None
        of_others = [k for k, x in enumerate(inputs) if id(x) in shared]
        constant = self.sunk - sum(moved.values())
        del moved[0]
        return Ways(
            constant,
            moved,
            whole[of_others].sum(0),
            _made_of([inputs[k] for k in of_others], streams, shared),
        )

    def _moved(self, pull: _Pull, whole: Tensor) -> dict[int, Tensor] | None:
        # By offset, what each token's sinks find at the token so far before it, (B, L); None where
        # no distance explains what they find with a random sign for each token.
        signs = random_signs(self.sunk[0])
        mixed = pull.of_tokens(signs).sum(0)
        best, least = None, math.inf
        for before, after in _DISTANCES:
            moved = {0: whole} if before == after == 0 else self._within(pull, before, after)
            told = sum(earlier(signs * part, -o) for o, part in moved.items())
            error = float((told - mixed).abs().amax())
            if least <= self.tolerances[1] and error > least / 2:
                break  # a wider one tells no more
            if error < least:
                best, least = moved, error
            if error <= self.tolerances[0]:
                break
        return best if least <= self.tolerances[1] else None

    def _within(self, pull: _Pull, before: int, after: int) -> dict[int, Tensor]:
        # As if no token was mixed with others farther away: one pass for each distance.
        t = torch.arange(self.sunk.shape[1], device=self.sunk.device)
        count, offsets = before + after + 1, range(-after, before + 1)
        moved = {o: torch.zeros_like(self.sunk) for o in offsets}
        for color in range(count):
            is_pulled = t % count == color
            pulled = pull.of_tokens(is_pulled.float()).sum(0)
            for o in offsets:
                moved[o] += torch.where(is_pulled, earlier(pulled, o), 0)
        return moved


@dataclass(frozen=True)
class _Pull:
    # A backward pass through a block, from all sinks of its books to what it was given. What
    # arrives where a mixer returned something, or where its edges start, ends there; from there the
    # coefficients of the score go on, and by no scan.
    roots: list[_Sink]
    inside: list[_Sink]
    outs: list[_Sink]
    scans: list[Tensor]
    given: list[Tensor]

    @classmethod
    def of(cls, block: _BlockOfStream, inputs: list[Tensor], starts: list[_Sink]) -> _Pull:
        after = [_Sink(x, g, None) for x, g in block.run.with_coefficients(block.stream.after)]
        outs = [
            _Sink(mixer.activations.output, g, mixer.order)
            for mixer in block.mixers
            if (g := block.run.coefficient_at(mixer.activations.output)) is not None
        ]
        scans = [y for mixer in block.mixers for y in mixer.activations.mixed if y.requires_grad]
        # What is read where it is given ends there.
        ends = {id(x) for x in inputs}
        at_ends = [sink for sink in starts if id(sink.x) in ends]
        inside = [sink for sink in starts if id(sink.x) not in ends]
        return cls([*after, *at_ends], [*outs, *inside], outs, scans, inputs)

    @contextmanager
    def ruled(self) -> Iterator[None]:
        """Gradients obey the rules of relevance while the block is open."""
        sinks = (*self.roots, *self.inside)
        later = [sink.x.grad_fn for sink in sinks if sink.x.grad_fn is not None]
        with ruled(later, [get_gradient_edge(x).node for x in self.given]):
            yield

    def of_tokens(self, weights: Tensor) -> Tensor:
        """What is found at each tensor given, and at last at all outputs: ``(N + 1, B, L)``.

        Args:
            weights (Tensor): ``(L,)``, of the tokens' sinks.
        """
        with ExitStack() as stack:
            for sink in self.inside:
                instead = partial(_instead, sink.weighted(weights))
                stack.enter_context(passing(get_gradient_edge(sink.x), instead))
            # What a block was given may be made of a tensor that it is given, too.
            for x in (*self.scans, *(x for x in self.given if x.grad_fn is not None)):
                stack.enter_context(passing(get_gradient_edge(x), partial(_instead, None)))
            gradients = torch.autograd.grad(
                [sink.x for sink in (*self.roots, *self.inside)],
                [*self.given, *(sink.x for sink in self.outs)],
                [
                    *(sink.weighted(weights) for sink in self.roots),
                    *(torch.zeros_like(sink.x) for sink in self.inside),
                ],
                retain_graph=True,
                allow_unused=True,
            )
        ends = [*(_Sink(x, None, None) for x in self.given), *self.outs]
        totals = [sink.total(g, weights) for sink, g in zip(ends, gradients, strict=True)]
        n = len(self.given)
        return torch.stack([*totals[:n], sum_of([torch.zeros_like(totals[0]), *totals[n:]])])


def earlier(x: Tensor, offset: int) -> Tensor:
    """``(..., L)``: at token t what is at token t - offset, zero where there is none."""
    L = x.shape[-1]
    shifted = torch.zeros_like(x)
    if abs(offset) < L:
        to = slice(max(0, offset), L + min(0, offset))
        shifted[..., to] = x[..., max(0, -offset) : L - max(0, offset)]
    return shifted


def _instead(gradient: Tensor | None, _: Tensor | None) -> Tensor | None:
    return gradient


def _composed(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    return inner if outer is None else outer if inner is None else outer[inner.to(outer.device)]


def _made_of(
    tensors: Sequence[Tensor], streams: Sequence[BlockStream], shared: set[int]
) -> frozenset[int]:
    # The blocks whose own part of the stream such tensors were made of.
    later = [Point.of(x) for x in tensors]

    def unshared(stream: BlockStream) -> list[Point]:
        return [Point.of(x) for x in stream.before if id(x) not in shared and x.requires_grad]

    return frozenset(
        k for k, block in enumerate(streams) if any(dependencies(later, unshared(block)))
    )
