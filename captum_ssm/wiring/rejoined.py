"""Earlier states that a residual stream already holds, and that join it once more.

Here the tokens after mixer 0 reach mixer 2 twice::

    input --+--> mixer 0 --+--> mixer 1 --+--(+)--> mixer 2
            |              |              |   |
            +--------------+--------------+   |     the residual stream
                           |                  |
                           +------------------+     joins once more

It may be a model's input that is added again after later mixers, also turned around, or the
embeddings that Zamba's attention is given beside its stream. A state is known by what it is made
of: the mixers and inputs whose sum it is, in the drawing the input and mixer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.points import Point
from captum_ssm.graph.segments import Side
from captum_ssm.graph.token_weights import TokenWeights, orthogonal, pulling, pushed
from captum_ssm.utils.lazy import cached_property
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.mixing_test import separating


@dataclass(frozen=True)
class Rejoined:
    """A state that joins, on the way to some tokens, the residual stream that holds it.

    Args:
        made_of (frozenset of int): the mixers and inputs whose sum it is.
        first (int, optional): the first mixer that is given just this state, on as many tokens.
        way (TokenWeights): from the tokens that read it to the last mixer or input that it is made
            of, by this state alone.
        outside (TokenWeights): there too, by all ways that do not go through the stream.
        is_factor (bool): whether it only multiplies the tokens, as a gate does.
    """

    made_of: frozenset[int]
    first: int | None
    way: TokenWeights
    outside: TokenWeights
    is_factor: bool

    @property
    def last(self) -> int:
        """The last mixer or input that it is made of."""
        return max(self.made_of)

    @cached_property
    def strength(self) -> Tensor:
        r"""How strongly each token reads it, next to the stream, which counts one: ``(B, T)``.

        The ratio of the norms of the two Jacobians of the last of what both are made of, negative
        for what :attr:`is_subtracted`.
        """
        width, batch = self.way.leaf.width, self.way.batch
        count = width if width <= 16 else max(2, 256 // width)
        total = torch.zeros(2, self.way.root.tokens, dtype=torch.float64)
        for seed in orthogonal(self.way.leaf, batch, count, seed=1):
            total += torch.stack([moved.square().sum(-1) for moved in self._moved(seed)]).to(total)
        mine, stream = total.sqrt()
        ratio = torch.where(mine > 0, mine / stream.clamp(min=1e-150), 0)
        return torch.where(self.is_subtracted, -ratio, ratio).view(batch, -1)

    @cached_property
    def is_subtracted(self) -> Tensor:
        """Whether each token reads it with the other sign than the stream, ``(B T,)`` bool.

        The cosine of the two Jacobians is below -1/2: it is near -1 for the input of a model that
        is taken off its last tokens again, and near 0 where a layer lies on the way.
        """
        leaf = self.way.leaf
        total = torch.zeros(3, self.way.root.tokens, dtype=torch.float64)
        for seed in orthogonal(leaf, self.way.batch, min(leaf.width, 4), seed=2):
            # All tokens move alike: others may be read by it than by the stream.
            mine, stream = self._moved(seed[:1].expand_as(seed))
            products = (mine * stream, mine.square(), stream.square())
            total += torch.stack([product.sum(-1) for product in products]).to(total)
        both, *sizes = total
        return both < -0.5 * (sizes[0] * sizes[1]).sqrt()

    @cached_property
    def keeps_positions(self) -> bool:
        """Whether each token reads the same tokens by it as by the stream."""
        root, generator = self.way.root, torch.Generator().manual_seed(0)
        for chosen in separating(root.tokens, generator):
            seed = root.unflat(root.noise(generator) * chosen.to(root.device)[:, None])
            mine, stream = self._by_each(partial(_pulled, seed=seed))
            read, held = mine.square().sum(-1), stream.square().sum(-1)
            if bool((read > 0)[held <= 1e-12 * held.amax()].any()):
                return False
        return True

    def _moved(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        # How far a step of the last of what both are made of moves the tokens that read them.
        return self._by_each(lambda way: pushed(way, way.leaf.unflat(direction))[0])

    def _by_each(self, derivative: Callable[[TokenWeights], Tensor]) -> tuple[Tensor, Tensor]:
        # A derivative by this state alone, and by the stream: what comes by no other way.
        ways = (self.way, self.outside, replace(self.outside, around=()))
        mine, outside, whole = (derivative(way).double() for way in ways)
        return mine, whole - outside


def rejoined(graph: MixerGraph, i: int, leads: Sequence[int]) -> list[Rejoined]:
    """The states that i reads once more, around the residual streams around its leads."""
    root = graph.entries[i]
    if root is None:
        return []
    streams, others = _joining(graph, root, leads)
    states = []
    # Finer and coarser tokens may be made of the same.
    alike = [
        k
        for k, *_ in graph.groups
        if (entry := graph.entries[k]) is not None and entry.tokens == root.tokens
    ]
    for made_of, sides in others.items():
        last = max(made_of)
        first = next((k for k in alike if graph.read_by(k) == made_of), None)
        if not any(k is not None and graph.is_same_grid(leads[0], k) for k in (first, last)):
            continue  # finer or coarser tokens: a skip
        larger = [side.edge for other, its in others.items() if other > made_of for side in its]
        outside = TokenWeights(root, graph.leaf(last), graph.batch, tuple(streams))
        way = replace(outside, around=(*streams, *larger))
        states.append(Rejoined(made_of, first, way, outside, all(side.is_factor for side in sides)))
    return states


def is_in_stream(graph: MixerGraph, i: int, leads: Sequence[int], made_of: frozenset[int]) -> bool:
    """Whether a state that i reads once more goes around i too, and is not for i alone."""
    later = [graph.entries[k] for k, direct in graph.direct.items() if i in direct]
    return not later or any(
        root is not None and made_of in _joining(graph, root, leads)[1] for root in later
    )


def _joining(
    graph: MixerGraph, root: Point, leads: Sequence[int]
) -> tuple[list[GradientEdge], dict[frozenset[int], list[Side]]]:
    # The residual streams around the leads, and what else joins that is made of parts of these, by
    # what it is made of. Streams are the largest sums, and all that is given to the leads.
    passed = {k for j in leads if j >= 0 for k in graph.groups[graph.step_of[j]]}
    entries = [entry for k in passed if (entry := graph.entries[k]) is not None]
    sides = graph.cut.around(root, passed).parted(graph.cut.before(entries))
    streams, held = {graph.read_by(j) for j in leads}, frozenset[int]()
    edges: list[GradientEdge] = []
    others: dict[frozenset[int], list[Side]] = {}
    for side in sorted(sides, key=lambda side: (side.is_factor, -len(side.read))):
        is_new = not side.read & held
        if side.read in streams or (is_new and not side.is_factor):
            streams.add(side.read)
            edges.append(side.edge)
            held |= side.read
        elif not is_new:
            others.setdefault(side.read, []).append(side)
    return edges, others


def _pulled(way: TokenWeights, seed: Tensor) -> Tensor:
    with pulling(way) as pull:
        gradient = pull(seed)
    leaf = way.leaf
    return seed.new_zeros(leaf.tokens, leaf.width) if gradient is None else leaf.flat(gradient)
