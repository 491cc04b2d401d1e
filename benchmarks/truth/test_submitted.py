"""A submitted function: its record, its ranks, and what the command line says of a mistake."""

import json
from pathlib import Path

import pytest

from truth import summary
from truth.__main__ import main, merged
from truth.submitted import report

QUICK = ["--quick", "--examples", "3", "--track", "tasks", "--output", "."]
ONE = ["--methods", "random", "--tasks", "chains-mamba2"]
METHOD = "def mine(model, inputs, target):\n    return {}\n"


def run(*options: str) -> dict:
    main([*QUICK, *ONE, *options])
    (row,) = json.loads(Path("quick.json").read_text())["tasks"]
    return row


def test_an_edited_file_is_measured_anew_and_an_unchanged_one_is_not(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD.format("inputs.nothing"))
    assert "no attribute 'nothing'" in run("--method", "mine.py:mine")["refused"]["mine"]
    said = capfd.readouterr()
    assert "mine.py" in said.err  # the traceback
    assert "line 2" in said.err
    assert "the random map's scores" in said.out
    Path("mine.py").write_text(METHOD.format("inputs.double()"))
    row = run("--method", "mine.py:mine")
    assert not row["refused"]
    first = row["scores"]["mine"]
    assert "mine, over 1 tasks" in capfd.readouterr().out
    run("--method", "mine.py:mine")
    assert "mine: hit" not in capfd.readouterr().out
    Path("mine.py").write_text(METHOD.format("-inputs.double()"))
    assert run("--method", "mine.py:mine")["scores"]["mine"] != first


def test_a_new_folder_begins_with_the_committed_record_for_a_submitted_method(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD.format("inputs.double()"))
    main(["--quick", *ONE, "--track", "tasks", "--output", ".", "--method", "mine.py:mine"])
    record = json.loads(Path("quick.json").read_text())
    (row,) = [row for row in record["tasks"] if row["name"] == "chains-mamba2"]
    assert {"MambaLRP", "mine"} <= set(row["scores"])
    assert len(record["tasks"]) > 1
    said = capfd.readouterr().out
    assert "mine: hit" in said
    assert "random: hit" not in said
    assert f"of {len(row['scores'])}" in said  # the rank among all


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "none.py:mine"], "there is no file none.py"),
        (["--method", "mine.py"], "expected path/to/file.py:function"),
        (["--method", "mine.py:yours"], "no function 'yours'"),
        (["--method", "mine.py:random"], "the name of another entrant"),
        (["--tasks", "copyng"], "copying-mamba"),
        (["--methods", "Lrp"], "MambaLRP"),
    ],
)
def test_a_mistake_in_the_command_is_told_before_a_run(
    tmp_path, monkeypatch, capsys, options, said
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD.format("inputs.double()") + "random = mine\n")
    with pytest.raises(SystemExit):
        main([*QUICK, *options])
    assert said in capsys.readouterr().err
    assert not Path("quick.json").exists()


def row_of(**scores) -> dict:
    counts = {"drawn": 3, "proven": 3, "explained": 3}
    return {"name": "a", "family": "a", "scores": scores, "refused": {}, "seconds": {}, **counts}


def test_a_method_without_other_trainings_has_no_rank_by_seeds_alone():
    both = {"hit": [0, 1, 1], "seeds": [1, 1, 0]}
    record = {
        "tasks": [
            row_of(random=both, mine={"hit": [1, 1, 1]}, few=both | {"seeds": [1]}, last=both)
        ]
    }
    record["tasks"][0]["trainings"] = [0, 1]
    assert set(summary.standings(record, "seeds")) == {"random", "last"}
    assert summary.standings(record, "hit")["mine"].rank == 1
    assert "seeds" not in report(record, "tasks", "mine")
    merged(record, "tasks", row_of(again={"hit": [1, 1, 1]}) | {"trainings": [0]})
    assert record["tasks"][0]["trainings"] == [0, 1]


def test_scores_on_other_examples_are_not_put_together():
    record = {"tasks": [row_of(random={"hit": [0, 1, 1]})]}
    with pytest.raises(SystemExit, match="3 examples drawn and this run 4"):
        merged(record, "tasks", row_of(mine={"hit": [1, 1, 1]}) | {"drawn": 4})
    assert "mine" not in record["tasks"][0]["scores"]
