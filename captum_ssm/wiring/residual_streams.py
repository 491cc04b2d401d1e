"""Which mixers a residual stream goes around, read off the graph between them."""

from __future__ import annotations

from collections.abc import Sequence

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.segments import times_finer
from captum_ssm.wiring.mixer_graph import ADVICE, MixerGraph


def streams_around(graph: MixerGraph, step: int, *, finer: bool) -> tuple[int, ...]:
    """How many steps before a step the residual streams leave that go around it.

    What is added to the tokens that the step returns reads some mixers and inputs by way of no
    other mixer. A stream leaves before the step that reads the same ones.

    Args:
        graph (MixerGraph): the run, with the grids of its tokens.
        step (int): the step.
        finer (bool): whether there are finer tokens elsewhere, as in a U-shape.

    Raises:
        UnsupportedModelError: where what is added is no such stream, or not the same for all that
            read the step.
    """
    group, nexts = graph.groups[step], _nexts(graph, step)
    if any(graph.entries[i] is None for i in group) or not nexts or not graph.inputs:
        return (0,)  # not recorded
    before = frozenset[int]().union(*(graph.before[i] for i in group))
    tokens = graph.exits[group[0]].tokens if finer else None
    additions = {_added(graph, root, group, before, tokens) for root in nexts}
    name = graph.name(group[0])
    if len(additions) > 1:
        raise UnsupportedModelError(
            f"{name} returns tokens that are read with a residual stream here and without it, "
            f"or with another one, there; expected the same for all that read them. {ADVICE}"
        )
    (added,) = additions
    if added and all(_is_taken_off(graph, step, root, added) for root in nexts):
        return ()
    rest, streams = added, []
    for back in range(step + 1):
        first = graph.groups[step - back][0]
        read = graph.read_by(first)
        if read & rest and read <= added and graph.is_same_grid(group[0], first):
            streams.append(back)
            rest = rest - read
    if not rest:
        return tuple(streams)
    raise UnsupportedModelError(
        f"{name} returns tokens to which others are added that no mixer before it was given; "
        f"expected a residual stream around it, or around it and the mixers before it. {ADVICE}"
    )


def is_given_stream(graph: MixerGraph, step: int) -> bool | None:
    """Whether a step's mixers are given the residual stream itself; None if that is unknown.

    They are not where they are given what a norm makes of it.
    """
    group, nexts = graph.groups[step], _nexts(graph, step)
    entry = graph.entries[group[0]]
    if entry is None or not nexts:
        return None
    return any(graph.cut.around(root, group).adds(entry) for root in nexts)


def _added(
    graph: MixerGraph,
    root: Point,
    group: Sequence[int],
    before: frozenset[int],
    tokens: int | None,
) -> frozenset[int]:
    # What is added reads, on the way from a step to a root. Finer tokens are those of a skip.
    sides = graph.cut.around(root, group).added
    if tokens is not None:
        sides = [side for side in sides if times_finer(side.edge, tokens) < 2]
    return frozenset().union(*(side.read for side in sides if side.read <= before))


def _is_taken_off(graph: MixerGraph, step: int, root: Point, added: frozenset[int]) -> bool:
    # Whether what is added to a step's tokens is subtracted again before they are read.
    sides = graph.cut.around(root, graph.groups[step]).added
    if sum(len(side.nodes) for side in sides) < 2:
        return False
    pulled = gradients([root], [root.noise()], [graph.leaf(i) for i in added])
    return not any(gradient is not None and bool(gradient.any()) for gradient in pulled)


def _nexts(graph: MixerGraph, step: int) -> list[Point]:
    # What is given to those that read a step.
    group = set(graph.groups[step])
    return [root for i, root in graph.entries.items() if root and graph.direct[i] & group]
