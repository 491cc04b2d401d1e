"""LaTIM whose relevance goes through lower layers by the target's own edges."""

from __future__ import annotations

import pytest
import torch
from families import build
from proofs import assert_sums_to_logits

from captum_ssm import LaTIM, RelevanceFlow

L = 7


def ids_for(count: int) -> torch.Tensor:
    return torch.randint(0, 37, (count, L), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "falcon_h1"])
def test_it_sums_to_the_logit(family: str) -> None:
    assert_sums_to_logits(build(family), ids_for(2), aggregation="flow_logit")


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_it_is_the_written_out_walk_along_positive_edges(family: str) -> None:
    model, ids, target = build(family), ids_for(1), 5
    latim = LaTIM(model)
    edges = RelevanceFlow(model).edges(
        ids, target=target, against=None, position=L - 2, formulation="unified"
    )
    layers = list(edges.values())
    options = {"target": torch.full((1, L), target), "aggregation": "alti_logit"}
    whole = latim.interactions(ids, None, **options)[0, L - 2]
    parts = [latim.interactions(ids, k, **options)[0, L - 2] for k in range(len(layers))]
    expected = torch.zeros(L)
    for k in reversed(range(len(layers))):
        walked = torch.zeros(L)
        for i in range(L):
            ways = layers[k].matrix()[0, i].clone()
            ways[i] += edges.blocks[k].before[0, i] - layers[k].drawn[0, i]
            ways = ways.clamp(min=0)
            if float(ways.sum()) > 0:
                walked += expected[i] * ways / ways.sum()
            else:
                walked[i] += expected[i]
        expected = walked + parts[k]
    # The stream before the first mixer counts to its own token.
    expected[L - 2] += whole.sum() - sum(parts).sum()
    found = latim.attribute(ids, target=target, position=L - 2, aggregation="flow_logit")
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-5)


def test_the_target_decides_the_way() -> None:
    # ALTI's rows are those of any target, so that what it carries is linear in the dot products.
    model, ids = build("mamba"), ids_for(1).expand(2, -1)
    latim, target = LaTIM(model), torch.tensor([3, 7])
    both = latim.attribute(ids, target=target, aggregation="flow_logit")
    one = latim.attribute(ids[:1], target=3, aggregation="flow_logit")
    torch.testing.assert_close(both[:1], one, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(both[0], both[1])
    assert not torch.allclose(one, latim.attribute(ids[:1], target=3), rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"layer": 0}, "goes through all layers"),
        ({"tolerance": 0.1}, "tolerance is 0.1"),
        ({"grid": 0}, "grid is 0"),
    ],
)
def test_what_it_does_not_offer(options: dict, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        LaTIM(build("mamba")).attribute(ids_for(1), target=3, aggregation="flow_logit", **options)


def test_it_has_no_map_of_all_positions() -> None:
    with pytest.raises(ValueError, match="once per position"):
        LaTIM(build("mamba")).interactions(ids_for(1), None, "flow_logit")
