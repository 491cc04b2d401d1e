"""Records of served models, written by the packaged models in each format, run again."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import captum_ssm
from captum_ssm import InputError, explain, replay
from captum_ssm.examples import load, sample
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.served.records import ServedToken, read_records
from captum_ssm.explanation.make.served.rendering import served_row
from captum_ssm.explanation.make.served.vocabulary import Vocabulary

TEXT = "Anna has a red ball. Tom has a blue kite. Anna's ball is"


def row_of(record, tokenizer):
    """What is asked about a record with one answer."""
    (one,) = read_records(record)
    return served_row(one, Vocabulary(tokenizer), 0.5, 1.0)


def compared(served, record, model=None, **how):
    """How the log probabilities of a record differ from a model's."""
    model = served.model if model is None else model
    return replay(model, served.tokenizer, record, methods="rollout", **how).examples[0].replay


def answered(model, ids, count, temperature=1.0):
    """What the model writes after ids, and the log probabilities of all tokens."""
    given = torch.tensor([ids])
    with torch.no_grad():
        whole = model.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=-1)
        scores = (model(whole[:, :-1]).logits[0].float() / temperature).log_softmax(-1)
    logprobs = scores.gather(1, whole[0, 1:, None])[:, 0].tolist()
    return whole[0, len(ids) :].tolist(), logprobs[: len(ids) - 1], logprobs[len(ids) - 1 :]


class Served:
    """A server with a packaged model, which records what it answers in each format."""

    def __init__(self, name="stories-mamba", count=4, temperature=1.0):
        self.model, self.tokenizer = load(name)
        self.messages = sample(name) if name.startswith("chat") else None
        prompt = TEXT
        if self.messages:
            prompt = self.tokenizer.apply_chat_template(
                self.messages, tokenize=False, add_generation_prompt=True
            )
        self.prompt, self.prompt_ids = prompt, self.tokenizer.encode(prompt)
        self.ids, self.before, self.logprobs = answered(
            self.model, self.prompt_ids, count, temperature
        )
        self.texts = [self.tokenizer.decode([one]) for one in self.ids]
        self.text = self.tokenizer.decode(self.ids, skip_special_tokens=True)

    def vllm(self):
        """A ``RequestOutput``."""
        entry = lambda one, value: SimpleNamespace(  # noqa: E731
            logprob=value, rank=1, decoded_token=self.tokenizer.decode([one])
        )
        pairs = zip(self.ids, self.logprobs, strict=True)
        rows = [{one: entry(one, value), 1: entry(1, -11.0)} for one, value in pairs]
        told = zip(self.prompt_ids[1:], self.before, strict=True)
        output = SimpleNamespace(index=0, text=self.text, token_ids=tuple(self.ids), logprobs=rows)
        return SimpleNamespace(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=[None, *({one: entry(one, value)} for one, value in told)],
            outputs=[output],
        )

    def completion(self, **choice):
        """A response of completions, with its request."""
        logprobs = {"tokens": self.texts, "token_logprobs": self.logprobs, "top_logprobs": None}
        choice = {"index": 0, "text": self.text, "logprobs": logprobs} | choice
        response = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
        return {"request": {"prompt": self.prompt, "temperature": 0.7}, "response": response}

    def chat(self):
        """A response of chat completions, with its request."""
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(self.texts, self.logprobs, strict=True)
        ]
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.ids)}
        response = {"object": "chat.completion", "choices": [choice], "usage": usage}
        return {"request": {"messages": self.messages}, "response": response}


@pytest.fixture(scope="module")
def stories():
    return Served()


@pytest.fixture(scope="module")
def chat():
    return Served("chat-mamba", count=3)


def formats(stories, chat):
    """Every format, and the server whose record it is."""
    echoed = stories.completion()
    texts = [stories.tokenizer.decode([one]) for one in stories.prompt_ids]
    # With echo the prompt's tokens come first, of which the first has no log probability.
    values = [None, *stories.before, *stories.logprobs]
    offsets = [a for a, _ in stories.tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]]
    offsets += [len(TEXT) + k for k in range(len(stories.ids))]
    echoed["request"]["echo"] = True
    echoed["response"]["choices"][0] |= {
        "text": f"{TEXT}{stories.text}",
        "logprobs": {"tokens": texts + stories.texts, "token_logprobs": values}
        | {"text_offset": offsets},
    }
    as_ids = [f"token_id:{one}" for one in stories.ids]
    by_id = stories.completion(logprobs={"tokens": as_ids, "token_logprobs": stories.logprobs})
    returned = chat.chat()
    returned["response"]["prompt_token_ids"] = chat.prompt_ids
    returned["response"]["choices"][0]["token_ids"] = chat.ids
    batch = {"custom_id": "a", "body": {"messages": chat.messages}}
    batch["response"] = {"status_code": 200, "body": chat.chat()["response"]}
    return {
        "vllm": (stories, stories.vllm()),
        "completion": (stories, stories.completion()),
        "echo": (stories, echoed),
        "token_id": (stories, by_id),
        "text": (stories, stories.completion(logprobs=None)),
        "chat": (chat, chat.chat()),
        "return_token_ids": (chat, returned),
        "batch": (chat, batch),
    }


