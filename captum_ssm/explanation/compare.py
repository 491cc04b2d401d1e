"""Two explanations: joined, or one minus the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from captum_ssm.explanation.parts import Example, Maps, Output
from captum_ssm.explanation.tables import rows_of

if TYPE_CHECKING:
    from captum_ssm.explanation.explanation import Explanation


def joined(first: Explanation, second: Explanation) -> Explanation:
    """The examples of both.

    Raises:
        ValueError: where they were explained by different methods or options.
    """
    mine, theirs = (
        [(m.name, dict(m.options)) for m in explanation.methods] for explanation in (first, second)
    )
    if mine != theirs:
        raise ValueError(
            f"the explanations were made by {_told(mine)} and by {_told(theirs)}; expected the "
            "same methods with the same options, in the same order."
        )
    model = first.model if first.model == second.model else f"{first.model}, {second.model}"
    return _of_both(first, second, model=model, examples=first.examples + second.examples)


def difference(first: Explanation, second: Explanation) -> Explanation:
    """One explanation minus another one, row by row.

    Raises:
        ValueError: where they are not of the same examples by the same methods, or do not explain
            the same answers.
    """
    names = [[method.name for method in explanation.methods] for explanation in (first, second)]
    if names[0] != names[1]:
        raise ValueError(
            f"the explanations were made by {', '.join(names[0])} and by {', '.join(names[1])}; "
            "expected the same methods in the same order."
        )
    if len(first.examples) != len(second.examples):
        raise ValueError(
            f"the explanations are of {len(first.examples)} and {len(second.examples)} examples; "
            "expected the same examples. explanation[i] is one of them."
        )
    pairs = zip(first.examples, second.examples, strict=True)
    title = first.title if first.title == second.title else f"{first.title} minus {second.title}"
    model = first.model if first.model == second.model else f"{first.model} minus {second.model}"
    examples = tuple(_example(a, b) for a, b in pairs)
    return _of_both(first, second, title=title, model=model, examples=examples)


def _told(methods: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return ", ".join(name + (f" {options}" if options else "") for name, options in methods)


def _of_both(first: Explanation, second: Explanation, **changes: Any) -> Explanation:
    # Settings and versions stay where both have them.
    for name in ("settings", "versions"):
        theirs = getattr(second, name)
        shared = {k: v for k, v in getattr(first, name).items() if theirs.get(k) == v}
        changes[name] = shared
    return replace(first, **changes)


def _example(a: Example, b: Example) -> Example:
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
    kept = [(row.index, theirs[_key(row)]) for row in rows_of(a) if _key(row) in theirs]
    new = {mine: i for i, (mine, _) in enumerate(kept)}
    for output in a.outputs:
        if output.answers[output.chosen].row not in new:
            raise ValueError(
                f"only one of the explanations explains {output.answers[output.chosen].text!r} at "
                f"token {output.position} of {a.name!r}; expected the same answers in both. "
                "Explain both with the same target."
            )
    mine, other = [i for i, _ in kept], [j for _, j in kept]
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
