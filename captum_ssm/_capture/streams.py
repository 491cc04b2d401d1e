"""Which mixers a residual stream goes around, read off the graph between them."""

from __future__ import annotations

from collections.abc import Sequence

from captum_ssm._capture.mixer_graph import ADVICE, MixerGraph
from captum_ssm._capture.wiring import INPUT
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import CutGraph


class ResidualStreams:
    """The residual streams of one run.

    Args:
        graph (MixerGraph): the run.
    """

    def __init__(self, graph: MixerGraph) -> None:
        self.graph, self.groups, self.direct = graph, graph.groups, graph.direct
        self.leaves = graph.exits | {INPUT - k: way.leaf for k, way in enumerate(graph.ways)}
        self.keys = list(self.leaves)
        self.entries = {i: entry for i, entry in graph.entries.items() if entry is not None}
        self.cut = CutGraph(list(self.entries.values()), list(self.leaves.values()))
        # By entry, the mixers and inputs that it reads by way of no other mixer.
        self.read = {i: self._named(self.cut.read_by(entry)) for i, entry in self.entries.items()}

    def around(self, stage: int, *, finer: bool) -> tuple[int, ...]:
        """How many stages before this one the residual streams leave that go around it.

        What is added to the tokens that the stage returns reads some mixers and inputs by way of no
        other mixer. A stream leaves before the stage that reads the same ones.

        Args:
            stage (int): the stage.
            finer (bool): whether there are finer tokens elsewhere, as in a U-shape.

        Raises:
            UnsupportedModelError: where what is added is no such stream, or not the same for all
                that read the stage.
        """
        group = self.groups[stage]
        nexts = [i for i in self.entries if self.direct[i] & set(group)]
        if any(i not in self.entries for i in group) or not nexts or min(self.leaves) >= 0:
            return (0,)  # not recorded
        found = {self._added(group, i, finer) for i in nexts}
        if len(found) > 1:
            raise self._refused(
                group,
                "returns tokens that are read with a residual stream here and without it, or with "
                "another one, there; expected the same for all that read them.",
            )
        (added,) = found
        rest, streams = added, []
        for back in range(stage + 1):
            first = self.groups[stage - back][0]
            read = self.read.get(first, frozenset())
            if read & rest and read <= added and self.graph.is_same_grid(group[0], first):
                streams.append(back)
                rest = rest - read
        if not rest:
            return tuple(streams)
        raise self._refused(
            group,
            "returns tokens to which others are added that no mixer before it was given; expected "
            "a residual stream around it, or around it and the mixers before it.",
        )

    def is_given(self, stage: int) -> bool | None:
        """Whether a stage's mixers are given the residual stream itself; None if that is unknown.

        They are not where they are given what a norm makes of it.
        """
        group = self.groups[stage]
        given = self.entries.get(group[0])
        passed = [self.keys.index(j) for j in group]
        nexts = [root for i, root in self.entries.items() if self.direct[i] & set(group)]
        if given is None or not nexts:
            return None
        return any(self.cut.is_added(root, passed, given) for root in nexts)

    def _added(self, group: Sequence[int], i: int, finer: bool) -> frozenset[int]:
        # What is read by that which is added between a group and an entry that reads it.
        before: set[int] = set()  # all that the group depends on
        stack = list(group)
        while stack:
            new = self.read.get(stack.pop(), frozenset()) - before
            before |= new
            stack.extend(new)
        passed, known = ([self.keys.index(j) for j in some] for some in (group, before))
        tokens = self.leaves[group[0]].tokens if finer else None
        return self._named(self.cut.added(self.entries[i], passed, known, tokens))

    def _refused(self, group: Sequence[int], how: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.graph.name(group[0])} {how} {ADVICE}")

    def _named(self, found: frozenset[int]) -> frozenset[int]:
        return frozenset(self.keys[k] for k in found)
