"""Which mixers a residual stream goes around, read off the graph between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import CutGraph, Point


class ResidualStreams:
    """The residual streams of one run, whose graph is cut at its mixers.

    Args:
        groups (sequence of sequence of int): the mixers of each stage.
        entries (dict of int to Point): by mixer, and for the output (the last key), the tokens that
            it was given.
        leaves (dict of int to Point): by mixer and by input, the tokens that it returned.
        direct (dict of int to frozenset): by entry, the mixers nearest before it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        entries: Mapping[int, Point],
        leaves: Mapping[int, Point],
        direct: Mapping[int, frozenset[int]],
    ) -> None:
        self.groups, self.entries, self.leaves, self.direct = groups, entries, leaves, direct
        self.keys = list(leaves)
        self.graph = CutGraph(list(entries.values()), list(leaves.values()))
        # By entry, the mixers and inputs that it reads by way of no other mixer.
        self.read = {i: self._named(self.graph.read_by(entry)) for i, entry in entries.items()}

    def around(
        self, stage: int, in_place: Callable[[int, int], bool], *, finer: bool
    ) -> tuple[int, ...]:
        """How many stages before this one the residual streams leave that go around it.

        What is added to the tokens that the stage returns reads some mixers and inputs by way of no
        other mixer. A stream leaves before the stage that reads the same ones.

        Args:
            stage (int): the stage.
            in_place (Callable): whether one mixer's tokens are those of an earlier one.
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
            raise UnsupportedModelError(
                "returns tokens that are read with a residual stream here and without it, or with "
                "another one, there; expected the same for all that read them."
            )
        (added,) = found
        rest, streams = added, []
        for back in range(stage + 1):
            first = self.groups[stage - back][0]
            read = self.read.get(first, frozenset())
            if read & rest and read <= added and in_place(group[0], first):
                streams.append(back)
                rest = rest - read
        if not rest:
            return tuple(streams)
        raise UnsupportedModelError(
            "returns tokens to which others are added that no mixer before it was given; expected "
            "a residual stream around it, or around it and the mixers before it."
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
        return any(self.graph.is_added(root, passed, given) for root in nexts)

    def _added(self, group: Sequence[int], i: int, finer: bool) -> frozenset[int]:
        # What is read by that which is added between a group and an entry that reads it.
        passed = [self.keys.index(j) for j in group]
        before = [self.keys.index(j) for j in self._before(group)]
        tokens = self.leaves[group[0]].tokens if finer else None
        return self._named(self.graph.added(self.entries[i], passed, before, tokens))

    def _before(self, group: Sequence[int]) -> set[int]:
        # All mixers and inputs that a group depends on.
        found: set[int] = set()
        stack = list(group)
        while stack:
            new = self.read.get(stack.pop(), frozenset()) - found
            found |= new
            stack.extend(new)
        return found

    def _named(self, found: frozenset[int]) -> frozenset[int]:
        return frozenset(self.keys[k] for k in found)
