"""memory_limit and estimate: smaller tiles, the same result, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from families import build, padded
from folders import ROOT
from models import tiny
from peak_memory import calls
from torch.autograd.profiler import profile
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from unchanged import assert_unchanged, fingerprint

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    MemoryLimitError,
    RawAttention,
    estimate,
    hidden_attention,
    kernels,
)
from captum_ssm.attr import methods
from captum_ssm.inspection.meter import OBJECTS, fitted, grown, measured
from captum_ssm.models import VisionMamba
from captum_ssm.utils.memory import is_lack_of_memory

L = 23


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 30, (2, L), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates by calls on 127 and 191 tokens only, as if the model were large."""
    monkeypatch.setattr("captum_ssm.inspection.cost.BUDGET", 0)


@pytest.fixture
def tiny_calls(short_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates by calls on 31 and 47 tokens, where sizes are asked for that are known exactly."""
    monkeypatch.setattr("captum_ssm.inspection.cost.CHUNK", 16)


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


@pytest.mark.parametrize(
    "family",
    ["mamba", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mamba2", "qwen3_next"))],
)
def test_an_estimate_knows_the_size_of_the_result(
    family: str, ids: torch.Tensor, tiny_calls: None
) -> None:
    maps_of, longer = partial(hidden_attention, build(family)), ids.repeat(1, 4)
    measured: list[tuple[torch.Tensor, dict[str, Any]]] = [(ids, {}), (longer, {})]
    measured += [(longer, {"reduction": "mean"}), (ids, {"formulation": "unified"})]
    for tokens, options in [*measured, (longer, {"rows": [-1]})]:
        maps = maps_of(tokens, **options)
        size = sum(m.numel() * m.element_size() for m in maps.values())
        assert estimate(maps_of, tokens, **options).result_bytes == size
    assert estimate(maps_of, ids, rows=[-1]) == estimate(partial(maps_of, rows=[-1]), ids)


def test_estimates_grow_as_the_work_does(short_calls: None) -> None:
    method = MambaRollout(build("mamba"))
    short, long = (torch.ones(1, n, dtype=torch.long) for n in (1024, 4096))
    row = [estimate(method, x) for x in (short, long)]
    assert 3.9 * row[0].high < row[1].high < 4.1 * row[0].high
    whole = [estimate(method.rollout, x) for x in (short, long)]
    assert whole[1].result_bytes == 16 * whole[0].result_bytes
    assert whole[1].low < whole[1].high
    assert " to " in str(whole[1])
    assert str(whole[1]).startswith("returns 64.0 MiB, works in ")


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("jamba", marks=pytest.mark.slow)])
def test_the_first_look_at_a_model_is_no_part_of_an_estimate(
    family: str, ids: torch.Tensor, tiny_calls: None
) -> None:
    method = MambaLRP(build(family))
    first, second = (estimate(method, ids.repeat(1, 10), target=3) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("method", ["rollout", MambaRollout, lambda x: x, partial(print, 3)])
def test_an_estimate_is_of_a_method(method: object, ids: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"method is .*; expected a method such as MambaRollout"):
        estimate(method, ids)


def allocated(run, tokens: torch.Tensor) -> int:
    """The most bytes of torch's allocator at a time, by its own account of them."""
    run(inputs=tokens[:, :16])  # loads what is loaded once
    with profile(profile_memory=True) as seen:
        run(inputs=tokens)
    events = seen.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("least", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_layer_more_keeps_its_tokens_and_the_stream(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The input is long, the graphs of mixers are made anew, and the wiring is measured.
    monkeypatch.setattr("captum_ssm.capture.substitute.KEPT", 0)
    ids, peaks = torch.randint(30, (1, 80)), []
    for layers in (least, least + 4):
        config = MambaConfig(num_hidden_layers=layers, hidden_size=64, state_size=2, vocab_size=30)
        method = MambaAttribution(MambaForCausalLM(config).eval().requires_grad_(False))
        peaks.append(allocated(partial(method.attribute, target=3), ids))
    assert peaks[1] - peaks[0] < 4 * 2.5 * 80 * 64 * 4


def assert_close(model, tokens, found) -> None:
    for name, (call, options) in calls(model).items():
        real = allocated(partial(call, **options), tokens)
        expected = found(call, options)
        assert real / 2 < expected.total_bytes < 2 * real, name
        assert expected.low <= expected.high
        assert expected.forwards >= 1


SIZES = [("mamba2", 3, 500)]
LARGER = [("mamba2", 1, 2048), ("qwen3_next", 1, 500), ("qwen3_next", 1, 2048)]
SIZES += [pytest.param(*size, marks=pytest.mark.slow) for size in LARGER]


@pytest.mark.parametrize(("family", "batch", "length"), SIZES)
def test_estimates_are_within_a_factor_of_two_of_what_is_allocated(
    family: str, batch: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if length == 500:  # as if the model were large
        monkeypatch.setattr("captum_ssm.inspection.cost.BUDGET", 0)
    model, asked = build(family), []
    model.register_forward_pre_hook(lambda _, args: asked.append(args[0].shape[1]))
    tokens = torch.randint(1, 30, (batch, length), generator=torch.Generator().manual_seed(0))

    def found(call, options):
        asked.clear()
        result = estimate(call, tokens, **options)
        assert max(asked) <= (191 if length == 500 else 575)
        return result

    assert_close(model, tokens, found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["copying-mamba", "stories-rwkv", "stories-qwen3next"])
def test_estimates_are_within_a_factor_of_two_of_the_resident_set(
    name: str, short_calls: None
) -> None:
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
    tokens = torch.zeros(1, length, dtype=torch.long)
    for request, (call, options) in calls(model).items():
        found = estimate(call, tokens, **options)
        assert real[request] / 2 < found.total_bytes < 2 * real[request], request


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_an_offloaded_model_takes_two_blocks_and_activations(kind: str) -> None:
    pytest.importorskip("accelerate")

    def measured(side: str) -> list[dict[str, float]]:
        run = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "offloaded.py"), "--one", kind, side],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)},
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    for here, away in zip(measured("in memory"), measured("offloaded"), strict=True):
        allowed = here["peak_MiB"] - here["weights_MiB"] + 2 * here["block_MiB"]
        assert away["peak_MiB"] <= allowed, here["method"]
        torch.testing.assert_close(torch.tensor(away["found"]), torch.tensor(here["found"]))


