"""What the model writes: the ids are those of its own `generate`, and so is everything after."""

import random

import numpy as np
import pytest
import torch
from models import VOCABULARY, tiny, word_tokenizer
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import PreTrainedTokenizerFast
from unchanged import assert_unchanged, fingerprint
from vision_models import vim

from captum_ssm import InputError, explain

TEXT = "w3 w4 w5 w6 w7"
READ = torch.tensor([[3, 4, 5, 6, 7]])
SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 30}


@pytest.fixture(scope="module")
def words():
    return word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}, eos_token="w2")


def never_ending(**changes):
    model = tiny(**changes)
    model.generation_config.eos_token_id = None
    return model


def answer_ids(explanation, example=0):
    shown = explanation.examples[example]
    return [token.id for token in shown.tokens[shown.prompt :]]


def assert_same(first, second):
    """Tokens, predictions and relevance are equal, to the last bit."""
    (a,), (b,) = first.examples, second.examples
    assert a.tokens == b.tokens
    assert (a.prompt, a.outputs) == (b.prompt, b.outputs)
    for name in a.relevance:
        np.testing.assert_array_equal(a.relevance[name], b.relevance[name])


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_the_answer_is_what_generate_returns(family, words):
    model = never_ending(family=family)
    expected = model.generate(READ, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    explained = explain(model, words, TEXT, max_new_tokens=6)
    assert answer_ids(explained) == expected
    assert len(explained.examples[0].outputs) == 6
    assert_same(explained, explain(model, words, TEXT, target=expected))


def test_random_states_of_all_generators_stay(monkeypatch):
    model = never_ending()
    generate = model.generate

    def random_everywhere(*args, **kwargs):
        random.random()
        np.random.rand()  # noqa: NPY002
        for state in gpus:
            state.add_(1)
        return generate(*args, **kwargs)

    gpus = [torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)]
    monkeypatch.setattr(model, "generate", random_everywhere)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [s.clone() for s in gpus])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda s: gpus.__setitem__(slice(2), s))
    before = random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    explain(model, READ, max_new_tokens=2)
    assert before == (random.getstate(), np.random.get_state()[2])  # noqa: NPY002
    assert [state.tolist() for state in gpus] == [[0] * 8, [1] * 8]


