"""What the arguments alone tell is said before any model is loaded, and the hub is asked once."""

import os
from importlib import import_module
from pathlib import Path

import pytest
from commands import STORIES

from captum_ssm.cli import main

EXPLAIN = ("explain", STORIES, "--text", "Anna has")
RUN = ("run", "rows.txt", "--model", STORIES, "--output", "why")
REPLAY = ("replay", STORIES, "log.jsonl")


@pytest.fixture
def unloaded(tmp_path, monkeypatch):
    """Commands that stand in a folder with files, and fail where they load a model."""

    def loaded(*_, **__):
        pytest.fail("a model is loaded")

    for command in ("explain", "run", "circuit", "replay"):
        module = import_module(f"captum_ssm.cli.{command}")
        for name in ("load_model", "load_for_rows"):
            monkeypatch.setattr(module, name, loaded, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("Anna has\n")
    Path("log.jsonl").write_text("{}\n")
    Path("empty.jsonl").write_text("")
    Path("deep.json").write_text("[" * 100_000)
    Path("page.html").mkdir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*EXPLAIN, "--max-new-tokens", "0"), "--max-new-tokens is 0"),
        ((*EXPLAIN, "--hops", "-1"), "--hops is -1"),
        ((*EXPLAIN, "--through", "swaps"), "--through is 'swaps'"),
        ((*EXPLAIN, "--alternatives", "-1"), "--alternatives is -1"),
        ((*EXPLAIN, "--output", "page.html"), "page.html, which cannot be written"),
        (("explain", STORIES, "--text", " "), "--text is ' ', which is empty"),
        (("explain", STORIES, "--ids", "3,-1"), "expected token ids from 0 on"),
        (("explain", STORIES, "--messages", "deep.json"), "deep.json, which is not JSON"),
        ((*RUN, "--rows-per-shard", "0"), "rows_per_shard is 0"),
        ((*RUN, "--batch-memory", "0"), "batch_memory is 0"),
        ((*RUN, "--hops", "-1"), "hops is -1"),
        (("run", "none.jsonl", *RUN[2:]), "none.jsonl', and there is no such file"),
        ((*RUN[:-1], "rows.txt"), "rows.txt', which is a file; expected a folder"),
        (("circuit", STORIES, "--text", ""), "--text is '', which is empty"),
        ((*REPLAY, "--bound", "x"), "--bound is 'x'"),
        ((*REPLAY, "--temperature", "0"), "temperature is 0.0"),
        (("replay", STORIES, "empty.jsonl"), "the list of records is empty"),
        (("replay", STORIES, "deep.json"), "deep.json is not JSON"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(unloaded, arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_folder_or_file_that_must_not_be_written_is_told_first(unloaded, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for another user than root
    assert main((*EXPLAIN, "--output", "why.html")) == 1
    assert "why.html, which cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [False, ConnectionError("no network")])
def test_the_hub_is_asked_once_for_a_model_that_is_not_here(answer, monkeypatch, capsys):
    asked = []

    def file_exists(*where):
        asked.append(where)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_exists", file_exists)
    assert main(["supported", "no-such-model"]) == 1
    assert asked == [("no-such-model", "config.json")]
    told = capsys.readouterr().err
    assert "neither a folder nor in the cache, and was not found on the hub" in told
    assert "no network" in told or "it has no config.json" in told
