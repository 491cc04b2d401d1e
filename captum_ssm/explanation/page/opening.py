"""Where the page of an answer of several tokens opens."""

from __future__ import annotations

import numpy as np

from captum_ssm.explanation.parts import Example, Output
from captum_ssm.explanation.units import TEMPLATE

NEAR = 3  # tokens before the one that an answer is read from, which most answers read


def opening_of(example: Example, method: str) -> int | None:
    """The output of an answer that rests most on one token of the prompt; None for no choice.

    The first token of an answer is often a word such as "The", and many others follow from the few
    tokens before them. What answers the prompt is a word that reads something in it from afar: the
    one for which a single token of the prompt, not one of those right before it, has the largest
    share of the relevance. Signs are passed over, and of a conversation the template's tokens.

    Args:
        example (Example): a text with an answer after its prompt.
        method (str): whose relevance is compared.
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
