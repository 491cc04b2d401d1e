"""Logs that Inspect and lm-evaluation-harness wrote of the packaged models, run again.

tests/logs/make_logs.py made the files, with the packages themselves.
"""

import json
import shutil

import pytest
import torch
from folders import ROOT
from test_served import Served

from captum_ssm import InputError, ServedLog, explain_dataset, replay
from captum_ssm.cli import main
from captum_ssm.examples import load
from captum_ssm.explanation.make.served.records import each_answer, read_records

LOGS = ROOT / "tests" / "logs"
CHOICES = LOGS / "samples_stories_choices.jsonl"
HOW = {"methods": "rollout", "alternatives": 0}


@pytest.fixture(scope="module")
def chat():
    return Served("chat-mamba", count=3)


def sample_of(chat, **changes):
    """A sample of Inspect's log as its package reads it, with what a server recorded."""
    served = chat.chat()
    (choice,) = served["response"]["choices"]
    output = {
        "model": "local",
        "choices": [
            {
                "message": {"role": "assistant", "content": chat.text},
                "stop_reason": "stop",
                "logprobs": choice["logprobs"],
            }
        ],
    }
    call = {
        "event": "model",
        "model": "hf/local",
        "input": chat.messages,
        "tools": [],
        "config": {"temperature": 0.5},
        "output": output,
    }
    grader = {**call, "output": {"model": "grader", "choices": []}}
    return {
        "id": "chat 0",
        "epoch": 1,
        "events": [{"event": "state"}, {**call, **changes}, grader],
        "output": output,
        "scores": {"match": {"value": "C"}},
    }


@pytest.mark.parametrize("name", ["inspect.eval", "inspect.json"])
def test_a_log_of_inspect_is_explained_as_it_ran(name, chat, tmp_path):
    pytest.importorskip("inspect_ai")
    log = ServedLog(LOGS / name)
    found = explain_dataset(chat.model, chat.tokenizer, log, tmp_path, **HOW)
    assert (len(found), found.errors) == (2, {})
    assert found.column("row.sample") == ["chat 0", "chat 1"]
    assert found.column("row.score_model_graded_qa") == ["C", "C"]
    for index, answer in enumerate(("blue", "pink")):
        example = found[index].examples[0]
        assert example.tokens[example.prompt].text == f" {answer}"
        assert (example.replay.format, len(example.replay.tokens)) == ("Inspect", 3)
        assert example.replay.max < 1e-4
        assert example.replay.sampling == {"temperature": 0.01}


def test_inspect_in_memory(chat):
    pytest.importorskip("inspect_ai")
    from inspect_ai.log import read_eval_log

    log = read_eval_log(LOGS / "inspect.eval", resolve_attachments=True)
    found = replay(chat.model, chat.tokenizer, log, **HOW)
    assert [example.replay.max < 1e-4 for example in found.examples] == [True, True]


def test_each_call_of_the_evaluated_model_is_a_record(chat):
    sample = sample_of(chat)
    for given in (sample, {"eval": {}, "samples": [sample]}):
        found = replay(chat.model, chat.tokenizer, given, **HOW)
        (example,) = found.examples
        assert [one.recorded for one in example.replay.tokens] == chat.logprobs
        assert example.replay.max < 1e-4
    (record,) = read_records(sample)
    assert record.columns == {
        **{"sample": "chat 0", "epoch": 1, "call": 0, "score_match": "C"},
        **{"model": "local", "finish_reason": "stop"},
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input": []}, r"stored elsewhere in the file; expected a log that was read"),
        ({"input": [{"role": "user", "content": "attachment://a"}]}, "stored elsewhere"),
        ({"tools": [{"name": "bash"}]}, "offers the model tools"),
        ({"input": [{"role": "user", "content": [{"type": "image"}]}]}, r"parts \(image\)"),
    ],
)
def test_calls_that_cannot_be_rendered_are_errors_of_their_own(changes, told, chat):
    with pytest.raises(InputError, match=told):
        read_records(sample_of(chat, **changes))
    found = list(each_answer([sample_of(chat, **changes), sample_of(chat)]))
    assert isinstance(found[0], InputError)
    assert found[1].format == "Inspect"


