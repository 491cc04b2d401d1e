"""A data set explained into a folder: what comes back, what survives, and what is refused."""

import errno
import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from explained_rows import BAD, ROWS, explained, rows
from models import tiny

from captum_ssm import InputError, explain_dataset
from captum_ssm.explanation import RowError, open_dataset
from captum_ssm.explanation.file import encoded
from captum_ssm.explanation.make.many import Explainer, InputRow


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    explained(folder)
    return folder


def started(folder: Path, k: int = 0, n: int = 1) -> Any:
    """Process k of n; forked, since importing PyTorch takes longer than all that is explained."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=explained, args=(folder,), kwargs={"process": (k, n)})
    process.start()
    return process


def test_examples_come_back_as_they_were_made(whole, words):
    found = open_dataset(whole)
    assert len(found) == ROWS
    assert found.is_complete
    assert set(found.errors) == {*BAD}
    explainer = Explainer(tiny(), words, maps=True)
    for start in range(0, ROWS, 4):
        asked = {i: rows()[i] for i in range(start, min(start + 4, ROWS)) if i not in BAD}
        made = explainer([InputRow(row["text"], row["target"]) for row in asked.values()])
        for (i, _), example in zip(asked.items(), made, strict=True):
            again, expected = found[i], explainer.explanation([example])
            assert encoded(vars(again)) == encoded(vars(expected))
            for kind in ("relevance", "deltas"):
                old, new = getattr(example, kind), getattr(again.examples[0], kind)
                assert list(old) == list(new)
                for name, values in old.items():
                    assert values.dtype == new[name].dtype
                    np.testing.assert_array_equal(values, new[name])
            for old, new in zip(example.maps, again.examples[0].maps, strict=True):
                for layer, values in old.layers.items():
                    np.testing.assert_array_equal(values, new.layers[layer])
    assert [one.examples[0].text for one in found] == [
        found[i].examples[0].text for i in range(ROWS) if i not in BAD
    ]


def test_rows_that_fail_are_recorded_with_their_number_and_error(whole):
    found = open_dataset(whole)
    told = {i: error.partition(":")[0] for i, error in found.errors.items()}
    assert told == {3: "InputError", 8: "TypeError", 13: "TypeError", 17: "TypeError"}
    with pytest.raises(RowError, match="row 3 was not explained: InputError: text is"):
        found[3]
    with pytest.raises(IndexError, match=r"expected 0 \.\. 21"):
        found[ROWS]
    assert found.column("row.year") == found.column("year") == [1990 + i for i in range(ROWS)]
    assert not {"row.list", "row.text"} & {*found.columns}
    with pytest.raises(ValueError, match="name is 'nothing'; expected one of index"):
        found.column("nothing")


def test_other_programs_open_the_shards(whole):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    shards = sorted(map(str, whole.glob("*.parquet")))
    table = pandas.concat(map(pandas.read_parquet, shards))
    found = open_dataset(whole)
    assert table["index"].tolist() == list(range(ROWS))
    first = found[0].examples[0]
    np.testing.assert_array_equal(
        np.stack(table["relevance.mamba-lrp"][0].iloc[0]), first.relevance["mamba-lrp"]
    )
    cache = str(whole.parent / "cache")
    loaded = datasets.load_dataset("parquet", data_files=shards, split="train", cache_dir=cache)
    assert loaded["target"] == found.column("target")
    answer = first.outputs[0].answers[first.outputs[0].chosen]
    assert (loaded[0]["target"], loaded[0]["probability"]) == (answer.text, answer.probability)
    assert loaded[0]["prediction"] == min(first.outputs[0].answers, key=lambda a: a.rank).text


@pytest.mark.parametrize("n", [2, 3])
def test_the_number_of_processes_changes_nothing(n, whole, tmp_path):
    for k in reversed(range(n)):
        explained(tmp_path, process=(k, n))
    assert files(tmp_path) == files(whole)


def test_two_processes_at_once_write_what_one_does(whole, tmp_path, monkeypatch):
    for process in [started(tmp_path, k, 2) for k in range(2)]:
        process.join()
        assert process.exitcode == 0
    assert files(tmp_path) == files(whole)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    explained(tmp_path / "ranked")
    assert sorted(p.stem for p in (tmp_path / "ranked").glob("*.parquet")) == [
        "part-00001",
        "part-00003",
        "part-00005",
    ]
    with pytest.raises(InputError, match=r"process is \(2, 2\); expected \(k, n\)"):
        explained(tmp_path, process=(2, 2))


def test_a_run_that_was_killed_goes_on(whole, tmp_path):
    moments = random.Random(0)
    for _ in range(6):
        process = started(tmp_path)
        process.join(moments.uniform(0.02, 0.5))
        process.kill()
        process.join()
        assert {
            name: held for name, held in files(tmp_path).items() if ".tmp" not in name
        }.items() <= (files(whole).items())
    explained(tmp_path)
    assert files(tmp_path) == files(whole)


@pytest.mark.parametrize(
    "step",
    [
        "os.fsync",
        "os.replace",
        "pyarrow.parquet.write_table",
        "captum_ssm.explanation.file.save_file",
    ],
)
@pytest.mark.parametrize("which", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_write_that_fails_at_any_step_leaves_finished_shards(
    step, which, whole, tmp_path, monkeypatch
):
    calls = 0
    module, _, name = step.rpartition(".")
    real = getattr(sys.modules[module], name)

    def full(*args, **named):
        nonlocal calls
        calls += 1
        if calls == which:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **named)

    monkeypatch.setattr(sys.modules[module], name, full)
    with pytest.raises(OSError, match=r"written \(No space left on device\)\. All files"):
        explained(tmp_path)
    kept = files(tmp_path)
    assert kept.items() <= files(whole).items()
    monkeypatch.undo()
    explained(tmp_path)
    assert files(tmp_path) == files(whole)


def test_what_a_killed_write_left_is_removed_by_its_own_process(tmp_path):
    for name in ("part-00001.parquet.1.9.tmp", "part-00002.parquet.2.9.tmp"):
        (tmp_path / name).write_bytes(b"half")
    explained(tmp_path, process=(1, 2))
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["part-00002.parquet.2.9.tmp"]
    (tmp_path / "part-00003.parquet").unlink()
    explained(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"alternatives": 2}, "settings: asked.alternatives was 1 and is 2"),
        ({"methods": "rollout"}, "methods: methods was "),
        ({"rows_per_shard": 5}, "settings: rows_per_shard was 4 and is 5"),
        (
            {"dataset": rows()[:-1]},
            "data set: data.hash was .*; the data set: it had 22 rows and has 21",
        ),
    ],
)
def test_something_else_is_refused_and_nothing_is_lost(changed, named, whole):
    before = files(whole)
    with pytest.raises(InputError, match=f"Changed is the {named}"):
        explained(whole, **changed)
    assert files(whole) == before


def test_another_model_is_refused_and_other_versions_are_told(whole, words, monkeypatch):
    model = tiny()
    model.backbone.embeddings.weight.data[5, 0] += 1e-3
    with pytest.raises(InputError, match=r"Changed is the model: hashes\.model was"):
        explain_dataset(model, words, rows(), whole, rows_per_shard=4, maps=True)
    versions = "captum_ssm.explanation.make.many._versions"
    monkeypatch.setattr(versions, lambda: {"torch": "0"})
    with pytest.warns(UserWarning, match="begun with other versions: .*torch .* -> 0"):
        explained(whole)


def test_a_row_that_fails_ends_the_run_where_that_is_asked_for(tmp_path):
    with pytest.raises(RowError, match="row 4 was not explained: TypeError"):
        explained(tmp_path, dataset=rows()[4:14], on_error="raise")
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["part-00000.parquet"]
