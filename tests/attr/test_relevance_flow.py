"""The relevance of edges: its books, brute force, and the graph that it forms."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import wild
from families import FAMILIES, build, padded, skip_what_fails_by_itself
from models import ids
from torch import Tensor
from vision_models import images, small

import captum_ssm
from captum_ssm import MambaLRP, RelevanceFlow, TargetError
from captum_ssm.attr.flow.activations import ActivationStandIns, PropagatedRun, ScaledStandIns
from captum_ssm.attr.flow.graph import FlowGraph
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance import coefficients_at
from captum_ssm.attr.relevance_stand_ins import with_leaves

L = 9
# What books may miss of all that flows at their largest token, in float32.
ROUNDING = 5e-7


@pytest.mark.filterwarnings("ignore:.*reads the padding", "ignore:relevance goes through")
@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_edges_skip_gate_and_biases_are_the_relevance_of_what_a_mixer_returns(family, side):
    skip_what_fails_by_itself(family, L, side)
    model = build(family)
    extra = None if side is None else {"attention_mask": padded(side, length=L)}
    for formulation in ("hidden", "unified"):
        flow = RelevanceFlow(model)
        edges = flow.edges(ids(2, L), 5, extra, formulation=formulation)
        for layer in edges.values():
            assert layer.out.any()
            matrix = layer.matrix()
            into = matrix.sum(2) + layer.skip + layer.gate + layer.bias
            out_of = matrix.sum(1) + layer.skip
            parts = layer.skip.abs() + layer.gate.abs() + layer.bias.abs()
            sizes = [matrix.abs().sum(k) + parts for k in (1, 2)]
            most = ROUNDING * float(torch.stack(sizes).max())
            torch.testing.assert_close(into, layer.out, rtol=0, atol=most)
            torch.testing.assert_close(out_of, layer.drawn, rtol=0, atol=most)
        assert max(max(pair) for pair in edges.errors.values()) < 2e-6  # of what arrives in all


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next", "recurrent_gemma"])
def test_attribute_and_the_edges_relevance_are_those_of_mamba_lrp(family):
    model, tokens = build(family), ids(2, L)
    expected, delta = MambaLRP(model).attribute(tokens, 5, return_convergence_delta=True)
    flow = RelevanceFlow(model)
    found, same = flow.attribute(tokens, 5, return_convergence_delta=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(same, delta, rtol=0, atol=0)
    edges = flow.edges(tokens, 5, against=None)
    torch.testing.assert_close(edges.relevance, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(edges.score, expected.sum(1) + delta, rtol=1e-5, atol=1e-6)


class _OneEdge(ActivationStandIns):
    # Each scan returns a share of one edge more, which is zero, and whose gradient is asked for.
    def __init__(self, request, share: Tensor, edge: tuple[int, int, int]) -> None:
        super().__init__(request)
        self.share, self.edge = share, edge

    def rebuilt(self, mixer, call):
        layer, i, j = self.edge
        if len(self.made_of) != layer:
            return super().rebuilt(mixer, call)
        frozen, share = mixer.detach_coefficients(), self.share
        (scan, _, _), *others = frozen.scans_in_order()
        assert not others
        mixed, v = scan.mixed, scan.values.detach()
        alpha = scan.recurrence.detach().matrix()  # (B, M, L, L)
        carried = alpha[:, :, i, j].repeat_interleave(v.shape[-1] // alpha.shape[1], 1) * v[:, j]
        added = torch.zeros_like(mixed).index_copy(1, torch.tensor([i]), carried[:, None])
        frozen.__dict__["mixed"] = mixed + share * added
        return super().rebuilt_of(frozen, call)


@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "qwen3_next", "recurrent_gemma", "jamba", "minimax"]
)
def test_an_edge_is_the_gradient_of_its_own_share_in_the_frozen_network(family):
    model, tokens = build(family), ids(1, L)
    flow = RelevanceFlow(model)
    edges = flow.edges(tokens, 5, against=None)
    for layer, i, j in ((0, 8, 2), (0, 5, 5), (1, 8, 0)):
        share = torch.zeros((), requires_grad=True)
        request = with_leaves(flow._request(tokens, None))
        stand_ins, frozen = flow._propagated(
            request,
            Arguments(tokens, 5),
            lambda asked, share=share, edge=(layer, i, j): _OneEdge(asked, share, edge),
        )
        stand_ins.inputs = (*stand_ins.inputs, share)  # where the graph begins
        score = frozen.require_score()
        kept = stand_ins.made_of
        run = PropagatedRun.of(stand_ins, [], kept, score, "lrp", retain_graph=False)
        found, expected = edges[layer].matrix()[0, i, j], run.coefficient_at(share)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "jamba"])
def test_rows_tiles_heads_and_the_largest_are_those_of_the_matrix(family, formulation):
    edges = RelevanceFlow(build(family)).edges(ids(2, L), 5, formulation=formulation)
    for layer in edges.values():
        matrix = layer.matrix()
        close = dict(rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.rows(torch.tensor([8, 1])), matrix[:, [8, 1]], **close)
        torch.testing.assert_close(layer.rows(torch.tensor([-1])), matrix[:, [8]], **close)
        torch.testing.assert_close(layer.tile(2, 5), matrix[:, 2:5], **close)
        heads = layer.heads()
        assert heads.shape[1] == layer.heads_count
        torch.testing.assert_close(heads.sum(1), matrix, **close)
        torch.testing.assert_close(layer.heads(groups=2).sum(1), matrix, **close)
        torch.testing.assert_close(layer.into, matrix.sum(2), **close)
        torch.testing.assert_close(layer.out_of, matrix.sum(1), **close)
    last = edges.of_layers(-1)
    assert list(last) == list(edges)[-1:]
    assert {edge.layer for edge in edges.top(3, layers=[0])} == {next(iter(edges))}
    whole = edges.matrix()
    for between in (False, True):
        for by in ("size", "signed"):
            ranked = whole.clone()
            if between:
                ranked.diagonal(0, 2, 3).zero_()
            size = ranked.abs() if by == "size" else ranked.clamp(min=0)
            top = edges.top(4, by, between=between)
            assert [edge.example for edge in top] == [0] * 4 + [1] * 4
            for b in (0, 1):
                best = size[b].flatten().topk(4)
                names = list(edges)
                mine = [edge for edge in top if edge.example == b]
                values = torch.tensor([edge.relevance for edge in mine])
                torch.testing.assert_close(values.abs(), best.values, **close)
                for edge in mine:
                    at = ranked[b, names.index(edge.layer), edge.target, edge.source]
                    assert float(at) == pytest.approx(edge.relevance, rel=1e-4)


def test_integrated_edges_add_up_to_what_all_of_them_change():
    model, tokens = build("mamba"), ids(1, L)
    with torch.no_grad():
        whole = model(tokens).logits[:, -1, 5]
        with captum_ssm.interventions.knockout(model):
            none = model(tokens).logits[:, -1, 5]
    edges = RelevanceFlow(model).edges(tokens, 5, against=None, rule="integrated", steps=40)
    torch.testing.assert_close(edges.matrix().sum((1, 2, 3)), whole - none, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(edges.score, whole)
    assert edges.rule == "integrated"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_gradient_edges_are_the_slope_of_removing_them(family):
    model, tokens = build(family), ids(1, L)
    edges = RelevanceFlow(model).edges(tokens, 5, against=None, rule="gradient")

    def score(scale: float) -> Tensor:
        flow = RelevanceFlow(model).in_changed_run(partial(ScaledStandIns, factor=scale))
        return flow.edges(tokens, 5, against=None, rule="gradient").score

    slope = (score(1.02) - score(0.98)) / 0.04
    torch.testing.assert_close(edges.matrix().sum((1, 2, 3)), slope, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_others_of_an_entry_are_those_of_its_token(batch):
    # A pair is the token and the answer there, also where two examples could take one number each.
    model, x = torch.nn.Sequential(wild.Mixer(), wild.Mixer()).eval(), wild.tokens(batch, L)
    row = model(x)[:, 4].detach()
    rest = row.clone()
    rest[:, 1] = -torch.inf
    expected = row[:, 1] - (rest.softmax(-1) * row).sum(-1)
    for target in ((4, 1), [(4, 1)] * batch):
        score = RelevanceFlow(model).edges(x, target).score
        torch.testing.assert_close(score, expected)
    torch.testing.assert_close(RelevanceFlow(model).edges(x, 1, position=4).score, expected)


def test_features_of_hidden_states_have_no_others():
    model, tokens = build("mamba").backbone, ids(2, L)
    score = RelevanceFlow(model).edges(tokens, (3, 5)).score
    torch.testing.assert_close(score, model(tokens).last_hidden_state[:, 3, 5].detach())


def test_what_the_score_is_compared_with():
    model, tokens = build("mamba"), ids(2, L)
    flow = RelevanceFlow(model)
    with torch.no_grad():
        logits = model(tokens).logits[:, -1]
    rivals = logits.clone()
    rivals[:, 5] = -torch.inf
    others = (rivals.softmax(1) * logits).sum(1)
    torch.testing.assert_close(flow.edges(tokens, 5).score, logits[:, 5] - others)
    torch.testing.assert_close(flow.edges(tokens, 5, against=None).score, logits[:, 5])
    against = flow.edges(tokens, 5, against=7)
    torch.testing.assert_close(against.score, logits[:, 5] - logits[:, 7])
    one, other = (flow.edges(tokens, c, against=None).matrix() for c in (5, 7))
    torch.testing.assert_close(against.matrix(), one - other, rtol=1e-4, atol=1e-6)
    at_third = flow.edges(tokens, (3, 5))
    torch.testing.assert_close(at_third.score, flow.edges(tokens, 5, position=3).score)
    with torch.no_grad():
        row = model(tokens).logits[:, 3]
    for against in (7, (3, 7)):  # a foil without a place is read where the target is
        at_third = flow.edges(tokens, (3, 5), against=against)
        torch.testing.assert_close(at_third.score, row[:, 5] - row[:, 7])
    assert not at_third.matrix()[:, :, 4:].any()


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "falcon_h1"])
def test_an_offloaded_model_has_the_same_edges(family):
    accelerate, tokens = pytest.importorskip("accelerate"), ids(1, L)
    there = RelevanceFlow(build(family))
    away = RelevanceFlow(accelerate.cpu_offload(build(family), execution_device="cpu"))
    close = dict(rtol=1e-4, atol=1e-6)
    for rule in ("lrp", "gradient"):
        expected = there.edges(tokens, 5, rule=rule).matrix()
        assert expected.any()
        torch.testing.assert_close(away.edges(tokens, 5, rule=rule).matrix(), expected, **close)
    torch.testing.assert_close(away.graph(tokens, 5).nodes, there.graph(tokens, 5).nodes, **close)
    written = [flow.components(tokens, 5).values for flow in (away, there)]
    torch.testing.assert_close(*written, **close)


def flowing(graph: FlowGraph) -> float:
    """The size of all that arrives at a node or leaves it, at the largest."""
    kept = (graph.residual.nan_to_num(0.0), graph.own, graph.gate, graph.rest, graph.constant)
    return float(
        (graph.nodes[:-1].abs() + sum(x.abs() for x in (*kept, *graph.shifts.values()))).max()
    )


@pytest.mark.filterwarnings("ignore:relevance goes through")
@pytest.mark.parametrize(
    "family",
    ["mamba", "mamba2", "jamba", "zamba2", "rwkv", "recurrent_gemma", "qwen3_next", "zaya"],
)
def test_half_precision_keeps_the_books(family):
    flow, tokens = RelevanceFlow(build(family).bfloat16()), ids(1, L)
    for formulation in ("hidden", "unified"):
        edges = flow.edges(tokens, 5, formulation=formulation)
        assert max(max(pair) for pair in edges.errors.values()) < 1e-2
    for formulation in (None, "hidden"):
        graph = flow.graph(tokens, 5, formulation=formulation)
        assert graph.lost.abs().max() < 1e-2 * flowing(graph)


@pytest.mark.filterwarnings("ignore:relevance goes through")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_arrives_at_a_node_is_what_leaves_it(family):
    flow, tokens = RelevanceFlow(build(family)), ids(1, L)
    for formulation in (None, "hidden"):
        graph = flow.graph(tokens, 5, formulation=formulation)
        assert graph.lost.abs().max() < ROUNDING * flowing(graph)
        matrices = flow.edges(tokens, 5, formulation=graph.formulation)
        assert set(graph.at) == {L - 1}
        by_layer = {name: layer.matrix()[0] for name, layer in matrices.items()}
        for s, layer in enumerate(graph.layers):
            E = sum(by_layer[name] for name in layer.name.split(" + "))
            arrived = E.sum(1) - E.diagonal() + graph.stays[s] + graph.bias[s]
            most = ROUNDING * flowing(graph)
            torch.testing.assert_close(arrived, graph.nodes[s + 1], rtol=0, atol=most)
            left = E.sum(0) - E.diagonal() + graph.stays[s] - graph.constant[s]
            for o, moved in graph.shifts.items():
                left[: L - o] += moved[s, o:]
                left -= moved[s]
            torch.testing.assert_close(left, graph.nodes[s], rtol=0, atol=most)
        assert 0.7 <= graph.held <= 1.001
    read_back = json.loads(graph.to_json())
    assert read_back["format"] == "captum_ssm.flow/1"
    assert len(read_back["layers"]) == len(graph.layers)


def test_what_biases_give_is_theirs_by_autograd():
    blocks = torch.nn.Sequential(_Block(wild.Mixer), _Block(wild.Mixer))
    model = torch.nn.Sequential(blocks, torch.nn.Linear(6, 5)).eval()
    for block in blocks:
        block.norm.bias.data.zero_()  # a constant in the run
    flow, x = RelevanceFlow(lambda x: model(x)[:, -1], model=model), wild.tokens(1, L)
    graph = flow.graph(x, 2, against=None, formulation="hidden")
    request = with_leaves(flow._request(x, None))
    stand_ins, frozen = flow._propagated(request, Arguments(x, 2), ActivationStandIns)
    biases = [
        bias
        for block in blocks
        for name, bias in block.named_parameters()
        if name.endswith("bias") and name != "norm.bias"
    ]
    given = coefficients_at(biases, frozen.require_score(), stand_ins.starts())
    parts = [
        0.0 if g is None else float((g * bias.detach()).sum())
        for g, bias in zip(given, biases, strict=True)
    ]
    expected = torch.tensor(parts).view(2, -1).sum(1)
    assert expected.abs().min() > 1e-3
    found = (graph.constant + graph.bias).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma", "lfm2", "zaya"])
def test_nothing_is_given_by_biases_that_are_zero(family):
    model, tokens = build(family), ids(1, L)
    with_biases = RelevanceFlow(model).graph(tokens, 5)
    assert with_biases.constant.abs().max() > 1e-3 * flowing(with_biases)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    graph = RelevanceFlow(model).graph(tokens, 5)
    assert graph.constant.abs().max() < ROUNDING * flowing(graph)
    assert graph.lost.abs().max() < ROUNDING * flowing(graph)


def test_token_shifts_carry_relevance_between_nodes():
    graph = RelevanceFlow(build("rwkv")).graph(ids(1, L), 5)
    assert graph.formulation == "hidden"
    assert set(graph.shifts) == {1}
    assert graph.shifts[1].abs().amax() > 0.01 * graph.nodes.abs().amax()
    kinds = [edge[5] for edge in graph.to_dict()["edges"] if len(edge) > 5]
    assert set(kinds) == {"shift"}
    with pytest.raises(AttributeError, match="shifts"):
        graph.shift  # noqa: B018


def test_a_short_convolution_carries_relevance_to_where_hidden_edges_start():
    model, tokens = build("mamba2"), ids(1, L)
    graph = RelevanceFlow(model).graph(tokens, 5, formulation="hidden")
    assert set(graph.shifts) == {1, 2, 3}
    hidden, unified = (
        RelevanceFlow(model).edges(tokens, 5, formulation=name) for name in ("hidden", "unified")
    )
    for s, (name, layer) in enumerate(hidden.items()):
        given, taken = sum(x[s] for x in graph.shifts.values()), torch.zeros(L)
        for o, moved in graph.shifts.items():
            taken[: L - o] += moved[s, o:]
        # Both read the same input, before the convolution and after it.
        before, after = unified[name].drawn[0], layer.drawn[0] - given + taken
        constant = graph.constant[s] - RelevanceFlow(model).graph(tokens, 5).constant[s]
        torch.testing.assert_close(after - constant, before, rtol=1e-4, atol=1e-5)


def test_convolutions_of_two_directions_carry_relevance_from_both_sides():
    model = small().eval()
    graph = RelevanceFlow(model).graph(images(), 2, formulation="hidden")
    assert {-1, 1} <= set(graph.shifts)
    assert graph.lost.abs().max() < ROUNDING * flowing(graph)


def test_nodes_carry_what_later_blocks_read_beside_the_stream():
    # Blocks of Zamba are given the embeddings once more, and those of Inkling 2 the outputs of all
    # blocks before; its head, too.
    for family in ("zamba", "inkling2"):
        graph = RelevanceFlow(build(family)).graph(ids(1, L), 5, against=None)
        assert graph.lost.abs().max() < ROUNDING * flowing(graph)
        last = torch.zeros(L)
        last[L - 1] = graph.score
        torch.testing.assert_close(graph.nodes[-1], last, rtol=1e-5, atol=1e-5)


def test_paths_lead_from_the_input_to_the_output():
    graph = RelevanceFlow(build("mamba")).graph(ids(1, L), 5, share=1.0)
    ways = graph.paths(4)
    assert ways
    assert ways == sorted(ways, key=lambda way: -way.share)
    for way in ways:
        assert way.nodes[0][0] == 0
        assert way.nodes[-1] == (2, L - 1)
        for (s, j, i), value in zip(way.steps, way.relevance, strict=True):
            if i == j:
                assert value == pytest.approx(float(graph.stays[s, i]))
            else:
                found = [e.relevance for e in graph.edges if (e.target, e.source) == (i, j)]
                assert value in found
    source = ways[0].nodes[0][1]
    assert graph.paths(1, source)[0].nodes == ways[0].nodes
    words = graph.with_tokens([f"w{t}" for t in range(L)])
    assert f"'w{source}' ({source})" in words.paths(1, source)[0].words(words.tokens)


def test_paths_go_along_token_shifts_by_brute_force():
    graph = RelevanceFlow(build("rwkv")).graph(ids(1, L), 5, share=1.0)
    ways = [(1.0, [(2, L - 1)])]
    for s in (1, 0):
        longer = []
        for share, way in ways:
            i = way[0][1]
            into = [e for e in graph.edges if e.target == i and graph.layer_of(e) == s]
            arrives = {edge.source: edge.relevance for edge in into}
            arrives[i] = float(graph.stays[s, i])
            for j, part in _positive_shares(arrives):
                after = graph.shifts[1][s, j + 1] if j + 1 < L else 0.0
                begins = {j: float(graph.nodes[s, j] - after)}
                if j:
                    begins[j - 1] = float(graph.shifts[1][s, j])
                for source, of_start in _positive_shares(begins):
                    start = [(s, j)] if source == j else [(s, source), (s, j)]
                    longer.append((share * part * of_start, [*start, *way]))
        ways = longer
    ways.sort(key=lambda way: -way[0])
    found = graph.paths(4)
    assert [way.nodes for way in found] == [nodes for _, nodes in ways[:4]]
    for way, (share, _) in zip(found, ways, strict=False):
        assert way.share == pytest.approx(share, rel=2e-2)
    shifted = next(way for way in graph.paths(50) if len(way.nodes) > 3)
    assert "by the token shift of layer" in shifted.words(graph.tokens)


def _positive_shares(parts: dict[int, float]) -> list[tuple[int, float]]:
    total = sum(max(0.0, part) for part in parts.values())
    return [(j, part / total) for j, part in parts.items() if part > 0]


def test_each_edge_of_a_graph_leads_to_the_output_by_edges_before_it():
    graph = RelevanceFlow(build("jamba")).graph(ids(1, L), 5, share=0.99)
    reached = {L - 1: len(graph.layers)}
    for edge in graph.edges:
        layer = graph.layer_of(edge)
        assert edge.target != edge.source
        assert reached[edge.target] > layer
        reached[edge.source] = max(reached.get(edge.source, 0), layer)


def test_a_scan_of_two_directions_has_edges_in_both():
    model = captum_ssm.models.vision_mamba.VisionMamba(
        image_size=16, patch_size=4, width=16, depth=2, classes=3
    ).eval()
    image = torch.randn(1, 3, 16, 16)
    edges = RelevanceFlow(model).edges(image, 1)
    assert max(max(pair) for pair in edges.errors.values()) < 2e-6
    matrix = edges[0].matrix()[0]
    assert matrix.triu(1).any()
    assert matrix.tril(-1).any()


@pytest.mark.parametrize(
    ("make", "given", "of_pairs"),
    [
        (lambda: build("mamba"), lambda: ids(1, L), 1),
        (lambda: build("jamba"), lambda: ids(1, L), 1),
        (lambda: build("falcon_h1"), lambda: ids(1, L), 1),  # two side by side in each layer
        (lambda: small().eval(), images, 2),  # in both directions
    ],
    ids=["mamba", "jamba", "falcon_h1", "vim"],
)
def test_a_graph_counts_the_edges_of_all_mixers_in_the_directions_that_they_read(
    make, given, of_pairs
):
    model = make()
    flow, inputs = RelevanceFlow(model), given()
    graph, edges = flow.graph(inputs, 2, share=1.0), flow.edges(inputs, 2)
    T = len(graph.tokens)
    assert graph.to_dict()["of"] == len(edges) * of_pairs * T * (T - 1) // 2


def test_bad_arguments_are_told():
    model, tokens = build("mamba"), ids(1, L)
    flow = RelevanceFlow(model)
    with pytest.raises(ValueError, match="formulation is 'whole'; expected one of"):
        flow.edges(tokens, 5, formulation="whole")
    with pytest.raises(ValueError, match="rule is 'eap'; expected one of"):
        flow.edges(tokens, 5, rule="eap")
    with pytest.raises(ValueError, match="steps is 0; expected an integer"):
        flow.edges(tokens, 5, rule="integrated", steps=0)
    with pytest.raises(ValueError, match="share is 2; expected a number above 0"):
        flow.graph(tokens, 5, share=2)
    with pytest.raises(TargetError, match="outside the vocabulary"):
        flow.edges(tokens, 5, against=10_000)
    with pytest.raises(TargetError, match="against is 'other'; expected 'others', another target"):
        flow.edges(tokens, 5, against="other")
    for target, against in ((5, 5), (5, torch.tensor([5])), ((3, 5), 5), ((3, 5), (3, 5))):
        with pytest.raises(TargetError, match="against is the target in an example"):
            flow.edges(tokens, target, against=against)
    with pytest.raises(TargetError, match="against is the target in an example"):
        flow.edges(ids(2, L), [5, 6], against=[7, 6])
    with pytest.raises(TargetError, match="3 entries for a batch of 2"):
        flow.edges(ids(2, L), [5, 6], against=[7, 8, 9])
    for example in (1, -2, "first"):
        with pytest.raises(captum_ssm.InputError, match=r"example is .*; expected an index of"):
            flow.graph(tokens, 5, example=example)
        with pytest.raises(captum_ssm.InputError, match=r"example is .*; expected an index of"):
            flow.components(tokens, 5).table(example)
    with pytest.raises(captum_ssm.InputError, match="tokens has 1 texts; the table has 9"):
        flow.components(tokens, 5).table(tokens=["a"])
    with pytest.raises(captum_ssm.InputError, match="source is 9; expected one of the 9 tokens"):
        flow.graph(tokens, 5).paths(source=L)
    edges = flow.edges(tokens, 5)
    for groups in (0, -4, 7):
        with pytest.raises(ValueError, match="expected a divisor of the 32 channels"):
            edges[0].heads(groups=groups)
    for wrong in ([L], [-L - 1]):
        with pytest.raises(captum_ssm.InputError, match="outside the 9 tokens"):
            edges[0].rows(torch.tensor(wrong))
    with pytest.raises(KeyError, match="names no layer"):
        flow.edges(tokens, 5, layers=[])
    with pytest.raises(ValueError, match="k is 0; expected"):
        edges.top(0)
    with pytest.raises(KeyError, match="expected an index from 0 to 1"):
        edges[2]
    with pytest.raises(captum_ssm.InputError, match="tokens has 2 texts; the graph has 9 tokens"):
        flow.graph(tokens, 5, tokens=["a", "b"])


class _Layers(torch.nn.Module):
    # Two mixers that no adapter knows, each after a norm and with a residual.
    def __init__(self, mixer: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([mixer(), mixer()])
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(6, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)[:, -1]


@pytest.mark.parametrize("kind", [wild.Mixer, wild.Normed, wild.Backward, wild.HalfScanned])
def test_scans_of_a_mixer_that_nobody_knows_have_edges(kind):
    model, x = _Layers(kind).eval(), wild.tokens(length=L)
    edges = RelevanceFlow(model).edges(x, 2)
    for layer in edges.values():
        assert layer.matrix().any()
        # What the graph of the run says of the scan's values is what the edges out of them carry.
        assert max(layer.relative_errors) < 2e-6
    unified = RelevanceFlow(model).edges(x, 2, formulation="unified")
    for name, layer in unified.items():
        hidden = edges[name]
        of_conv = layer.bias - hidden.bias  # the convolution's bias
        expected = hidden.into + hidden.skip
        torch.testing.assert_close(layer.into + of_conv, expected, rtol=1e-4, atol=1e-5)


class _Block(torch.nn.Module):
    def __init__(self, mixer: type[torch.nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(6), mixer()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.SiLU())
        self.down = torch.nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.down(self.mlp(x))


@pytest.mark.parametrize("kind", [wild.Mixer, wild.Normed, wild.Backward, wild.BothWays])
def test_nodes_between_mixers_that_nobody_knows_balance(kind):
    blocks = torch.nn.Sequential(_Block(kind), _Block(kind))
    model = torch.nn.Sequential(blocks, torch.nn.Linear(6, 5)).eval()
    flow = RelevanceFlow(lambda x: model(x)[:, -1], model=model)
    hidden = flow.graph(wild.tokens(length=L), 2, formulation="hidden")
    assert hidden.lost.abs().max() < ROUNDING * flowing(hidden)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    graph = flow.graph(wild.tokens(length=L), 2)
    assert graph.formulation == "unified"
    assert graph.lost.abs().max() < ROUNDING * flowing(graph)
    assert graph.nodes[0].abs().max() > 0


def test_scans_that_work_on_tokens_in_several_ways_are_refused_in_words():
    model, x = _Layers(wild.InBatch).eval(), wild.tokens(length=L)
    with pytest.raises(captum_ssm.UnsupportedModelError, match="has no adapter, and its scans"):
        RelevanceFlow(model).edges(x, 2)


def test_a_graph_that_loses_relevance_says_so():
    # Unified edges of a token shift, a part of which no edge shows.
    with pytest.warns(UserWarning, match="of the relevance at a token leaves it by no edge"):
        graph = RelevanceFlow(build("rwkv")).graph(ids(1, L), 5, formulation="unified")
    assert graph.error > 0.05
