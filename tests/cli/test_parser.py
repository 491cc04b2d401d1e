"""The process: arguments that are not understood, exit statuses, and what it costs to start."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from importlib import import_module

import pytest
from commands import COPYING, READ, STORIES, explain
from folders import ROOT

import captum_ssm
from captum_ssm.attr import methods
from captum_ssm.cli import main
from captum_ssm.cli.parser import COMMANDS

NOT_UNDERSTOOD = {
    "": "the following arguments are required: COMMAND",
    "explan": "COMMAND is 'explan'. Did you mean explain?",
    "magic": "COMMAND is 'magic'. Expected explain, run, circuit, replay, supported, compare, "
    "report or show.",
    "explain M": "one of the arguments --text --ids --input --messages --image is required",
    "explain --text a": "the following arguments are required: MODEL",
    "explain M --txt a": "captum-ssm explain has no option --txt. Did you mean --text?",
    "explain M --zzz a": "captum-ssm explain has no option --zzz.",
    "explain M --text a --ids 3": "argument --ids: not allowed with argument --text",
    "explain M --text a --units wrd": "--units is 'wrd'. Did you mean word?",
    "explain M --text a --methods mamba-lpr": "--methods is 'mamba-lpr'. Did you mean mamba-lrp?",
    "explain M --text a --methods magic": "--methods is 'magic'. Expected latim, mamba-attribution",
    "explain M --text a --alternatives x": "argument --alternatives: invalid int value: 'x'",
    "explain M --text two words": "'words' was not expected. Quote a text of several words.",
    "supported M --lengt 3": "captum-ssm supported has no option --lengt. Did you mean --length?",
}


@pytest.mark.parametrize(("arguments", "message"), NOT_UNDERSTOOD.items())
def test_what_is_not_understood_takes_two_lines(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(arguments))
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith(f"captum-ssm: error: {message}")
    assert len(lines) == 2
    assert lines[1].endswith(" --help lists what it takes.")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"captum-ssm {captum_ssm.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_in_sentences(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: captum-ssm {command}")
    parser = argparse.ArgumentParser(prog=command)
    import_module(f"captum_ssm.cli.{command}").add(parser)
    for told in (action.help for action in parser._actions if action.help != argparse.SUPPRESS):
        if told.startswith("show this help"):
            continue
        sentences = told.partition(" Default: ")[0]
        assert sentences[0].isupper()
        assert sentences.endswith(".")
        assert sentences.split()[0] not in ("Of", "That", "Those", "The same")


@pytest.mark.parametrize("name", ["MambaLRP", "mamba_lrp", "MAMBA-LRP"])
def test_a_method_in_any_spelling(name, capsys):
    assert explain("--ids", READ, "--methods", name) == 0
    assert "'17', probability 1.0000" in capsys.readouterr().out


@pytest.mark.parametrize("method", methods().values())
def test_a_method_by_its_class(method):
    from captum_ssm.cli.options import method_named

    assert method_named(method.__name__) == method.name


def test_the_model_after_a_flag_as_in_earlier_versions(capsys):
    said = []
    for model in ([COPYING], ["--model", COPYING]):
        assert main(["explain", *model, "--ids", READ]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["explain", "--ids", READ, "--model", COPYING]) == 0
    assert said[0] == capsys.readouterr().out


def test_an_interrupted_command_has_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("captum_ssm.cli.show.run", interrupted)
    assert main(["show", "a.html"]) == 130
    assert capsys.readouterr().err == "captum-ssm: interrupted\n"


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "captum_ssm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


def test_help_and_version_start_without_heavy_imports():
    script = (
        "import sys\nfrom captum_ssm.cli import main\n"
        "try:\n    main([sys.argv[1]])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'captum', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for flag in ("--help", "--version"):
        started = subprocess.run(
            [sys.executable, "-c", script, flag], cwd=ROOT, capture_output=True, text=True
        )
        assert started.returncode == 0, started.stderr


@pytest.mark.slow
def test_as_a_module_into_a_pipe():
    done = run("explain", COPYING, "--ids", READ, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "'17', probability 1.0000" in done.stdout
    assert "Loading" not in done.stderr
    text = "Anna has a red ball. Tom has a blue kite. Anna's ball is"
    done = run("explain", STORIES, "--text", text, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {c for c in done.stdout + done.stderr if not c.isprintable()} == {"\n"}


@pytest.mark.slow
def test_a_reader_that_stops_reading_and_an_interrupt():
    command = f"{shlex.quote(sys.executable)} -m captum_ssm supported {shlex.quote(COPYING)}"
    done = subprocess.run(
        f"{command} | head -1", shell=True, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.startswith("MambaForCausalLM, ")
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
    with subprocess.Popen(
        shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.readline()  # it is at work
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode in (130, 0)  # 0 where it was done before
    assert "Traceback" not in errors
