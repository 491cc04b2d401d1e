"""The loop: every method on every task, and all scores per example."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from . import measures, models
from .methods import Method, relevance_of
from .task import Examples, Task, proven

BATCH = 10


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        examples (int): of each task and each training.
        randomized (int): how many of these the models with shuffled weights are asked.
        stages (int): how many of the models of the cascade, from the first to the last.
        seed (int): of the examples and of all noise.
    """

    examples: int = 30
    randomized: int = 8
    stages: int = 3
    seed: int = 0


@dataclass
class Subject:
    """A task's model with the examples that it answers by their cause."""

    task: Task
    model: nn.Module
    parts: list[Examples]

    def maps(self, method: Method, read: Callable[[Examples], Tensor]) -> list[Tensor]:
        """A method's maps of some inputs of each part."""
        found = []
        for part in self.parts:
            inputs = read(part)
            pieces = zip(inputs.split(BATCH), part.target.split(BATCH), strict=True)
            found.append(
                torch.cat([relevance_of(method, self.task, self.model, x, t) for x, t in pieces])
            )
        return found

    def of_others(self, model: nn.Module, parts: list[Examples]) -> Subject:
        """Another model on these examples."""
        return Subject(self.task, model, parts)


def subject_of(task: Task, plan: Plan, training: int = 0) -> tuple[Subject, dict[str, int]]:
    """The model of a training, with examples that passed the proof."""
    model = task.model(training)
    parts, counts = proven(task, model, plan.examples, plan.seed)
    return Subject(task, model, parts), counts


def scored_task(
    task: Task,
    methods: dict[str, Method],
    plan: Plan,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All scores of all methods on one task, per example.

    A method that raises on a task is refused there: the error's first line is kept in its place.
    """
    with models.fast_scan():
        subject, counts = subject_of(task, plan)
        known = [measures.references(task, subject.model, part) for part in subject.parts]
        few = [part[: -(-plan.randomized // len(subject.parts))] for part in subject.parts]
        shuffled = [subject.of_others(model, few) for model in _cascade(subject.model, plan)]
        retrained = _retrained(task, plan)
    scores: dict[str, Any] = {}
    refused: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name, method in methods.items():
        torch.manual_seed(plan.seed)
        try:
            with models.fast_scan():
                start = time.process_time()
                own = subject.maps(method, lambda part: part.inputs)
                seconds[name] = (time.process_time() - start) / sum(map(len, subject.parts))
                found = _finding(subject, own) | _agreement(subject, own, known)
                found |= _paraphrase(subject, method, own) | _shuffled(shuffled, method, own)
                if retrained:
                    found |= _seeds(retrained, method)
        except Exception as error:  # any refusal of any entrant
            refused[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
            tell(f"{task.name}: {name} refused: {refused[name]}")
            continue
        scores[name] = {
            key: [round(float(x), 4) for x in values.tolist()] for key, values in found.items()
        }
        means = ", ".join(f"{k} {v.double().mean():.2f}" for k, v in found.items())
        tell(f"{task.name}: {name}: {means}; {seconds[name]:.3f} s")
    return {
        "name": task.name,
        "family": task.family,
        "about": task.about,
        **counts,
        "explained": sum(map(len, subject.parts)),
        "units": [int(task.units_of(part.inputs).max()) + 1 for part in subject.parts],
        "trainings": [s for s in task.seeds if s in retrained] or [0],
        "guesses right": _guesses(shuffled[-1]),
        "scores": scores,
        "refused": refused,
        "seconds": {name: round(s, 4) for name, s in seconds.items() if name in scores},
    }


def _cascade(model: nn.Module, plan: Plan) -> list[nn.Module]:
    found = list(models.randomized(model, plan.seed))
    chosen = torch.linspace(0, len(found) - 1, min(plan.stages, len(found)))
    return [found[k] for k in chosen.round().int().tolist()]


def _joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def _finding(subject: Subject, maps: list[Tensor]) -> dict[str, Tensor]:
    return _joined(
        [
            measures.finding(own, part.cause, subject.task.changed(part))
            for own, part in zip(maps, subject.parts, strict=True)
        ]
    )


def _agreement(
    subject: Subject, maps: list[Tensor], known: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    return _joined(
        [
            measures.agreement(own, effect, part.cause, subject.task.changed(part))
            for own, effect, part in zip(maps, known, subject.parts, strict=True)
        ]
    )


def _paraphrase(subject: Subject, method: Method, own: list[Tensor]) -> dict[str, Tensor]:
    again = subject.maps(method, lambda part: part.redrawn[0])
    return {"paraphrase": torch.cat([*map(measures.alike, own, again)])}


def _shuffled(shuffled: list[Subject], method: Method, own: list[Tensor]) -> dict[str, Tensor]:
    cascade = []
    for subject in shuffled:
        maps = subject.maps(method, lambda part: part.inputs)
        first = [whole[: len(part)] for whole, part in zip(own, subject.parts, strict=True)]
        cascade.append(torch.cat([*map(measures.unmoved, first, maps)]))
    return {
        "randomized": torch.stack(cascade).mean(0),
        "guessing": _finding(shuffled[-1], maps)["precision"],
    }


def _guesses(subject: Subject) -> float:
    # The share of answers that a model with all weights shuffled gives right.
    right = [
        subject.task.says(subject.model, part.inputs, part.target, part.answer)
        for part in subject.parts
    ]
    return round(float(torch.cat(right).double().mean()), 4)


def _retrained(task: Task, plan: Plan) -> dict[int, Subject]:
    """Each training's model, on the examples that all of them answer by their cause."""
    seeds = [s for s in task.seeds if s == 0 or models.is_trained(task.trained_as, s)]
    if len(seeds) < 2:
        return {}
    trained = {seed: task.model(seed) for seed in seeds}
    generator = torch.Generator().manual_seed(plan.seed)
    parts = task.draw(2 * plan.examples, generator)
    kept = []
    for part in parts:
        passes = torch.stack([task.is_proven(model, part) for model in trained.values()]).all(0)
        kept.append(part[passes][: -(-plan.examples // len(parts))])
    kept = [part for part in kept if len(part)]
    return {seed: Subject(task, model, kept) for seed, model in trained.items()} if kept else {}


def _seeds(retrained: dict[int, Subject], method: Method) -> dict[str, Tensor]:
    maps = [subject.maps(method, lambda part: part.inputs) for subject in retrained.values()]
    pairs = [torch.cat([*map(measures.alike, a, b)]) for a, b in combinations(maps, 2)]
    found = {"seeds": torch.stack(pairs).mean(0)}
    for (seed, subject), own in zip(retrained.items(), maps, strict=True):
        if seed:
            found[f"precision, training {seed}"] = _finding(subject, own)["precision"]
    return found
