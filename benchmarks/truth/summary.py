"""Intervals and ranks from the scores per example, which a record keeps.

A score over all tasks is the mean over the tasks of a family, then over families. Its interval and
the interval of its rank are the middle 95% over bootstrap samples: the examples of each task are
drawn anew, the same for all methods, and all methods are ranked anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

TRACKS = {
    "tasks": (
        "random",
        {
            "hit": True,
            "precision": True,
            "share": True,
            "removal": True,
            "interchange": True,
            "paraphrase": True,
            "seeds": True,
            "randomized": False,
            "guessing": False,
        },
    ),
    "circuits": ("random edges", {"faithful": True, "complete": True, "gap": False}),
}
"""Each track's entrant of chance, and its measures with whether more is better."""


@dataclass(frozen=True)
class Standing:
    """A method's score by one measure, and its rank among all methods, with 95% intervals."""

    value: float
    low: float
    high: float
    rank: int
    first: int
    last: int


def entrants(record: dict[str, Any], track: str = "tasks") -> list[str]:
    """The methods of a record, in the order of its first task."""
    rows = record[track]
    return list(dict.fromkeys(n for row in rows for n in (*row["scores"], *row["refused"])))


def scores_of(row: dict[str, Any], method: str, measure: str, chance: str) -> np.ndarray | None:
    """A method's scores on a task; where it refuses, those of chance. None without the measure."""
    own = row["scores"].get(method, row["scores"].get(chance, {}))
    return np.asarray(own[measure]) if measure in own else None


def standings(
    record: dict[str, Any], measure: str, track: str = "tasks", resamples: int = 1000, seed: int = 0
) -> dict[str, Standing]:
    """Each method's score over all tasks by one measure, and its rank.

    Args:
        record (dict): what a run wrote.
        measure (str): one of the track's in :data:`TRACKS`.
        track (str, optional): Default: ``"tasks"``
        resamples, seed (int, optional): of the bootstrap.

    Returns:
        dict: by method; it lacks a method for which a task has neither a refusal nor scores by this
        measure on as many examples as the random map's.
    """
    chance, measures = TRACKS[track]
    rows = [row for row in record[track] if measure in row["scores"].get(chance, {})]
    methods = [
        name
        for name in entrants(record, track)
        if all(
            name in row["refused"]
            or len(row["scores"].get(name, {}).get(measure, ()))
            == len(row["scores"][chance][measure])
            for row in rows
        )
    ]
    if not rows:
        return {}
    rng = np.random.default_rng(seed)
    families: dict[str, list[np.ndarray]] = {}
    for row in rows:
        found = [scores_of(row, name, measure, chance) for name in methods]
        each = np.stack([x for x in found if x is not None])  # (methods, examples)
        drawn = rng.integers(each.shape[1], size=(resamples, each.shape[1]))
        samples = np.concatenate([each.mean(1)[:, None], each[:, drawn].mean(2)], 1)
        families.setdefault(row["family"], []).append(samples)  # (methods, 1 + resamples)
    total = np.mean([np.mean(samples, 0) for samples in families.values()], 0)
    better = total if measures[measure] else -total
    ranks = 1 + (better[None] > better[:, None] + 1e-12).sum(1)  # (methods, 1 + resamples)
    low, high = np.percentile(total[:, 1:], [2.5, 97.5], 1)
    first, last = np.percentile(ranks[:, 1:], [2.5, 97.5], 1, method="nearest")
    return {
        name: Standing(
            float(total[k, 0]), float(low[k]), float(high[k]), int(ranks[k, 0]),
            int(first[k]), int(last[k]),
        )
        for k, name in enumerate(methods)
    }  # fmt: skip


def by_task(
    record: dict[str, Any], measure: str, track: str = "tasks"
) -> dict[str, dict[str, Any]]:
    """The mean of a measure by method and task, None where the method refuses or was not run."""
    return {
        name: {
            row["name"]: float(np.mean(row["scores"][name][measure]))
            if measure in row["scores"].get(name, {})
            else None
            for row in record[track]
        }
        for name in entrants(record, track)
    }


def difference(
    record: dict[str, Any],
    first: str,
    second: str,
    measure: str,
    tasks: list[str] | None = None,
    track: str = "tasks",
    resamples: int = 1000,
) -> tuple[float, float, float]:
    """How much more one method has than another one on the same examples, with a 95% interval."""
    chance, _ = TRACKS[track]
    rng, parts = np.random.default_rng(0), {}
    for row in record[track]:
        if tasks is None or row["name"] in tasks:
            pair = [scores_of(row, name, measure, chance) for name in (first, second)]
            if pair[0] is None or pair[1] is None:
                continue
            each = pair[0] - pair[1]
            drawn = rng.integers(len(each), size=(resamples, len(each)))
            samples = np.concatenate([[each.mean()], each[drawn].mean(1)])
            parts.setdefault(row["family"], []).append(samples)
    total = np.mean([np.mean(samples, 0) for samples in parts.values()], 0)
    low, high = np.percentile(total[1:], [2.5, 97.5])
    return float(total[0]), float(low), float(high)
