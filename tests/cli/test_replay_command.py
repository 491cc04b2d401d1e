"""``replay``: the log of a server, compared and explained."""

import json

import pytest
import torch

from captum_ssm import Explanation
from captum_ssm.cli import main
from captum_ssm.examples import load

PROMPT = "Anna has a red ball. Anna's ball is"


@pytest.fixture(scope="module")
def record():
    """A response of completions to the prompt, in a line of a batch."""
    model, tokenizer = load("stories-mamba")
    with torch.no_grad():
        scores = model(tokenizer(PROMPT, return_tensors="pt").input_ids).logits[0, -1]
    value = float(scores.log_softmax(-1)[tokenizer.convert_tokens_to_ids("red")])
    logprobs = {"tokens": ["red"], "token_logprobs": [value]}
    body = {"choices": [{"index": 0, "text": " red", "logprobs": logprobs}]}
    return {"custom_id": "a", "response": {"status_code": 200, "body": body}}


def test_a_batch_is_compared_explained_and_written(record, tmp_path, capsys):
    log, asked, out = tmp_path / "log.jsonl", tmp_path / "asked.jsonl", tmp_path / "why.json"
    log.write_text(f"{json.dumps(record)}\n\n{json.dumps(record)}\n")
    asked.write_text(json.dumps({"custom_id": "a", "body": {"prompt": PROMPT}}))
    given = ["replay", str(log), "--model", "stories-mamba", "--requests", str(asked)]
    assert main([*given, "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.count("1 log probabilities differ from the recorded ones by at most 0.0000") == 2
    assert "'red', probability" in said
    assert [len(one.replay.tokens) for one in Explanation.load(out).examples] == [1, 1]


def test_what_differs_is_refused_or_told(record, tmp_path, capsys):
    log = tmp_path / "log.json"
    changed = json.loads(json.dumps(record))
    changed["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"] = [-7.0]
    log.write_text(json.dumps([changed | {"request": {"prompt": PROMPT}}]))
    assert main(["replay", "stories-mamba", str(log)]) == 1
    assert "1 of 1 tokens differ from the recorded ones by more than 0.5" in capsys.readouterr().err
    assert main(["replay", "stories-mamba", str(log), "--bound", "none"]) == 0
    told = capsys.readouterr()
    assert "It is explained as it is" in told.err
    assert "recorded   -7.0000" in told.out


def test_a_file_that_is_not_a_log(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text('data: {"a": 1}\ndata: [DONE]\nnothing\n')
    assert main(["replay", "stories-mamba", str(log)]) == 1
    assert "log.jsonl, line 3 is not JSON" in capsys.readouterr().err
    log.write_text('{"custom_id": "b"}')
    assert main(["replay", "stories-mamba", str(log), "--requests", str(log), "--bound", "x"]) == 1
    assert "--bound is 'x'" in capsys.readouterr().err
