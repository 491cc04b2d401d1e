"""How explanations of small models are read off, scored and written, for the scripts that do so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from captum_ssm import LaTIM
from captum_ssm.metrics import bootstrap

Rows = Callable[[Any], Tensor]
"""Takes a batch to the relevance of its source for each prediction, ``(examples, R, source)``."""


@dataclass(frozen=True)
class Readings:
    """How methods are read at the predictions of batches.

    Args:
        where (Callable): takes a batch to the positions that predict, ``(R,)``, and the number of
            source tokens at its beginning. Batches have ``tokens``, ``inputs`` and ``targets``.
    """

    where: Callable[[Any], tuple[Tensor, int]]

    def by_position(self, method: Any, **options: Any) -> Rows:
        """A method that explains one prediction of each example at a time."""

        def rows(batch: Any) -> Tensor:
            (positions, source), count = self.where(batch), len(batch.tokens)
            found = method.attribute(
                batch.inputs.repeat_interleave(len(positions), 0),
                target=batch.targets.reshape(-1),
                position=positions.repeat(count),
                **options,
            )
            return found.reshape(count, len(positions), -1)[..., :source]

        return rows

    def by_map(self, latim: LaTIM, layer: int | None, aggregation: str, activation: str) -> Rows:
        """LaTIM's map, cut to predictions and source tokens."""

        def rows(batch: Any) -> Tensor:
            positions, source = self.where(batch)
            target = batch.tokens[:, 1:] if aggregation == "alti_logit" else None
            found = latim.interactions(
                batch.inputs, layer, aggregation, target=target, activation=activation
            )
            return found[:, positions, :source]

        return rows


def best_layer(readings: Sequence[Rows], quality: Callable[[Rows], Any]) -> int | None:
    """The layer at which a method is read best; None of one that is read once for all layers."""
    if len(readings) == 1:
        return None
    qualities = [quality(rows) for rows in readings]
    return max(range(len(readings)), key=lambda k: qualities[k])


def interval(values: Iterable[Any]) -> list[float]:
    """Mean and the ends of its bootstrap interval."""
    if not torch.is_tensor(values):
        values = torch.stack([torch.as_tensor(value) for value in values])
    found = bootstrap(values)
    return [round(x, 4) for x in (found.value, found.low, found.high)]


def versions(*packages: Any) -> dict[str, str]:
    """The versions of packages, by name."""
    return {package.__name__: package.__version__ for package in packages}


def write(folder: Path, name: str, record: dict[str, Any], text: str) -> None:
    """Write a record as JSON, and what it says as Markdown next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)
