"""Folders that are damaged, unfinished or begun twice, and what makes a run another one."""

import copy
import datetime
import decimal
import multiprocessing
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from explained_rows import BAD, ROWS, explained, rows
from models import tiny

from captum_ssm import InputError, explain_dataset
from captum_ssm.cli import main
from captum_ssm.explanation import open_dataset, summarize
from captum_ssm.explanation.make.dataset import run as run_module
from captum_ssm.explanation.make.dataset.identity import hash_of_model, hash_of_tokenizer

TEXT = {"text": "w3 w4"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "why"
    explained(folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(finished, tmp_path / "why")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kept", [0, 2000, -10])
@pytest.mark.parametrize("number", [1, 5])
def test_a_shard_that_was_cut_is_told_and_made_again(kept, number, folder, finished, capsys):
    path = folder / f"part-{number:05d}.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    found = open_dataset(folder)
    said = rf"part-0000{number}\.parquet cannot be read .* delete part-0000{number}\.parquet"
    with pytest.raises(ValueError, match=said):
        found[4 * number]
    with pytest.raises(ValueError, match=said):
        found.column("target")
    assert main(["report", str(folder)]) == 1
    assert "call explain_dataset again" in capsys.readouterr().err
    explained(folder)
    assert files(folder) == files(finished)


def test_maps_that_were_cut_or_removed_are_told(folder, capsys):
    path = folder / "part-00001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"part-00001\.safetensors cannot be read"):
        open_dataset(folder)[4]
    assert main(["report", str(folder)]) == 1
    path.unlink()
    with pytest.raises(ValueError, match=r"part-00001\.safetensors cannot be read"):
        open_dataset(folder)[4]


def test_copies_and_folders_of_similar_names_are_not_shards(folder):
    for name in ("part-00000 (1).parquet", "part-0.parquet", "part-.parquet"):
        shutil.copy(folder / "part-00000.parquet", folder / name)
    (folder / "part-00007.parquet").mkdir()
    found = open_dataset(folder)
    assert len(found) == ROWS
    assert found.column("index") == [*range(ROWS)]


@pytest.mark.parametrize("missing", [0, 2])
def test_what_is_there_of_an_unfinished_run_is_read_by_its_numbers(missing, folder, finished):
    # As processes leave it that are still at work.
    (folder / f"part-{missing:05d}.parquet").unlink()
    found, whole = open_dataset(folder), open_dataset(finished)
    gone = range(4 * missing, 4 * missing + 4)
    here = [i for i in range(ROWS) if i not in gone]
    assert len(found) == len(here)
    assert not found.is_complete
    assert found[-1].examples[0].text == whole[-1].examples[0].text == whole[21].examples[0].text
    with pytest.raises(IndexError, match=rf"row {gone[0]} is in a shard that was not finished"):
        found[gone[0]]
    right = ["yes" if i % 2 else found.column("target")[k] for k, i in enumerate(here)]
    report = summarize(found, by=[str(i) for i in here], labels=right)
    read = [i for i in here if i not in BAD]
    assert [example.index for example in report.examples] == read
    assert [example.columns["column"] for example in report.examples] == [str(i) for i in read]
    by_column = summarize(found, by="year", labels="target", against=whole)
    assert [example.columns["year"] for example in by_column.examples] == [1990 + i for i in read]
    assert by_column.change is not None
    assert by_column.change.moved.value == 0


def test_another_run_whose_first_row_failed_is_compared(finished, tmp_path):
    data = [TEXT | {"text": ""}, *rows()[1:]]
    other = explained(tmp_path / "other", dataset=data)
    change = summarize(open_dataset(finished), against=other).change
    assert change is not None
    assert (change.moved.value, change.unpaired) == (0, 1)


def test_a_run_that_another_one_has_begun_meanwhile_is_refused(tmp_path, monkeypatch):
    measured, fork = run_module.measured, multiprocessing.get_context("fork")

    def meanwhile(*args: Any) -> Any:
        other = fork.Process(target=explained, args=(tmp_path,), kwargs={"methods": "rollout"})
        monkeypatch.setattr(run_module, "measured", measured)
        other.start()
        other.join()
        assert other.exitcode == 0
        return measured(*args)

    monkeypatch.setattr(run_module, "measured", meanwhile)
    with pytest.raises(InputError, match="Changed is the methods"):
        explained(tmp_path)
    found = open_dataset(tmp_path)
    assert found.is_complete
    assert [method.name for method in found[0].methods] == ["rollout"]


def test_halves_of_characters_in_columns_and_errors_are_escaped(words, tmp_path):
    data = [
        TEXT | {"note": "cut \ud83d"},
        TEXT | {"note": "whole \U0001f600", "target": "cut \ud83d"},
        TEXT | {"units": "\ud83d"},
    ]
    found = explain_dataset(tiny(), words, data, tmp_path)
    assert found.column("note") == ["cut \\ud83d", "whole \U0001f600", None]
    assert [*found.errors] == [1, 2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1)),
        (decimal.Decimal(1), decimal.Decimal(2)),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
    ],
)
def test_every_value_that_is_kept_makes_another_data_set(before, after, words, tmp_path):
    explain_dataset(tiny(), words, [TEXT | {"when": before}], tmp_path)
    explain_dataset(tiny(), words, [TEXT | {"when": before}], tmp_path)
    with pytest.raises(InputError, match=r"Changed is the data set: data\.hash was"):
        explain_dataset(tiny(), words, [TEXT | {"when": after}], tmp_path)


def test_how_answers_are_written_makes_another_model_and_a_version_does_not():
    model, before = tiny(), hash_of_model(tiny())
    model.config.transformers_version = "0"
    assert hash_of_model(model) == before
    model.generation_config.repetition_penalty = 2.0
    assert hash_of_model(model) != before


def test_what_a_tokenizer_was_called_with_does_not_make_another_one(words):
    used = copy.deepcopy(words)
    used.pad_token = "w0"
    used(["w3", "w4 w5"], padding=True, truncation=True, max_length=3)
    assert hash_of_tokenizer(used) == hash_of_tokenizer(words)
    used.add_tokens(["w99"])
    assert hash_of_tokenizer(used) != hash_of_tokenizer(words)


def test_the_settings_of_a_processor_are_part_of_a_run():
    from transformers import ViTImageProcessor

    default, same, other = ViTImageProcessor(), ViTImageProcessor(), ViTImageProcessor()
    other.image_mean = [0.1] * 3
    assert hash_of_tokenizer(default) == hash_of_tokenizer(same) != hash_of_tokenizer(other)
