"""The residual stream around mixers, in models that write their blocks in different ways."""

import pytest
import torch
from torch import nn

from captum_ssm import LaTIM, RelevanceFlow, UnsupportedModelError
from captum_ssm.models import BidirectionalMamba

WIDTH, LAYERS, TOKENS = 12, 3, 7


class Feature(nn.Module):
    """An MLP with its norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Whole(nn.Module):
    """A block that returns the stream."""

    def __init__(self, norm, mixer, mlp):
        super().__init__()
        self.norm, self.mixer, self.mlp = norm, mixer, mlp

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


class Branch(nn.Module):
    """A block that returns what is to be added to the stream."""

    def __init__(self, norm, mixer):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, x):
        return self.mixer(self.norm(x))


class Written(nn.Module):
    """One function: blocks are modules, or the model's own forward adds to the stream."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.embedding = form, nn.Embedding(9, WIDTH)
        norms = [nn.LayerNorm(WIDTH) for _ in range(LAYERS)]
        mixers = [BidirectionalMamba(WIDTH, state=4) for _ in range(LAYERS)]
        mlps = [Feature() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.mlps = nn.ModuleList(mlps)
        if form == "blocks":
            self.layers = nn.ModuleList(map(Whole, norms, mixers, mlps))
        elif form == "branches":
            self.layers = nn.ModuleList(map(Branch, norms, mixers))
        elif form == "sequential":
            self.layers = nn.ModuleList(map(nn.Sequential, norms, mixers))
        else:
            self.norms, self.mixers = nn.ModuleList(norms), nn.ModuleList(mixers)

    def forward(self, given):
        x = given if given.is_floating_point() else self.embedding(given)
        for k, mlp in enumerate(self.mlps):
            if self.form == "blocks":
                x = self.layers[k](x)
                continue
            if self.form in ("branches", "sequential"):
                x = x + self.layers[k](x)
            else:
                x = x + self.mixers[k](self.norms[k](x))
            x = x if self.form == "pooled" else x + mlp(x)
        if self.form == "pooled":
            return self.head(x.mean(1))
        return self.head(self.norm(x)[:, -1])

    def fused(self, x):
        for norm, mixer, mlp in zip(self.norms, self.mixers, self.mlps, strict=True):
            x = Added.apply(x, mixer(norm(x)))
            x = Added.apply(x, mlp(x))
        return self.head(self.norm(x)[:, -1])


def ids():
    return torch.randint(9, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["lists", "branches", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_is_found_however_blocks_are_written(form, dtype):
    models = [Written(name).eval().to(dtype) for name in ("blocks", form)]
    graphs = [RelevanceFlow(model).graph(ids(), target=2) for model in models]
    maps = [LaTIM(model).attribute(ids(), target=2, aggregation="flow_logit") for model in models]
    for part in ("nodes", "residual", "rest", "stays", "lost"):
        expected, found = (getattr(graph, part) for graph in graphs)
        torch.testing.assert_close(found, expected, msg=part)
    assert graphs[0].residual.abs().sum() > 0
    torch.testing.assert_close(maps[1], maps[0])


class Added(torch.autograd.Function):
    """A sum by a function of the model's own, as a fused kernel."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_what_a_function_of_the_model_returned_is_the_stream(monkeypatch):
    """So is an input of floats that nothing embeds."""
    models = [Written(name).eval() for name in ("blocks", "lists")]
    x = models[0].embedding(ids()).detach()
    expected, found = (RelevanceFlow(model).graph(x, target=2) for model in models)
    torch.testing.assert_close(found.nodes, expected.nodes)
    monkeypatch.setattr(models[1], "forward", models[1].fused)
    with pytest.warns(UserWarning, match="Added, which has no rule"):
        found = RelevanceFlow(models[1]).graph(x, target=2)
    torch.testing.assert_close(found.nodes, expected.nodes)


@pytest.mark.parametrize("form", ["lists", "branches", "sequential"])
def test_mixers_write_the_same_however_blocks_are_written(form):
    whole, other = (Written(name).eval() for name in ("blocks", form))
    for model in (whole, other):
        for mlp in model.mlps:
            nn.init.zeros_(mlp.down.weight)
    expected, found = (RelevanceFlow(m).components(ids(), target=2) for m in (whole, other))
    mixers = [k for k, kind in enumerate(expected.kinds) if kind == "recurrence"]
    others = [k for k, kind in enumerate(found.kinds) if kind == "recurrence"]
    assert len(mixers) == len(others) == LAYERS
    torch.testing.assert_close(found.by_token[:, others], expected.by_token[:, mixers])


def test_a_stream_that_is_not_found_is_refused_in_words():
    model = Written("pooled").eval()
    flow = RelevanceFlow(model)
    for asked in (flow.graph, flow.components):
        with pytest.raises(UnsupportedModelError, match="the residual stream after the last mixer"):
            asked(ids(), target=2)
    with pytest.raises(UnsupportedModelError, match=r"around mixers\.2"):
        LaTIM(model).attribute(ids(), target=2, aggregation="flow_logit")
