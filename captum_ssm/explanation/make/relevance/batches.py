"""Which inputs are computed together: as many as there is memory for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from captum_ssm.explanation.make.relevance.run import OneInput
from captum_ssm.utils.blocks import bound, contextmanager

# What is computed at a time: more would need more memory, and gain little.
TOKENS = 4096
ARRAYS = 8


@dataclass
class Room:
    """What inputs that are computed together may take, and what one of them takes.

    Args:
        total (float): for all of them.
        cost (Callable): of one input, by its size.
    """

    total: float
    cost: Callable[[int], float]

    def holds(self, size: int) -> float:
        """How many inputs of a size there is room for."""
        return self.total / self.cost(size)

    def was_exceeded(self, count: int, size: int) -> None:
        """Keep to half of what so many inputs of a size take."""
        self.total = min(self.total, count * self.cost(size) / 2)


class BatchLimit:
    """How many inputs are computed together: fewer once there was no memory for so many.

    Args:
        memory (Room, optional): in bytes, in addition to :data:`TOKENS` of texts, which are padded
            to the longest, or :data:`ARRAYS` other inputs. Default: None
    """

    def __init__(self, memory: Room | None = None) -> None:
        self._texts = [Room(TOKENS, float), *([] if memory is None else [memory])]
        self._arrays = [Room(ARRAYS, lambda size: 1.0), *self._texts[1:]]

    def most(self, example: OneInput, size: int) -> int:
        """How many inputs like an example are computed together; ``size`` is the largest one's."""
        rooms = self._texts if example.is_text else self._arrays
        return example.run.most(max(1, int(min(room.holds(size) for room in rooms))))

    def was_exceeded(self, several: Sequence[OneInput]) -> None:
        """What was computed together took more memory than there is: keep to half of it."""
        size = max(example.size for example in several)
        for room in self._texts if several[0].is_text else self._arrays:
            room.was_exceeded(len(several), size)


_LIMIT: ContextVar[BatchLimit | None] = ContextVar("captum_ssm_batch_limit", default=None)


@contextmanager
def batch_limit(limit: BatchLimit) -> Iterator[None]:
    """Keep the batches that are made inside to a limit."""
    with bound(_LIMIT, limit):
        yield


def current_limit() -> BatchLimit:
    """The limit that holds for batches: a new one, where none was set."""
    return _LIMIT.get() or BatchLimit()


def batches(items: Sequence[OneInput], most: int | None = None) -> Iterator[list[int]]:
    """The indices of items that are computed together: those of one group.

    Args:
        items (sequence): in an order in which inputs of similar length are neighbors.
        most (int, optional): how many items a batch may have; None for as many as
            :func:`batch_limit` allows when the batch is asked for. Default: None
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for k, item in enumerate(items):
        groups.setdefault(item.group, []).append(k)
    limit = current_limit()
    for numbers in groups.values():
        batch: list[int] = []
        longest = 0
        for k in numbers:
            example = items[k]
            longest = max(longest, example.size)
            allowed = limit.most(example, longest) if most is None else example.run.most(most)
            if batch and len(batch) >= allowed:
                yield batch
                batch, longest = [], example.size
            batch.append(k)
        yield batch
