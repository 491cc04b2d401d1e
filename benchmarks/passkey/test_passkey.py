"""Tests of the passkey task, of what is measured on it and of the saved model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measure import answer_logits, largest_at
from records import (
    CONTEXT,
    FIRST_DIGIT_ID,
    KEY,
    QUERY,
    RECORD_LENGTH,
    RECORDS,
    VALUE_LENGTH,
    PasskeyBatch,
    decode,
    held_out_batch,
    make_batch,
)
from transformers import AutoModelForCausalLM

from captum_ssm import MambaLRP
from captum_ssm.examples.copying import is_held_out

MODEL = Path(__file__).resolve().parents[2] / "tutorials" / "models" / "passkey-mamba"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records_of(batch: PasskeyBatch) -> torch.Tensor:
    """Key and value of every record, ``(examples, records, 2)``."""
    positions = batch.starts[..., None] + torch.arange(1, RECORD_LENGTH)
    return batch.tokens.gather(1, positions.flatten(1)).view_as(positions)


@pytest.mark.parametrize(("context", "records", "questions"), [(3, 1, 1), (12, 4, 8), (64, 4, 2)])
def test_layout(context: int, records: int, questions: int) -> None:
    batch = make_batch(16, generator(0), context, records, questions)
    assert batch.tokens.shape == (16, context + RECORD_LENGTH * questions)
    found = records_of(batch)
    for row in range(16):
        words = decode(batch.tokens[row])
        for start, record in zip(batch.starts[row].tolist(), found[row], strict=True):
            key, *value = decode(record)
            assert words[start : start + RECORD_LENGTH] == [KEY, key, *value]
        assert words[:context].count(KEY) == records
        for question, asked in enumerate(batch.asked[row].tolist()):
            key, *value = decode(found[row, asked])
            first = context + RECORD_LENGTH * question
            assert words[first : first + RECORD_LENGTH] == [QUERY, key, *value]
    assert all(len(set(row.tolist())) == records for row in found[..., 0])
    assert torch.equal(batch.targets, batch.tokens.gather(1, batch.answer_positions))
    assert torch.equal(batch.targets, batch.tokens[:, batch.predicting_positions + 1])
    # Digits stand in values only.
    digits = (batch.tokens >= FIRST_DIGIT_ID) & (batch.tokens < FIRST_DIGIT_ID + 10)
    assert digits.sum(1).eq(records + questions).all()


def test_record_masks() -> None:
    batch = make_batch(16, generator(0))
    right, others = batch.record_masks()
    assert right.sum(1).eq(RECORD_LENGTH).all()
    assert others.sum(1).eq(RECORD_LENGTH * (RECORDS - 1)).all()
    assert not (right & others).any()
    assert right.gather(1, batch.answer_positions).all()


def test_held_out_examples_never_meet_training() -> None:
    # One seed for both: the records, not the seed, decides the side.
    training = records_of(make_batch(500, generator(7)))
    reserved = records_of(held_out_batch(500, generator(7)))
    assert not is_held_out(training.flatten(1)).any()
    assert is_held_out(reserved.flatten(1)).all()


def test_the_seed_decides() -> None:
    assert torch.equal(make_batch(8, generator(1)).tokens, make_batch(8, generator(1)).tokens)
    assert not torch.equal(make_batch(8, generator(1)).tokens, make_batch(8, generator(2)).tokens)


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not go with 11 tokens"):
        make_batch(1, generator(0), 11, records=4)
    with pytest.raises(ValueError, match="0 questions"):
        make_batch(1, generator(0), 64, records=2, questions=0)


def test_largest_at() -> None:
    batch = make_batch(8, generator(0))
    right, others = batch.record_masks()
    cases = {
        "token": torch.nn.functional.one_hot(batch.answer_positions, CONTEXT),
        "record": right.int()[:, None].expand(-1, 1, -1),  # its first token, <KEY>
        "distractor": others.int()[:, None].expand(-1, 1, -1),
        "filler": (~(right | others)).int()[:, None].expand(-1, 1, -1),
    }
    expected = {
        "token": (True, True, False),
        "record": (False, True, False),
        "distractor": (False, False, True),
        "filler": (False, False, False),
    }
    for name, rows in cases.items():
        found = largest_at(rows, batch)
        for key, value in zip(("token", "record", "distractor"), expected[name], strict=True):
            assert found[key].shape == (8, 1)
            assert (found[key] == value).all(), (name, key)


def test_saved_model_retrieves() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()
    batch = held_out_batch(100, generator(99))
    with torch.no_grad():
        right = answer_logits(model, batch).argmax(-1) == batch.targets
    assert right.double().mean() > 0.95

    batch = held_out_batch(10, generator(98))
    positions = batch.predicting_positions
    rows = MambaLRP(model).attribute(
        batch.inputs.repeat_interleave(VALUE_LENGTH, 0),
        target=batch.targets.reshape(-1),
        position=positions.repeat(10),
    )
    hits = largest_at(rows.reshape(10, VALUE_LENGTH, -1)[..., :CONTEXT], batch)
    chance = RECORD_LENGTH / CONTEXT
    assert hits["record"].double().mean() > 3 * chance