KINDS = ("vllm", "completion", "echo", "token_id", "text", "chat", "return_token_ids", "batch")


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_is_read_to_the_ids_that_were_served(kind, stories, chat):
    served, record = formats(stories, chat)[kind]
    row = row_of(record, served.tokenizer)
    assert (row.inputs.ids, row.target.ids) == (served.prompt_ids, served.ids)
    if kind == "text":
        with pytest.warns(UserWarning, match="holds no log probabilities"):
            assert compared(served, record).tokens == ()
        return
    told = compared(served, record)
    P = len(served.prompt_ids)
    with_prompt = len(served.before) if kind in ("vllm", "echo") else 0
    assert len(told.tokens) == with_prompt + len(served.ids)
    recorded = [one.recorded for one in told.tokens]
    assert recorded == (served.before if with_prompt else []) + served.logprobs
    assert told.tokens[-1].position == P + len(served.ids) - 1
    assert told.max < 1e-4
    # A copy that was written to a file says the same.
    if kind != "vllm":
        assert row_of(json.loads(json.dumps(record)), served.tokenizer) == row


def test_a_replayed_record_is_explained_as_its_tokens_are(stories, tmp_path):
    found = replay(stories.model, stories.tokenizer, stories.completion(), methods="rollout")
    ids = stories.prompt_ids
    same = explain(stories.model, stories.tokenizer, [ids], target=stories.ids, methods="rollout")
    assert found.examples[0].outputs == same.examples[0].outputs
    for k in range(len(stories.ids)):
        assert np.array_equal(found.relevance(output=k), same.relevance(output=k))
    assert found.examples[0].replay.sampling == {"temperature": 0.7}
    assert "; replayed, 4 log probabilities differ from the recorded ones by at most" in repr(found)
    found.save(tmp_path / "why.json")
    again = captum_ssm.Explanation.load(tmp_path / "why.json")
    assert again.examples[0].replay == found.examples[0].replay


def test_one_run_is_compared_and_explained(stories):
    # Which tokens the model is run on, also where more of them are read than are explained.
    def runs_of(call):
        seen = []
        hook = lambda _, args, named: seen.append((args or (named["input_ids"],))[0].tolist())  # noqa: E731
        handle = stories.model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            return call(), seen
        finally:
            handle.remove()

    how = {"methods": "rollout", "lens": True}
    records = [stories.vllm(), stories.completion()]
    asked = [InputRow([stories.prompt_ids], stories.ids)] * 2
    # What is measured once, also of a model with this hook, is known then.
    runs_of(lambda: Explainer(stories.model, stories.tokenizer, **how)(asked))
    found, runs = runs_of(lambda: replay(stories.model, stories.tokenizer, records, **how))
    same, expected = runs_of(lambda: Explainer(stories.model, stories.tokenizer, **how)(asked))
    assert runs == expected
    assert [one.outputs for one in found.examples] == [one.outputs for one in same]
    count, P = len(stories.ids), len(stories.prompt_ids)
    assert [len(one.replay.tokens) for one in found.examples] == [P - 1 + count, count]


def test_the_turns_of_a_chat_are_marked(chat):
    found = replay(chat.model, chat.tokenizer, chat.chat(), methods="rollout")
    assert "user 1" in {span.name for span in found.examples[0].units["turn"]}
    assert found.examples[0].prompt == len(chat.prompt_ids)


def test_several_answers_and_records(stories, chat):
    record = stories.completion()
    choices = record["response"]["choices"]
    choices.append(choices[0] | {"index": 1})
    found = replay(stories.model, stories.tokenizer, [record, stories.vllm()], methods="rollout")
    assert len(found) == sum(one.replay is not None for one in found.examples) == 3
    with pytest.raises(InputError, match=r"records\[1\] of 2: the record has the keys nothing"):
        replay(stories.model, stories.tokenizer, [record, {"nothing": 1}])


