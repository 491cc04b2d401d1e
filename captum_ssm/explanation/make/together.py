"""Examples of many inputs: their questions take each step that needs the model together.

A question is a generator of such steps. Questions about inputs of similar length go side by side:
what all of them need next is computed in batches, and each goes on with its own part. A batch that
fails is halved, so that an error is that of one input, and what does not fit the memory is tried
with less; batches after it are of no more than did fit. Batches before and after it are computed
once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from captum_ssm.explanation import Example
from captum_ssm.explanation.make.generate import Generation
from captum_ssm.explanation.make.questions.asked import Answerable
from captum_ssm.explanation.make.questions.base import Steps
from captum_ssm.explanation.make.relevance.batches import batch_limit, batches, current_limit
from captum_ssm.utils.memory import is_lack_of_memory
from captum_ssm.utils.progress import Bar

SIDE_BY_SIDE = 256  # questions, of which each keeps the scores that it is about

Outcome = Example | Exception


def answered(
    asked: Sequence[Answerable], writing: Generation | None
) -> Iterator[tuple[int, Outcome]]:
    """The example of each question by its index, or the error of its input; shorter inputs first.

    Args:
        asked (sequence): a question about each input.
        writing (Generation, optional): how the model writes the answers that are explained.
    """
    order = sorted(range(len(asked)), key=lambda k: asked[k].size)
    limit = current_limit()
    with Bar("examples", len(asked)) as bar:
        for start in range(0, len(order), SIDE_BY_SIDE):
            numbers = order[start : start + SIDE_BY_SIDE]
            steps = [_example(asked[k], writing) for k in numbers]
            with batch_limit(limit):
                outcomes = _side_by_side(steps)
            yield from zip(numbers, outcomes, strict=True)
            bar.advance(len(numbers))


def _example(question: Any, writing: Generation | None) -> Steps[Example]:
    asked = question if writing is None else writing.written(question)
    return (yield from asked.answer())


def _side_by_side(questions: Sequence[Steps[Example]]) -> list[Outcome]:
    ended: dict[int, Outcome] = {}
    needed: dict[int, Any] = {}  # by question: its next step

    def go_on(k: int, result: Any = None) -> None:
        # A generator is begun by sending nothing; an error is its own to raise.
        resume = questions[k].throw if isinstance(result, Exception) else questions[k].send
        try:
            needed[k] = resume(result)
        except StopIteration as end:
            ended[k] = end.value
        except Exception as error:
            ended[k] = error

    for k in range(len(questions)):
        go_on(k)
    while needed:
        kind = type(next(iter(needed.values())))
        steps = {k: step for k, step in needed.items() if type(step) is kind}
        for k in steps:
            del needed[k]
        for k, result in zip(steps, _each(list(steps.values())), strict=True):
            go_on(k, result)
    return [ended[k] for k in range(len(questions))]


def _each(steps: Sequence[Any]) -> list[Any]:
    # What each step of one kind needs, or its error.
    outcomes: dict[int, Any] = {}
    for numbers in batches(steps):
        outcomes |= zip(numbers, _batch([steps[k] for k in numbers]), strict=True)
    return [outcomes[k] for k in range(len(steps))]


def _batch(steps: Sequence[Any]) -> list[Any]:
    try:
        results: list[Any] = steps[0].together(steps)
        return results
    except Exception as error:
        if len(steps) == 1:
            return [error]
        lacked = is_lack_of_memory(error)
    if lacked:
        current_limit().was_exceeded(steps)
        gc.collect()  # circles of the error's frames hold what the batch has filled the memory with
    middle = len(steps) // 2
    return _batch(steps[:middle]) + _batch(steps[middle:])
