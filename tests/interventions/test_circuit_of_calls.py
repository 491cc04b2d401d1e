"""Circuits of a mixer that a model calls several times, against a model with a mixer per call."""

from copy import deepcopy

import pytest
import torch
from models import made
from torch import nn

from captum_ssm import RelevanceFlow
from captum_ssm.attr import Edge
from captum_ssm.interventions import circuit
from captum_ssm.models import BidirectionalMamba

CALLS, L = 3, 6


class Chunked(nn.Module):
    """The channels in chunks, each mixed on its own, as in UltraLight VM-UNet."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(CALLS * 4), nn.Linear(CALLS * 4, 5)
        self.mixers = nn.ModuleList([BidirectionalMamba(4, state=3)] * CALLS)

    def forward(self, x):
        chunks = self.norm(x).chunk(CALLS, -1)
        return self.head(torch.cat([m(c) for m, c in zip(self.mixers, chunks, strict=True)], -1))


@pytest.fixture
def shared():
    return made(Chunked)


def of_circuit(model, x, edges, **options):
    with torch.no_grad(), circuit(model, edges, **options):
        return model(x)


@pytest.mark.parametrize("remove", [False, True])
def test_an_edge_is_of_the_call_that_it_names(shared, remove):
    x = torch.randn(1, L, CALLS * 4).double()
    apart = deepcopy(shared)
    apart.mixers = nn.ModuleList(deepcopy(shared.mixers[0]) for _ in range(CALLS))
    flows = [RelevanceFlow(model).edges(x, (3, 1)) for model in (shared, apart)]
    assert list(flows[0]) == ["mixers.0", "mixers.0:1", "mixers.0:2"]
    assert list(flows[1]) == ["mixers.0", "mixers.1", "mixers.2"]
    for k in (1, 7, 30):
        found, expected = (
            of_circuit(model, x, flow.top(k), remove=remove)
            for model, flow in zip((shared, apart), flows, strict=True)
        )
        torch.testing.assert_close(found, expected)
    found = of_circuit(shared, x, [("mixers.0:1", 3, 2), Edge("mixers.0", 4, 1)], remove=remove)
    expected = of_circuit(apart, x, [(1, 3, 2), (0, 4, 1)], remove=remove)
    torch.testing.assert_close(found, expected)
    found = of_circuit(shared, x, [("mixers.0", 3, 2)], remove=remove)
    torch.testing.assert_close(
        found, of_circuit(apart, x, [(k, 3, 2) for k in range(CALLS)], remove=remove)
    )


def test_a_path_with_a_number_is_of_a_mixer(shared):
    with (
        pytest.raises(ValueError, match="edges holds 'norm:1'"),
        circuit(shared, [("norm:1", 1, 0)]),
    ):
        pass
