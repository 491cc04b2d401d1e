"""How many rows of a data set are explained together: as many as fit a budget of memory.

What a row takes is measured once, before the first shard, and kept in the manifest: so batches, and
with them the last bits of what is written, are the same for every process and after each new start.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.dataset.rows import RowReader
from captum_ssm.explanation.make.dataset.sources import attempt
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.relevance.batches import BatchLimit, Room, batch_limit
from captum_ssm.explanation.make.relevance.run import OneInput
from captum_ssm.metrics.evaluation import seeded
from captum_ssm.utils.peak import PeakMemory

LOOKED_AT = 32  # of the first rows: their shortest and their longest are measured
TRIED = 4  # rows that may fail before one is measured
UNKNOWN = 8 << 30  # bytes that a device is taken to have
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class RowCost:
    """What one row takes by its size, from what was measured of a small one and a large one.

    Between the two it grows evenly, and above them with the square of the size, as maps do.

    Args:
        measured (sequence): ``(size, bytes)`` of both, or of one if all are of a size.
    """

    measured: Sequence[tuple[int, int]]

    def __call__(self, size: int) -> float:
        (small, least), (large, most) = self.measured[0], self.measured[-1]
        if size <= small:
            return least
        if size >= large:
            return most * (size / large) ** 2
        return least + (most - least) * (size - small) / (large - small)


def limit_of(told: Mapping[str, Any] | None) -> BatchLimit:
    """The limit of batches, from what a manifest tells of them."""
    if not told or not told["measured"]:
        return BatchLimit()
    return BatchLimit(Room(told["memory"], RowCost(told["measured"])))


def checked(memory: Any) -> int | None:
    """A budget of bytes, as it is given.

    Raises:
        InputError: for what is neither a positive integer nor None.
    """
    if memory is not None and (type(memory) is not int or memory < 1):
        raise InputError(
            f"batch_memory is {brief(memory)}; expected a positive number of bytes, or None."
        )
    return memory


def measured(
    make: Callable[[], Explainer],
    columns: RowReader,
    memory: int | None,
    seed: int,
    rows: Sequence[Any],
) -> dict[str, Any]:
    """What a manifest tells of batches: the budget, and what rows were measured to take.

    Args:
        make (Callable): an explainer.
        columns (RowReader): what the model reads.
        memory (int, optional): bytes for all rows of a batch; None for a quarter of what the
            model's device has.
        seed (int): of random numbers.
        rows (sequence): the first ones of the data set.

    Returns:
        dict: ``memory`` in bytes, and ``measured``, ``(size, bytes)`` of a small and a large row
        that can be explained: one pair where they have the same size, none where all fail.
    """
    explainer = make()
    model = explainer.setup.model
    read = (attempt(columns.row, row) for row in rows[:LOOKED_AT])
    asked = [input_row for input_row in read if isinstance(input_row, InputRow)]
    sizes = [attempt(explainer.size, input_row) for input_row in asked]
    order = sorted((k for k in range(len(asked)) if type(sizes[k]) is int), key=lambda k: sizes[k])
    with warnings.catch_warnings(), seeded(seed):
        warnings.simplefilter("ignore")  # rows warn again when they are explained
        for _ in range(2):  # first runs also make what is kept for others, and do not count
            ends = [
                _taken(explainer, [asked[k] for k in some[:TRIED]]) for some in (order, order[::-1])
            ]
    device = next((tensor.device for tensor in _tensors(model)), torch.device("cpu"))
    memory = memory or capacity_of(device) // 4
    return {"memory": memory, "measured": sorted(dict(filter(None, ends)).items())}


def _taken(explainer: Explainer, rows: Sequence[InputRow]) -> tuple[int, int] | None:
    # The size and the bytes of the first row that can be explained.
    for row in rows:
        limit = _Single()
        with batch_limit(limit), PeakMemory(_tensors(explainer.setup.model)) as memory:
            (outcome,) = explainer([row])
        if not isinstance(outcome, Exception):
            return limit.largest, memory.peak
    return None


class _Single(BatchLimit):
    # One input at a time, of which the largest is kept.
    largest = 0

    def most(self, example: OneInput, size: int) -> int:
        self.largest = max(self.largest, size)
        return 1


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def capacity_of(device: torch.device) -> int:
    """The bytes that a device has, or that this process may use of them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        here = UNKNOWN
    return int(min(here, *map(_limit_in, CGROUPS)))


def _limit_in(path: str) -> float:
    # What a container may use, where the file of its control group says so.
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return float("inf")
