"""memory_limit and estimate: smaller tiles, the same result, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from families import build

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaRollout,
    MemoryLimitError,
    RawAttention,
    estimate,
    hidden_attention,
)

L = 23


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 30, (2, L), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_a_limit_changes_tiles_and_not_results(family: str, ids: torch.Tensor) -> None:
    model = build(family)
    for method, options in (
        (MambaAttribution, {"target": 3}),
        (RawAttention, {"reduction": "max"}),
        (LaTIM, {"layer": 0, "aggregation": "l2"}),
    ):
        free = method(model).attribute(ids, **options)
        tight = method(model, memory_limit=4096).attribute(ids, **options)
        torch.testing.assert_close(tight, free, rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_says_what_would(ids: torch.Tensor) -> None:
    model = build("mamba")
    whole = hidden_attention(model, ids)
    size = sum(m.numel() * m.element_size() for m in whole.values())
    # It fits exactly, and one byte less does not.
    assert len(hidden_attention(model, ids, memory_limit=size)) == len(whole)
    with pytest.raises(MemoryLimitError, match="reduction='mean'") as caught:
        hidden_attention(model, ids, memory_limit=size - 1)
    assert "needs" in str(caught.value)
    with pytest.raises(MemoryLimitError, match=r"attribute\(\), one row"):
        MambaRollout(model, memory_limit=5000).rollout(ids)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1GB"])
def test_a_limit_is_a_number_of_bytes(limit: object, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="memory_limit is"):
        RawAttention(build("mamba"), memory_limit=limit).attribute(ids)


def test_an_estimate_knows_the_size_of_the_result(ids: torch.Tensor) -> None:
    for family in ("mamba", "mamba2", "qwen3_next"):
        model = build(family)
        for options in ({}, {"reduction": "mean"}, {"formulation": "unified"}, {"rows": 1}):
            asked = {**options, **({"rows": [-1]} if "rows" in options else {})}
            maps = hidden_attention(model, ids, **asked)
            size = sum(m.numel() * m.element_size() for m in maps.values())
            found = estimate(model, ids, request="hidden_attention", **options)
            assert found.result_bytes == size
            assert found.layers == len(maps)


def test_estimates_grow_as_the_work_does() -> None:
    model = build("mamba")
    short, long = (torch.ones(1, n, dtype=torch.long) for n in (1024, 4096))
    row = [estimate(model, x) for x in (short, long)]
    assert row[1].flops == 4 * row[0].flops
    assert row[1].working_bytes < 4.1 * row[0].working_bytes
    whole = [estimate(model, x, request="rollout") for x in (short, long)]
    assert whole[1].result_bytes == 16 * whole[0].result_bytes
    assert "mixers: returns" in str(whole[0])
    with pytest.raises(ValueError, match="request is 'map'"):
        estimate(model, short, request="map")
