"""The proof, the measures, the ranks, and the README's own example of a new method."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from truth import measures, models, summary
from truth.__main__ import main, tasks
from truth.floats import float_tasks
from truth.harness import Plan, scored_task
from truth.methods import HEURISTICS, METHODS, from_file, relevance_of
from truth.task import Examples, Task, proven
from truth.texts import renamed, text_tasks

HERE = Path(__file__).resolve().parent
RECORDS = sorted((HERE / "results").glob("*.json"))


class Third(nn.Module):
    """Ten classes, by the token at place 2 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.eye(10))
        self.blocks = nn.ModuleList([nn.Linear(10, 10)])
        self.blocks[0].weight.data = torch.eye(10)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, ids):
        return self.blocks[0](self.embedding(ids))[:, 2]


def drawn(place: int):
    """Texts that say that the token at a place decides."""

    def draw(count, generator):
        ids = torch.randint(10, (count, 5), generator=generator)
        again = torch.randint(10, (3, count, 5), generator=generator)
        again[..., place], again[..., 4] = ids[:, place], ids[:, 4]
        cause = torch.zeros_like(ids, dtype=torch.bool)
        cause[:, place] = True
        other = (ids[:, place] + 1) % 10
        swapped = torch.where(cause, other[:, None], ids)
        answer = ids[:, 2]
        return [Examples(ids, answer, cause, swapped, again, answer, other, ~cause & False)]

    return draw


def task_of(place: int = 2) -> Task:
    return Task("third", "test", "", lambda seed: Third(), drawn(place), torch.arange(5), 0)


def test_the_proof_passes_the_cause_and_no_other_place():
    parts, counts = proven(task_of(), Third(), 20, seed=0)
    assert sum(map(len, parts)) == 20 == counts["drawn"]
    assert task_of().changed(parts[0]).sum(1).max() == 3  # the token that no redraw changes is none
    with pytest.raises(ValueError, match="none passed the proof"):
        proven(task_of(place=1), Third(), 20, seed=0)


def test_each_intervention_of_the_proof_can_fail():
    (examples,) = drawn(2)(50, torch.Generator().manual_seed(0))
    task, model = task_of(), Third()
    assert task.is_proven(model, examples).all()
    wrong = {
        "answer": (examples.answer + 1) % 10,
        "swapped": examples.inputs,
        "redrawn": (examples.redrawn + 1) % 10,
    }
    for name, value in wrong.items():
        assert not task.is_proven(model, replace(examples, **{name: value})).any(), name


def test_renaming_keeps_what_is_fixed_and_changes_all_else_alike():
    ids = torch.tensor([0, 1, 2, 0, 3, 7, 8])
    letters, pairs = torch.arange(4)[:, None], torch.tensor([[4, 5], [6, 7], [8, 9]])
    found = renamed(ids, [letters, pairs], {1}, torch.Generator().manual_seed(0))
    assert found[1] == 1
    assert found[0] == found[3]
    assert (found[[0, 2, 4, 5, 6]] != ids[[0, 2, 4, 5, 6]]).all()
    assert set(found[[0, 2, 4]].tolist()) == {0, 2, 3}
    assert int(found[5]) % 2 == 1  # a form stays that form


def test_findings_of_a_perfect_a_wrong_and_a_constant_map():
    cause = torch.tensor([[False, True, False, False]]).expand(3, -1)
    irrelevant = torch.tensor([[True, False, True, False]]).expand(3, -1)
    maps = torch.tensor([[0.0, 1, -1, 9], [2, 1, 1, 9], [5, 5, 5, 5]])
    found = measures.finding(maps, cause, irrelevant)
    assert found["hit"].tolist() == pytest.approx([1, 0, 1 / 3])
    assert found["share"].tolist() == pytest.approx([1, 1 / 4, 1 / 3])
    assert found["precision"].tolist() == pytest.approx([1, 1 / 3, 1 / 3])


def test_effects_are_those_of_the_deciding_token_alone():
    task = task_of()
    (examples,) = drawn(2)(6, torch.Generator().manual_seed(1))
    for name, effects in measures.references(task, task.model(), examples).items():
        assert (effects[:, [0, 1, 3, 4]] == 0).all(), name
        changed = examples.inputs[:, 2] != (0 if name == "removal" else -1)
        assert (effects[changed, 2] > 0).all(), name


def test_the_last_shuffled_model_keeps_the_values_of_the_weights_and_not_their_order():
    model = task_of().model()
    stages = list(models.randomized(model))
    assert len(stages) == 2  # the block, the embedding
    assert torch.equal(stages[0].embedding.weight, model.embedding.weight)
    last = stages[1].embedding.weight
    assert not torch.equal(last, model.embedding.weight)
    assert torch.equal(last.flatten().sort()[0], model.embedding.weight.flatten().sort()[0])
    assert torch.equal(model.embedding.weight, torch.eye(10))


