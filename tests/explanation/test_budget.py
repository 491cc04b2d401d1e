"""Rows of a data set that are explained together keep to a budget of memory."""

import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from explained_rows import explained
from models import VOCABULARY, tiny, word_tokenizer
from transformers import MambaConfig, MambaForCausalLM

from captum_ssm import ExplainBatches, InputError, explain_dataset
from captum_ssm.explanation import ExplainedDataset
from captum_ssm.explanation.make import together
from captum_ssm.explanation.make.dataset import budget
from captum_ssm.explanation.make.dataset.budget import RowCost, capacity_of, limit_of
from captum_ssm.explanation.make.relevance import batches as batches_module
from captum_ssm.explanation.make.relevance import rows as rows_module
from captum_ssm.explanation.make.relevance.batches import BatchLimit, batch_limit, batches
from captum_ssm.explanation.make.relevance.run import OneInput, Run
from captum_ssm.utils.memory import is_lack_of_memory
from captum_ssm.utils.peak import PeakMemory

KIB = 1 << 10


def ids(count: int, longest: int = 60) -> list[dict[str, list[int]]]:
    """Rows of token ids of several lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 3, longest + 1, (count,), generator=draw).tolist()
    return [
        {"input_ids": torch.randint(0, VOCABULARY, (length,), generator=draw).tolist()}
        for length in lengths
    ]


def words():
    return word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})


def told(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())["batches"]


def text(length: int) -> OneInput:
    run = Run(torch.nn.Identity(), is_causal=True)
    return OneInput(run, torch.zeros(1, length, dtype=torch.long))


def test_peak_memory_counts_what_is_alive_at_once():
    weight = torch.zeros(10 * KIB, requires_grad=True)
    with PeakMemory([weight]) as memory:
        weight.detach()[:5].add_(0)  # nothing is made
        assert memory.peak == 0
        for _ in range(3):  # one is freed before the next is made
            torch.zeros(KIB)
        assert memory.peak == 4 * KIB
        kept = torch.zeros(KIB)
        view = kept.view(32, 32).T
        assert memory.peak == 4 * KIB
        copy = view.contiguous()
        assert memory.peak == 8 * KIB
        del kept, view, copy
        # Autograd keeps the result of each exponential, and backward adds gradients.
        result = weight.exp().exp().sum()
        assert memory.peak == 2 * 40 * KIB + 4
        result.backward()
        assert memory.peak == 3 * 40 * KIB + 8  # one is freed before the next gradient is made


@pytest.mark.parametrize("sizes", [(10, 40), (7, 8)])
def test_what_rows_take_grows_evenly_between_those_measured(sizes):
    cost = RowCost([(size, 1000 + 30 * size) for size in sizes])
    for size in range(sizes[0], sizes[1] + 1):
        assert cost(size) == pytest.approx(1000 + 30 * size)
    assert cost(1) == cost(sizes[0])
    quadratic = RowCost([(40, 3 * 40**2)])
    assert quadratic(80) == 3 * 80**2
    assert quadratic(10) == quadratic(40)


def test_batches_hold_what_there_is_memory_for():
    items = [text(length) for length in (5, 5, 6, 10, 10, 20, 90)]
    assert [*batches(items)] == [[*range(7)]]
    plan = {"memory": 3000, "measured": [(10, 1000), (20, 2000)]}
    with batch_limit(limit_of(plan)):
        assert [*batches(items)] == [[0, 1, 2], [3, 4], [5], [6]]
        assert [*batches(items, most=4)] == [[0, 1, 2, 3], [4, 5, 6]]
    for nothing in (None, {"memory": 3000, "measured": []}):
        with batch_limit(limit_of(nothing)):
            assert [*batches(items)] == [[*range(7)]]


@pytest.mark.parametrize("plan", [None, {"memory": 5000, "measured": [(10, 1000)]}])
def test_batches_after_a_lack_of_memory_are_half_as_large(plan, monkeypatch):
    monkeypatch.setattr(batches_module, "TOKENS", 50)
    items, limit = [text(10)] * 10, limit_of(plan)
    with batch_limit(limit):
        sizes = []
        for places in batches(items):
            sizes.append(len(places))
            if len(places) > 2:
                limit.was_exceeded([items[k] for k in places])
        assert sizes == [5, 2, 2, 1]
    arrays = [OneInput(Run(torch.nn.Identity()), torch.zeros(1, 3, 4, 4))] * 24
    with batch_limit(BatchLimit()) as _:
        assert [len(places) for places in batches(arrays)] == [8, 8, 8]


@pytest.fixture
def counted(monkeypatch):
    """The bytes of each batch of relevance that several rows share, and how many rows it has."""
    found: list[tuple[int, int]] = []
    plain = rows_module.rows

    def watched(method, asked, **options):
        with PeakMemory([*asked[0].run.module.parameters()]) as memory:
            result = plain(method, asked, **options)
        found.append((len(asked), memory.peak))
        return result

    monkeypatch.setattr(rows_module, "rows", watched)
    return found


def run(folder: Path, **options) -> ExplainedDataset:
    options = {"alternatives": 0, "methods": ["mamba-lrp"]} | options
    return explain_dataset(tiny(), words(), ids(24), folder, **options)


def test_rows_that_are_explained_together_keep_to_the_budget(tmp_path, counted):
    free = run(tmp_path / "free", batch_memory=1 << 40)
    assert max(count for count, _ in counted) == len(ids(24))
    most = max(peak for _, peak in counted)
    for share in (2, 4, 16):
        counted.clear()
        kept = run(tmp_path / str(share), batch_memory=most // share)
        shared = [peak for count, peak in counted if count > 1]
        # Some of a batch is there once for all of its rows, so that it takes less than each alone.
        assert all(peak <= most // share for peak in shared)
        assert len(counted) > share
        for a, b in zip(free, kept, strict=True):
            a, b = (x.examples[0].relevance["mamba-lrp"] for x in (a, b))
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max())
    assert told(tmp_path / "16")["memory"] == most // 16


def test_a_row_that_takes_more_than_the_budget_is_explained_alone(tmp_path, counted):
    found = run(tmp_path, batch_memory=1)
    assert not found.errors
    assert {count for count, _ in counted} == {1}


def test_what_was_measured_holds_for_every_process_and_new_start(tmp_path, monkeypatch):
    options = {"rows_per_shard": 6, "batch_memory": 400 * KIB}
    run(tmp_path / "one", **options)
    assert len(told(tmp_path / "one")["measured"]) == 2
    run(tmp_path / "two", process=(1, 2), **options)
    again = lambda *args: pytest.fail("rows were measured again")  # noqa: E731
    monkeypatch.setattr("captum_ssm.explanation.make.dataset.run.measured", again)
    run(tmp_path / "two", process=(0, 2), **options)
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()
    }
    with pytest.raises(InputError, match=r"settings: asked.batch_memory was 409600 and is 1"):
        run(tmp_path / "one", **options | {"batch_memory": 1})


def test_rows_that_fail_are_not_measured(tmp_path):
    found = explained(tmp_path, dataset=[{"text": text} for text in ("", "w5 w6", None)])
    (size, taken), *others = told(tmp_path)["measured"]
    assert (size, others, sorted(found.errors)) == (2, [], [0, 2])
    assert taken > 0
    explained(tmp_path / "none", dataset=[{"text": ""}])
    assert told(tmp_path / "none")["measured"] == []


def test_batches_by_ray_keep_to_the_budget(counted):
    explain_batch = ExplainBatches(
        lambda: (tiny(), words()), batch_memory=1, methods="mamba-lrp", alternatives=0
    )
    table = {"input_ids": [row["input_ids"] for row in ids(4)]}
    for _ in range(2):
        assert explain_batch(table)["error"].to_pylist() == [None] * 4
    assert {count for count, _ in counted} == {1}


@pytest.mark.parametrize("memory", [0, -1, 1.5, "1 GiB", True])
def test_a_budget_is_a_number_of_bytes(memory, tmp_path):
    with pytest.raises(InputError, match=r"batch_memory is .* expected a positive number of bytes"):
        run(tmp_path, batch_memory=memory)


def test_a_container_may_use_what_it_is_allowed(tmp_path, monkeypatch):
    whole = capacity_of(torch.device("cpu"))
    assert whole > 1 << 28
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budget, "CGROUPS", (str(limit), str(tmp_path / "none")))
    limit.write_text("134217728\n")
    assert capacity_of(torch.device("cpu")) == 1 << 27
    limit.write_text("max\n")
    assert capacity_of(torch.device("cpu")) >= whole


def limited(folder: Path) -> None:
    """In a process of its own: rows are explained as ever, then with next to no memory left."""
    import resource

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=512, num_hidden_layers=4, vocab_size=VOCABULARY)
    asked = [MambaForCausalLM(config).eval(), words(), ids(16, 180)]
    options = {"alternatives": 0, "methods": ["mamba-lrp"]}
    free = explain_dataset(*asked, folder / "free", **options)
    lacked: list[bool] = []
    together.is_lack_of_memory = lambda error: lacked.append(is_lack_of_memory(error)) or lacked[-1]
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (560 << 20), before[1]))
    kept = explain_dataset(*asked, folder / "kept", **options)
    resource.setrlimit(resource.RLIMIT_AS, before)
    pairs = [
        [found[k].examples[0].relevance["mamba-lrp"] for found in (free, kept)]
        for k in range(len(kept))
        if k not in kept.errors
    ]
    differences = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs]
    (folder / "told.json").write_text(json.dumps([lacked, kept.errors, differences]))


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_process_that_has_no_memory_left_goes_on_with_less(tmp_path):
    fork = multiprocessing.get_context("fork")  # importing PyTorch takes longer than the rest
    process = fork.Process(target=limited, args=(tmp_path,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    lacked, errors, differences = json.loads((tmp_path / "told.json").read_text())
    assert errors == {}
    assert lacked  # PyTorch's allocator found no memory for the first batch
    assert all(lacked)
    assert len(lacked) < 6  # and batches after it were smaller at once
    assert max(differences) < 2e-5
