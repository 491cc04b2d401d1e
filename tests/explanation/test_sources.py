"""What a data set may be, how its rows are read, and the command and the batches that read them."""

import json
import math
import os
import sys

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from commands import STORIES
from models import tiny

from captum_ssm import ExplainBatches, InputError, examples, explain_dataset
from captum_ssm.cli import main
from captum_ssm.explanation import open_dataset

ROWS = [
    {"text": "w3 w4", "target": "w5", "n": 1, "share": 0.5, "tag": "a"},
    {"text": " ", "target": None, "n": 2, "share": None, "tag": None},
    {"text": "w6 w7 w8", "target": "w9", "n": None, "share": 2, "tag": "007"},
]
EXPECTED = {"row.n": [1, 2, None], "row.share": [0.5, None, 2.0], "row.tag": ["a", None, "007"]}


def jsonl(path):
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    return path


def sources(folder):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = pandas.DataFrame(ROWS)
    table.astype({"n": "Int64"}).to_csv(folder / "rows.csv", index=False)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    held = datasets.Dataset.from_list(ROWS)
    return {
        "list": ROWS,
        "iterator": iter(ROWS),
        "pandas": table.astype({"n": "Int64"}),
        "csv": str(folder / "rows.csv"),
        "jsonl": jsonl(folder / "rows.jsonl"),
        "parquet": folder / "rows.parquet",
        "dataset": held,
        "streaming": held.to_iterable_dataset(),
    }


def test_every_source_gives_the_same_explanations(tmp_path, words):
    shards = {}
    for name, source in sources(tmp_path).items():
        found = explain_dataset(tiny(), words, source, tmp_path / name, rows_per_shard=2)
        assert len(found) == 3, name
        assert found.is_complete, name
        assert found.manifest["rows"] == 3, name
        assert {key: found.column(key) for key in EXPECTED} == EXPECTED, name
        assert list(found.errors) == [1], name
        shards[name] = [path.read_bytes() for path in sorted((tmp_path / name).glob("*.parquet"))]
    assert all(one == shards["list"] for one in shards.values()), list(shards)


def test_a_stream_is_skipped_forward_and_data_that_changed_are_refused(tmp_path, words):
    whole = explain_dataset(tiny(), words, iter(ROWS), tmp_path / "whole", rows_per_shard=1)
    explain_dataset(tiny(), words, iter(ROWS), tmp_path / "two", rows_per_shard=1, process=(1, 2))
    found = explain_dataset(tiny(), words, iter(ROWS), tmp_path / "two", rows_per_shard=1)
    for name in ("part-00000.parquet", "part-00001.parquet", "manifest.json"):
        assert (whole.folder / name).read_bytes() == (found.folder / name).read_bytes()
    with pytest.raises(InputError, match=r"Changed is the data set: data\.first_row was"):
        explain_dataset(tiny(), words, iter(ROWS[1:]), tmp_path / "two", rows_per_shard=1)


def test_columns_are_named_and_what_is_not_there_is_refused(tmp_path, words):
    rows = [{"review": "w3 w4", "stars": "w7", "text": "w5"}]
    names = {"text": "review", "target": "stars"}
    found = explain_dataset(tiny(), words, rows, tmp_path / "named", columns=names)
    assert (found[0].examples[0].text, found.column("row.text")) == ("w3 w4 w7", ["w5"])
    for columns, message in (
        ({"txt": "review"}, "columns names 'txt'.* Did you mean 'text'"),
        ({"text": "reviews"}, "has the columns review, stars, text. Did you mean 'review'"),
    ):
        with pytest.raises(InputError, match=message):
            explain_dataset(tiny(), words, rows, tmp_path / "wrong", columns=columns)
    for dataset, error, message in (
        ([], InputError, "the data set is empty"),
        ([{"a": 1, "b": 2}], InputError, "has the columns a, b; expected one that is named text"),
        ("w3 w4", InputError, "One text alone is a list of one"),
        ("none.csv", FileNotFoundError, "there is no such file"),
        ({"train": ROWS}, TypeError, "choose one, such as dataset"),
        (7, TypeError, "dataset is a int; expected a data set"),
    ):
        with pytest.raises(error, match=message):
            explain_dataset(tiny(), words, dataset, tmp_path / "wrong")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="which is a file; expected a folder"):
        explain_dataset(tiny(), words, ROWS, tmp_path / "file")


