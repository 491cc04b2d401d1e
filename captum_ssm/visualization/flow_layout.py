"""Where the nodes and edges of a flow graph are drawn: in points, from the lower left corner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FlowNode = tuple[int, int]  # of a node: its stage and its token

WIDEST, THINNEST = 26.0, 0.8  # of nodes and edges
LEFT, RIGHT = 62.0, 10.0  # room for the names of layers
GAP, COLUMN = 26.0, 16.0  # between tokens where some are left out, and of a token, at least
QUIET, RUN, JUMP, LANE = 16.0, 44.0, 66.0, 4.0  # heights of layers, and between edges in one
ABOVE, BELOW, TURNED = 36.0, 34.0, 64.0  # the answer, and names of tokens, level or turned
LETTER = 5.2  # the width of a letter
HELD, CARRIED, MOST = 0.6, 0.9, 24  # what is shown unless it is asked for


@dataclass
class FlowLink:
    """An edge, or what a token keeps, between two nodes.

    Args:
        source, target (tuple): ``(stage, token)``.
        value (float): relevance where it arrives; ``low`` is that where it leaves.
        is_kept (bool): whether it is what a token keeps.
    """

    source: FlowNode
    target: FlowNode
    value: float
    low: float
    is_kept: bool = False
    x: tuple[float, float] = (0.0, 0.0)
    y: tuple[float, float] = (0.0, 0.0)
    lane: float | None = None
    width: float = 0.0

    @property
    def is_shift(self) -> bool:
        """Whether it is a token shift, before the edges of a layer begin."""
        return self.source[0] == self.target[0]


@dataclass(frozen=True)
class FlowBand:
    """A layer, or several in which no edge is drawn, between two heights."""

    first: int
    end: int
    low: float
    high: float
    links: list[FlowLink]
    jumps: bool


@dataclass
class FlowLayout:
    """A drawing of the largest edges of a flow graph and of one path.

    Args:
        data (dict): of the format captum_ssm.flow/1.
        edges (int or None): how many edges.
        path (int or None): which path.
        width (float): in points.
    """

    data: Mapping[str, Any]
    edges: int | None
    path: int | None
    width: float
    links: list[FlowLink] = field(default_factory=list)
    bands: list[FlowBand] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.W = len(self.data["layers"])
        self.values = {(s, t): value for s, t, value, *_ in self.data["nodes"]}
        self.told = self._told()
        self.reads = self._reads()
        self._link()
        self._scale()
        self._columns()
        self._ends()
        self._rows()

    def _told(self) -> list[FlowNode]:
        # The path that is asked for, or the likeliest from another token than the output's.
        paths = [[(s, t) for s, t in path["nodes"]] for path in self.data["paths"]]
        if self.path is not None:
            if not 0 <= self.path < len(paths):
                raise ValueError(f"path is {self.path}; expected 0 .. {len(paths) - 1}, or None.")
            return paths[self.path]
        others = [path for path in paths if path[0][1] != self.data["at"]]
        return next(iter(others or paths), [])

    def _reads(self) -> list[Sequence[Any]]:
        mixes = [row for row in self.data["edges"] if len(row) < 6 or row[5] == "mix"]
        ranked = mixes[: self.data["ranked"]]
        if self.edges is not None and not 0 <= self.edges <= len(ranked):
            raise ValueError(f"edges is {self.edges}; expected 0 .. {len(ranked)}, or None.")
        chosen = ranked[: _opening(self.data, ranked) if self.edges is None else self.edges]
        pairs = list(pairwise(self.told))
        steps = {(s, j, i) for (s, j), (end, i) in pairs if i != j and end > s}
        have = {tuple(row[:3]) for row in chosen}
        return chosen + [row for row in mixes if tuple(row[:3]) in steps - have]

    def _shifts(self) -> list[Sequence[Any]]:
        # The token shifts that the path goes along.
        steps = {(s, j, i) for (s, j), (end, i) in pairwise(self.told) if end == s}
        return [row for row in self.data["edges"] if row[5:] == ["shift"] and (*row[:3],) in steps]

    def _link(self) -> None:
        top = {self.data["at"]: self.W} | ({self.told[0][1]: 0} if self.told else {})
        top[self.data["at"]] = self.W
        shifts = self._shifts()
        for s, j, i, *_ in (*self.reads, *shifts):
            top[j], top[i] = max(top.get(j, 0), s), max(top.get(i, 0), s + 1)
        active = {row[0] for row in (*self.reads, *shifts)}
        self.stages = [s for s in range(self.W + 1) if {s - 1, s} & active or s in (0, self.W)]
        self.tokens = sorted(top)
        kept = {(s, t): value for s, t, value, *_ in self.data["stays"]}
        for t in self.tokens:
            drawn = [s for s in self.stages if s <= top[t]]
            for low, high in pairwise(drawn):
                first, last = kept.get((low, t), 0.0), kept.get((high - 1, t), 0.0)
                self.links.append(FlowLink((low, t), (high, t), last, first, is_kept=True))
        for s, j, i, value, *_ in self.reads:
            self.links.append(FlowLink((s, j), (s + 1, i), value, value))
        for s, j, i, value, *_ in shifts:
            self.links.append(FlowLink((s, j), (s, i), value, value))
        self.nodes = list(
            dict.fromkeys(p for link in self.links for p in (link.source, link.target))
        )
        self.nodes = self.nodes or [(self.W, self.data["at"])]
        self.busy = {
            p for link in self.links if not link.is_kept for p in (link.source, link.target)
        }
        self.busy |= {(0, t) for t in self.tokens} | {(self.W, self.data["at"])}
        self._sides()

    def _sides(self) -> None:
        # What arrives at each node, and what leaves it, from left to right.
        self.into: dict[FlowNode, list[FlowLink]] = {}
        self.out: dict[FlowNode, list[FlowLink]] = {}
        links = [link for link in self.links if not link.is_shift]
        for link in sorted(links, key=lambda one: one.source[1]):
            self.into.setdefault(link.target, []).append(link)
        for link in sorted(links, key=lambda one: (not one.is_kept, one.target[1])):
            self.out.setdefault(link.source, []).append(link)

    def _scale(self) -> None:
        sizes = [abs(self.values.get(node, 0.0)) for node in self.nodes]
        sizes += [sum(abs(link.value) for link in side) for side in self.into.values()]
        sizes += [sum(abs(link.low) for link in side) for side in self.out.values()]
        self.unit = WIDEST / max([*sizes, 1e-12])
        for link in self.links:
            link.width = self.thick(link.value)

    def thick(self, value: float) -> float:
        """How wide a relevance is drawn."""
        return max(THINNEST, abs(value) * self.unit)

    def _columns(self) -> None:
        names = [len(self.data["tokens"][t].strip()) * LETTER + 10 for t in self.tokens]
        flow = dict.fromkeys(self.tokens, 0.0)
        for s, t in self.nodes:
            flow[t] = max(flow[t], self.node_width((s, t)) + 8)
        ends = [-1, *self.tokens, len(self.data["tokens"])]
        skipped = [b - a - 1 for a, b in pairwise(ends)]
        holes = sum(1 for count in skipped if count)
        level = [max(COLUMN, n, flow[t]) for n, t in zip(names, self.tokens, strict=True)]
        room = self.width - LEFT - RIGHT
        self.is_turned = sum(level) + holes * GAP > room
        widths = [max(COLUMN, flow[t]) for t in self.tokens] if self.is_turned else level
        gap = min(GAP, max(8.0, (room - sum(widths)) / max(1, holes)))
        extra = max(0.0, (room - sum(widths) - gap * holes) / len(widths))
        self.width = max(self.width, sum(widths) + gap * holes + LEFT + RIGHT)
        self.x: dict[int, float] = {}
        x = LEFT
        for t, width, count in zip(self.tokens, widths, skipped, strict=False):
            if count:
                self.gaps.append((x + gap / 2, count))
                x += gap
            self.x[t] = x + (width + extra) / 2
            x += width + extra
        if skipped[-1]:
            self.gaps.append((x + gap / 2, skipped[-1]))

    def node_width(self, node: FlowNode) -> float:
        """As wide as its relevance, or as what is drawn at it."""
        return max(
            3.0,
            self.thick(self.values.get(node, 0.0)),
            sum(link.width for link in self.into.get(node, ())),
            sum(self.thick(link.low) for link in self.out.get(node, ())),
        )

    def _ends(self) -> None:
        for link in self.links:
            link.x = self.x[link.source[1]], self.x[link.target[1]]
        for node in self.nodes:
            x = self.x[node[1]]
            arriving, leaving = self.into.get(node, []), self.out.get(node, [])
            left = x - sum(link.width for link in arriving) / 2
            for link in arriving:
                link.x = link.x[0], left + link.width / 2
                left += link.width
            left = x - sum(self.thick(link.low) for link in leaving) / 2
            for link in leaving:
                link.x = left + self.thick(link.low) / 2, link.x[1]
                left += self.thick(link.low)

    def _rows(self) -> None:
        y = TURNED if self.is_turned else BELOW
        self.y = {0: y}
        for first, end in pairwise(self.stages):
            links = [link for link in self.links if not link.is_kept and link.source[0] == first]
            jumps = bool(links) and self.data["layers"][first]["kind"] != "recurrence"
            needed = sum(link.width + LANE for link in links) + 20
            height = QUIET if not links else JUMP if jumps else max(RUN, needed)
            if links and not jumps:
                _lanes(links, y + (height - needed) / 2 + 10 + LANE / 2)
            self.bands.append(FlowBand(first, end, y, y + height, links, jumps))
            y += height
            self.y[end] = y
        self.height = y + ABOVE
        for link in self.links:
            link.y = self.y[link.source[0]], self.y[link.target[0]]

    def along(self) -> list[FlowLink]:
        """The links of the path, from the text to the answer."""
        drawn = []
        for (s, j), (end, i) in pairwise(self.told):
            for link in self.links:
                first, last = link.source[0], link.target[0]
                covers = first == s == last if end == s else first <= s < last
                covers = covers and link not in drawn
                if covers and link.source[1] == j and link.target[1] == i:
                    drawn.append(link)
                    break
        return drawn


def _lanes(links: Sequence[FlowLink], y: float) -> None:
    # Edges that begin further to the right lie lower, so that edges of one source do not cross.
    for link in sorted(links, key=lambda one: (-one.source[1], one.target[1])):
        link.lane = y + link.width / 2
        y += link.width + LANE


def _opening(data: Mapping[str, Any], ranked: Sequence[Sequence[Any]]) -> int:
    # The fewest edges with a large share: of the score by runs, else of all magnitudes.
    curve = data.get("curve")
    if curve:
        wanted = [k for k, share in curve if share >= CARRIED and k <= min(MOST, len(ranked))]
        return wanted[0] if wanted else min(MOST, len(ranked))
    sizes = [abs(row[3]) for row in ranked]
    whole = sum(sizes) / (data.get("held") or 1.0)
    held = 0.0
    for k, size in enumerate(sizes[:MOST]):
        held += size
        if held >= HELD * whole:
            return k + 1
    return min(MOST, len(ranked))
