"""memory_limit and estimate: smaller tiles, the same result, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import build, padded
from peak_memory import RUNS
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaRollout,
    MemoryLimitError,
    RawAttention,
    estimate,
    hidden_attention,
)
from captum_ssm._cost import Asked, Costs
from captum_ssm._meter import OBJECTS, fitted, grown, measured

L = 23
ROOT = Path(__file__).parents[1]
# What `peak_memory.RUNS` runs, as it is asked of `estimate`.
ASKED = {name: {"request": name} for name in RUNS}
ASKED["unified"] = {"request": "attribution", "formulation": "unified"}


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


def allocated(run) -> int:
    """The most bytes of torch's allocator at a time, by its own account of them."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("family", "batch"), [("mamba2", 3), pytest.param("qwen3_next", 1, marks=pytest.mark.slow)]
)
def test_estimates_are_within_a_factor_of_two_of_what_is_allocated(
    family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captum_ssm._cost.SMALL", 0)  # as if the model were large
    model, length = build(family), 500
    tokens = torch.randint(1, 30, (batch, length), generator=torch.Generator().manual_seed(0))
    costs = Costs(model, tokens)
    assert costs.lengths[-1] <= 192
    for name, run in RUNS.items():
        real = allocated(lambda run=run: run(model, tokens))
        found = costs.of(Asked(**ASKED[name]))
        assert real / 2 < found.total_bytes < 2 * real, name
        assert found.forwards >= 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["copying-mamba", "stories-rwkv", "stories-qwen3next"])
def test_estimates_are_within_a_factor_of_two_of_the_resident_set(name: str) -> None:
    folder, length = ROOT / "tutorials" / "models" / name, 512
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "peak_memory.py"), str(folder), str(length)],
        capture_output=True,
        text=True,
        timeout=300,
        # What is freed is given back, so that each request starts from the same level.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    real = json.loads(run.stdout.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    costs = Costs(model, torch.zeros(1, length, dtype=torch.long))
    for request, asked in ASKED.items():
        found = costs.of(Asked(**asked))
        assert real[request] / 2 < found.total_bytes < 2 * real[request], request


def test_an_estimate_leaves_the_model_as_it_was(ids: torch.Tensor) -> None:
    model = build("mamba")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    for request in ("attribution", "latim", "lrp"):
        estimate(model, ids, request=request)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    after = [module.__dict__ for module in model.modules()]
    assert [a.keys() for a in after] == [b.keys() for b in attributes]


@pytest.mark.parametrize("length", [1, 5])
def test_estimates_of_a_few_tokens_and_of_embeddings(length: int) -> None:
    model = build("mamba")
    tokens = torch.ones(2, length, dtype=torch.long)
    for asked in ASKED.values():
        assert estimate(model, tokens, **asked).total_bytes > 0
    embeddings = model.get_input_embeddings()(tokens).detach()
    for request in ("row", "attribution", "latim", "lrp"):
        found = estimate(model, embeddings, request=request)
        assert found.result_bytes == embeddings.numel() * 4


def test_an_estimate_takes_padding_and_says_what_it_does_not_take(ids: torch.Tensor) -> None:
    model = build("mamba")
    plain = estimate(model, ids)
    for side in ("left", "right"):
        for mask in (padded(side, length=L), padded(side, length=L).flip(0)):
            found = estimate(model, ids, additional_forward_args={"attention_mask": mask})
            assert (found.result_bytes, found.flops) == (plain.result_bytes, plain.flops)
    with pytest.raises(InputError, match="estimate takes token ids"):
        estimate(model, torch.randn(1, 3, 8, 8))
    with pytest.raises(TypeError, match="inputs is a list"):
        estimate(model, ids.tolist())
    with pytest.raises(ValueError, match="at least 1"):
        estimate(model, ids, request="hidden_attention", rows=-1)


@pytest.mark.parametrize(
    ("request_", "given"),
    [("latim", {"layers": 0}), ("lrp", {"formulation": "unified"}), ("row", {"reduction": "max"})],
)
def test_an_estimate_takes_what_its_request_takes(request_, given, ids: torch.Tensor) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} is .* which takes .* leave {name} out"):
        estimate(build("mamba"), ids, request=request_, **given)


def test_the_meter_counts_what_exists_together() -> None:
    owned = torch.zeros(1000)

    def call(mark) -> None:
        a = owned + 1
        b = a + 1  # two
        del a
        mark()
        c = b.view(10, 100) * 2 + owned.view(10, 100)  # b, its double, and the sum
        del b, c

    one = 4000 + OBJECTS
    found = measured(call, [owned])
    assert (found.peak, found.kept, found.later_peak) == (2 * one, one, 3 * one)
    assert found.seconds > 0
    assert found.later_seconds > 0


def test_the_meter_sees_what_a_graph_keeps_and_backward_makes() -> None:
    x = torch.randn(1000, requires_grad=True)

    def call(mark) -> None:
        y = x.exp()
        for _ in range(5):
            y = y.exp()  # each is kept for the way back
        mark()
        y.sum().backward()
        x.grad = None

    found = measured(call, [x])
    assert found.peak == found.kept == 6 * (4000 + OBJECTS)
    assert found.later_peak >= 7 * 4000


def test_lines_and_parabolas_are_carried_exactly() -> None:
    def total(lengths, f, length, **options) -> float:
        return sum(fitted(lengths, [f(n) for n in lengths], length, **options))

    assert total([64, 128], lambda n: 7 + 3 * n, 1000) == pytest.approx(3007)
    fixed, growing = fitted([64, 128], [7 + 3 * 64, 7 + 3 * 128], 1000)
    assert (fixed, growing) == pytest.approx((7, 3000))
    curve = total([64, 128, 192], lambda n: 7 + 3 * n + 2 * n * n, 1000, curved=True)
    assert curve == pytest.approx(7 + 3000 + 2_000_000)
    # A line where it was not allowed to curve, and nothing that falls.
    assert total([64, 128, 192], lambda n: 5 * n, 1000) == pytest.approx(5000)
    assert total([64, 128], lambda n: 500 - n, 1000) == pytest.approx(372)
    for exact in (lambda n: 3 * n, lambda n: 2 * n * n, lambda n: 3 * n + 2 * n * n):
        assert grown([64, 128], [exact(64), exact(128)], 1000) == pytest.approx(exact(1000))
    # Between a line and a parabola, whatever the clock says.
    assert grown([64, 128], [1.0, 1.0], 1280) == pytest.approx(10)
    assert grown([64, 128], [0.0, 1.0], 1280) == pytest.approx(100)
