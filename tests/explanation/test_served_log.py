"""The log of a server as a data set: each answer compared with the run that explains it."""

import json
from functools import partial

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from commands import STORIES
from test_served import TEXT, Served

from captum_ssm import ExplainBatches, InputError, ServedLog, explain_dataset, replay
from captum_ssm.cli import main
from captum_ssm.explanation import open_dataset

HOW = {"methods": "rollout", "alternatives": 0}
# Older versions of pyarrow sort the fields of a record, which then are columns in that order.
_FIELDS = pyarrow.Table.from_pylist([{"of": {"b": 1, "a": 2}}]).schema.field("of").type
keeps_order = pytest.mark.skipif(_FIELDS.field(0).name == "a", reason="pyarrow sorts fields")


@pytest.fixture(scope="module")
def stories():
    return Served()


@pytest.fixture(scope="module")
def records(stories):
    """Two good answers in one record, one of another model, one without a prompt, and no record."""
    good = stories.completion(finish_reason="length") | {"custom_id": "a", "stars": 5}
    choices = good["response"]["choices"]
    choices.append(choices[0] | {"index": 1, "finish_reason": "stop"})
    other = stories.completion() | {"custom_id": "b"}
    other["response"]["choices"][0]["logprobs"]["token_logprobs"] = [-7.0] * len(stories.ids)
    return [good, other, stories.completion()["response"], {"nothing": 1}]


def lines(records, path):
    path.write_text("\n".join([*map(json.dumps, records), "no JSON", "data: [DONE]", ""]))
    return path


def test_each_answer_is_a_row_and_what_differs_is_its_error(stories, records, tmp_path):
    log = ServedLog(lines(records, tmp_path / "log.jsonl"))
    found = explain_dataset(stories.model, stories.tokenizer, log, tmp_path / "why", **HOW)
    assert len(found) == 6
    assert [error.partition(":")[0] for error in found.errors.values()] == [
        *["InputError"] * 3,
        "ValueError",
    ]
    assert list(found.errors) == [2, 3, 4, 5]
    for index, said in ((2, "4 of 4 tokens differ"), (3, "no prompt"), (5, "line 5 is not JSON")):
        assert said in found.errors[index]
    assert found.column("row.custom_id") == ["a", "a", "b", None, None, None]
    assert found.column("row.finish_reason")[:2] == ["length", "stop"]
    assert found.column("row.stars")[:2] == [5, 5]
    (one,) = replay(stories.model, stories.tokenizer, stories.completion(), **HOW).examples
    for index in (0, 1):
        row = found[index].examples[0]
        assert (row.text, row.prompt) == (one.text, one.prompt)
        np.testing.assert_allclose(row.relevance["rollout"], one.relevance["rollout"], rtol=1e-4)
        assert [token.recorded for token in row.replay.tokens] == stories.logprobs
        assert row.replay.max < 1e-4
    difference = found.column("difference")
    assert difference[0][: one.prompt] == [None] * one.prompt
    assert all(abs(each) < 1e-4 for each in difference[0][one.prompt :])
    assert difference[2] is None
    assert "4 log probabilities differ from the recorded ones by at most" in repr(found[0])


