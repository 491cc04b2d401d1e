"""``circuit``: the paths and edges of a prediction, as the method has them."""

import re

import pytest
from commands import COPYING, READ

import captum_ssm
from captum_ssm import Explanation
from captum_ssm.attr import RelevanceFlow
from captum_ssm.cli import main

TEXT = "Anna has a yellow book. Tom has a brown doll. Anna's book is"


def test_it_tells_the_paths_and_the_largest_edges(capsys):
    assert main(["circuit", "stories-qwen3next", "--text", TEXT, "--edges", "3"]) == 0
    said = capsys.readouterr().out
    model, tokenizer = captum_ssm.examples.load("stories-qwen3next")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    answer = int(model(ids).logits[0, -1].argmax())
    graph = RelevanceFlow(model).graph(ids, target=(ids.shape[1] - 1, answer))
    assert f"'yellow', score {graph.score:+.4g}, read at 'is' (15)" in said
    assert "'yellow' (3) -> 'is' (15) in layer 2" in said
    assert "'is' (15) keeps its own" in said
    first = graph.edges[0]
    found = re.search(r"The largest 3 of 360 edges between tokens:\n +(\S+) +(\S+)%  (.*)", said)
    assert found[1] == f"{first.relevance:+.4g}"
    assert float(found[2]) == pytest.approx(100 * first.relevance / graph.score, abs=0.06)
    assert found[3] == "layer 2, attention: 'is' (15) reads 'yellow' (3)"
    assert len(re.findall(r" reads ", said)) == 3


@pytest.mark.parametrize("ending", ["html", "json", "png", "svg", "pdf"])
def test_it_writes_pages_data_and_pictures(ending, tmp_path, capsys):
    path = tmp_path / f"circuit.{ending}"
    assert main(["circuit", COPYING, "--ids", READ, "--output", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert path.stat().st_size > 5000
    if ending == "json":
        (circuit,) = Explanation.load(path).examples[0].circuits
        assert circuit["answer"] == "17"


def test_one_circuit_per_token_of_the_target(capsys):
    assert main(["circuit", "stories-mamba", "--text", TEXT, "--target", "yellow ."]) == 0
    assert capsys.readouterr().out.count("Paths, by their share") == 2


def test_the_circuit_of_one_answer_against_another(capsys):
    assert main(["circuit", "stories-qwen3next", "--text", TEXT, "--against", "brown"]) == 0
    said = capsys.readouterr().out
    model, tokenizer = captum_ssm.examples.load("stories-qwen3next")
    logits = model(**tokenizer(TEXT, return_tensors="pt")).logits[0, -1]
    yellow, brown = logits[tokenizer.convert_tokens_to_ids(["yellow", "brown"])].tolist()
    score = float(re.search(r"'yellow' against 'brown', score (\S+), read at", said)[1])
    assert score == pytest.approx(yellow - brown, rel=1e-3)


def test_what_is_wrong_is_said_before_the_model_is_loaded(tmp_path, capsys):
    given = ["circuit", COPYING, "--ids", READ]
    for more, message in (
        (["--output", "circuit.csv"], "--output is circuit.csv; expected a name that ends in"),
        (["--output", str(tmp_path / "no" / "a.html")], "there is no folder"),
        (["--edges", "-1"], "--edges is -1; expected 0 or more"),
        (["--target", "x"], "--target is 'x'; expected token ids"),
    ):
        assert main([*given, *more]) == 1
        assert message in capsys.readouterr().err


def test_a_model_without_a_circuit_is_an_error(capsys, monkeypatch):
    def refuse(*args, **named):
        raise ValueError("the residual stream was not found.")

    monkeypatch.setattr(RelevanceFlow, "graph", refuse)
    assert main(["circuit", COPYING, "--ids", READ]) == 1
    assert "no circuit: the residual stream was not found." in capsys.readouterr().err
