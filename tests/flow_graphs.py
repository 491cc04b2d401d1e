"""Flow graphs made by hand, of the format captum_ssm.flow/1: no model runs."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pages

from captum_ssm.explanation import Answer, Example, Output, Token

TEXT = "Anna has a yellow book . Tom has a brown doll . Anna 's book is"
WORDS = TEXT.split()
# By layer: target, source, and the share of the target's relevance that the edge carries.
READS: dict[int, list[tuple[int, int, float]]] = {
    0: [(3, 2, 0.25), (15, 13, 0.2), (9, 8, 0.5)],
    1: [(15, 14, 0.1)],
    2: [(15, 3, 0.65), (15, 9, -0.15)],
}


def flow_graph(
    words: list[str] = WORDS,
    answer: str = " yellow",
    reads: dict[int, list[tuple[int, int, float]]] = READS,
    layers: int = 3,
    heads: int = 2,
    attention: tuple[int, ...] = (2,),
    score: float = 10.0,
) -> dict[str, Any]:
    """A graph that balances: each node's relevance is divided into its edges and what stays."""
    at, T = len(words) - 1, len(words)
    now, edges, nodes, stays = {at: score}, [], {(layers, at): score}, []
    for layer in reversed(range(layers)):
        before: dict[int, float] = defaultdict(float)
        for token, value in now.items():
            mine = [
                (source, share * value) for i, source, share in reads.get(layer, []) if i == token
            ]
            stay = value - sum(part for _, part in mine)
            stays.append([layer, token, stay, 0.6 * stay, 0.1 * stay, 0.1 * stay, 0.2 * stay])
            before[token] += stay
            for source, part in mine:
                before[source] += part
                split = [part * (k + 1) for k in range(heads)]
                total = heads * (heads + 1) / 2
                edges.append([layer, source, token, part, [x / total for x in split]])
        now = dict(before)
        nodes |= {(layer, token): value for token, value in now.items()}
    edges.sort(key=lambda edge: -abs(edge[3]))
    whole = sum(abs(edge[3]) for edge in edges)
    return {
        "format": "captum_ssm.flow/1",
        "tokens": words,
        "at": at,
        "answer": answer,
        "predicted": answer,
        "score": {"of": "contrast", "value": score},
        "formulation": "unified",
        "layers": [
            {
                "name": f"layers.{k}.mixer",
                "kind": "attention" if k in attention else "recurrence",
                "heads": heads,
            }
            for k in range(layers)
        ],
        "relevance": [now.get(t, 0.0) for t in range(T)],
        "nodes": [[s, t, value, 0.0, 0.0] for (s, t), value in sorted(nodes.items())],
        "stays": stays,
        "edges": edges,
        "ranked": len(edges),
        "of": layers * T * (T - 1) // 2,
        "curve": [
            [k + 1, sum(abs(edge[3]) for edge in edges[: k + 1]) / whole] for k in range(len(edges))
        ],
        "alone": {"edges": 2, "right": True},
        "paths": paths(edges, stays, nodes, layers, at),
    }


def paths(
    edges: list[Any], stays: list[Any], nodes: dict[tuple[int, int], float], layers: int, at: int
) -> list[dict[str, Any]]:
    """All ways to the output, the likeliest first, by brute force."""
    steps = [(layer, j, i, value) for layer, j, i, value, *_ in edges]
    steps += [(layer, t, t, value) for layer, t, value, *_ in stays]
    ways: list[tuple[float, list[list[int]]]] = [(1.0, [[layers, at]])]
    for layer in reversed(range(layers)):
        longer = []
        for share, way in ways:
            into = [(j, v) for s, j, i, v in steps if (s, i) == (layer, way[0][1]) and v > 0]
            total = sum(value for _, value in into)
            longer += [(share * value / total, [[layer, j], *way]) for j, value in into]
        ways = longer
    ways.sort(key=lambda way: -way[0])
    return [{"share": share, "nodes": way} for share, way in ways[:5]]


def shifted() -> dict[str, Any]:
    """With a token shift between two of the graph's tokens, and neither a curve nor names.

    The last path goes along the shift.
    """
    graph = flow_graph(attention=())
    graph["edges"].append([0, 2, 3, 5.0, None, "shift"])
    graph["paths"].append({"share": 0.02, "nodes": [[0, 2], [0, 3], [1, 3], [2, 3], [3, 15]]})
    for name in ("curve", "alone", "predicted"):
        del graph[name]
    return graph | {"held": 0.8}


def deep(layers: int = 24, tokens: int = 200) -> dict[str, Any]:
    """Many tokens and layers, few of which move anything."""
    words = [f"w{k}" for k in range(tokens)]
    rng = np.random.default_rng(4)
    at, reads = tokens - 1, defaultdict(list)
    reads[20] += [(at, 120, 0.4)]
    reads[11] += [(120, 40, 0.7)]
    for k, layer in enumerate((2, 3, 5, 8, 13, 17)):
        target = (at, 120, 40)[k % 3]
        reads[layer] += [(target, int(rng.integers(0, 40)), 0.1), (at, 150 + k, -0.02)]
    return flow_graph(words, "w40", dict(reads), layers, 1, (11, 20))


def explained(graph: dict[str, Any], name: str = "Anna") -> Example:
    """A text of the graph's tokens, whose last one is its answer, and an answer without a graph."""
    texts = [*(word if k == 0 else f" {word}" for k, word in enumerate(graph["tokens"]))]
    texts.append(graph["answer"])
    ends = np.cumsum([len(text) for text in texts]).tolist()
    pieces = tuple(
        Token(text, k, end - len(text), end)
        for k, (text, end) in enumerate(zip(texts, ends, strict=True))
    )
    row = np.array([*graph["relevance"], 0.0], np.float32)
    answers = (
        Answer(graph["answer"], 7, 0.9, 12.0, 1, 0),
        Answer(" brown", 8, 0.05, 9.0, 2, 1),
    )
    rows = np.stack([row, row[::-1]])
    return Example(
        name=name,
        outputs=(Output(graph["at"], answers, 0),),
        relevance={"mamba-lrp": rows, "raw-attention": np.abs(rows)},
        deltas={"mamba-lrp": np.zeros(2)},
        tokens=pieces,
        prompt=len(pieces) - 1,
        circuits=({**graph, "tokens": texts[:-1]},),
    )


def hostile() -> Example:
    """Texts that try to leave their place, wherever a circuit has text."""
    words = [pages.HOSTILE[k % len(pages.HOSTILE)] for k in range(len(WORDS))]
    graph = flow_graph(words, pages.HOSTILE[0])
    for layer in graph["layers"]:
        layer["name"] = layer["kind"] = pages.HOSTILE[2]
    graph |= {"predicted": pages.HOSTILE[3], "title": pages.HOSTILE[0]}
    graph["score"]["of"] = pages.HOSTILE[0]
    example = explained(graph)
    return replace(example, circuits=(graph,))
