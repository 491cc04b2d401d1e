"""Conversations: the ids of the chat template, and each character in the turn that says it."""

import json
import re

import numpy as np
import pytest
import torch
from models import Slow, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from captum_ssm import InputError, explain
from captum_ssm.explanation import Explanation

# Three forms of templates, as widely used models have them.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ system }}{% endif %}"
    "{{ m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% else %}{{ raise_exception('no role ' + m['role']) }}"
    "{% endif %}{% endfor %}"
)
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
ASKED = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "user: who has the ball?\n\nThe user or the assistant? é🎈"},
    {"role": "assistant", "content": "assistant"},
    {"role": "user", "content": "  user  "},
]


# What the templates make, written by hand: pieces, each with who says it.


def chatml(messages, is_open=True):
    for name, role, content in said(messages):
        yield f"<|im_start|>{role}\n", "template"
        yield content, name
        yield "<|im_end|>\n", "template"
    yield "<|im_start|>assistant\n" * is_open, "template"


def llama(messages, is_open=True):
    yield "<s>", "template"
    for name, role, content in said(messages):
        yield f"<|start_header_id|>{role}<|end_header_id|>\n\n", "template"
        yield content.strip(), name
        yield "<|eot_id|>", "template"
    yield "<|start_header_id|>assistant<|end_header_id|>\n\n" * is_open, "template"


def mistral(messages, is_open=True):
    """The system's message stands inside of the last user's."""
    everything = list(said(messages))
    system = [one for one in everything if one[1] == "system"]
    last = max(k for k, one in enumerate(everything) if one[1] == "user")
    yield "<s>", "template"
    for k, (name, role, content) in enumerate(everything):
        if role == "user":
            yield "[INST] ", "template"
            for who, _, text in system if k == last else []:
                yield text, who
                yield "\n\n", "template"
            yield content, name
            yield " [/INST]", "template"
        elif role == "assistant":
            yield " ", "template"
            yield content, name
            yield "</s>", "template"


def said(messages):
    counts = {}
    for message in messages:
        role = message["role"]
        counts[role] = counts.get(role, 0) + 1
        yield f"{role} {counts[role]}", role, message["content"]


TEMPLATES = {"chatml": (CHATML, chatml), "llama": (LLAMA, llama), "mistral": (MISTRAL, mistral)}


@pytest.fixture(scope="module")
def model():
    return tiny(vocab_size=320)