def test_a_perfect_method_is_found_so_and_a_heuristic_is_found_out():
    def perfect(model, inputs, target):
        embedded = model.embedding(inputs).detach().requires_grad_()
        score = model.blocks[0](embedded)[:, 2].gather(1, target[:, None]).sum()
        return (torch.autograd.grad(score, embedded)[0] * embedded).sum(-1)

    def refuses(model, inputs, target):
        raise NotImplementedError("no texts")

    methods = {"perfect": perfect, "refuses": refuses}
    methods |= {name: METHODS[name] for name in HEURISTICS}
    found = scored_task(task_of(), methods, Plan(examples=20, randomized=20))
    scores = {
        name: {k: sum(v) / len(v) for k, v in own.items()} for name, own in found["scores"].items()
    }
    assert scores["perfect"]["hit"] == scores["perfect"]["share"] == 1
    assert scores["perfect"]["precision"] == scores["perfect"]["paraphrase"] == 1
    assert scores["position: later"]["paraphrase"] == pytest.approx(1, abs=1e-3)
    assert scores["position: later"]["randomized"] == pytest.approx(1, abs=1e-3)
    assert (
        scores["same token, brightness"]["precision"]
        == scores["same token, brightness"]["guessing"]
    )
    assert found["refused"] == {"refuses": "NotImplementedError: no texts"}
    assert found["guesses right"] < 0.5


def test_ranks_have_intervals_that_hold_the_truth():
    rng = torch.Generator().manual_seed(0)
    levels = {"good": 0.8, "fair": 0.75, "random": 0.2}
    scores = {
        name: {"hit": (torch.rand(30, generator=rng) < level).double().tolist()}
        for name, level in levels.items()
    }
    row = {"name": "a", "family": "a", "scores": scores, "refused": {"shy": "no"}, "seconds": {}}
    found = summary.standings({"tasks": [row]}, "hit")
    assert found["random"].rank == found["shy"].rank == 3
    assert found["random"].value == found["shy"].value  # a refusal has the scores of chance
    assert found["good"].first == 1
    assert found["good"].low < found["good"].value < found["good"].high
    both = summary.difference({"tasks": [row]}, "good", "random", "hit")
    assert both[1] > 0


@pytest.mark.parametrize("task", [*text_tasks(), *float_tasks()], ids=lambda task: task.name)
def test_every_task_has_examples_with_a_proof(task):
    with models.fast_scan():
        model = task.model()
        parts, counts = proven(task, model, 4, seed=3)
    assert counts["proven"] / counts["drawn"] > 0.4
    for part in parts:
        assert part.cause.any(1).all()
        assert task.changed(part).any(1).all()
        assert not (task.changed(part) & part.cause).any()


def test_a_method_is_added_as_the_readme_says(tmp_path, monkeypatch, capsys):
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# mine\.py\n(.*?)```", readme, re.DOTALL)
    commands = re.findall(r"^python -m benchmarks\.truth (.*mine\.py:\w+)$", readme, re.MULTILINE)
    trial, command = commands
    assert trial.startswith("--quick --tasks ")
    assert trial.endswith(command.removeprefix("--quick "))
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code, encoding="utf-8")
    tried = ["--tasks", "stories-mamba, animal", "series-classifier", "--methods", "random"]
    main([*command.split(), *tried, "--examples", "3", "--track", "tasks", "--output", "."])
    record = json.loads(Path("quick.json").read_text())
    assert [row["name"] for row in record["tasks"]] == [
        "stories-mamba, animal",
        "series-classifier",
    ]
    for row in record["tasks"]:
        assert not row["refused"]
        assert set(row["scores"]) == {"random", "gradient_norm"}
        assert all(len(row["scores"]["gradient_norm"][key]) == 3 for key in ("hit", "removal"))
    assert "gradient_norm" in Path("quick.html").read_text(encoding="utf-8")


def test_relevance_of_another_shape_or_not_finite_is_an_error(tmp_path):
    task, ids, target = task_of(), torch.zeros(2, 5, dtype=torch.long), torch.zeros(2).long()
    with pytest.raises(ValueError, match="expected that of the inputs"):
        relevance_of(lambda m, x, t: torch.zeros(2, 4), task, task.model(), ids, target)
    with pytest.raises(ValueError, match="NaN"):
        relevance_of(lambda m, x, t: x / 0.0 * 0, task, task.model(), ids, target)
    with pytest.raises(ValueError, match=r"expected path/to/file\.py:function"):
        from_file("nothing.py:at_all")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_whole(path):
    record = json.loads(path.read_text())
    known = {task.name for task in tasks()} | {"typeseg"}
    for row in record["tasks"]:
        assert row["name"] in known
        assert {"MambaLRP", *HEURISTICS} <= set(row["scores"])
        for scores in row["scores"].values():
            assert len(scores["hit"]) == row["explained"]
            assert all(-1.001 <= x <= 1.001 for values in scores.values() for x in values)
    found = summary.standings(record, "precision")
    assert found["random"].value < found["MambaLRP"].value