def test_an_estimate_leaves_the_model_as_it_was(ids: torch.Tensor) -> None:
    model = build("mamba")
    before = fingerprint(model)
    for method in (MambaAttribution, LaTIM, MambaLRP):
        estimate(method(model), ids, target=3)
    assert_unchanged(model, before)


@pytest.mark.parametrize("length", [1, 5])
def test_estimates_of_a_few_tokens_and_of_embeddings(length: int) -> None:
    model = build("mamba")
    tokens = torch.ones(2, length, dtype=torch.long)
    for call, options in calls(model).values():
        assert estimate(call, tokens, **options).total_bytes > 0
    embeddings = model.get_input_embeddings()(tokens).detach()
    for method in (MambaRollout, MambaAttribution, LaTIM, MambaLRP):
        found = estimate(method(model), embeddings, target=3)
        assert found.result_bytes == embeddings.numel() * 4


@pytest.mark.parametrize("name", methods())
def test_every_method_is_estimated(name: str, ids: torch.Tensor, tiny_calls: None) -> None:
    model, long = tiny(layers=1), ids.repeat(1, 10)
    mask = torch.ones_like(long)
    mask[:, :200] = 0  # the first tokens alone are all padding
    target = [(-1, 3), (225, 4)]
    for given in ({"target": 3}, {"target": target}, {"target": [3, 4], "position": [220, -1]}):
        extra = {"attention_mask": mask}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the padding is read
            found = estimate(methods()[name](model), long, additional_forward_args=extra, **given)
        assert found.result_bytes == long.numel() * 4


