"""Books per token: what a score reads, at which tokens, and what moves between tokens unseen.

A run is cut at its mixers: what they return starts a new graph, so that the graph that is left is
all that lies between and after them. In it every token of a plain model is handled by itself, and
whatever the score reads it reads at the tokens of some cut. Three entries are kept:

- *what is read directly*: after the last mixer there is a last tensor in which tokens are still
  apart, each made of one token of that mixer (:func:`gathered`). The sizes of the score's gradients
  there are the weights with which it reads them (:func:`weights`): of the last token, a CLS token,
  a mean, a weighted sum, attention that pools, or a head of its own for each token alike. Norms and
  probabilities count as constants. A mixer or an input that is read by another way too has
  gradients left when these tensors are closed (:func:`read_around`).
- *what leaks*: all tensors that hold tokens, also those that no mixer is given, are looked at
  (:func:`token_tensors`). Gradients put in at some tokens must not arrive at others.
- *whether autograd tells the truth*: :mod:`captum_ssm.capture.honesty` moves some tokens of the
  cuts a little and looks at what changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from captum_ssm.graph.kinds import is_inverse, kind_of
from captum_ssm.graph.points import Point, closed
from captum_ssm.graph.reachability import dependencies, edges_before, meetings
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.graph.token_weights import TokenWeights, pairs

# Seeds of an output of many entries, whose gradients stand for those of all of them.
_SEEDS = 4
# Nodes that stand for what they are given.
_CUT = "_ExitBackward"
_TRANSPARENT = (_CUT, "CloneBackward")


@dataclass(frozen=True)
class Gathered:
    """The last tensor on the way to a score in which tokens of a mixer are still apart.

    Args:
        point (Point): the tensor.
        source (Tensor): ``(T,)``, the token of the mixer that each of its tokens is made of; -1 for
            none.
    """

    point: Point
    source: Tensor

    @property
    def is_permuted(self) -> bool:
        """Whether tokens of the mixer are all that it holds."""
        return bool((self.source >= 0).all())

    @property
    def keeps_positions(self) -> bool:
        """Whether its tokens are those of the mixer, at their positions."""
        return torch.equal(self.source.cpu(), torch.arange(len(self.source)))

    def holds_all_of(self, leaf: Point) -> bool:
        """Whether each of the mixer's tokens is there, once."""
        read = self.source[self.source >= 0]
        return len(read) == len(read.unique()) == leaf.tokens

    def weights(self, read: Tensor, batch: int, tokens: int) -> Tensor:
        """How strongly tokens are ``read (T,)``, as weights ``(B, S)`` of the mixer's tokens."""
        kept = (self.source >= 0).to(read.device)
        totals = read.new_zeros(tokens)
        totals.index_add_(0, self.source.to(read.device)[kept], read[kept])
        return totals.view(batch, -1)


def gathered(root: Point, leaf: Point, batch: int) -> list[Gathered]:
    """Where tokens of ``leaf`` are still apart on the way to ``root``, the last one last.

    The first is the leaf itself. The root is a score, an output without tokens, or what another
    mixer is given.
    """
    tensors = [Gathered(leaf, torch.arange(leaf.tokens))]
    for edge in meetings([root], [leaf]):
        held = sorted(points(edge, batch), key=lambda one: one.tokens != leaf.tokens)
        sources = ((point, source_of(point, leaf, batch)) for point in held)
        here = next(
            (Gathered(point, source) for point, source in sources if source is not None), None
        )
        # A tensor without axes of tokens, as in a linear layer, may be followed by one with them.
        if here is None and held and len(tensors) > 1:
            break
        if here is not None:
            tensors.append(here)
    while len(tensors) > 1 and _is_weighed(tensors[-1].point, leaf):
        tensors.pop()
    return tensors


def _is_weighed(point: Point, leaf: Point) -> bool:
    # Whether tokens were just multiplied by numbers that are not made of their own size: those of a
    # weighted sum, or a gate; not the denominator of a norm.
    node = point.edge.node
    if kind_of(node) != "Mul":
        return False
    factors = [GradientEdge(x, i) for x, i in node.next_functions if x is not None]
    read = dependencies([replace(point, edge=factor) for factor in factors], [leaf])
    made = [factor for factor, leaves in zip(factors, read, strict=True) if leaves]
    return len(made) == 1 or any(_is_weight(factor, point.channels) for factor in made)