def test_a_column_that_begins_in_a_late_row_is_read(tmp_path, words):
    rows = [{"text": "w3 w4"}, {"text": "w5"}, {"text": "w6", "target": "w9", "tag": "late"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("no JSON\n" + "\n".join(map(json.dumps, rows)))
    for name, data, first in (("held", rows, 0), ("file", path, 1)):
        found = explain_dataset(tiny(), words, data, tmp_path / name, rows_per_shard=1)
        assert [*found.errors] == [*range(first)]
        assert found.column("target")[-1] == "w9"
        assert found.column("row.tag")[first:] == [None, None, "late"]


def test_a_table_of_values_is_read_as_it_is_written_or_refused(tmp_path, words):
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,tag\nw3 w4,a\nw5, w6,b\nw7 \xe9,c\nw8,caf\xc3\xa9\n"w9, ""w10""",'
        + b"x" * 200_000
    )
    found = explain_dataset(tiny(), words, path, tmp_path / "rows", alternatives=0)
    assert list(found.errors) == [1, 2]
    assert "the row has 3 values, and the header 2" in found.errors[1]
    assert "can't decode byte 0xe9" in found.errors[2]
    assert found.column("tag")[3:] == ["caf\xe9", "x" * 200_000]
    assert found[4].examples[0].text.startswith('w9, "w10"')
    path.write_text('text\n"w3 w4\nw5\nw6\n')  # else one row, of all that follows
    with pytest.raises(InputError, match=r"rows\.csv', line .*unexpected end of data"):
        explain_dataset(tiny(), words, path, tmp_path / "open")


def test_the_mark_that_begins_a_file_is_not_a_part_of_its_first_text(tmp_path, words):
    for name, text in (("rows.txt", "w3 w4\nw5\n"), ("rows.jsonl", '{"text": "w3 w4"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        found = explain_dataset(tiny(), words, tmp_path / name, tmp_path / f"of {name}")
        assert found[0].examples[0].tokens[0].text == "w3"


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz"])
def test_files_that_are_not_arrays_are_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"no arrays")
    with pytest.raises(InputError, match=rf"{name}' cannot be read .*; expected arrays of numbers"):
        explain_dataset(tiny(), None, tmp_path / name, tmp_path / "why")


def test_rows_without_columns_are_texts_and_ids(tmp_path, words):
    rows = ["w3 w4", [5, 6], None, torch.tensor([7, 8]), float("nan"), 3, []]
    found = explain_dataset(tiny(), words, rows, tmp_path)
    assert [one.examples[0].prompt for one in found] == [2, 2, 2]
    assert list(found.errors) == [2, 4, 5, 6]


def test_series_with_numbers_that_are_not_finite_are_recorded(tmp_path):
    model, _ = examples.load("series-forecaster")
    series = examples.sample("series-forecaster")[0].float().numpy()
    bad = series.copy()
    bad[3, 1] = math.nan
    found = explain_dataset(model, None, [series, bad, series[::-1].copy()], tmp_path)
    assert list(found.errors) == [1]
    assert "holds nan at (3, 1)" in found.errors[1]
    assert found[2].examples[0].series.shape == series.shape
    assert found[2].relevance().shape == series.shape
    np.testing.assert_array_equal(found[0].examples[0].series, series)


def test_batches_have_the_columns_of_shards(tmp_path, words):
    shard = explain_dataset(tiny(), words, ROWS, tmp_path)
    batch = pyarrow.Table.from_pylist(ROWS)
    explain_batch = ExplainBatches(lambda: (tiny(), words))
    expected = pyarrow.parquet.read_table(tmp_path / "part-00000.parquet")
    for form in (batch, batch.to_pandas(), batch.to_pydict()):
        found = explain_batch(form)
        assert found.column_names == shard.columns
        for name in ("text", "relevance.mamba-lrp", "error", "details", "row.tag"):
            assert found[name].to_pylist() == expected[name].to_pylist()


# Ray warns of settings of its own, and opens files that it does not close.
@pytest.mark.filterwarnings("default")
def test_ray_explains_batches(words):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": paths})
    try:
        data = ray.data.from_items(ROWS)
        explained = data.map_batches(
            ExplainBatches,
            fn_constructor_args=(lambda: (tiny(), words),),
            concurrency=1,
            batch_size=2,
            batch_format="pyarrow",
        )
        found = explained.take_all()
    finally:
        ray.shutdown()
    expected = ExplainBatches(lambda: (tiny(), words))(pyarrow.Table.from_pylist(ROWS))
    for name in ("text", "error", "row.n", "row.tag", "relevance.mamba-lrp"):
        for row, other in zip(found, expected[name].to_pylist(), strict=True):
            assert repr(row[name]) == repr(other), name


def test_the_command_explains_and_tells_what_failed(tmp_path, capsys):
    lines = ['{"review": "the dogs near the bird", "says": "bark"}', '{"review": ""}', "no JSON"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    output = tmp_path / "why"
    command = ["run", str(tmp_path / "rows.jsonl"), "--model", STORIES, "--output", str(output)]
    columns = ("--columns", "text=review", "target=says")
    assert main([*command, *columns]) == 0
    told = capsys.readouterr().out
    assert told.splitlines() == [
        "row 1: InputError: review is '', which is empty; expected a text.",
        "row 2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        f"explained 1 rows, 2 failed, in {output}",
    ]
    assert open_dataset(output)[0].examples[0].text == "the dogs near the bird bark"
    assert main([*command, *columns, "--methods", "rollout"]) == 1
    assert "Changed is the methods" in capsys.readouterr().err
    assert main([*command, "--columns", "review"]) == 1
    assert "expected ROLE=COLUMN" in capsys.readouterr().err
