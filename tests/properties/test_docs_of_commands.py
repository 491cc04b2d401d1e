"""Every command of docs/how_to/command_line.md runs as it is printed, in a folder of its own."""

import json
import re
import shlex
import shutil

import pytest
from folders import ROOT

from captum_ssm import examples
from captum_ssm.cli import main

PAGE = (ROOT / "docs" / "how_to" / "command_line.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^    captum-ssm ((?:.*\\\n)*.*)", PAGE, re.MULTILINE)
COMMANDS = [block.replace("\\\n", "") for block in BLOCKS]


def test_the_page_has_commands_of_each_kind():
    assert {command.split()[0] for command in COMMANDS} == {
        "explain",
        "run",
        "circuit",
        "replay",
        "supported",
        "compare",
        "report",
        "show",
    }


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with the files that the commands read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    shutil.copy(examples.folder("digits-vim") / "sample.png", "digit.png")
    (tmp_path / "chat.json").write_text(json.dumps(examples.sample("chat-mamba")))
    (tmp_path / "prompts.csv").write_text("text,target\nthe dogs near the bird,bark\n")
    record = {"prompt_token_ids": [12, 2, 3], "outputs": [{"token_ids": [20]}]}
    (tmp_path / "log.jsonl").write_text(json.dumps(record))
    text = ("--text", "the dogs near the bird", "--target", "bark")
    for name, method in (("first", "gate"), ("second", "silu")):
        options = ("--methods", "latim", "--activation", method, "--output", f"{name}.json")
        assert main(["explain", "stories-mamba", *text, *options]) == 0
    return tmp_path


@pytest.mark.slow
def test_the_commands_run(there, capsys):
    # Checkpoints of the hub are a download; a model of the package stands in for them.
    for command in COMMANDS:
        given = shlex.split(command.replace("state-spaces/mamba-130m-hf", "stories-mamba"))
        given = ["bark" if word == " Paris" else word for word in given]
        assert main(given) == 0, (command, capsys.readouterr().err)
        if "--output" in given:
            assert (there / given[given.index("--output") + 1]).stat().st_size > 100
