"""The parts of a whole answer: prompt, reasoning, answer proper; and where its page opens."""

from __future__ import annotations

from typing import Any

import numpy as np

from captum_ssm.explanation.parts import Example, Output, Span
from captum_ssm.explanation.units import TEMPLATE, within

NEAR = 3  # tokens before the one that an answer is read from, which most answers read


def whole_of(example: Example, is_written: bool) -> dict[str, Any] | None:
    """What the page needs to know of an answer of several tokens; None where there is none.

    Args:
        example (Example): a text with an answer after its prompt.
        is_written (bool): whether the model wrote it, or it is one of a conversation.

    Returns:
        dict: ``"regions"``, the three parts as ``[name, first, end]``, without empty ones,
        ``"spans"``, what the model says in the last two, and ``"opening"``, the tokens
        ``[first, end]`` that the page explains where it opens, or None for a single token.
    """
    parts = [output.part for output in example.outputs if output.part is not None]
    is_long = is_written and sum(_writes(output, example) for output in example.outputs) > 1
    if not example.tokens or not (parts or is_long):
        return None
    regions = _regions(example)
    # A circuit is of one token, and who asked for it wants to see it.
    spans = [_said(example, *region) for region in regions if region[0] != "prompt"]
    first = parts[0] if parts else None if example.circuits else spans[-1][1:]
    return {
        "regions": [list(region) for region in regions],
        "spans": [list(span) for span in spans],
        "opening": first and list(first),
    }


def divided(spans: tuple[Span, ...], whole: dict[str, Any] | None) -> tuple[Span, ...]:
    """Units that end where the prompt, the reasoning and the answer do."""
    if whole is None:
        return spans
    return within(spans, [Span(name, first, end) for name, first, end in whole["regions"]])


def _regions(example: Example) -> list[tuple[str, int, int]]:
    # A mark that ends the reasoning, such as </think>, is said neither here nor there: it is put
    # to what it ends.
    L, P = len(example.tokens), example.prompt
    middle = P if example.reasoning is None else example.reasoning[1]
    regions = [("prompt", 0, P), ("reasoning", P, middle), ("answer", middle, L)]
    return [(name, first, end) for name, first, end in regions if first < end]


def _said(example: Example, name: str, first: int, end: int) -> tuple[str, int, int]:
    # Without marks around the reasoning, and what ends the answer, such as <|im_end|>.
    if name == "reasoning" and example.reasoning is not None:
        return (name, *example.reasoning)
    is_said = [token.start < token.end for token in example.tokens]
    last = max((k for k in range(first, end) if is_said[k]), default=end - 1)
    return name, first, last + 1


def _writes(output: Output, example: Example) -> bool:
    # Whether an output explains a token of the continuation.
    at, row = output.position, output.answers[output.chosen].row
    return at is not None and at >= example.prompt - 1 and row is not None


def opening_of(example: Example, method: str) -> int | None:
    """The output of an answer that rests most on one token of the prompt; None for no choice.

    The first token of an answer is often a word such as "The", and many others follow from the few
    tokens before them. What answers the prompt is a word that reads something in it from afar: the
    one for which a single token of the prompt, not one of those right before it, has the largest
    share of the relevance. Signs are passed over, and of a conversation the template's tokens.
    """
    said = np.ones(example.prompt, dtype=bool)
    for span in example.units.get("turn", ()):
        if span.name == TEMPLATE:
            said[span.first : span.end] = False
    shares = {}
    for k, output in enumerate(example.outputs):
        row, at = _row(output), output.position
        if row is not None and at is not None and at >= example.prompt - 1:
            sizes = np.abs(example.relevance[method][row])
            far = (sizes[: example.prompt] * said)[: max(0, at - NEAR)]
            shares[k] = float(far.max(initial=0) / (sizes.sum() or 1))
    return max(shares, key=lambda k: shares[k]) if len(shares) > 1 else None


def _row(output: Output) -> int | None:
    # The row of an answer; a sign that says nothing has none.
    answer = output.answers[output.chosen]
    return answer.row if any(sign.isalnum() for sign in answer.text) else None
