"""Whole answers made by hand, for tests of the page and the page's benchmark: no model runs."""

from dataclasses import replace

import numpy as np
import pages

from captum_ssm.explanation import Answer, Example, Explanation, Output, Token
from captum_ssm.explanation.units import matched

PROMPT = (
    "Anna has 3 apples. Tom has 9 pears and a dog. Lena gives Anna 2 more apples. It rains in the "
    "garden. How many apples does Anna have now?"
)
REASONING = " Anna starts with 3 apples. Then Lena adds 2 of them. So 3 + 2 = 5."
ANSWER = " Anna has 5 apples now. Tom still has his dog."
CODE = "def double(x):\n    return 2 * x\n\nprint(double(4))"
WRITTEN = "\n# prints\n8\n# and ends\n"
OWN = 0.3  # of the token that is read


def _place(texts: list[str], text: str, number: int) -> int:
    return [k for k, one in enumerate(texts) if one.strip() == text][number]


def rows_of(pieces: tuple[Token, ...], prompt: int, links: dict) -> np.ndarray:
    """One row for each token of the continuation: a little of all, most of what is linked."""
    rng = np.random.default_rng(3)
    texts, L = [piece.text for piece in pieces], len(pieces)
    rows = np.zeros((L - prompt, L))
    for row, token in zip(rows, range(prompt, L), strict=True):
        row[:token] = rng.normal(0, 0.02, token)
        row[token - 1] = OWN
    for (text, number), sources in links.items():
        at = _place(texts, text, number)
        for source, which, value in sources:
            rows[at - prompt, _place(texts, source, which)] += value
    return rows.astype(np.float32)


# What a word was written from: a word and which of several, and how much of it.
LINKS = {
    ("3", 1): [("3", 0, 3.0), ("How", 0, 0.8)],
    ("adds", 0): [("gives", 0, 1.2), ("Lena", 1, 0.6)],
    ("2", 1): [("2", 0, 2.6), ("gives", 0, 0.7), ("9", 0, -0.6)],
    ("3", 2): [("3", 1, 2.4), ("3", 0, 0.5)],
    ("2", 2): [("2", 1, 2.2), ("2", 0, 0.4)],
    ("5", 0): [("3", 2, 1.6), ("2", 2, 1.6), ("+", 0, 0.8)],
    ("Anna", 4): [("Anna", 2, 1.0), ("How", 0, 0.7)],
    ("has", 2): [("Anna", 2, 0.8)],
    ("5", 1): [("5", 0, 4.0), ("many", 0, 0.8), ("9", 0, -0.7)],
    ("apples", 4): [("apples", 2, 1.5)],
    ("now", 1): [("now", 0, 1.0)],
    ("Tom", 1): [("Tom", 0, 1.6)],
    ("still", 0): [("has", 1, 0.9)],
    ("dog", 1): [("dog", 0, 2.8)],
}


def _outputs(pieces: tuple[Token, ...], prompt: int) -> tuple[Output, ...]:
    def answer(k: int) -> tuple[Answer, ...]:
        other = Answer(" six", 6, 0.02, 3.0, 2, None)
        return (Answer(pieces[k].text, k, 0.9 + 0.001 * (k % 90), 12.0, 1, k - prompt), other)

    return tuple(Output(k - 1, answer(k), 0) for k in range(prompt, len(pieces)))


def thoughts(name: str = "How many apples?") -> Example:
    """A question, three sentences of reasoning, and an answer of two, each token explained."""
    pieces = pages.tokens(PROMPT + REASONING + ANSWER)
    prompt, middle = (len(pages.tokens(text)) for text in (PROMPT, PROMPT + REASONING))
    relevance = rows_of(pieces, prompt, LINKS)
    return Example(
        name=name,
        outputs=_outputs(pieces, prompt),
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance) * 1e-3},
        deltas={"mamba-lrp": np.full(len(relevance), 0.25, np.float32)},
        tokens=pieces,
        prompt=prompt,
        units={"word": matched(pieces, "word"), "sentence": matched(pieces, "sentence")},
        reasoning=(prompt, middle),
    )


def without_reasoning() -> Example:
    """The tokens of a thought, of which none is reasoning."""
    return replace(thoughts("No reasoning"), reasoning=None)