def bytes_of(template=CHATML):
    """Byte-level BPE, as most chat models have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["user assistant system who has the ball The word answer one"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=list(SPECIAL), initial_alphabet=alphabet
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=template,
    )


def assert_in_turns(example, pieces):
    pieces = list(pieces)
    text = "".join(piece for piece, _ in pieces)
    wanted = [name for piece, name in pieces for _ in piece]
    assert example.text[: len(text)] == text
    for span in example.units["turn"]:
        for token in example.tokens[span.first : span.end]:
            # Tokens of no width begin a character that the next one ends.
            for k in range(token.start, max(token.end, token.start + 1)):
                # A token may hold white space of the template, and letters of a message.
                owner = wanted[k] if k < len(wanted) else span.name
                assert owner == span.name or (owner == "template" and text[k].isspace())
    names = {name for _, name in pieces} - {"template"}
    assert names <= {span.name for span in example.units["turn"]}


@pytest.mark.parametrize("kind", ["fast", "slow"])
@pytest.mark.parametrize("form", TEMPLATES)
def test_every_character_is_in_the_turn_that_says_it(form, kind, model):
    template, written = TEMPLATES[form]
    tokenizer = bytes_of(template)
    ids = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    read = Slow(tokenizer) if kind == "slow" else tokenizer
    explained = explain(model, read, messages=ASKED, target=[30, 31])
    (example,) = explained.examples
    assert [token.id for token in example.tokens[: example.prompt]] == ids[0].tolist()
    assert_in_turns(example, written(ASKED))
    assert example.units["turn"][-1].name == "assistant 2"
    assert example.units["turn"][-1].first == example.prompt
    same = explain(model, tokenizer, ids, target=[30, 31])
    np.testing.assert_array_equal(explained.relevance(output=1), same.relevance(output=1))


@pytest.mark.parametrize("form", TEMPLATES)
def test_an_answer_is_read_as_the_template_puts_it(form, model):
    template, written = TEMPLATES[form]
    tokenizer = bytes_of(template)
    answer = "The ball has one user."
    whole = [*ASKED, {"role": "assistant", "content": answer}]
    last = explain(model, tokenizer, messages=whole)
    target = explain(model, tokenizer, messages=ASKED, target=answer)
    (example,) = last.examples
    assert example.tokens == target.examples[0].tokens
    np.testing.assert_array_equal(last.relevance(), target.relevance())
    rendered = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=False)
    read = [token.id for token in example.tokens]
    assert read == rendered[0, : len(read)].tolist()
    assert_in_turns(example, list(written(whole, False))[:-2])
    assert example.text.endswith(answer)
    # What stands before the answer is what stands there when the model is to write it.
    opened = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert read[: example.prompt] == opened[0].tolist()


def test_the_model_writes_the_answer(model):
    tokenizer = bytes_of(LLAMA)
    ids = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    explained = explain(model, tokenizer, messages=ASKED, max_new_tokens=5, units="turn")
    (example,) = explained.examples
    assert [token.id for token in example.tokens[example.prompt :]] == expected
    same = explain(model, tokenizer, ids, target=expected)
    np.testing.assert_array_equal(explained.relevance(), same.relevance())
    total = explained.relevance(units="turn").sum()
    assert total == pytest.approx(explained.relevance().sum(), rel=1e-4)
    assert explained.settings["units"] == "turn"


def test_several_conversations_each_with_its_answer(model):
    tokenizer = bytes_of()
    both = [ASKED[:2], ASKED[1:2]]
    explained = explain(model, tokenizer, messages=both, target=["one", "who"])
    for k, target in enumerate(("one", "who")):
        alone = explain(model, tokenizer, messages=both[k], target=target)
        assert explained.examples[k].tokens == alone.examples[0].tokens
        np.testing.assert_array_equal(explained.relevance(example=k), alone.relevance())
    # A conversation is known without its keyword, too.
    again = explain(model, tokenizer, both, target=["one", "who"])
    assert again.examples[1].tokens == explained.examples[1].tokens


def test_words_and_sentences_end_with_their_turn(model):
    explained = explain(model, bytes_of(MISTRAL), messages=ASKED[1:], target="one")
    (example,) = explained.examples
    starts = {span.first for span in example.units["turn"]}
    for unit in ("word", "sentence"):
        assert starts <= {span.first for span in example.units[unit]}
        assert example.units[unit][-1].end == len(example.tokens)


def test_a_content_may_be_a_list_of_texts(model):
    tokenizer = bytes_of()
    parts = [{"type": "text", "text": "who has "}, {"type": "text", "text": "the ball?"}]
    split = explain(model, tokenizer, messages=[{"role": "user", "content": parts}])
    plain = explain(model, tokenizer, messages=[{"role": "user", "content": "who has the ball?"}])
    assert split.examples[0].tokens == plain.examples[0].tokens
    assert split.examples[0].name == "who has the ball?"


def test_a_contrast_is_between_two_answers_of_the_template(model):
    tokenizer = bytes_of(MISTRAL)
    explained = explain(model, tokenizer, messages=ASKED[1:2], target="one", against="two")
    (contrast,) = explained.examples[0].outputs[0].contrasts
    ids = tokenizer.apply_chat_template(
        [*ASKED[1:2], {"role": "assistant", "content": "two"}], return_dict=False
    )
    place = explained.examples[0].prompt
    assert explained.examples[0].outputs[0].answers[contrast.against].id == ids[place]


def test_a_template_that_changes_what_is_said_is_followed_or_named(model):
    # Reasoning is left out of earlier answers, as in many templates of reasoning models.
    thinking = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    messages = [
        {"role": "user", "content": "who"},
        {"role": "assistant", "content": "<think>the user</think>one"},
        {"role": "user", "content": "has"},
    ]
    (example,) = explain(model, bytes_of(thinking), messages=messages, target="one").examples
    spoken = [{**messages[0]}, {"role": "assistant", "content": "one"}, {**messages[2]}]
    assert_in_turns(example, chatml(spoken))

    shouted = CHATML.replace("m['content']", "m['content'] | upper")
    (example,) = explain(model, bytes_of(shouted), messages=ASKED, target=[30]).examples
    loud = [{**message, "content": message["content"].upper()} for message in ASKED]
    assert_in_turns(example, chatml(loud))

    deaf = CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')")
    with pytest.warns(UserWarning, match=r"are not marked as turns: system 1\."):
        (example,) = explain(model, bytes_of(deaf), messages=ASKED[:2]).examples
    assert {span.name for span in example.units["turn"]} == {"template", "user 1", "assistant 1"}

    quoted = CHATML.replace("m['content']", "(m['content'] | tojson)")
    (example,) = explain(model, bytes_of(quoted), messages=ASKED[1:2], target="one").examples
    told = json.dumps(ASKED[1]["content"], ensure_ascii=False)[1:-1]
    (span,) = [span for span in example.units["turn"] if span.name == "user 1"]
    spoken = "".join(
        token.text for token in example.tokens[span.first : span.end] if token.end > token.start
    )
    assert told in spoken
    counted = CHATML.replace("m['content']", "(m['content'] | length | string)")
    with pytest.warns(UserWarning, match="not marked as turns: system 1, user 1"):
        (example,) = explain(model, bytes_of(counted), messages=ASKED[:2]).examples
    assert "turn" not in example.units
    with pytest.raises(InputError, match=re.escape("Pass its token ids: target=ids")):
        explain(model, bytes_of(counted), messages=ASKED[:2], target="one")


def test_a_classifier_reads_the_whole_conversation():
    model = tiny("jamba_classifier", vocab_size=320)
    tokenizer = bytes_of()
    explained = explain(model, tokenizer, messages=ASKED[:3], target=2)
    (example,) = explained.examples
    ids = tokenizer.apply_chat_template(ASKED[:3], return_dict=False)
    assert [token.id for token in example.tokens] == ids
    assert_in_turns(example, chatml(ASKED[:3], False))
    same = explain(model, tokenizer, ids, target=2)
    np.testing.assert_array_equal(explained.relevance(), same.relevance())


def test_a_pipeline_has_its_template(model):
    from transformers import pipeline

    made = pipeline("text-generation", model=model, tokenizer=bytes_of())
    expected = explain(model, bytes_of(), messages=ASKED, max_new_tokens=2)
    for explained in (
        explain(made, messages=ASKED, max_new_tokens=2),
        explain(made, ASKED, max_new_tokens=2),
    ):
        assert explained.examples[0].tokens == expected.examples[0].tokens


def test_turns_are_kept_in_a_file_and_in_a_table(model, tmp_path):
    explained = explain(model, bytes_of(), messages=ASKED, target="one")
    explained.save(tmp_path / "chat.json")
    again = Explanation.load(tmp_path / "chat.json")
    assert again.examples[0].units == explained.examples[0].units
    pytest.importorskip("pandas")
    table = again.to_pandas(units="turn")
    assert len(table[table.answer == table.answer[0]]) == len(explained.examples[0].units["turn"])


def test_a_message_that_an_answer_would_drop_stays(model):
    # Some templates put the system's message into the user's last one, if nothing follows it.
    wanted = "not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list"
    assert wanted in MISTRAL
    tokenizer = bytes_of(MISTRAL.replace(wanted, "loop.last"))
    given = explain(model, tokenizer, messages=ASKED, target="The ball.").examples[0]
    asked = explain(model, tokenizer, messages=ASKED, target=[30]).examples[0]
    assert given.tokens[: given.prompt] == asked.tokens[: asked.prompt]
    assert "system 1" in {span.name for span in given.units["turn"]}
    assert given.text.endswith("[/INST] The ball.")


def test_a_template_may_take_parts_alone(model):
    # As of models that also read images; one leaves texts out, the other refuses them.
    for part in ("{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}", "{{ p.text + '' }}"):
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% for p in m['content'] %}" + part + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        (example,) = explain(model, bytes_of(template), messages=ASKED, target="one").examples
        assert_in_turns(example, chatml(ASKED))


def test_named_parts_are_of_the_rendered_text(model):
    tokenizer = bytes_of()
    text = tokenizer.apply_chat_template(ASKED, tokenize=False)
    start = text.index("who has")
    explained = explain(model, tokenizer, messages=ASKED, units={"asked": (start, start + 7)})
    (span,) = [one for one in explained.examples[0].units["span"] if one.name]
    tokens = explained.examples[0].tokens[span.first : span.end]
    assert "".join(token.text for token in tokens).strip() == "who has"


IMAGE = [{"type": "image", "url": "ball.png"}]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"messages": []}, r"messages is empty; expected at least one"),
        ({"messages": [[]]}, r"messages\[0\] is empty"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi'; expected a dict with a role"),
        ({"inputs": [{"role": "user"}]}, r"\['content'\] is None; expected a text"),
        ({"messages": [{"content": "hi"}]}, "expected a dict with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"\['content'\] is 3; expected a text"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "of type 'image'; expected"),
        ({"messages": [{"role": "user", "content": [3]}]}, r"\['content'\]\[0\] is 3; expected"),
        ({"messages": ASKED, "inputs": "hi"}, "messages is given together with another input"),
        (
            {"messages": [*ASKED, ASKED[2]], "target": "one"},
            "the answer to explain, and target is given as well",
        ),
        ({"messages": [*ASKED, ASKED[2]], "max_new_tokens": 2}, "and max_new_tokens is given"),
        ({"messages": ASKED, "target": ""}, "The answer is ''"),
        ({"inputs": "who", "units": "turn"}, "units is 'turn', and there is no conversation"),
        (
            {"messages": [{"role": "tool", "content": "3"}]},
            r"refuses these messages \(roles: tool\): no role tool",
        ),
    ],
)
def test_errors_say_what_to_do(asked, message, model):
    with pytest.raises((InputError, TypeError), match=message):
        explain(model, bytes_of(MISTRAL), **asked)


def test_a_tokenizer_without_a_template_is_told(model):
    tokenizer = bytes_of(None)
    with pytest.raises(InputError, match=r"has no chat template; set tokenizer\.chat_template"):
        explain(model, tokenizer, messages=ASKED)
    with pytest.raises(TypeError, match="no tokenizer with a chat template"):
        explain(model, messages=ASKED)


def test_without_messages_there_are_no_turns(model):
    assert "turn" not in explain(model, torch.tensor([[30, 31]])).examples[0].units
