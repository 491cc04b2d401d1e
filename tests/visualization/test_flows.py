"""Flow graphs as figures: widths to scale, the path, what is folded, and what is refused."""

from itertools import pairwise

import flow_graphs
import numpy as np
import pages
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from models import ids, tiny

from captum_ssm.attr import RelevanceFlow
from captum_ssm.visualization import flow_graph
from captum_ssm.visualization.flow_layout import FlowLayout

GRAPH = flow_graphs.flow_graph()


def ribbons(figure) -> list[PathPatch]:
    """The edges: lines to scale, without their casing, what stays, and the path."""
    patches = [one for one in figure.axes[0].patches if isinstance(one, PathPatch)]
    return [one for one in patches if not one.get_facecolor()[3] and is_colored(one)]


def is_colored(one: PathPatch) -> bool:
    color = one.get_edgecolor()[:3]
    return max(color) - min(color) > 0.1


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("k", range(7))
def test_edges_are_as_wide_as_their_relevance(k):
    widths = sorted(one.get_linewidth() for one in ribbons(flow_graph(GRAPH, edges=k)))
    sizes = sorted(abs(edge[3]) for edge in GRAPH["edges"][: max(k, 1)])  # one is of the path
    assert len(widths) == len(sizes)
    ratio = np.array(widths)[-1] / sizes[-1]
    np.testing.assert_allclose(widths, np.maximum(0.8, np.array(sizes) * ratio), rtol=1e-6)


def test_what_arrives_is_as_wide_as_what_leaves():
    # All edges are drawn, so each node is covered by both.
    drawn = FlowLayout(GRAPH, 6, None, 500.0)
    into, out = drawn.into, drawn.out
    checked = 0
    for node in set(into) & set(out):
        if any(one.value < 0 for one in (*into[node], *out[node])):
            continue
        arriving = sum(one.value for one in into[node])
        leaving = sum(one.low for one in out[node])
        np.testing.assert_allclose([arriving, leaving], drawn.values[node], rtol=1e-9)
        checked += 1
    assert checked >= 3


def test_the_path_leads_from_the_word_to_the_answer():
    drawn = FlowLayout(GRAPH, 2, None, 500.0)
    links = drawn.along()
    assert links[0].source == (0, 3)
    assert links[-1].target == (3, 15)
    assert all(a.target == b.source for a, b in pairwise(links))
    shown = texts(flow_graph(GRAPH, title="Why yellow?"))
    assert {"yellow", "is", "3", "15", "+6.5", "Why yellow?", "attention"} <= {*shown}
    bold = [t.get_text() for t in flow_graph(GRAPH).axes[0].texts if t.get_weight() == "bold"]
    assert bold.count("yellow") == 2  # the word and the answer
    other = next(n for n, p in enumerate(GRAPH["paths"]) if p["nodes"][0][1] == 2)
    assert FlowLayout(GRAPH, 1, other, 500.0).along()[0].source == (0, 2)


def test_attention_jumps_and_a_recurrence_runs_along():
    drawn = FlowLayout(GRAPH, 6, None, 500.0)
    jumps = {band.first: band.jumps for band in drawn.bands}
    assert jumps == {0: False, 1: False, 2: True}
    lanes = [link.lane for link in drawn.links if not link.is_kept and link.source[0] == 0]
    assert len({*lanes}) == len(lanes) == 3
    assert all(drawn.y[0] < lane < drawn.y[1] for lane in lanes)
    kinds = [set(one.get_path().codes) for one in ribbons(flow_graph(GRAPH, edges=6))]
    assert sum(Path.CURVE4 in kind for kind in kinds) == 2


def test_colors_tell_the_sign():
    colors = [np.array(to_rgb(one.get_edgecolor())) for one in ribbons(flow_graph(GRAPH, edges=6))]
    against = [color for color in colors if color[2] > color[0]]
    assert len(against) == sum(edge[3] < 0 for edge in GRAPH["edges"])


def test_quiet_tokens_and_layers_are_folded():
    graph = flow_graphs.deep()
    drawn = FlowLayout(graph, None, None, 500.0)
    assert len(drawn.tokens) < 30
    assert sum(count for _, count in drawn.gaps) + len(drawn.tokens) == 200
    assert len(drawn.bands) < len(graph["layers"])
    assert any("quiet" in text for text in texts(flow_graph(graph)))


@pytest.mark.parametrize("make", [flow_graphs.shifted, flow_graphs.deep, lambda: GRAPH])
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_it_is_written_in_every_format(make, ending, tmp_path):
    flow_graph(make()).savefig(tmp_path / f"circuit.{ending}")
    assert (tmp_path / f"circuit.{ending}").stat().st_size > 5000


def test_a_path_goes_along_a_token_shift():
    drawn = FlowLayout(flow_graphs.shifted(), None, 5, 400.0)
    shift, *others = drawn.along()
    assert (shift.source, shift.target) == ((0, 2), (0, 3))
    assert shift.is_shift
    assert not any(link.is_shift for link in others)
    assert shift.lane > shift.y[0] == shift.y[1]
    assert "+5" in texts(flow_graph(flow_graphs.shifted(), path=5))
    assert "+5" not in texts(flow_graph(flow_graphs.shifted(), path=0))


def test_it_draws_what_the_method_returns(tmp_path):
    model = tiny("mamba")
    graph = RelevanceFlow(model).graph(ids(7)[:1], target=5)
    graph = graph.with_tokens([f"w{k}" for k in range(graph.nodes.shape[-1])])
    one, other = flow_graph(graph, edges=3), flow_graph(graph.to_dict(), edges=3)
    assert texts(one) == texts(other)
    assert [p.get_linewidth() for p in ribbons(one)] == [p.get_linewidth() for p in ribbons(other)]
    assert torch.isfinite(graph.nodes).all()


def test_hostile_tokens_are_texts(tmp_path):
    words = [pages.HOSTILE[k % len(pages.HOSTILE)] for k in range(len(flow_graphs.WORDS))]
    words[3] = "$x$"
    figure = flow_graph(flow_graphs.flow_graph(words, "$\\frac{1$"), title="$y")
    figure.savefig(tmp_path / "hostile.svg")
    assert "<img" not in (tmp_path / "hostile.svg").read_text()


def test_a_graph_without_edges_is_a_token_that_stays():
    figure = flow_graph(flow_graphs.flow_graph(reads={}))
    assert ribbons(figure) == []
    assert "is" in texts(figure)


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match=r"expected a FlowGraph.*captum_ssm.flow/1"):
        flow_graph({"nodes": []})
    with pytest.raises(TypeError, match="graph is list"):
        flow_graph([1, 2])
    with pytest.raises(ValueError, match=r"edges is 99; expected 0 \.\. 6"):
        flow_graph(GRAPH, edges=99)
    with pytest.raises(ValueError, match=r"path is 7; expected 0 \.\. "):
        flow_graph(GRAPH, path=7)
    with pytest.raises(ValueError, match="NaN or Inf"):
        flow_graph(GRAPH | {"nodes": [[0, 0, float("nan")]]})
