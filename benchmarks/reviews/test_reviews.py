"""Tests of the reviews and of the classifier trained on them."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from captum_ssm import MambaLRP
from captum_ssm.examples.reviews import (
    BAD,
    GOOD,
    LABELS,
    PEOPLE,
    WORDS,
    Review,
    is_held_out,
    make_review,
    of_each_label,
)

MODEL = Path(__file__).resolve().parents[2] / "tutorials" / "models" / "reviews-jamba"


def reviews(n: int, **options: bool) -> list[Review]:
    rng = random.Random(0)
    return [make_review(rng, **options) for _ in range(n)]


def test_judgments_are_about_the_film_and_rivals_about_people() -> None:
    for review in reviews(200):
        assert set(review.words) <= set(WORDS)
        for judgment in review.judgments:
            word = review.words[judgment.word]
            modifiers = [review.words[k] for k in judgment.modifiers]
            sign = (1 if word in GOOD else -1) * (-1 if "not" in modifiers else 1)
            assert judgment.value == sign * (2 if "very" in modifiers else 1)
            start = judgment.word - len(modifiers)
            assert review.words[start - 1] == "was"
        for rival in review.rivals:
            assert review.words[rival] in GOOD + BAD
            nearby = review.words[max(0, rival - 3) : rival + 2]
            assert set(nearby) & set(PEOPLE)


def test_a_label_is_the_sign_of_the_sum() -> None:
    found = {review.label for review in reviews(100)}
    assert found == {0, 1, 2}
    for review in reviews(100):
        total = sum(judgment.value for judgment in review.judgments)
        assert (
            LABELS[review.label]
            == {-1: "negative", 0: "mixed", 1: "positive"}[(total > 0) - (total < 0)]
        )


@pytest.mark.parametrize("held_out", [False, True])
def test_held_out_reviews_have_a_reserved_pair(held_out: bool) -> None:
    for review in reviews(100, held_out=held_out):
        pairs = []
        for judgment in review.judgments:
            subject = judgment.word - len(judgment.modifiers) - 2
            pairs.append((review.words[subject], review.words[judgment.word]))
        assert any(is_held_out(*pair) for pair in pairs) == held_out


def test_the_tokenizer_gives_the_words_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for review in reviews(20):
        assert tokenizer(review.text)["input_ids"] == review.ids
        assert tokenizer.decode(review.ids) == review.text


def test_the_model_names_held_out_labels_and_reads_the_judgments() -> None:
    model = AutoModelForSequenceClassification.from_pretrained(MODEL).eval()
    assert model.config.id2label == dict(enumerate(LABELS))
    assert min(json.loads((MODEL / "metrics.json").read_text())["accuracy"].values()) > 0.95
    right = hits = asked = 0
    for review in islice(of_each_label(random.Random(5), held_out=True), 30):
        ids = torch.tensor([review.ids])
        with torch.no_grad():
            found = int(model(ids).logits.argmax())
        right += found == review.label
        if found != review.label or not review.rivals:
            continue
        relevance = MambaLRP(model).attribute(ids, target=found)[0].abs()
        judging = max(float(relevance[judgment.word]) for judgment in review.judgments)
        asked += 1
        hits += judging > float(relevance[list(review.rivals)].max())
    assert right >= 28
    assert asked >= 10
    assert hits >= 0.8 * asked
