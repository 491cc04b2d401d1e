"""The flow through blocks that return the residual stream apart, and read it themselves."""

import pytest
import torch
import wild
from models import made, without_biases
from torch import nn

from captum_ssm import MambaLRP, RelevanceFlow

L = 9


class Unfused(nn.Module):
    """mamba-ssm's block without fused kernels: add, norm, mixer."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(6), wild.Mixer()

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return self.mixer(self.norm(residual)), residual


class FirstValues(Unfused):
    """Every block is given the values of the first one, too, as in RWKV-7."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(6, 6)

    def forward(self, hidden, first):
        given = self.norm(hidden)
        first = self.value(given) if first is None else first
        return hidden + self.mixer(given + 0.5 * first), first


class Pairs(nn.Module):
    """Blocks that return two tensors."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.kind = nn.ModuleList(kind() for _ in range(3)), kind
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        other = None
        for layer in self.layers:
            x, other = layer(x, other)
        return self.head(self.norm(x if self.kind is FirstValues else x + other))


@pytest.mark.parametrize("kind", [Unfused, FirstValues])
def test_the_books_hold_what_a_block_returns_and_not_what_it_reads_of_it(kind):
    model, x = made(lambda: Pairs(kind)), wild.tokens(1, L).double()
    flow, target = RelevanceFlow(model), (L - 1, 2)
    graph = flow.graph(x, target, against=None)
    assert graph.error < 1e-6
    relevance = MambaLRP(model).attribute(x, target).sum(-1)[0]
    assert (graph.nodes[0] - relevance).abs().max() < 1e-6
    bare = without_biases(model)
    graph = flow.graph(x, target, against=None)
    with torch.no_grad():
        score = bare(x)[0, L - 1, 2]
    assert (graph.nodes.sum(1) - score).abs().max() < 1e-6


def test_parts_of_unfused_blocks_add_up_to_the_score():
    model, x = made(lambda: Pairs(Unfused)), wild.tokens(1, L).double()
    found = RelevanceFlow(model).components(x, (L - 1, 2), against=None)
    assert found.error < 1e-6
    mixers = [f"layers.{k}.mixer" for k in range(3)]
    assert found.names == ["embedding", *mixers, "bias"]
    torch.testing.assert_close(found.values.sum(1), model(x)[:, L - 1, 2])
    # Written out: the norm's deviation is a constant of direct logit attribution.
    stream, parts = x, [x]
    for layer in model.layers:
        parts.append(layer.mixer(layer.norm(stream)))
        stream = stream + parts[-1]
    scale = model.norm.weight * (stream[:, -1].var(-1, unbiased=False) + model.norm.eps).rsqrt()
    expected = [
        ((p[:, -1] - p[:, -1].mean(-1, keepdim=True)) * scale) @ model.head.weight[2] for p in parts
    ]
    torch.testing.assert_close(found.values[:, :-1], torch.stack(expected, 1))


class GivenInputs(Unfused):
    """Every block is given the model's inputs, too."""

    def forward(self, hidden, inputs):
        return hidden + self.mixer(self.norm(hidden) + 0.5 * torch.tanh(inputs))


class Once(nn.Module):
    """Blocks that are given the embeddings once more; the first one is given nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GivenInputs() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        given = x
        for layer in self.layers:
            x = layer(x, given)
        return self.head(self.norm(x))


def test_embeddings_that_all_blocks_are_given_write_once():
    model, x = made(Once), wild.tokens(1, L).double()
    found = RelevanceFlow(model).components(x, (L - 1, 2), against=None)
    assert found.error < 1e-6
    torch.testing.assert_close(found.values.sum(1), model(x)[:, L - 1, 2])
    stream = x
    for layer in model.layers:
        stream = layer(stream, x)
    scale = model.norm.weight * (stream[:, -1].var(-1, unbiased=False) + model.norm.eps).rsqrt()
    expected = ((x[:, -1] - x[:, -1].mean(-1, keepdim=True)) * scale) @ model.head.weight[2]
    torch.testing.assert_close(found.values[:, found.names.index("embedding")], expected)