def test_tokens_that_were_not_drawn_are_not_taken_for_the_answer(chat):
    """Inspect's hf provider records the likeliest token at each place, whichever was drawn."""
    sample = sample_of(chat)
    sample["output"]["choices"][0]["message"]["content"] = "pink."
    with pytest.raises(InputError, match=r"tokens spell 'blue\.', and the answer is 'pink\.'"):
        replay(chat.model, chat.tokenizer, sample)
    # It also writes characters' numbers where bytes belong.
    sample = sample_of(chat)
    sample["output"]["choices"][0]["logprobs"]["content"][0]["bytes"] = [288, 97]
    assert replay(chat.model, chat.tokenizer, sample, **HOW).examples[0].replay.max < 1e-4


def test_choices_of_lm_eval_are_compared_by_their_sums(stories, tmp_path):
    model, tokenizer = stories
    lines = [json.loads(line) for line in CHOICES.read_text().splitlines()]
    found = explain_dataset(model, tokenizer, ServedLog(CHOICES), tmp_path, **HOW)
    assert (len(found), found.errors) == (5, {})
    assert found.column("row.index") == [0, 1, 2, 0, 1]
    assert found.column("row.is_greedy") == [True, False, False, True, False]
    assert found.column("row.doc_id") == [0, 0, 0, 1, 1]
    recorded = [float(one[0][0]) for line in lines for one in line["resps"]]
    for index, value in enumerate(recorded):
        example = found[index].examples[0]
        (whole,) = example.replay.tokens
        assert (whole.recorded, whole.count) == (value, 2)
        assert abs(whole.difference) < 1e-4
        P = example.prompt
        assert whole.position == P
        assert whole.text == "".join(one.text for one in example.tokens[P:]).strip()
        # The sum, from the model alone.
        ids = torch.tensor([[token.id for token in example.tokens]])
        with torch.no_grad():
            scores = model(ids).logits[0, P - 1 : -1].log_softmax(-1)
        assert abs(float(scores.gather(1, ids[0, P:, None]).sum()) - value) < 1e-4


def test_what_lm_eval_had_written_is_explained(stories):
    record = json.loads((LOGS / "samples_stories_written.jsonl").read_text())
    with pytest.warns(UserWarning, match="holds no log probabilities"):
        found = replay(*stories, record, **HOW)
    assert found.examples[0].text.endswith("ball is red")
    # As the harness has them in memory, and with two answers to one request.
    record |= {"arguments": [("Anna's ball is", {"until": ["."]})], "resps": [["red", "blue"]]}
    assert [one.text for one in read_records(record)] == ["red", "blue"]
    with pytest.raises(InputError, match="a text without an answer"):
        read_records(record | {"arguments": [("Anna's ball",)], "resps": [["-3.0"]]})


def test_choices_of_another_model_are_refused(stories):
    model, tokenizer = stories
    other, _ = load("stories-qwen3next")
    record = json.loads(CHOICES.read_text().splitlines()[1])
    assert replay(model, tokenizer, record, **HOW).examples[0].replay.max < 1e-4
    record["resps"][0][0][0] = "-0.9"
    assert replay(model, tokenizer, record, **HOW).examples[0].replay.max < 1  # per token 0.45
    with pytest.raises(InputError, match=r"1 of 1 tokens differ .* by more than 0\.5: '"):
        replay(other, tokenizer, record)


def test_damaged_samples_end_nothing(tmp_path):
    good = json.loads(CHOICES.read_text().splitlines()[0])
    found = list(each_answer([{**good, "resps": [[["a", "b"]]]}, good]))
    assert [isinstance(one, Exception) for one in found] == [True, False, False, False]


def test_the_command_reads_evaluations(tmp_path, capsys):
    assert main(["replay", "stories-mamba", str(CHOICES), "--methods", "rollout"]) == 0
    assert "1 log probabilities differ" in capsys.readouterr().out
    path = tmp_path / "log.eval"
    shutil.copy(LOGS / "inspect.eval", path)
    try:
        import inspect_ai  # noqa: F401
    except ImportError:
        assert main(["replay", "chat-mamba", str(path)]) == 1
        told = capsys.readouterr().err
        assert "is a log of Inspect; expected pip install captum-ssm[logs]" in told
    else:
        assert main(["replay", "chat-mamba", str(path), "--methods", "rollout"]) == 0