def test_it_is_greedy_whatever_the_models_settings_are():
    model = never_ending()
    expected = model.generate(READ, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    model.generation_config.update(do_sample=True, temperature=5.0, num_beams=3)
    assert answer_ids(explain(model, READ, max_new_tokens=6)) == expected


def test_options_go_to_generate_and_the_random_state_stays(words):
    model = never_ending()
    torch.manual_seed(4)
    expected = model.generate(READ, max_new_tokens=8, **SAMPLED)[0, 5:].tolist()
    torch.manual_seed(4)
    before = fingerprint(model)
    settings = model.generation_config.to_dict()
    explained = explain(model, words, TEXT, max_new_tokens=8, generation=SAMPLED)
    assert answer_ids(explained) == expected
    assert_unchanged(model, before)
    assert model.generation_config.to_dict() == settings
    assert explained.settings["generation"] == SAMPLED
    assert explained.settings["max_new_tokens"] == 8
    greedy = model.generate(READ, max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    assert expected != greedy  # or the options would show nothing


def test_the_end_of_the_text_is_explained_and_ends_it(words):
    model = never_ending()
    plain = model.generate(READ, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    end = next(token for token in plain[2:] if token not in plain[:2])
    stop = plain.index(end) + 1
    stopped = explain(model, words, TEXT, max_new_tokens=6, generation={"eos_token_id": end})
    assert answer_ids(stopped) == plain[:stop]
    # An empty answer is its end alone: why the model says nothing.
    empty = explain(model, words, TEXT, max_new_tokens=6, generation={"eos_token_id": plain[0]})
    assert answer_ids(empty) == plain[:1]
    assert len(empty.examples[0].outputs) == 1


def test_each_text_gets_its_own_answer(words):
    model = never_ending()
    texts = [TEXT, "w9 w8", "w30"]
    both = explain(model, words, texts, max_new_tokens=3)
    for k, text in enumerate(texts):
        own = explain(model, words, text, max_new_tokens=3)
        (one,), (other,) = both[k].examples, own.examples
        assert (one.tokens, one.prompt) == (other.tokens, other.prompt)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.position, a.chosen, a.role) == (b.position, b.chosen, b.role)
            assert [(x.text, x.id, x.rank, x.row) for x in a.answers] == [
                (x.text, x.id, x.rank, x.row) for x in b.answers
            ]
            likely = [[answer.probability for answer in out.answers] for out in (a, b)]
            np.testing.assert_allclose(*likely, rtol=1e-4)
        np.testing.assert_allclose(both[k].relevance(), own.relevance(), rtol=1e-4, atol=1e-6)


def test_ids_and_masks_are_taken_as_texts_are():
    model = never_ending()
    batch = torch.tensor([[0, 3, 4], [5, 6, 7]])
    explained = explain(
        model,
        input_ids=batch,
        attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
        max_new_tokens=3,
    )
    for k, row in enumerate(([3, 4], [5, 6, 7])):
        whole = model.generate(torch.tensor([row]), max_new_tokens=3, do_sample=False)[0].tolist()
        assert row + answer_ids(explained, k) == whole


def test_ids_are_kept_where_their_text_would_be_read_in_another_way():
    # "ab" is one token, and the model writes it as two.
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")

    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = never_ending()

        def forward(self, input_ids):
            logits = self.model(input_ids, use_cache=False).logits
            score = torch.zeros_like(logits)
            wanted = torch.where(input_ids == 1, 2, 1)
            return logits + 1e3 * score.scatter(2, wanted[..., None], 1.0)

    explained = explain(Alternating(), tokenizer, "ab", max_new_tokens=4)
    assert [token.id for token in explained.examples[0].tokens] == [3, 1, 2, 1, 2]
    assert explained.examples[0].text == "ababab"


def test_a_plain_module_is_continued_greedily(words):
    inner = never_ending()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids):
            return self.inner(input_ids, use_cache=False).logits

    expected = inner.generate(READ, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    assert answer_ids(explain(Plain(), words, TEXT, max_new_tokens=6)) == expected
    ended = explain(
        Plain(), words, TEXT, max_new_tokens=6, generation={"eos_token_id": expected[0]}
    )
    assert answer_ids(ended) == expected[:1]
    with pytest.raises(InputError, match="has no generate that knows where to end"):
        explain(Plain(), words, TEXT, generation={})
    with pytest.raises(InputError, match="'temperature', which the model's generate does not"):
        explain(Plain(), words, TEXT, max_new_tokens=2, generation={"temperature": 2})


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_a_generate_of_ones_own_is_called_as_it_is_written(limit, words):
    inner = never_ending()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.cache = None

        def forward(self, input_ids):
            return self.inner(input_ids, use_cache=False).logits

        if limit == "max_new_tokens":

            def generate(self, input_ids, max_new_tokens, bias=0):
                self.kept = self.cache = input_ids
                written = (torch.arange(max_new_tokens) + 10 + bias)[None]
                return torch.cat([input_ids, written], 1)

        else:  # as in mamba_ssm

            def generate(self, input_ids, max_length, bias=0):
                count = max_length - input_ids.shape[1]
                return torch.cat([input_ids, (torch.arange(count) + 10 + bias)[None]], 1)

    model = Own()
    before = fingerprint(model)
    explained = explain(model, words, TEXT, max_new_tokens=3, generation={"bias": 2})
    assert answer_ids(explained) == [12, 13, 14]
    assert_unchanged(model, before)
    assert model.cache is None
    with pytest.raises(InputError, match="Did you mean 'bias'"):
        explain(model, words, TEXT, max_new_tokens=3, generation={"bais": 2})


def test_an_answer_is_held_against_another_one(words):
    model = never_ending()
    first = model.generate(READ, max_new_tokens=2, do_sample=False)[0, 5].item()
    other = (first + 1) % VOCABULARY
    explained = explain(model, words, TEXT, max_new_tokens=2, against=f"w{other}")
    assert explained.relevance(against=f"w{other}").shape == (7,)


def test_models_that_nnsight_wraps():
    nnsight = pytest.importorskip("nnsight")
    model = never_ending()
    expected = model.generate(READ, max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    plain = explain(model, READ, max_new_tokens=4)
    wrapped = explain(nnsight.NNsight(model), READ, max_new_tokens=4)
    assert answer_ids(plain) == answer_ids(wrapped) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected an integer from 1"),
        ({"max_new_tokens": "4"}, "max_new_tokens is '4'"),
        ({"max_new_tokens": 2, "target": "w3"}, "target is 'w3', so there is nothing to write"),
        ({"max_new_tokens": 2, "position": 1}, "position is 1, which explains tokens of the text"),
        ({"max_new_tokens": 2, "generation": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"max_new_tokens": 2, "generation": {"max_new_tokens": 3}}, "given twice"),
        ({"max_new_tokens": 2, "generation": {"input_ids": 3}}, "explain gives to generate"),
        ({"max_new_tokens": 2, "generation": {"num_return_sequences": 2}}, "expected one answer"),
        ({"max_new_tokens": 2, "generation": [1]}, "expected a dict of the options"),
    ],
)
def test_errors_say_what_to_do(asked, message, words):
    with pytest.raises((InputError, TypeError), match=message):
        explain(never_ending(), words, TEXT, **asked)


def test_only_a_language_model_writes():
    for model, inputs in ((tiny("jamba_classifier"), READ), (vim(), torch.rand(3, 16, 16))):
        with pytest.raises(TypeError, match="the model does not write texts"):
            explain(model, inputs, max_new_tokens=2)


def test_every_token_may_be_explained(words):
    explained = explain(never_ending(), words, TEXT, max_new_tokens=2, position="all")
    assert [output.position for output in explained.examples[0].outputs] == [0, 1, 2, 3, 4, 5]
