"""A flow graph, put together from the edges of all layers and the nodes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.flow.graph import FlowGraph, FlowLayer
from captum_ssm.attr.flow.layer_edges import LayerEdges, Ranking
from captum_ssm.attr.flow.paths import joined
from captum_ssm.attr.flow.stream import UNKNOWN_STREAM
from captum_ssm.attr.flow.ways import earlier
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.integers import example_index

# So many edges of a layer are candidates for a graph, and so many are drawn at most.
CANDIDATES, MOST = 1000, 300
# Relevance by head is told of layers with so many maps at most.
FEW_HEADS = 16
# What is a smaller part of the largest relevance was not read.
_READ = 1e-5


def graph_of(edges: RelevanceEdges, example: int, share: float) -> FlowGraph:
    """The graph of one example.

    ``share`` is how much of the size of all edges between tokens the graph's edges hold, where so
    many lead to the output.
    """
    example = example_index(example, len(edges.score))
    steps = [[list(edges.values())[k] for k in step] for step in edges.steps]
    nodes = _nodes(edges, steps)
    rankings = [[layer.ranking(CANDIDATES) for layer in step] for step in steps]

    out, gate, skip, out_of, bias = (
        _summed(steps, name) for name in ("out", "gate", "skip", "out_of", "bias")
    )
    diagonal, positive = (_summed(rankings, name) for name in ("own", "positive"))
    residual, constant, shifts = _of_blocks(edges, out)
    passing = nodes[1:] - out
    stays = passing + diagonal + skip + gate
    arrived = _arrived(constant, shifts)
    at = (nodes[-1, example] != 0).nonzero()[:, 0].tolist()
    chosen, total = _chosen(steps, rankings, at, example, share)
    return FlowGraph(
        layers=[_layer(step) for step in steps],
        nodes=nodes[:, example],
        stays=stays[:, example],
        residual=residual[:, example],
        own=(diagonal + skip)[:, example],
        gate=gate[:, example],
        rest=(passing - residual.nan_to_num(0.0))[:, example],
        bias=bias[:, example],
        constant=constant[:, example],
        shifts={o: x[:, example] for o, x in shifts.items()},
        lost=(nodes[:-1] + arrived - stays - (out_of - diagonal))[:, example],
        edges=chosen,
        heads=_heads(edges, chosen, example),
        positive=positive[:, example],
        score=float(edges.score[example]),
        of=edges.of,
        relevance=_token_relevance(edges, example, nodes),
        at=at,
        total=total,
        formulation=edges.formulation,
        tokens=[str(t) for t in range(nodes.shape[-1])],
        count=_count(rankings, nodes.shape[-1]),
    )


def _summed(steps: Sequence[Sequence[LayerEdges | Ranking]], name: str) -> Tensor:
    # The sum over the mixers of each step, (W, B, L).
    return torch.stack([sum_of([getattr(mixer, name) for mixer in step]) for step in steps])


def _count(rankings: Sequence[Sequence[Ranking]], tokens: int) -> int:
    # How many edges between tokens there are: half of all pairs where none reads a later one.
    pairs = tokens * (tokens - 1)
    return sum(pairs if r.reads_later else pairs // 2 for step in rankings for r in step)


def _nodes(edges: RelevanceEdges, steps: Sequence[Sequence[LayerEdges]]) -> Tensor:
    # (W + 1, B, L): measured at the blocks' ends, and elsewhere what the books say.
    books = [
        sum_of([layer.out_of + layer.skip + layer.gate - layer.out for layer in step])
        for step in steps
    ]
    known = _measured(edges)
    W = len(steps)
    if W not in known:
        raise UnsupportedModelError(
            f"{UNKNOWN_STREAM} The edges of each layer are there: call edges()."
        )
    shapes = {x.shape for x in known.values()} | {
        layer.out.shape for step in steps for layer in step
    }
    if len(shapes) > 1:
        raise UnsupportedModelError(
            "the layers of this model work on different tokens, so they form no graph over one "
            "row of tokens; expected layers that all work on the input's tokens. The edges of each "
            "layer are there: call edges()."
        )
    if not edges.is_whole and 0 in known:
        return _upwards(edges, known[0], books)
    for s in reversed(range(W)):
        if s not in known:
            known[s] = known[s + 1] + books[s]
    return torch.stack([known[s] for s in range(W + 1)])


def _measured(edges: RelevanceEdges) -> dict[int, Tensor]:
    # By stage, (B, L): the stream's relevance there, and what later blocks read of shared tensors.
    first = {step[0]: s for s, step in enumerate(edges.steps)}
    last = {k: s for s, step in enumerate(edges.steps) for k in step}
    blocks = [block for block in edges.blocks if len(block.mixers)]

    def read_later(start: int, here: int) -> Tensor | float:
        ways = (block.ways for block in edges.blocks if block.index >= start)
        return sum(
            block_ways.shared
            for block_ways in ways
            if block_ways and here not in block_ways.made_of
        )

    known: dict[int, Tensor] = {}
    for block in blocks:
        after = block.after + read_later(block.index + 1, block.index)
        known.setdefault(last[block.mixers[-1]] + 1, after)
    for block in blocks:
        if block.mixers[0] in first:
            known[first[block.mixers[0]]] = block.before + read_later(block.index, block.index)
    return known


def _upwards(edges: RelevanceEdges, first: Tensor, books: Sequence[Tensor]) -> Tensor:
    # What is carried on at each token, by whichever tensor: from the first stage on, as the books
    # say. At last it is where the score reads it.
    _, constant, shifts = _of_blocks(edges, torch.stack([*books]))
    arrived = _arrived(constant, shifts)
    nodes = [first]
    for s, book in enumerate(books):
        nodes.append(nodes[-1] + arrived[s] - book)
    is_read = nodes[-1].abs() > _READ * nodes[-1].abs().amax()
    nodes[-1] = torch.where(is_read, nodes[-1], 0)
    return torch.stack(nodes)


def _arrived(constant: Tensor, shifts: Mapping[int, Tensor]) -> Tensor:
    # What a token's edges begin with and its node does not hold.
    return constant + sum(x - earlier(x, -o) for o, x in shifts.items())


def _of_blocks(edges: RelevanceEdges, like: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    # What passes by each step, NaN where that is not known; what biases around it give; and what
    # is moved between tokens around it, by offset: (W, B, L).
    residual = torch.full_like(like, torch.nan)
    constant, shifts = torch.zeros_like(like), dict[int, Tensor]()
    steps = {k: s for s, step in enumerate(edges.steps) for k in step}
    for block in edges.blocks:
        inside = [s for s, step in enumerate(edges.steps) if set(step) <= set(block.mixers)]
        if len(inside) == 1 and block.residual is not None:
            residual[inside[0]] = block.residual
        # A block without mixers belongs to the layer before it.
        s = inside[0] if inside else steps.get(block.mixers.start - 1)
        if s is None or block.ways is None:
            continue
        constant[s] += block.ways.constant
        for o, moved in block.ways.shifts.items():
            shifts.setdefault(o, torch.zeros_like(like))[s] += moved
    return residual, constant, shifts


def _layer(step: Sequence[LayerEdges]) -> FlowLayer:
    kinds = {layer.kind for layer in step}
    kind = kinds.pop() if len(kinds) == 1 else "hybrid"
    name = " + ".join(layer.name for layer in step)
    return FlowLayer(name, kind, sum(layer.heads_count for layer in step))


def _chosen(
    steps: Sequence[Sequence[LayerEdges]],
    rankings: Sequence[Sequence[Ranking]],
    at: Sequence[int],
    example: int,
    share: float,
) -> tuple[list[Edge], float]:
    candidates = [
        (value, s, target, source, layer.name)
        for s, (step, ranked) in enumerate(zip(steps, rankings, strict=True))
        for layer, ranking in zip(step, ranked, strict=True)
        for value, target, source in zip(*(x[example].tolist() for x in ranking[:3]), strict=True)
        if value != 0
    ]
    whole = sum(float(r.total[example]) for step in rankings for r in step)
    candidates = sorted(candidates, key=lambda candidate: -abs(candidate[0]))[:CANDIDATES]
    chosen, held = [], 0.0
    for n in joined([candidate[:4] for candidate in candidates], at, len(steps))[:MOST]:
        if held >= share * whole:
            break
        value, _, target, source, name = candidates[n]
        chosen.append(Edge(name, target, source, value))
        held += abs(value)
    return chosen, whole


def _heads(edges: RelevanceEdges, chosen: Sequence[Edge], example: int) -> list[Tensor]:
    # By edge: its relevance by head.
    by_edge: dict[Edge, Tensor] = {}
    for name, layer in edges.items():
        mine = [edge for edge in chosen if edge.layer == name]
        if not mine or layer.heads_count > FEW_HEADS:
            by_edge |= {edge: torch.zeros(0) for edge in mine}
            continue
        targets = sorted({edge.target for edge in mine})
        heads = layer.heads(torch.tensor(targets))[example]  # (M, R, L)
        by_edge |= {edge: heads[:, targets.index(edge.target), edge.source] for edge in mine}
    return [by_edge[edge] for edge in chosen]


def _token_relevance(edges: RelevanceEdges, example: int, nodes: Tensor) -> Tensor:
    relevance = edges.relevance
    if torch.is_tensor(relevance) and relevance.dim() >= 2:
        here = relevance[example].reshape(len(relevance[example]), -1).sum(-1)
        if len(here) == nodes.shape[-1]:
            return here
    return nodes[0, example]