def test_a_stream_is_joined(chat):
    whole = chat.chat()
    (choice,) = whole["response"]["choices"]
    chunks = [
        {
            "id": "1",
            "object": "chat.completion.chunk",
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            ],
        }
    ]
    for text, one in zip(chat.texts, choice["logprobs"]["content"], strict=True):
        shown = "" if text == "<end>" else text
        part = {"index": 0, "delta": {"content": shown}, "logprobs": {"content": [one]}}
        chunks.append({"id": "1", "object": "chat.completion.chunk", "choices": [part]})
    chunks.append(
        {
            "id": "1",
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": whole["response"]["usage"],
        }
    )
    row = row_of({"request": whole["request"], "response": chunks}, chat.tokenizer)
    assert (row.inputs.ids, row.target.ids) == (chat.prompt_ids, chat.ids)
    chunks[-1]["usage"] = {"completion_tokens": 9}
    with pytest.raises(InputError, match="holds 3 tokens of the answer, and the server counted 9"):
        row_of({"request": whole["request"], "response": chunks}, chat.tokenizer)
    (alone,) = read_records([{**chunk, "messages": chat.messages} for chunk in chunks[:-1]])
    assert (len(alone.answer), alone.messages) == (3, chat.messages)


def test_half_precision_passes_and_another_checkpoint_does_not(stories):
    half = load("stories-mamba")[0].to(torch.bfloat16)
    assert 1e-4 < compared(stories, stories.vllm(), half).max < 0.2
    other, _ = load("stories-qwen3next")
    with pytest.raises(InputError, match=r"differ from the recorded ones by more than 0\.5: '"):
        replay(other, stories.tokenizer, stories.vllm())
    with pytest.warns(UserWarning, match="It is explained as it is"):
        found = replay(other, stories.tokenizer, stories.vllm(), bound=None, methods="rollout")
    assert found.examples[0].replay.max > 0.5


def test_another_tokenizer_or_template_is_named(stories, chat):
    _, other = load("documents-mamba2")
    with pytest.raises(InputError, match=r"token 0 of the answer is 'red' \(id \d+\), and the"):
        replay(stories.model, other, stories.vllm())
    record = stories.completion()
    record["response"]["choices"][0]["logprobs"]["tokens"] = ["red", "never", "x", "y"]
    with pytest.raises(InputError, match="token 1 of the answer is 'never', which the tokenizer"):
        replay(stories.model, stories.tokenizer, record)
    template = chat.tokenizer.chat_template
    try:
        chat.tokenizer.chat_template = template.replace("<end>", "")
        with pytest.raises(InputError, match=r"server counted .* tokens of the prompt"):
            replay(chat.model, chat.tokenizer, chat.chat())
    finally:
        chat.tokenizer.chat_template = template


def test_records_that_are_cut_off_are_refused(stories):
    record = stories.completion()
    record["response"]["choices"][0]["logprobs"]["token_logprobs"] = stories.logprobs[:2]
    with pytest.raises(InputError, match=r"holds 4 tokens and .* 2, so the record is cut off"):
        replay(stories.model, stories.tokenizer, record)
    with pytest.raises(InputError, match="an answer and no prompt"):
        replay(stories.model, stories.tokenizer, stories.completion()["response"])
    with pytest.raises(TypeError, match="target is given, and the record tells it"):
        replay(stories.model, stories.tokenizer, stories.vllm(), target="red")
    with pytest.raises(InputError, match="bound is -1"):
        replay(stories.model, stories.tokenizer, stories.vllm(), bound=-1)


def test_log_probabilities_of_another_temperature():
    served = Served(temperature=2.0)
    assert compared(served, served.vllm(), temperature=2.0).max < 1e-4
    with pytest.raises(InputError, match="temperature"):
        compared(served, served.vllm(), bound=0.1)


def test_characters_that_are_split_over_tokens():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "Ġa"])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ġ", "a")]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    text = "é a€ a"
    ids = tokenizer.encode(text)
    data = [b"\xc3", b"\xa9", b" a", b"\xe2", b"\x82", b"\xac", b" a"]
    known = Vocabulary(tokenizer)
    # As OpenAI writes parts of characters, and as vLLM does.
    exact = [ServedToken(None, repr(one), one) for one in data]
    lossy = [ServedToken(None, one.decode(errors="replace")) for one in data]
    assert known.ids_of(exact, text) == known.ids_of(lossy, text) == ids
    # A text that is not tokenized as the tokenizer itself would.
    parts = [*exact[:2], ServedToken(None, " ", b" "), ServedToken(None, "a", b"a")]
    assert tokenizer.decode(known.ids_of(parts, "é a")) == "é a" != ids[:3]
    with pytest.raises(InputError, match="may be any of the ids"):
        known.ids_of(lossy, None)
