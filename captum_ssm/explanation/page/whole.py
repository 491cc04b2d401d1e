"""The parts of a whole answer: the prompt, the reasoning and the answer proper."""

from __future__ import annotations

from typing import Any

from captum_ssm.explanation.parts import Example, Output, Span
from captum_ssm.explanation.units import within


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
        "regions": [list(one) for one in regions],
        "spans": [list(one) for one in spans],
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
