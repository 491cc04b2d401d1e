"""The difference of two explanations, example by example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from captum_ssm.explanation.parts import Example, Maps, Output
from captum_ssm.explanation.tables import rows_of


def difference(a: Example, b: Example) -> Example:
    """One example minus the same one of another explanation, row by row.

    Raises:
        ValueError: where they are not of the same input, or do not explain the same answers.
    """
    texts = [[token.text for token in example.tokens] for example in (a, b)]
    inputs = [
        [
            held if held is None else held.tobytes()
            for held in (example.image, example.series, *(each.image for each in example.pictures))
        ]
        for example in (a, b)
    ]
    if texts[0] != texts[1] or inputs[0] != inputs[1]:
        raise ValueError(
            f"the example {a.name!r} is not the same in both explanations; expected the same "
            "tokens, image or series. Explain both with the same target."
        )
    theirs = {_key(row): row.index for row in rows_of(b)}
    shared = [(row.index, theirs[_key(row)]) for row in rows_of(a) if _key(row) in theirs]
    new = {mine: i for i, (mine, _) in enumerate(shared)}
    for output in a.outputs:
        if output.answers[output.chosen].row not in new:
            raise ValueError(
                f"only one of the explanations explains {output.answers[output.chosen].text!r} at "
                f"token {output.position} of {a.name!r}; expected the same answers in both. "
                "Explain both with the same target."
            )
    mine, other = [i for i, _ in shared], [j for _, j in shared]
    return replace(
        a,
        outputs=tuple(_renumbered(output, new) for output in a.outputs),
        relevance={
            name: a.relevance[name][mine] - b.relevance[name][other] for name in a.relevance
        },
        deltas={
            name: a.deltas[name][mine] - b.deltas[name][other]
            for name in a.deltas
            if name in b.deltas
        },
        maps=_maps(a.maps, b.maps),
        validation=None,
    )


def _key(row: Any) -> tuple[Any, ...]:
    against = None if row.against is None else row.against.id
    return row.output.position, row.output.part, row.answer.id, against, row.hop


def _renumbered(output: Output, new: dict[int, int]) -> Output:
    return replace(
        output,
        answers=tuple(
            replace(answer, row=None if answer.row is None else new.get(answer.row))
            for answer in output.answers
        ),
        contrasts=tuple(
            replace(contrast, row=new[contrast.row])
            for contrast in output.contrasts
            if contrast.row in new
        ),
        hops=tuple(new[row] for row in output.hops if row in new),
    )


def _maps(first: Sequence[Maps], second: Sequence[Maps]) -> tuple[Maps, ...]:
    # Only layers that both have can be subtracted.
    theirs = {maps.name: maps.layers for maps in second}
    differences = []
    for maps in first:
        other = theirs.get(maps.name, {})
        layers = {name: a - other[name] for name, a in maps.layers.items() if name in other}
        if layers:
            differences.append(replace(maps, layers=layers))
    return tuple(differences)
