"""The questions ask what they say: another token at one place makes the foil right."""

import json
from dataclasses import replace

import pytest
import torch
from circuit_questions import NAMES, answered, load, questions
from circuit_tables import write_tables

TASKS = [name for name in NAMES if name in ("copying-mamba", "passkey-mamba", "stories-mamba")]


@pytest.mark.parametrize("name", TASKS)
def test_a_question_differs_from_its_corrupted_one_in_the_token_that_decides(name):
    q = questions(name, 10, seed=0)
    changed = q.ids != q.corrupted
    assert len(q) == 10
    assert changed.sum(1).tolist() == [1] * 10
    assert bool((changed.int().argmax(1) < q.positions).all())
    assert bool((q.answers != q.foils).all())
    if not name.startswith("stories"):  # there the word decides which one follows
        assert torch.equal(q.ids[changed], q.answers)
        assert torch.equal(q.corrupted[changed], q.foils)


def test_questions_of_long_stories_are_those_that_the_model_answers():
    asked = questions("stories-mamba", 6, seed=0, length=200)
    assert asked.ids.shape == (6, 200)
    model = load("stories-mamba")
    right = answered(model, asked)
    with torch.no_grad():
        said = model(right.ids).logits[:, -1].argmax(-1)
    assert 3 <= len(right) <= 6
    assert torch.equal(said, right.answers)
    assert not len(answered(model, replace(asked, answers=asked.foils)))
    with pytest.raises(SystemExit, match="only stories"):
        questions("copying-mamba", 6, seed=0, length=200)


def test_tables_hold_means_over_models_and_paired_differences(tmp_path):
    names = [
        *("LRP contrast |E|", "LRP contrast, signed", "LRP logit |E|", "EAP |E|", "EAP-IG |E|"),
        *("gradient x hidden attention", "LaTIM l1, reach"),
    ]
    for model, kept in (("a", 1.0), ("b", 0.5)):
        rows = [
            {
                "ranking": name,
                "ablation": ablation,
                "area": {
                    what: {"value": kept if name == names[0] else 0.0}
                    for what in ("kept", "removed", "gap", "control")
                },
                "curves": {"kept": [kept, kept]},
                "each": [kept if name == names[0] else 0.0] * 4,
                "kept_whole": 1.0,
                "kept_none": 0.25,
            }
            for name in names
            for ablation in ("zero", "mean")
        ]
        record = {"model": model, "examples": 4, "ks": [1, 5], "rows": rows}
        (tmp_path / f"{model}.json").write_text(json.dumps(record))
    write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| LRP contrast \\|E\\| | 0.75 | 0.75 |" in text
    assert "| LRP contrast \\|E\\| minus EAP \\|E\\| | 0.750 [" in text
    assert "| no edge | 0.25 | 0.25 |" in text
