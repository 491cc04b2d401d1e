"""The flow through mixers and blocks as public models write them, which no adapter knows."""

import pytest
import torch
import wild
from long_convolutions import S4D, TokensLast
from models import made, without_biases
from torch import nn
from torch.nn import functional as F

from captum_ssm import MambaLRP, RelevanceFlow
from captum_ssm.attr.flow.graph import FlowGraph

L = 9


class SkipOutside(wild.Mixer):
    """The mixer adds the skip, and its scan's function does not; ``copied``: of other tensors."""

    copied = False

    def scanned(self, v):
        step, B, C = self.x_proj(v).split([v.shape[-1], self.state, self.state], -1)
        given = 1 * v if self.copied else v
        zeros = torch.zeros_like(self.D)
        y = wild.scan(given, F.softplus(step), -self.rates.exp(), B, C, zeros)
        return y + self.D * v


class SkipOfCopies(SkipOutside):
    copied = True


class FormedBlock(nn.Module):
    """A block that returns its tokens in some form."""

    def __init__(self, form, mixer):
        super().__init__()
        self.norm, self.mixer, self.form = nn.LayerNorm(6), mixer, form

    def forward(self, x):
        return self.form(x + self.mixer(self.norm(x)))


class OfBlocks(nn.Module):
    """Two such blocks and a head."""

    def __init__(self, form=lambda x: x, back=lambda y: y, mixer=wild.Mixer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(FormedBlock(form, mixer()) for _ in range(2))
        self.back, self.head = back, nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = self.back(layer(x))
        return self.head(x)


class BlockInPlace(FormedBlock):
    """A block that adds its tokens to what the mixer returned, in place."""

    def forward(self, x):
        y = self.mixer(self.norm(x))
        y += x
        return self.form(y)


def test_what_a_measured_mixer_returned_may_be_changed_in_place():
    x, model = wild.tokens(1, L).double(), made(OfBlocks)
    expected = RelevanceFlow(model).edges(x, (L - 1, 2)).matrix()
    model = made(OfBlocks)
    for layer in model.layers:
        layer.__class__ = BlockInPlace
    flow = RelevanceFlow(model)
    for _ in range(2):  # not known, and known
        assert (flow.edges(x, (L - 1, 2)).matrix() - expected).abs().max() < 1e-9


def books_of(edges) -> None:
    for layer in edges.values():
        matrix = layer.matrix()
        assert matrix.tril(-1).any()
        assert layer.skip.any()
        into = matrix.sum(2) + layer.skip + layer.gate + layer.bias
        torch.testing.assert_close(into, layer.out, rtol=0, atol=1e-9)
        torch.testing.assert_close(matrix.sum(1) + layer.skip, layer.drawn, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [SkipOutside, SkipOfCopies])
def test_a_skip_that_the_module_adds_is_counted_once(kind):
    model = made(lambda: OfBlocks(mixer=kind))
    x = wild.tokens(1, L).double()
    flow = RelevanceFlow(model)
    books_of(flow.edges(x, (L - 1, 2)))
    graph = flow.graph(x, (L - 1, 2), against=None)
    assert graph.error < 1e-6
    relevance = MambaLRP(model).attribute(x, (L - 1, 2)).sum(-1)[0]
    assert (graph.nodes[0] - relevance).abs().max() < 1e-6


def test_a_graph_is_hidden_where_biases_before_a_convolution_have_no_place_in_the_other():
    x = wild.tokens(1, L).double()
    flow = RelevanceFlow(made(OfBlocks))
    with pytest.warns(UserWarning, match="was not found"):
        assert flow.graph(x, (L - 1, 2), formulation="unified").error > 0.1
    graph = flow.graph(x, (L - 1, 2))
    assert graph.formulation == "hidden"
    assert graph.error < 1e-6
    flow = RelevanceFlow(without_biases(made(OfBlocks)))
    assert flow.graph(x, (L - 1, 2)).formulation == "unified"


@pytest.mark.parametrize("way", ["past", "both"])
def test_the_skip_of_a_long_convolution_is_counted_once(way):
    model = made(lambda: TokensLast(S4D(way=way), S4D(way=way)))
    books_of(RelevanceFlow(model).edges(torch.randn(1, L, 6).double(), (L - 1, 2)))


def flows_of(model: nn.Module, x: torch.Tensor) -> tuple[FlowGraph, torch.Tensor]:
    flow, target = RelevanceFlow(model), (L - 1, 2)
    return flow.graph(x, target), flow.components(x, target).values


@pytest.mark.parametrize(
    ("form", "back"),
    [
        (lambda x: ((x, x[..., :2]), None), lambda y: y[0][0]),  # with a router's logits
        (lambda x: ([x, x.sum()], {"cache": 1}), lambda y: y[0][0]),
        (lambda x: {"x": x, "aux": (1, None)}, lambda y: y["x"]),
    ],
)
def test_blocks_may_return_nested_results(form, back):
    x = wild.tokens(1, L).double()
    graph, components = flows_of(made(lambda: OfBlocks(form, back)), x)
    expected, parts = flows_of(made(OfBlocks), x)
    torch.testing.assert_close(graph.nodes, expected.nodes)
    torch.testing.assert_close(components, parts)
