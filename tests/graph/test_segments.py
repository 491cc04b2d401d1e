"""What joins on the way from some leaves to a later tensor, in graphs written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captum_ssm.graph.points import Point
from captum_ssm.graph.segments import Around, SegmentGraph

TOKENS, E = 5, 4
FIRST, SECOND, MIXER, FINER = range(4)


def leaves() -> list[Tensor]:
    """Three leaves of equally many tokens, and one of twice as many."""
    generator = torch.Generator().manual_seed(0)
    sizes = (TOKENS, TOKENS, TOKENS, 2 * TOKENS)
    made = (torch.randn(1, size, E, generator=generator) for size in sizes)
    return [x.requires_grad_().clone() for x in made]


def around(root: Tensor, cut: list[Tensor], passed: int = MIXER) -> Around:
    graph = SegmentGraph({name: Point.of(x) for name, x in enumerate(cut)})
    return graph.around(Point.of(root), [passed])


def merged(x: Tensor) -> Tensor:
    return x.unflatten(1, (TOKENS, 2)).sum(2)


WAYS = {
    "nothing": (lambda a, b, m, f: m.tanh(), []),
    "a stream": (lambda a, b, m, f: a + m, [({FIRST}, False)]),
    "a stream of two": (lambda a, b, m, f: (a + b) + m.tanh(), [({FIRST, SECOND}, False)]),
    "two streams": (lambda a, b, m, f: a + (b - 2 * m), [({FIRST}, False), ({SECOND}, False)]),
    "a gate": (lambda a, b, m, f: a.sigmoid() * m, [({FIRST}, True)]),
    "a gate that is added too": (lambda a, b, m, f: a * m + a, [({FIRST}, False)]),
    "what the mixer is a gate of": (lambda a, b, m, f: m.sigmoid() * a, [({FIRST}, False)]),
    "other tokens": (lambda a, b, m, f: m + merged(f), [({FINER}, False)]),
}


@pytest.mark.parametrize(("way", "expected"), WAYS.values(), ids=WAYS)
def test_all_that_joins_is_found_with_what_it_is_made_of(way, expected):
    cut = leaves()
    sides = around(way(*cut), cut).sides
    assert sorted((sorted(side.read), side.is_factor) for side in sides) == [
        (sorted(read), is_factor) for read, is_factor in expected
    ]


def test_sides_are_all_that_a_root_reads_past_the_leaves():
    # With the tensors that join held constant, nothing but the mixer's leaf has a gradient.
    cut = leaves()
    a, b, m, f = cut
    stream, skip = a.tanh() + b, merged(f.tanh())
    root = (stream + m.tanh()) * b.sigmoid() + skip
    edges = [side.edge for side in around(root, cut).sides]
    total = torch.autograd.grad(root.sum(), cut, retain_graph=True)
    by_sides = torch.autograd.grad(root.sum(), edges, retain_graph=True)
    parts = torch.autograd.grad(edges, cut, by_sides, retain_graph=True, allow_unused=True)
    assert parts[MIXER] is None
    for k in (FIRST, SECOND, FINER):
        torch.testing.assert_close(parts[k], total[k])


def test_a_tensor_that_is_added_itself_is_told_from_what_is_made_of_it():
    cut = leaves()
    a, _, m, _ = cut
    stream = a.tanh()
    for root, adds in ((stream + m, True), (2 * (m - stream), True), (stream.exp() + m, False)):
        assert around(root, cut).adds(Point.of(stream)) is adds


def test_the_first_sum_is_the_one_before_all_others():
    cut = leaves()
    a, b, m, _ = cut
    first = a + m.tanh()
    (edge,) = around(b + first.tanh(), cut).first_sums
    assert edge.node is first.grad_fn


def test_streams_and_skips_leave_the_graph_before_a_mixer_where_it_ends():
    cut = leaves()
    a, _, m, f = cut
    finer = f.tanh()
    stream = a + merged(finer)
    entry = Point.of(stream.exp())
    root = (m + stream) + merged(finer * 2)
    graph = SegmentGraph({name: Point.of(x) for name, x in enumerate(cut)})
    joints = graph.around(Point.of(root), [MIXER]).joints(graph.before([entry]), TOKENS)
    assert [edge.node for edge in joints.stream] == [stream.grad_fn]
    assert [edge.node for edge in joints.skips] == [finer.grad_fn]
    assert not joints.leaves


def test_a_sum_of_states_and_of_the_stream_is_taken_apart():
    cut = leaves()
    a, b, m, _ = cut
    state, stream = a.tanh(), a.tanh() + b.tanh()
    before = [Point.of(stream.exp()), Point.of(state)]
    graph = SegmentGraph({name: Point.of(x) for name, x in enumerate(cut)})
    # The stream itself joins as well, so that the sum is told from it.
    root = (m + (0.5 * state + 0.25 * stream)) + stream
    sides = graph.around(Point.of(root), [MIXER]).parted(graph.before(before))
    assert sorted(sorted(side.read) for side in sides) == [
        [FIRST],
        [FIRST, SECOND],
        [FIRST, SECOND],
    ]