def test_an_estimate_moves_positions_and_cuts_targets(ids: torch.Tensor, short_calls: None) -> None:
    model, long, seen = tiny(), ids.repeat(1, 10), []

    class Seen(LaTIM):
        def attribute(self, inputs, target=None, additional_forward_args=None, *, position=None):
            seen.append((inputs.shape[1], target, position))
            return inputs.float()

        def interactions(self, inputs, *, target, additional_forward_args=None):
            seen.append(target.shape)
            return inputs.float()

    method = Seen(model)
    estimate(method, long, target=[(-1, 3), (0, 4)])
    assert [found[:2] for found in seen[::3]] == [(127, [(126, 3)]), (191, [(190, 3)])]
    seen.clear()
    estimate(method, long, position=torch.tensor([115, 229]))
    assert [int(found[2]) for found in seen[::3]] == [127 // 2, 191 // 2]
    seen.clear()
    estimate(method.interactions, long, target=long)
    assert seen[::3] == [(1, 127), (1, 191)]
    # What the call does not take, it says itself.
    with pytest.raises(TypeError, match="no option 'reduction'"):
        estimate(MambaLRP(model), ids, target=3, reduction="max")
    with pytest.raises(ValueError, match="reduction is 'most'"):
        estimate(RawAttention(model), ids, reduction="most")


def test_an_estimate_takes_padding_and_says_what_it_does_not_take(ids: torch.Tensor) -> None:
    method = RawAttention(build("mamba"))
    plain = estimate(method, ids)
    for side in ("left", "right"):
        for mask in (padded(side, length=L), padded(side, length=L).flip(0)):
            found = estimate(method, ids, additional_forward_args={"attention_mask": mask})
            assert found.result_bytes == plain.result_bytes
    with pytest.raises(InputError, match="holds ids from"):
        estimate(method, ids + 1000)
    with pytest.raises(TypeError, match="inputs is a list"):
        estimate(method, ids.tolist())


def test_an_image_is_run_as_it_is() -> None:
    model = VisionMamba((16, 16), 4, classes=5, width=8, depth=2, state=4).eval()
    images = torch.randn(3, 3, 16, 16)
    one, three = (estimate(MambaRollout(model), x) for x in (images[:1], images))
    assert three.result_bytes == images.numel() * 4
    assert three.high == 3 * one.high == 3 * one.low


def test_the_meter_counts_what_exists_together() -> None:
    owned = torch.zeros(1000)

    def call() -> torch.Tensor:
        a = owned + 1
        b = a + 1  # two
        del a
        c = b.view(10, 100) * 2 + owned.view(10, 100)  # b, its double, and the sum
        return c[0]

    found = measured(call, [owned])
    assert found.peak == (3 * (4000 + OBJECTS),) * 2
    assert found.result == (400, 400)
    assert found.seconds > 0


def test_the_meter_sees_what_a_graph_keeps_and_backward_makes() -> None:
    x = torch.randn(1000, requires_grad=True)

    def call() -> None:
        y = x.exp()
        for _ in range(5):
            y = y.exp()  # each is kept for the way back
        y.sum().backward()
        x.grad = None

    found = measured(call, [x])
    assert found.peak[0] >= 6 * (4000 + OBJECTS) + 4000


def test_tensors_of_two_token_axes_count_as_at_the_whole_length() -> None:
    def call(tokens: int) -> torch.Tensor:
        run = torch.zeros(50, tokens)
        matrix = torch.zeros(2, tokens, tokens)
        tile = torch.zeros(256, tokens)
        del run, tile
        return matrix

    found = [measured(lambda n=n: call(n), [], n, 4095 / n) for n in (319, 575)]
    whole = 4 * (2 * 4095**2 + (50 + 256) * 4095) + 3 * OBJECTS
    for i, expected in ((1, whole), (0, None)):
        total = sum(fitted([319, 575], [r.peak[i] for r in found], 4095))
        assert total == pytest.approx(expected) if expected else total < whole / 2
    assert sum(fitted([319, 575], [r.result[1] for r in found], 4095)) == 4 * 2 * 4095**2


def test_lines_are_extrapolated_exactly() -> None:
    fixed, growing = fitted([64, 128], [7 + 3 * 64, 7 + 3 * 128], 1000)
    assert (fixed, growing) == pytest.approx((7, 3000))
    assert sum(fitted([64, 128], [500 - 64, 500 - 128], 1000)) == pytest.approx(372)
    assert fitted([64], [128], 1000) == (0, 2000)
    for exact in (lambda n: 3 * n, lambda n: 2 * n * n, lambda n: 3 * n + 2 * n * n):
        assert grown([64, 128], [exact(64), exact(128)], 1000) == pytest.approx(exact(1000))
    # Between a line and a parabola, whatever the clock says.
    assert grown([64, 128], [1.0, 1.0], 1280) == pytest.approx(10)
    assert grown([64, 128], [0.0, 1.0], 1280) == pytest.approx(100)
    assert grown([64], [2.0], 128) == pytest.approx(4)


@pytest.mark.skipif(not kernels.extension_loaded(), reason="the extension is not built")
def test_what_the_extension_cannot_allocate_is_a_lack_of_memory():
    L = 4_000_000  # a map of so many tokens squared has 64 TB
    numbers = torch.ones(1, L, 1)
    coefficients = kernels.DiagonalCoefficients(
        numbers, numbers, -torch.ones(1, 1), numbers[..., None], numbers[..., None]
    )
    with pytest.raises(RuntimeError) as raised:
        kernels.diagonal_mean(coefficients)
    assert is_lack_of_memory(raised.value)
    assert not is_lack_of_memory(RuntimeError("API call failed"))
