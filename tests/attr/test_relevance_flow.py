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
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance_stand_ins import with_leaves

L = 9
# Their values, or the model's own ways, are mixed with neighbors by more than a convolution.
SHIFTED = ("rwkv",)
# Something else than the stream before it feeds a mixer: the input's embeddings, or a convolution
# of its values; or biases of MLPs and norms take relevance.
UNBALANCED = ("rwkv", "zamba", "zamba2", "recurrent_gemma", "lfm2", "inkling2", "zaya")


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
            scale = layer.out.abs().amax()
            assert scale > 0
            matrix = layer.matrix()
            into = matrix.sum(2) + layer.skip + layer.gate + layer.bias
            torch.testing.assert_close(into / scale, layer.out / scale, rtol=0, atol=2e-6)
            if formulation == "unified" and family in SHIFTED:
                continue
            out_of = matrix.sum(1) + layer.skip
            torch.testing.assert_close(out_of / scale, layer.drawn / scale, rtol=0, atol=2e-6)
        assert max(max(pair) for pair in edges.errors.values()) < 2e-6 or family in SHIFTED


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


def test_half_precision_keeps_the_books():
    model = build("mamba2").bfloat16()
    edges = RelevanceFlow(model).edges(ids(1, L), 5)
    assert max(max(pair) for pair in edges.errors.values()) < 1e-2


@pytest.mark.filterwarnings("ignore:relevance goes through", "ignore:.*leaves it by no edge")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_arrives_at_a_node_is_what_leaves_it(family):
    flow, tokens = RelevanceFlow(build(family)), ids(1, L)
    graph = flow.graph(tokens, 5)
    if family not in UNBALANCED:
        assert graph.error < 2e-6
    matrices = flow.edges(tokens, 5, formulation=graph.formulation)
    assert set(graph.at) == {L - 1}
    total = graph.stays + graph.bias
    by_layer = {name: layer.matrix()[0] for name, layer in matrices.items()}
    for s, layer in enumerate(graph.layers):
        E = sum(by_layer[name] for name in layer.name.split(" + "))
        arrived = E.sum(1) - E.diagonal() + total[s]
        if family not in SHIFTED and not graph.shift.any():
            scale = graph.nodes.abs().amax()
            torch.testing.assert_close(
                arrived / scale, graph.nodes[s + 1] / scale, rtol=0, atol=2e-6
            )
    assert 0.9 <= graph.held <= 1.001 or family in SHIFTED
    read_back = json.loads(graph.to_json())
    assert read_back["format"] == "captum_ssm.flow/1"
    assert len(read_back["layers"]) == len(graph.layers)


def test_token_shifts_carry_relevance_between_nodes():
    model = build("rwkv")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    graph = RelevanceFlow(model).graph(ids(1, L), 5)
    assert graph.formulation == "hidden"
    assert graph.shift.abs().amax() > 0.01 * graph.nodes.abs().amax()
    assert graph.error < 5e-6
    kinds = [edge[5] for edge in graph.to_dict()["edges"] if len(edge) > 5]
    assert set(kinds) == {"shift"}


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
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    flow = RelevanceFlow(lambda x: model(x)[:, -1], model=model)
    graph = flow.graph(wild.tokens(length=L), 2)
    assert graph.formulation == "unified"
    assert graph.error < 2e-6
    assert graph.nodes[0].abs().max() > 0


def test_scans_that_work_on_tokens_in_several_ways_are_refused_in_words():
    model, x = _Layers(wild.InBatch).eval(), wild.tokens(length=L)
    with pytest.raises(captum_ssm.UnsupportedModelError, match="has no adapter, and its scans"):
        RelevanceFlow(model).edges(x, 2)


def test_a_graph_that_loses_relevance_says_so():
    model = build("rwkv")
    for name, parameter in model.named_parameters():
        if name.endswith("ln1.bias"):
            parameter.data.fill_(1.0)
    with pytest.warns(UserWarning, match="of the relevance at a token leaves it by no edge"):
        graph = RelevanceFlow(model).graph(ids(1, L), 5)
    assert graph.error > 0.05
