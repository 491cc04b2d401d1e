"""The search for few edges that suffice: how many of a ranking, and which of them not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.interventions.circuit_flow import CircuitFlow
from captum_ssm.metrics.circuit_runs import CircuitRuns
from captum_ssm.utils.memory import tile_entries


class Measured(NamedTuple):
    """What a run with a set of edges gave, in the example where it did worst.

    Args:
        faithfulness (float): the lowest of all examples.
        is_same (bool): the first answer is that of the whole model in all of them.
        score (float): the mean.
    """

    faithfulness: float
    is_same: bool
    score: float


@dataclass(frozen=True)
class CircuitSearch:
    """How faithful sets of edges are, which all examples share.

    Args:
        runs (CircuitRuns): runs the model with some edges.
        edges (list of Edge): the largest first.
        wanted (float): the faithfulness that suffices.
        whole, none (Tensor): ``(B,)``, the scores with all edges, and with none.
        curve (dict): what was measured of the k largest edges, by k.
    """

    runs: CircuitRuns
    edges: list[Edge]
    wanted: float
    whole: Tensor
    none: Tensor
    curve: dict[int, Measured] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: CircuitRuns, edges: list[Edge], wanted: float) -> CircuitSearch:
        """A search among edges.

        Raises:
            ValueError: for a score that does not depend on the edges in an example.
        """
        whole, none = runs.scores(runs.whole), runs.scores(runs.logits([[]]))[0]
        if bool((whole == none).any()):
            b = int((whole == none).int().argmax())
            raise ValueError(
                f"the score is {float(whole[b]):.4g} with all edges and with none, in example {b}; "
                "expected an answer that depends on what tokens read from each other."
            )
        return cls(runs, edges, wanted, whole, none)

    def measured(self, sets: Sequence[Sequence[Edge]]) -> list[Measured]:
        """What the model gives with each set of edges."""
        logits = self.runs.logits(sets)  # (K, B, V)
        scores = self.runs.scores(logits)
        is_same = (logits.argmax(-1) == self.runs.whole.argmax(-1)).all(1)
        recovered = (scores - self.none) / (self.whole - self.none)
        lowest = (1 - (1 - recovered).abs()).amin(1)
        rows = zip(lowest.tolist(), is_same.tolist(), scores.mean(1).tolist(), strict=True)
        return [Measured(*row) for row in rows]

    def suffices(self, measured: Measured) -> bool:
        """Whether a set is as faithful as it has to be, with the model's own first answer."""
        return measured.is_same and measured.faithfulness >= self.wanted

    def shortest(self) -> list[Edge]:
        """The k largest edges from which on the measured sets suffice; else the most faithful."""
        ks = [2**n for n in range(len(self.edges).bit_length())]
        ks = [*(k for k in ks if k < len(self.edges)), len(self.edges)]
        failing = [
            n for n, measured in enumerate(self._of_largest(ks)) if not self.suffices(measured)
        ]
        if failing and failing[-1] == len(ks) - 1:
            return self.edges[: max(ks, key=lambda k: self.curve[k].faithfulness)]
        low, high = (ks[failing[-1]], ks[failing[-1] + 1]) if failing else (0, ks[0])
        while high - low > 1:
            middle = (low + high) // 2
            is_enough = self.suffices(*self._of_largest([middle]))
            low, high = (low, middle) if is_enough else (middle, high)
        return self.edges[:high]

    def _of_largest(self, ks: Sequence[int]) -> list[Measured]:
        new = [k for k in ks if k not in self.curve]
        if new:
            self.curve.update(zip(new, self.measured([self.edges[:k] for k in new]), strict=True))
        return [self.curve[k] for k in ks]

    def pruned_by_relevance(
        self, edges: list[Edge], flow: CircuitFlow, asked: dict[str, Any]
    ) -> list[Edge]:
        """The edges without those of the smallest relevance in the run of the set itself.

        As many as can be are removed at once, and relevance is computed anew in what is left.
        """
        count = len(edges) + 1
        while 1 < len(edges) < count:
            count = len(edges)
            size = _sizes(flow.edges(edges, **asked), edges)
            order = sorted(range(count), key=lambda n: -size[n])
            ks = sorted({max(1, count - 2**n) for n in range(count.bit_length())})
            sets = [[edges[n] for n in sorted(order[:k])] for k in ks]
            enough = map(self.suffices, self.measured(sets))
            edges = next(compress(sets, enough), edges)
        return edges

    def pruned_by_runs(self, edges: list[Edge]) -> list[Edge]:
        """The edges without those that are not needed, so that none can be removed alone."""
        while smaller := self._smaller(edges):
            edges = smaller
        return edges

    def _smaller(self, edges: list[Edge]) -> list[Edge]:
        # The largest part of the edges' removable ones is gone; none if there is none.
        if len(edges) < 2:
            return []
        measured = self.measured([edges[:n] + edges[n + 1 :] for n in range(len(edges))])
        removable = [n for n, without in enumerate(measured) if self.suffices(without)]
        removable.sort(key=lambda n: -measured[n].faithfulness)
        count = len(removable)
        while count:
            gone = set(removable[:count])
            left = [edge for n, edge in enumerate(edges) if n not in gone]
            if left and self.suffices(*self.measured([left])):
                return left
            count //= 2
        return []


def shared_top(edges: RelevanceEdges, k: int) -> list[Edge]:
    """The k edges of the largest mean size over all examples, with their mean relevance."""
    if len(edges.score) == 1:
        return edges.top(k)
    candidates: list[tuple[float, Edge]] = []
    for name, layer in edges.items():
        B, L = layer.out.shape
        step = max(1, tile_entries(1 << 24) // (B * L))
        for start in range(0, L, step):
            tile = layer.tile(start, min(L, start + step))
            size, mean = tile.abs().mean(0).flatten(), tile.mean(0).flatten()
            best, at = size.topk(min(k, len(size)))
            at = at[best > 0]
            entries = zip((start + at // L).tolist(), (at % L).tolist(), strict=True)
            sized = zip(best.tolist(), entries, mean[at].tolist(), strict=False)
            candidates += [(s, Edge(name, i, j, value)) for s, (i, j), value in sized]
    return [edge for _, edge in sorted(candidates, key=lambda one: -one[0])[:k]]


def _sizes(of: RelevanceEdges, edges: Sequence[Edge]) -> list[float]:
    # The mean size of each edge's relevance.
    size = [0.0] * len(edges)
    for name, layer in of.items():
        here = [n for n, edge in enumerate(edges) if edge.layer == name]
        if here:
            targets, sources = (
                torch.tensor([getattr(edges[n], end) for n in here]) for end in ("target", "source")
            )
            readers, row = targets.unique(return_inverse=True)
            sizes = layer.rows(readers).abs().mean(0)[row, sources]
            for n, value in zip(here, sizes.tolist(), strict=True):
                size[n] = value
    return size
