"""Tests of the chats, of their tokenizer and of the model trained on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from captum_ssm.examples.chat import COLORS, IDS, OBJECTS, PEOPLE, WORDS, Chat, as_text, make_chat

MODEL = Path(__file__).resolve().parents[2] / "tutorials" / "models" / "chat-mamba"


def chats(n: int, **options: bool) -> list[Chat]:
    rng = random.Random(0)
    return [make_chat(rng, **options) for _ in range(n)]


@pytest.mark.parametrize("held_out", [False, True])
def test_each_answer_follows_from_a_fact(held_out: bool) -> None:
    for chat in chats(100, held_out=held_out):
        told = as_text(next(words for role, words in chat.turns if role == "user"))
        is_short = chat.turns[0][0] == "system"
        for role, words in chat.turns:
            assert set(words) <= set(WORDS)
            if role != "assistant":
                continue
            known = set(words) & {*PEOPLE, *COLORS, *OBJECTS}
            sentences = [f"{part}." for part in told.split(".")]
            assert any(all(word in part for word in known) for part in sentences)
            assert (len(words) == 2) == is_short


def test_answers_are_where_the_words_say() -> None:
    for chat in chats(50):
        spans = [[chat.words[k] for k in answer] for answer in chat.answers]
        assert spans == [[*words, "<end>"] for role, words in chat.turns if role == "assistant"]


def test_the_template_gives_the_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for chat in chats(20):
        text = tokenizer.apply_chat_template(chat.messages, tokenize=False)
        assert tokenizer(text)["input_ids"] == [IDS[word] for word in chat.words]
        ids = tokenizer.apply_chat_template(
            chat.messages[:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert ids == [IDS[word] for word in chat.words[: chat.answers[-1].start]]


def test_the_model_answers_held_out_questions() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert min(json.loads((MODEL / "metrics.json").read_text())["accuracy"].values()) > 0.95
    right = 0
    for chat in chats(20, held_out=True):
        answer = chat.answers[-1]
        ids = torch.tensor([[IDS[word] for word in chat.words[: answer.start]]])
        found = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        right += found.tolist() == [IDS[chat.words[k]] for k in answer]
    assert right >= 18
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
