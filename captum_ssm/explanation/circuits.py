"""Circuits of an explanation: flow graphs of the format captum_ssm.flow/1, and their checks.

A circuit is plain data, the dict that ``FlowGraph.to_dict`` makes. Layers and tokens are counted
from 0; stage s of W + 1 is the residual stream before layer s, and stage W is the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from captum_ssm.explanation.parts import Example
from captum_ssm.explanation.read import Damaged, read

FORMAT = "captum_ssm.flow/1"
# More edges than can be told apart are no picture.
MOST_EDGES = 10_000
KINDS = MIX, SHIFT = ("mix", "shift")

Number = float | None


def check_circuits(example: Example, path: str) -> None:
    """All circuits of an example.

    Raises:
        Damaged: where one holds something else than a flow graph of the example's tokens.
    """
    for i, circuit in enumerate(example.circuits):
        here = f"{path}.circuits[{i}]"
        check_circuit(circuit, here)
        known = len(example.tokens)
        if len(circuit["tokens"]) > known:
            raise Damaged(f"{here}.tokens", circuit["tokens"], f"at most the text's {known} tokens")
        if circuit.get("answer") is None:
            raise Damaged(f"{here}.answer", None, "the text of an answer")


def check_circuit(circuit: Any, path: str = "the graph") -> None:
    """One flow graph.

    Raises:
        Damaged: for another format, numbers that are not finite, and indices out of range.
    """
    graph = _Graph(circuit, path)
    graph.of_tokens()
    graph.of_stream()
    graph.of_edges()
    graph.of_curve()


class _Graph:
    def __init__(self, held: Any, path: str) -> None:
        self.path = path
        self.held: Mapping[str, Any] = read(Mapping[str, Any], held, path)
        self.require(self.held.get("format") == FORMAT, "format", FORMAT)
        self.T = len(self.read(tuple[str, ...], "tokens"))
        layers = self.read(tuple[Mapping[str, Any], ...], "layers")
        self.W = len(layers)
        self.require(self.T > 0, "tokens", "one or more")
        self.require(self.W > 0, "layers", "one or more")
        for i, layer in enumerate(layers):
            for name, kind in (("name", str), ("kind", str), ("heads", int)):
                read(kind, layer.get(name), f"{path}.layers[{i}].{name}")

    def require(self, is_right: bool, name: str, expected: str) -> None:
        if not is_right:
            raise Damaged(f"{self.path}.{name}", self.held.get(name), expected)

    def read(self, kind: Any, name: str) -> Any:
        return read(kind, self.held.get(name), f"{self.path}.{name}")

    def of_tokens(self) -> None:
        at, cause = self.read(int, "at"), self.read(int | None, "cause")
        self.require(0 <= at < self.T, "at", f"0 .. {self.T - 1}")
        self.require(cause is None or 0 <= cause < self.T, "cause", f"None or 0 .. {self.T - 1}")
        for name in ("answer", "against", "predicted"):
            self.read(str | None, name)
        relevance = self.read(tuple[float, ...], "relevance")
        is_right = len(relevance) == self.T and all(map(math.isfinite, relevance))
        self.require(is_right, "relevance", f"{self.T} finite numbers")
        score = self.read(Mapping[str, Any], "score")
        value = read(float, score.get("value"), f"{self.path}.score.value")
        read(str, score.get("of"), f"{self.path}.score.of")
        self.require(math.isfinite(value), "score", "a finite value")

    def of_stream(self) -> None:
        for name, stages, most in (("nodes", self.W + 1, 3), ("stays", self.W, 5)):
            for row in self.read(tuple[tuple[Number, ...], ...], name):
                is_right = 3 <= len(row) <= most + 2 and self._at(row[:2], stages)
                is_right = is_right and row[2] is not None and _finite(row[2:])
                self.require(is_right, name, f"rows of a stage, a token and {most} numbers")

    def of_edges(self) -> None:
        rows = self.read(tuple[Any, ...], "edges")
        self.require(len(rows) <= MOST_EDGES, "edges", f"at most {MOST_EDGES:,}")
        for i, row in enumerate(rows):
            path = f"{self.path}.edges[{i}]"
            expected = "[layer, from, to, relevance, its heads, mix or shift]"
            if not isinstance(row, (list, tuple)) or not 4 <= len(row) <= 6:
                raise Damaged(path, row, expected)
            heads = read(tuple[float, ...] | None, row[4] if len(row) > 4 else None, path)
            kind = row[5] if len(row) > 5 else MIX
            numbers = read(tuple[float, ...], list(row[:4]), path)
            is_right = self._at(numbers[:2], self.W) and self._at((0, numbers[2]), 1)
            if not (is_right and _finite(numbers) and _finite(heads or ()) and kind in KINDS):
                raise Damaged(path, row, expected)
        ranked = self.read(int, "ranked")
        self.require(0 <= ranked <= len(rows), "ranked", f"0 .. {len(rows)}")
        self.require(self.read(int, "of") >= ranked, "of", "at least the ranked edges")
        for i, route in enumerate(self.read(tuple[Mapping[str, Any], ...], "paths")):
            path = f"{self.path}.paths[{i}]"
            share = read(float, route.get("share"), f"{path}.share")
            nodes = read(tuple[tuple[int, int], ...], route.get("nodes"), f"{path}.nodes")
            steps = [step for step, _ in nodes]  # one twice where a token shift is passed
            is_whole = steps == sorted(steps) and {*steps} == {*range(self.W + 1)}
            is_whole = is_whole and all(self._at(node, self.W + 1) for node in nodes)
            if not (is_whole and math.isfinite(share)):
                raise Damaged(path, route, f"a share, and a token at each of {self.W + 1} steps")

    def of_curve(self) -> None:
        curve = self.read(tuple[tuple[int, float], ...] | None, "curve") or ()
        counts = [count for count, _ in curve]
        is_right = counts == sorted({*counts}) and min(counts, default=1) > 0
        is_right = is_right and _finite([share for _, share in curve])
        self.require(is_right, "curve", "growing numbers of edges, each with a finite share")
        held = self.read(float | None, "held")
        self.require(held is None or 0 <= held <= 1.001, "held", "a share")
        alone = self.read(Mapping[str, Any] | None, "alone")
        if alone is not None:
            read(int, alone.get("edges"), f"{self.path}.alone.edges")
            read(bool, alone.get("right"), f"{self.path}.alone.right")

    def _at(self, indices: Sequence[Any], stages: int) -> bool:
        # JSON gives whole numbers.
        limits = zip(indices, (stages, self.T), strict=True)
        return all(isinstance(index, int) and 0 <= index < limit for index, limit in limits)


def _finite(values: Sequence[Number]) -> bool:
    return all(value is None or math.isfinite(value) for value in values)
