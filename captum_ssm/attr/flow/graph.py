"""The graph of one answer: nodes of the residual stream, the edges between them, and paths."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.paths import Path, Steps, likeliest_paths
from captum_ssm.errors import InputError, brief, renamed

FORMAT = "captum_ssm.flow/1"


@dataclass(frozen=True)
class FlowLayer:
    """One layer of the graph: a mixer, or several side by side.

    Args:
        name (str): the mixer's path; several are joined by " + ".
        kind (str): ``"recurrence"``, ``"attention"``, or ``"hybrid"`` for both side by side.
        heads (int): the number of their maps.
    """

    name: str
    kind: str
    heads: int


@dataclass(frozen=True, eq=False)
class FlowGraph:
    r"""Where the relevance of one answer went: tokens at each depth, and what joins them.

    Stage s of W + 1 is the residual stream before layer s, and the last one is the output. What
    arrives at a node is what leaves it:

    .. math::
        R_{s+1,i} = \sum_j E_{ij} + stay_i + bias_i, \qquad
        R_{s,j} = \sum_i E_{ij} + stay_j - constant_j
            - \sum_o (shift_{o,j} - shift_{o,j+o}) + lost_j .

    Args:
        layers (list of FlowLayer): W layers, in forward order.
        nodes (Tensor): R, ``(W + 1, L)``.
        stays (Tensor): ``(W, L)``, what a token keeps: the next four together.
        residual (Tensor): ``(W, L)``, what passes by all in the block; NaN where that is unknown.
        own (Tensor): ``(W, L)``, what a token reads from itself, the skip with it.
        gate (Tensor): ``(W, L)``, what the gates' arguments take by the half rule.
        rest (Tensor): ``(W, L)``, what else the block adds: its MLP; with the residual where that
            is unknown.
        bias (Tensor): ``(W, L)``, what the mixers' biases contribute at each token after a layer.
        constant (Tensor): ``(W, L)``, what biases of norms and MLPs around the mixers of a layer
            give, and what the layer reads that are not its tokens, such as a condition.
        shifts (dict of int to Tensor): by offset o, ``(W, L)``, what token t of a layer is given by
            token t - o outside of the mixers' edges: by a token shift, or by the short convolution
            before ``"hidden"`` edges.
        lost (Tensor): ``(W, L)``, what leaves a node before a layer by none of these: rounding.
        edges (list of Edge): edges between tokens, ranked so that each is joined to the output by
            edges before it.
        heads (list of Tensor): by edge, ``(M,)``, its relevance by head; empty where a layer has
            more maps than are worth telling.
        positive (Tensor): ``(W, L)``, all positive edges into each token.
        score (float): what is explained.
        of (str): what the score is: that of the target, ``"score"``, its ``"contrast"`` with all
            other answers, or its ``"difference"`` from another answer.
        relevance (Tensor): ``(L,)``, of the inputs' tokens.
        at (list of int): the output's tokens, those that the score reads.
        total (float): the size of all edges between tokens.
        formulation (str): ``"unified"`` or ``"hidden"``.
        tokens (list of str): their texts.
        count (int): how many edges between tokens the mixers have, of which ``edges`` are some.
        facts (dict): what else is told of the graph, such as the model's name and its answer.
            Default: {}

    Examples::

        >>> graph = RelevanceFlow(model).graph(input_ids, target=5)
        >>> graph.nodes.shape, len(graph.layers)
        (torch.Size([3, 7]), 2)
        >>> graph.error < 1e-5
        True
        >>> print(graph.paths(1)[0].words(graph.tokens))  # doctest: +ELLIPSIS
        '...
    """

    layers: list[FlowLayer]
    nodes: Tensor
    stays: Tensor
    residual: Tensor = field(repr=False)
    own: Tensor = field(repr=False)
    gate: Tensor = field(repr=False)
    rest: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)
    constant: Tensor = field(repr=False)
    shifts: dict[int, Tensor] = field(repr=False)
    lost: Tensor = field(repr=False)
    edges: list[Edge] = field(repr=False)
    heads: list[Tensor] = field(repr=False)
    positive: Tensor = field(repr=False)
    score: float
    of: str
    relevance: Tensor = field(repr=False)
    at: list[int]
    total: float
    formulation: str
    tokens: list[str] = field(repr=False)
    count: int
    facts: dict[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:
        __getattr__ = renamed(shift="shifts")

    @property
    def error(self) -> float:
        """The largest relevance at a node before a layer that nothing carries on, relative."""
        return float(self.lost.abs().amax() / self.nodes.abs().amax().clamp(min=1e-30))

    @property
    def held(self) -> float:
        """The share of the size of all edges between tokens that :attr:`edges` hold."""
        return sum(abs(edge.relevance) for edge in self.edges) / max(self.total, 1e-30)

    def layer_of(self, edge: Edge) -> int:
        """The index of an edge's layer.

        Raises:
            KeyError: for an edge of a layer that the graph does not have.
        """
        for index, layer in enumerate(self.layers):
            if edge.layer in layer.name.split(" + "):
                return index
        names = ", ".join(layer.name for layer in self.layers)
        raise KeyError(f"the graph has no layer {edge.layer!r}; expected one of {names}.")

    def paths(self, count: int = 3, source: int | None = None) -> list[Path]:
        """The likeliest ways from an input token to the output, the likeliest first.

        A step goes to a node by its share of the positive relevance that arrives. Edges are exact;
        a path's share, the product of its steps', is a first-order reading.

        Args:
            count (int, optional): how many, at most. Default: 3
            source (int, optional): the token that they begin at; None for any. Default: None

        Returns:
            list of Path: empty where nothing positive arrives at the output, as for an answer that
            the others beat.

        Raises:
            InputError: for a source that is not a token of the graph.
        """
        if source is not None and source not in range(len(self.tokens)):
            raise InputError(
                f"source is {brief(source)}; expected one of the {len(self.tokens)} tokens of the "
                f"graph, 0 .. {len(self.tokens) - 1}, or None for any."
            )
        edges = [(self.layer_of(e), e.target, e.source, e.relevance) for e in self.edges]
        steps = Steps(self.stays, self.positive, edges, self.nodes, self.shifts, self.at)
        return likeliest_paths(steps, count, source)

    def with_facts(self, **facts: Any) -> FlowGraph:
        """A copy of the graph that tells more: the title, the model, the answer."""
        return replace(self, facts=self.facts | facts)

    def with_tokens(self, tokens: Sequence[str]) -> FlowGraph:
        """A copy of the graph with the texts of its tokens.

        Raises:
            InputError: for another number of texts than of tokens.
        """
        check_texts(tokens, len(self.tokens), "the graph")
        return replace(self, tokens=list(tokens))

    def to_dict(self) -> dict[str, Any]:
        """The graph in JSON's types, as the page draws it and a file holds it."""
        W = len(self.layers)
        last = dict.fromkeys(self.at, W)
        steps = [(self.layer_of(edge), edge.source, edge.target) for edge in self.edges]
        ways = self.paths(5)
        for way in ways:
            steps += [(s, j, i) for s, j, i in way.steps if j != i]
        for s, j, i in steps:
            last[j] = max(last.get(j, 0), s)
            last[i] = max(last.get(i, 0), s + 1)
        drawn = {(s, t) for t, top in last.items() for s in range(top + 1)}
        return {
            "format": FORMAT,
            "tokens": self.tokens,
            "at": self.at[-1],
            "score": {"of": self.of, "value": _rounded(self.score)},
            "formulation": self.formulation,
            "layers": [vars(layer) for layer in self.layers],
            "relevance": [_rounded(x) for x in self.relevance.tolist()],
            "nodes": [self._node(s, t) for s, t in sorted(drawn)],
            "stays": [self._stay(s, t) for s, t in sorted(drawn) if (s + 1, t) in drawn],
            "edges": self._edges(steps),
            "ranked": len(self.edges),
            "of": self.count,
            "held": _rounded(self.held),
            "paths": [
                {"share": _rounded(way.share), "nodes": [list(node) for node in way.nodes]}
                for way in ways
            ],
        } | self.facts

    def to_json(self) -> str:
        """:meth:`to_dict` as a text."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def _node(self, s: int, t: int) -> list[Any]:
        arrived = self.bias[s - 1, t] if s else 0.0
        left = self.lost[s, t] - self.constant[s, t] if s < len(self.layers) else 0.0
        return [s, t, *map(_rounded, (self.nodes[s, t], arrived, left))]

    def _stay(self, s: int, t: int) -> list[Any]:
        parts = (self.stays, self.residual, self.own, self.gate, self.rest)
        return [s, t, *(_rounded(part[s, t]) for part in parts)]

    def _edges(self, steps: Sequence[tuple[int, int, int]]) -> list[list[Any]]:
        known: dict[tuple[int, int, int], list[Any]] = {}
        for n, (step, edge) in enumerate(zip(steps, self.edges, strict=False)):
            heads = [_rounded(x) for x in self.heads[n].tolist()] if self.heads else []
            known[step] = [*step, _rounded(edge.relevance), *([heads] if heads else [])]
        least = 1e-3 * float(self.nodes.abs().amax())
        shifts = [
            [s, t - o, t, _rounded(moved[s, t]), None, "shift"]
            for o, moved in self.shifts.items()
            for s, t in (moved.abs() > least).nonzero().tolist()
        ]
        return [*known.values(), *shifts]


def check_texts(tokens: Sequence[str], count: int, what: str) -> None:
    """Raise InputError unless there are ``count`` texts of tokens, one for each of ``what``."""
    if len(tokens) != count:
        raise InputError(
            f"tokens has {len(tokens)} texts; {what} has {count} tokens: expected one for each."
        )


def _rounded(x: Any) -> float | None:
    value = float(x)
    return float(f"{value:.5g}") if math.isfinite(value) else None