@keeps_order
def test_all_forms_of_a_log_are_one_data_set(stories, records, tmp_path):
    records = records[:2]
    whole = tmp_path / "log.json"
    whole.write_text(json.dumps(records, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "log.parquet")
    forms = {
        "list": records,
        "iterator": iter(records),
        "json": whole,
        "parquet": str(tmp_path / "log.parquet"),
        "pandas": pandas.DataFrame(records, dtype=object),
        "vllm": [stories.vllm()],
    }
    shards = {}
    for name, form in forms.items():
        folder, log = tmp_path / name, ServedLog(form)
        found = explain_dataset(
            stories.model, stories.tokenizer, log, folder, rows_per_shard=1, **HOW
        )
        if name == "vllm":
            assert len(found[0].examples[0].replay.tokens) == len(stories.prompt_ids) + 3
            continue
        assert found.manifest["rows"] == 3, name
        assert list(found.errors) == [2], name
        shards[name] = [path.read_bytes() for path in sorted(folder.glob("*.parquet"))]
    assert [name for name, one in shards.items() if one != shards["list"]] == []


def test_a_run_goes_on_with_the_same_log_and_bound_only(stories, records, tmp_path):
    path = lines(records, tmp_path / "log.jsonl")
    folder = tmp_path / "why"

    def run(**given):
        log = ServedLog(path, **given)
        explain_dataset(stories.model, stories.tokenizer, log, folder, rows_per_shard=2, **HOW)
        return {one.name: one.read_bytes() for one in folder.iterdir()}

    before = run()
    (folder / "part-00001.parquet").unlink()
    assert run() == before
    with pytest.raises(InputError, match=r"data\.bound was 0\.5 and is 0\.1"):
        run(bound=0.1)
    path.write_text(path.read_text().replace('"stars": 5', '"stars": 4'))
    with pytest.raises(InputError, match=r"data\.hash was"):
        run()
    for name, value in (("target", "red"), ("columns", {"text": "a"}), ("max_new_tokens", 3)):
        with pytest.raises(TypeError, match=f"{name} is given, and the record tells it"):
            explain_dataset(
                stories.model, stories.tokenizer, ServedLog(path), folder, **{name: value}
            )
    with pytest.raises(InputError, match="bound is -1"):
        ServedLog(path, bound=-1)
    with pytest.raises(FileNotFoundError, match="expected a log"):
        explain_dataset(stories.model, stories.tokenizer, ServedLog("none.jsonl"), folder)


def test_what_differs_is_explained_where_no_bound_is_set(stories, records, tmp_path):
    log = ServedLog(records[1:2], bound=None)
    found = explain_dataset(stories.model, stories.tokenizer, log, tmp_path, **HOW)
    assert not found.errors
    assert found[0].examples[0].replay.max > 1
    assert max(map(abs, found.column("difference")[0][-4:])) > 1


def test_the_command_explains_a_log_with_the_requests_of_its_batch(stories, tmp_path, capsys):
    body = stories.completion()["response"]
    batch = [{"custom_id": name, "response": {"status_code": 200, "body": body}} for name in "ab"]
    log = lines(batch, tmp_path / "log.jsonl")
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"custom_id": "a", "body": {"prompt": TEXT}}))
    output = tmp_path / "why"
    command = ["run", str(log), "--model", STORIES, "--output", str(output)]
    assert main([*command, "--served", "--requests", str(asked), "--methods", "rollout"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "row 1: InputError: no request has the custom_id 'b' of this record."
    assert told[-1] == f"explained 1 rows, 2 failed, in {output}"
    assert len(open_dataset(output)[0].examples[0].replay.tokens) == len(stories.ids)
    assert main([*command, "--bound", "0.1"]) == 1
    assert "--bound and --temperature are about a log; add --served" in capsys.readouterr().err


@keeps_order
def test_batches_of_records_are_explained_as_a_log(stories, records, tmp_path):
    load = lambda: (stories.model, stories.tokenizer)  # noqa: E731
    found = explain_dataset(*load(), ServedLog(records), tmp_path / "why", **HOW)
    expected = pyarrow.parquet.read_table(found.folder / "part-00000.parquet")
    batch = pyarrow.Table.from_pylist(records)
    table = ExplainBatches(load, log=ServedLog, **HOW)(batch)
    assert table.column_names == expected.column_names
    assert len(table) == 5
    for name in ("text", "difference", "relevance.rollout", "row.custom_id", "row.stars"):
        assert table[name].to_pylist() == expected[name].to_pylist(), name
    told = [one and one.partition(":")[0] for one in table["error"].to_pylist()]
    assert told == [None, None, *["InputError"] * 3]
    anything = ExplainBatches(load, log=partial(ServedLog, bound=None), **HOW)(batch)
    assert anything["error"][2].as_py() is None
    assert max(map(abs, anything["difference"][2].as_py()[-4:])) > 1
    with pytest.raises(TypeError, match="target is given, and the record tells it"):
        ExplainBatches(load, log=ServedLog, target="red", **HOW)(batch)
