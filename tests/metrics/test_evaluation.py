"""The harness: batches in order, seeded, and the same numbers from one process and from two."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from folders import TESTS
from sharded_scores import SAMPLES, all_scores

from captum_ssm.metrics import Curve, Interval, SegmentationScores, evaluate, segmentation


def leaves(scores: object, path: str = "") -> dict[str, object]:
    """Tensors and numbers of nested scores by path."""
    if dataclasses.is_dataclass(scores):
        scores = vars(scores)
    if not isinstance(scores, dict):
        return {path: scores}
    found: dict[str, object] = {}
    for key, value in scores.items():
        found |= leaves(value, f"{path}/{key}")
    return found


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one_to_the_last_bit(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    script = TESTS / "sharded_scores.py"
    done = subprocess.run(
        [*command, "2", str(script), str(tmp_path / "found")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = leaves(all_scores(None))
    assert expected["/images/positive/values"].shape == (SAMPLES, 9)
    for rank in range(2):
        with torch.serialization.safe_globals([Curve, Interval, SegmentationScores]):
            found = leaves(torch.load(tmp_path / f"found-{rank}"))
        assert list(found) == list(expected)
        for name, value in expected.items():
            same = (
                torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
            )
            assert same, name


def test_samples_of_any_kind_come_in_order_and_in_batches():
    seen = []

    def score(texts, numbers, places):
        seen.append((texts, numbers.tolist(), places))
        return {"a": {"b": numbers * 2}}

    found = evaluate(score, list("abcde"), torch.arange(5), range(5), batch_size=2)
    assert seen == [
        (["a", "b"], [0, 1], [0, 1]),
        (["c", "d"], [2, 3], [2, 3]),
        (["e"], [4], [4]),
    ]
    assert found["a"]["b"].tolist() == [0, 2, 4, 6, 8]


def test_curves_and_segmentations_are_joined_as_if_scored_at_once():
    torch.manual_seed(0)
    maps, masks = torch.randn(5, 3, 4, 6), torch.randint(-1, 2, (5, 4, 6))
    whole = segmentation(maps, masks)
    parts = evaluate(segmentation, maps, masks, batch_size=2)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(whole).values(), vars(parts).values(), strict=True)
    )
    assert parts.miou() == whole.miou()
    shares = torch.tensor([0.0, 1.0])
    curve = evaluate(lambda x: Curve(shares, x), torch.arange(10.0).view(5, 2), batch_size=3)
    assert curve.values.tolist() == torch.arange(10.0).view(5, 2).tolist()
    assert torch.equal(curve.shares, shares)


def test_random_numbers_are_the_batch_s_own_and_the_caller_s_are_left_alone():
    def noise(x):
        return torch.rand(len(x))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = evaluate(noise, range(6), batch_size=2)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert torch.equal(first, evaluate(noise, range(6), batch_size=2))
    assert not torch.equal(first, evaluate(noise, range(6), batch_size=2, seed=9))
    assert first[:2].tolist() != first[2:4].tolist()


def test_no_seed_waits_for_a_gpu(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    evaluate(lambda x: torch.rand(len(x)), range(4), batch_size=2)
    assert seeds == []


def test_random_states_of_all_gpus_are_given_back(monkeypatch):
    states = {0: "first", 1: "second"}

    def seeded(seed):
        states.update(dict.fromkeys(states, seed))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, device: states.update({device: s}))
    found = evaluate(lambda x: torch.tensor([states[k] for k in x]), range(2), batch_size=2, seed=7)
    assert found.tolist() == [7, 7]
    assert states == {0: "first", 1: "second"}


def test_gradients_are_dropped():
    x = torch.ones(3, requires_grad=True)
    assert not evaluate(lambda part: part * 2, x).requires_grad


def test_errors_of_evaluate():
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"hold \[4, 3\] samples"):
        evaluate(lambda a, b: a, x, x[:3])
    with pytest.raises(ValueError, match="at least one"):
        evaluate(lambda a: a, [])
    with pytest.raises(ValueError, match="batch_size is 0"):
        evaluate(lambda a: a, x, batch_size=0)
    with pytest.raises(
        ValueError, match=r"shape \(\) for a batch of 4; expected one row per sample"
    ):
        evaluate(lambda a: a.mean(), x)
    with pytest.raises(TypeError, match="returned a float; expected tensors, Curve"):
        evaluate(lambda a: 0.5, x)
    with pytest.raises(ValueError, match="different shares"):
        evaluate(lambda a: Curve(a[:1], a[:, None]), torch.arange(4.0), batch_size=2)
