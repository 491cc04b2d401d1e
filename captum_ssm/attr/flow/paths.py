"""Paths through a flow graph, from an input token to the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

# Steps of a smaller share of what arrives at a node are not followed.
_LEAST = 1e-3


@dataclass(frozen=True)
class Path:
    """One way from an input token to the output.

    Args:
        share (float): the product of the shares of its steps.
        nodes (list of tuple): ``(stage, token)``, from the input to the output. Two of one stage
            are joined by a token shift of the layer that follows.
        relevance (list of float): of each step.
    """

    share: float
    nodes: list[tuple[int, int]]
    relevance: list[float]

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """The steps, as ``(layer, source, target)``; a token that stays is its own source."""
        return [(s, j, i) for (s, j), (_, i) in pairwise(self.nodes)]

    def words(self, tokens: Sequence[str]) -> str:
        """The path as a sentence, such as ``'dog' (44) -> 'duck' (47) by layer 1 (+4.9)``."""
        text = f"'{tokens[self.nodes[0][1]]}' ({self.nodes[0][1]})"
        for ((s, j), (end, i)), value in zip(pairwise(self.nodes), self.relevance, strict=True):
            if i == j:
                text += f" stays in layer {s} ({value:+.2g})"
            else:
                way = f"the token shift of layer {s}" if end == s else f"layer {s}"
                text += f" -> '{tokens[i]}' ({i}) by {way} ({value:+.2g})"
        return text


@dataclass(frozen=True)
class Steps:
    """What arrives at the tokens after each layer, ``(W, L)`` each.

    Args:
        stays (Tensor): from the same token.
        positive (Tensor): by all positive edges from others.
        edges (list of tuple): ``(layer, target, source, relevance)`` of the edges that are known.
        nodes (Tensor): before the layer.
        shifts (dict of int to Tensor): by offset o, what token t is given by token t - o before the
            edges of a layer begin.
        at (sequence of int): the output's tokens.
    """

    stays: Tensor
    positive: Tensor
    edges: list[tuple[int, int, int, float]]
    nodes: Tensor
    shifts: Mapping[int, Tensor]
    at: Sequence[int]

    def arriving(self, layer: int) -> dict[int, list[tuple[int, float, float]]]:
        """By token after a layer, what arrives: ``(source, relevance, share)``, the stay first."""
        stays = self.stays[layer].tolist()
        total = (self.positive[layer] + self.stays[layer].clamp(min=0)).clamp(min=1e-12).tolist()
        by_token = {
            i: [(i, stay, stay / total[i])] if stay > _LEAST * total[i] else []
            for i, stay in enumerate(stays)
        }
        for s, target, source, value in self.edges:
            if s == layer and value > _LEAST * total[target]:
                by_token[target].append((source, value, value / total[target]))
        return by_token

    def shifted(self, layer: int, token: int) -> list[tuple[int, float, float]]:
        """Where what a token's edges begin with is from: as :meth:`arriving`, its own first."""
        L = self.nodes.shape[1]
        incoming = {o: float(moved[layer, token]) for o, moved in self.shifts.items()}
        away = [float(x[layer, token + o]) for o, x in self.shifts.items() if 0 <= token + o < L]
        remaining = float(self.nodes[layer, token]) - sum(away)
        parts = [(token, remaining), *((token - o, value) for o, value in incoming.items())]
        total = sum(max(0.0, value) for _, value in parts)
        return [(j, value, value / total) for j, value in parts if value > _LEAST * total]


def likeliest_paths(steps: Steps, count: int, source: int | None) -> list[Path]:
    """The likeliest paths from an input token, or from ``source``, to the output."""
    W = len(steps.stays)
    best = {t: [Path(1.0 / len(steps.at), [(W, t)], [])] for t in steps.at}
    for s in reversed(range(W)):
        before: dict[int, list[Path]] = {}
        into = steps.arriving(s)
        for i, ways in best.items():
            for j, value, share in into[i]:
                before.setdefault(j, []).extend(_longer(way, s, j, value, share) for way in ways)
        best = _likeliest(_through_shifts(steps, s, before) if steps.shifts else before, count)
    ends = best.values() if source is None else [best.get(source, [])]
    return sorted((way for ways in ends for way in ways), key=_by_share)[:count]


def _likeliest(ways: Mapping[int, list[Path]], count: int) -> dict[int, list[Path]]:
    return {j: sorted(of_token, key=_by_share)[:count] for j, of_token in ways.items()}


def _through_shifts(steps: Steps, s: int, ways: Mapping[int, list[Path]]) -> dict[int, list[Path]]:
    # By token before a layer, ways from there to where its edges begin, and on.
    by_token: dict[int, list[Path]] = {}
    for token, of_token in ways.items():
        for j, value, share in steps.shifted(s, token):
            by_token.setdefault(j, []).extend(
                replace(way, share=way.share * share)
                if j == token
                else _longer(way, s, j, value, share)
                for way in of_token
            )
    return by_token


def _longer(way: Path, s: int, j: int, value: float, share: float) -> Path:
    return Path(way.share * share, [(s, j), *way.nodes], [value, *way.relevance])


def _by_share(way: Path) -> float:
    return -way.share


def joined(
    candidates: Sequence[tuple[float, int, int, int]], at: Sequence[int], layers: int
) -> list[int]:
    """An order of edges in which each is joined to the output by those before it.

    The largest edge is taken first whose target leads to the output; edges that never do are left
    out.

    Args:
        candidates (sequence of tuple): ``(relevance, layer, target, source)``.
        at (sequence of int): the tokens that the output is read at.
        layers (int): W.
    """
    live = dict.fromkeys(at, layers)  # by token, the last stage at which it leads to the output
    waiting = sorted(range(len(candidates)), key=lambda n: -abs(candidates[n][0]))
    order: list[int] = []
    while waiting:
        for index, n in enumerate(waiting):
            _, layer, target, source = candidates[n]
            if live.get(target, -1) > layer:
                live[source] = max(live.get(source, -1), layer)
                order.append(n)
                del waiting[index]
                break
        else:
            break
    return order
