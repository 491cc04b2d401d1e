"""Explanations as tables, pandas' and Captum's, and what their rows and columns tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from captum_ssm.explanation.parts import Answer, Example, Method, Output
from captum_ssm.explanation.units import bounds_of, spans_of, summed, texts_of

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Row:
    """A row of relevance with what it explains."""

    output: Output
    answer: Answer
    against: Answer | None
    index: int
    hop: int = 0


def rows_of(example: Example) -> Iterator[Row]:
    """All rows of an example, by output: answers, then contrasts, then hops."""
    for output in example.outputs:
        for answer in output.answers:
            if answer.row is not None:
                yield Row(output, answer, None, answer.row)
        for contrast in output.contrasts:
            yield Row(
                output,
                output.answers[contrast.answer],
                output.answers[contrast.against],
                contrast.row,
            )
        for k, index in enumerate(output.hops):
            yield Row(output, output.answers[output.chosen], None, index, hop=k + 1)


class ToldAnswer(NamedTuple):
    """The answers of several outputs, joined.

    Args:
        target (str): what is explained first at each.
        prediction (str): the likeliest one at each.
        probability (float or None): of all that is explained; None where one has none.
    """

    target: str
    prediction: str
    probability: float | None


def told_answer(outputs: Sequence[Output], between: str = "") -> ToldAnswer:
    """What outputs answer, with what stands between two answers."""
    chosen = [output.answers[output.chosen] for output in outputs]
    likely = [min(output.answers, key=lambda answer: answer.rank) for output in outputs]
    known = [answer.probability for answer in chosen if answer.probability is not None]
    return ToldAnswer(
        between.join(answer.text for answer in chosen),
        between.join(answer.text for answer in likely),
        math.prod(known) if len(known) == len(chosen) else None,
    )


def require_texts(examples: Iterable[Example], what: str) -> None:
    """Raise where an example is not a text."""
    for example in examples:
        if not example.tokens:
            kind = "an image" if example.image is not None else "a series"
            shape = next(iter(example.relevance.values())).shape[1:]
            raise ValueError(
                f"{what} is of texts, and the example {example.name!r} is {kind}; its relevance is "
                f"returned by explanation.relevance(), {shape}."
            )


def shares(values: np.ndarray) -> np.ndarray:
    """Each number's part of the total magnitude."""
    total = np.abs(values).sum()
    return np.abs(values) / total if total else np.zeros_like(values)


def to_pandas(
    methods: Sequence[Method], examples: Sequence[Example], units: str
) -> pandas.DataFrame:
    """The table of :meth:`Explanation.to_pandas`."""
    import pandas

    require_texts(examples, "the table")
    lines: list[tuple[Any, ...]] = []
    for example in examples:
        spans, texts = spans_of(example, units), texts_of(example, units)
        bounds = bounds_of(example, units)
        for method in methods:
            for row in rows_of(example):
                values = summed(example.relevance[method.name][row.index], spans)
                against = "" if row.against is None else row.against.text
                about = (example.name, method.name, row.output.position, row.answer.text, against)
                for unit, (value, share) in enumerate(zip(values, shares(values), strict=True)):
                    about_unit = (unit, bounds[unit][0], texts[unit])
                    lines.append((*about, *about_unit, float(value), float(share), row.hop))
    return pandas.DataFrame(lines, columns=_COLUMNS)


_COLUMNS = (
    *("example", "method", "output", "answer", "against"),
    *("unit", "position", "text", "value", "share", "hop"),
)


def _target(row: Row) -> str:
    if row.hop:
        return f"{row.answer.text}, hop {row.hop}"
    return row.answer.text + (f", not {row.against.text}" if row.against else "")


def to_captum(methods: Sequence[Method], examples: Sequence[Example]) -> list[Any]:
    """The records of :meth:`Explanation.to_captum`."""
    require_texts(examples, "Captum's table")
    import torch

    from captum_ssm.visualization import text_record

    def record(example: Example, method: Method, row: Row) -> Any:
        likely, delta = row.output.answers[0], example.deltas.get(method.name)
        return text_record(
            torch.from_numpy(example.relevance[method.name][row.index]),
            [token.text for token in example.tokens],
            predicted=likely.text,
            probability=math.nan if likely.probability is None else likely.probability,
            target=_target(row),
            true=method.title,
            delta=math.nan if delta is None else float(delta[row.index]),
        )

    return [
        record(example, method, row)
        for example in examples
        for method in methods
        for row in rows_of(example)
    ]