def _is_weight(factor: GradientEdge, channels: int | None) -> bool:
    # Whether a factor is a gate, or a number of each token's that is not one over its size.
    shape = Point.at(factor).shape
    is_one = channels is not None and len(shape) > 1 and shape[channels] == 1
    return (is_one and not is_inverse(factor.node)) or kind_of(factor.node) == "Sigmoid"


def points(edge: GradientEdge, batch: int) -> list[Point]:
    """A tensor as tokens, its channels last or second; none where it has no such axes."""
    shape = Point.at(edge).shape
    if len(shape) < 3 or shape[0] != batch or 0 in shape:
        return []
    return [Point.at(edge, axis) for axis in (-1, 1)]


def source_of(root: Point, leaf: Point, batch: int) -> Tensor | None:
    """The one token of ``leaf`` that each token of ``root`` is made of, ``(T,)``, -1 for none.

    None where a token is made of several, or all of none.
    """
    paired = pairs(TokenWeights(root, leaf, batch), repeated=root.tokens > leaf.tokens)
    return None if paired is None or not len(paired.root) else paired.source(root.tokens)


def weights(
    root: Point,
    leaves: Sequence[Point],
    batch: int,
    cuts: Iterable[Point],
    around: Iterable[GradientEdge] = (),
    *,
    power: int = 1,
) -> list[Tensor | None]:
    """How strongly a score, or an output, reads the tokens of each leaf: ``(T,)``.

    These are the sums over channels of the gradients' sizes, norms and probabilities held
    constant; with a ``power`` of 2 of plain gradients' squares, as transports have them. The ways
    through the tensors in ``around`` do not count. None for a leaf that is not read.
    """
    total: list[Tensor | None] = [None] * len(leaves)
    nodes = [point.edge.node for point in (*leaves, *cuts)]
    with torch.enable_grad(), closed(around):
        rules = ExitStack()
        carries = rules.enter_context(ruled([root.edge.node], nodes))
        with rules:
            if power > 1 or not carries[root.edge.node]:  # or of a probability
                rules.close()
            for seed in _seeds(root, batch):
                gradients = torch.autograd.grad(
                    root.edge,
                    [leaf.edge for leaf in leaves],
                    seed,
                    retain_graph=True,
                    allow_unused=True,
                )
                for k, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
                    if gradient is not None:
                        size = leaf.flat(gradient).abs().double().pow(power).sum(-1)
                        known = total[k]
                        total[k] = size if known is None else known + size
    return total


def _seeds(root: Point, batch: int) -> Iterator[Tensor]:
    # One for a score; of an output some, the same for each example where it holds them apart.
    apart = root.shape[:1] == (batch,)
    entries = root.shape[apart:]
    generator = torch.Generator().manual_seed(0)
    for _ in range(1 if not entries or set(entries) == {1} else _SEEDS):
        seed = torch.randn(entries, generator=generator) if entries else torch.ones(())
        yield seed.expand(root.shape).to(root.device, root.dtype)


def structure(ends: Iterable[Node | None], *, is_cut: bool = False) -> frozenset[tuple[str, str]]:
    """What the graph before some nodes is made of: the names of each node and of one before it.

    What was once measured of a graph holds for one that is made of nothing else.

    Args:
        ends (iterable of Node): where it ends.
        is_cut (bool, optional): whether it begins where the run was cut, also in a graph that was
            kept whole. Default: False
    """
    seen, stack = set[Node](), [node for node in ends if node is not None]
    names = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            while before is not None and before.name().startswith(_TRANSPARENT):
                is_begun = is_cut and before.name().startswith(_CUT)
                before = None if is_begun else before.next_functions[0][0]
            if before is not None:
                names.add((node.name(), before.name()))
                stack.append(before)
    return frozenset(names)


def token_tensors(root: Point, leaves: Iterable[Point], tokens: int, batch: int) -> list[Point]:
    """The last tensors before ``root`` that hold ``tokens`` for each example, channels apart."""

    def held(edge: GradientEdge) -> Point | None:
        here = [layout for layout in points(edge, batch) if layout.tokens == tokens * batch]
        return here[0] if here and len(here[0].shape) == 3 else None

    ends = {leaf.edge.node for leaf in leaves}
    walked = edges_before(root.edge.node, ends, lambda edge: held(edge) is None)
    edges = {edge: held(edge) for _, edge in walked if edge.node not in ends}
    return [point for point in edges.values() if point is not None]