def code() -> Example:
    """Lines of code, without a full stop."""
    pieces = pages.tokens(CODE + WRITTEN)
    prompt = len(pages.tokens(CODE))
    relevance = rows_of(pieces, prompt, {("8", 0): [("4", 0, 2.0), ("2", 0, 1.0)]})
    return replace(
        thoughts("Code"),
        tokens=pieces,
        prompt=prompt,
        outputs=_outputs(pieces, prompt),
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance)},
        deltas={},
        units={"word": matched(pieces, "word"), "line": matched(pieces, "line")},
        reasoning=None,
    )


def with_hops(example: Example, part: tuple[int, int], hops: np.ndarray) -> Example:
    """A part explained by a row and by rows of its hops, in addition to its single tokens."""
    (output,), R = in_one_row(example, part, hops).outputs, len(hops)
    singles = []
    for one in example.outputs:
        rows = [None if answer.row is None else answer.row + R for answer in one.answers]
        pairs = zip(one.answers, rows, strict=True)
        singles.append(replace(one, answers=tuple(replace(a, row=row) for a, row in pairs)))
    both = {name: np.concatenate([hops, own]) for name, own in example.relevance.items()}
    return replace(
        example,
        outputs=(output, *singles),
        relevance={name: values.astype(np.float32) for name, values in both.items()},
        deltas={},
    )


def in_one_row(example: Example, part: tuple[int, int], hops: np.ndarray) -> Example:
    """A part of the answer explained by one row, and by rows of its hops, ``(K + 1, L)``."""
    L = len(example.tokens)
    text = "".join(token.text for token in example.tokens[part[0] : part[1]])
    whole = Answer(text, part[0] * L + part[1] - 1, None, 12.0, 1, 0)
    output = Output(None, (whole,), 0, role="part", part=part, hops=tuple(range(1, len(hops))))
    return replace(
        example,
        outputs=(output,),
        relevance={name: hops.astype(np.float32) for name in example.relevance},
        deltas={},
    )


def followed(rows: np.ndarray, prompt: int, span: tuple[int, int], count: int = 8) -> np.ndarray:
    """Hops of a span by the definition: positive rows, divided by their sums."""
    positive = np.maximum(rows.astype(float), 0)
    shares = positive / positive.sum(1, keepdims=True)
    hops = [rows[span[0] - prompt : span[1] - prompt].astype(float).sum(0)]
    least = 0.02 * abs(hops[0]).sum()
    while len(hops) <= count:
        weights = np.maximum(hops[-1][prompt:], 0)
        if weights.sum() < least:
            break
        hops.append(weights @ shares)
    return np.stack(hops)


def long(prompt: int = 4000, answer: int = 1000) -> Example:
    """A long answer of which only a span and its hops were explained."""
    rng = np.random.default_rng(0)
    sentence = "Anna has 3 apples and the garden of Tom is wet."
    text = " ".join([sentence] * (-(-(prompt + answer) // len(pages.tokens(sentence)))))
    pieces = pages.tokens(text)[: prompt + answer]
    hops = rng.normal(0, 0.1, (4, len(pieces))) ** 3
    for k, row in enumerate(hops):
        ends = (prompt, prompt + answer * 4 // 5)
        row[rng.integers(0, ends[0], 5)] += 3.0 / 2**k
        row[rng.integers(*ends, 3)] += 2.0 / 2**k
    hops[:, -1] = 0
    held = replace(
        thoughts("Long"),
        tokens=pieces,
        prompt=prompt,
        units={"word": matched(pieces, "word"), "sentence": matched(pieces, "sentence")},
        reasoning=(prompt, prompt + answer * 4 // 5),
    )
    return in_one_row(held, (prompt + answer * 4 // 5, prompt + answer), hops)


def long_rows(prompt: int = 4000, answer: int = 1000) -> Example:
    """The example, with a row for each token of the answer."""
    one = long(prompt, answer)
    rng = np.random.default_rng(0)
    rows = np.tril(rng.normal(0, 0.1, (answer, prompt + answer)) ** 3, prompt - 1)
    for row, token in zip(rows, range(prompt, prompt + answer), strict=True):
        row[rng.integers(0, token, 6)] += 2.0
    return replace(
        one,
        outputs=_outputs(one.tokens, prompt),
        relevance={"mamba-lrp": rows.astype(np.float32)},
    )


def explained(*examples: Example) -> Explanation:
    """An explanation of what a model wrote."""
    return replace(pages.explanation(*examples), settings={"max_new_tokens": 40})
