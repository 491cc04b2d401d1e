"""Units of a text: neighboring tokens whose relevance is summed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from captum_ssm.errors import brief
from captum_ssm.explanation.parts import LABEL, Example, Output, Span, Token
from captum_ssm.explanation.pictures import TEXT, Picture, owners, picture_names

# Words, and each punctuation mark by itself; what ends in a full stop, a question or exclamation
# mark, or a line break; lines, such as those of code, each with the empty ones after it.
PATTERNS = {
    "word": re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]"),
    "sentence": re.compile(r"\S.*?(?:[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s|$)|$|\n)", re.DOTALL),
    "line": re.compile(r"[^\n]*\S[^\n]*(?:\n|$)"),
}

TEMPLATE = "template"  # the turn of what no message says


@dataclass(frozen=True)
class Turn:
    """What one message says: a part of the text by its characters, such as ``"user 1"``."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Turns:
    """Who says what in a conversation.

    Args:
        before (tuple of Turn): of the text before the answer.
        answer (str): the name of the turn that is the answer.
    """

    before: tuple[Turn, ...]
    answer: str

    def spans(self, tokens: Sequence[Token], prompt: int) -> tuple[Span, ...]:
        """Turns, and what the template puts between them; the answer begins at ``prompt``."""
        of_turns = (
            (turn.name for turn in self.before if belongs(token, turn.start, turn.end))
            for token in tokens[:prompt]
        )
        names = [next(turns, TEMPLATE) for turns in of_turns]
        return _runs([*names, *[self.answer] * (len(tokens) - prompt)])

    def title(self, text: str) -> str:
        """What was said last before the answer."""
        last = max(self.before, key=lambda turn: turn.start, default=None)
        return text if last is None else text[last.start : last.end]


def belongs(token: Token, start: int, end: int) -> bool:
    """Whether a token has something to see, or else white space, in ``start .. end - 1``.

    A token of no width is the first part of a character that several tokens make up.
    """
    if token.start == token.end:
        return start <= token.start < end
    begin = _begin(token) if token.text.strip() else token.start
    return begin < end and start < token.end


def says_nothing(token: Token) -> bool:
    """Whether a token is special, or has neither a letter nor a digit, such as a full stop."""
    return token.start == token.end or not any(sign.isalnum() for sign in token.text)


def read_apart(example: Example, output: Output) -> int | None:
    """The token at which an answer is read, which is told apart from those that it rests on.

    A token's own label, and a word from which a classifier reads a whole text, are told with them.
    """
    at = output.reading_token
    is_word = output.position is None and at is not None and not says_nothing(example.tokens[at])
    return None if output.role == LABEL or is_word else at


def matched(tokens: Sequence[Token], unit: str) -> tuple[Span, ...]:
    """The words, sentences or lines of a text, ``"word"``, ``"sentence"`` or ``"line"``.

    A token belongs to the one that its first visible character lies in.
    """
    text = "".join(token.text for token in tokens if token.start < token.end)
    matches = [match.span() for match in PATTERNS[unit].finditer(text)]
    keys: list[object] = []
    k = 0
    for i, token in enumerate(tokens):
        if token.start == token.end:  # a special token
            keys.append(("special", i))
            continue
        while k + 1 < len(matches) and matches[k + 1][0] <= _begin(token):
            k += 1
        keys.append(k)
    return _runs(keys)


def named(tokens: Sequence[Token], spans: Mapping[str, tuple[int, int]]) -> tuple[Span, ...]:
    """Parts given by a name and their characters; every other token is a unit by itself.

    Raises:
        ValueError: for a part outside the text, without a token, or that shares one with another.
    """
    length = max((token.end for token in tokens), default=0)
    owners: dict[int, str] = {}
    for name, (start, end) in spans.items():
        if not 0 <= start < end <= length:
            raise ValueError(
                f"units[{name!r}] is {(start, end)}; expected characters (start, end) of the text, "
                f"0 <= start < end <= {length}."
            )
        for i, token in enumerate(tokens):
            if _begin(token) < end and start < token.end and token.start < token.end:
                if i in owners:
                    raise ValueError(
                        f"units[{name!r}] and units[{owners[i]!r}] share the token "
                        f"{token.text!r}; let one end before it."
                    )
                owners[i] = name
        if name not in owners.values():
            raise ValueError(f"units[{name!r}] is {(start, end)}, which holds no token; widen it.")
    return _runs([owners.get(i, i) for i in range(len(tokens))])


def within(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """Spans that are divided where others begin."""
    firsts = {other.first for other in others}
    pieces = []
    for name, first, end in ((span.name, span.first, span.end) for span in spans):
        bounds = [first, *(i for i in range(first + 1, end) if i in firsts), end]
        pieces += [Span(name, a, b) for a, b in pairwise(bounds)]
    return tuple(pieces)


def with_pictures(
    units: Mapping[str, tuple[Span, ...]], pictures: Sequence[Picture], L: int
) -> dict[str, tuple[Span, ...]]:
    """Units that end where images do, and ``"modality"``: what is text, and what each image.

    The tokens of an image are one unit, except among words, where each stays by itself.
    """
    parts = _runs([TEXT if k is None else pictures[k].name for k in owners(pictures, L)])
    of_pictures = [part for part in parts if part.name != TEXT]
    covered = {k for part in of_pictures for k in range(part.first, part.end)}
    by_unit = {}
    for unit, spans in units.items():
        divided = within(spans, parts)
        if unit != "word":
            divided = (*(span for span in divided if span.first not in covered), *of_pictures)
        by_unit[unit] = tuple(sorted(divided, key=lambda span: span.first))
    return {**by_unit, "modality": parts}


def spans_of(example: Example, units: str) -> tuple[Span, ...] | None:
    """The spans of an example's units, or a ValueError where it has none; None for its tokens."""
    if units == "token":
        return None
    if units not in example.units:
        raise ValueError(
            f"units is {brief(units)}; expected "
            f"{' or '.join(map(repr, ('token', *example.units)))}."
        )
    return example.units[units]


def bounds_of(example: Example, units: str) -> list[tuple[int, int]]:
    """The first token of each unit, and the one after its last."""
    spans = spans_of(example, units)
    if spans is None:
        return [(i, i + 1) for i in range(len(example.tokens))]
    return [(span.first, span.end) for span in spans]


def texts_of(example: Example, units: str) -> list[str]:
    """The text of each unit; of an image its name, and of one of its tokens the place."""
    pictures = example.pictures
    owner = owners(pictures, len(example.tokens))
    texts = picture_names(pictures, [token.text for token in example.tokens])
    return [
        "".join(texts[a:b]) if (k := owner[a]) is None or b - a == 1 else pictures[k].name
        for a, b in bounds_of(example, units)
    ]


def summed(relevance: np.ndarray, spans: Sequence[Span] | None) -> np.ndarray:
    """Relevance ``(..., L)`` summed over units, ``(..., units)``."""
    if spans is None:
        return relevance
    return np.add.reduceat(relevance, [span.first for span in spans], axis=-1)


def _begin(token: Token) -> int:
    return token.start + len(token.text) - len(token.text.lstrip())


def _runs(keys: Iterable[object]) -> tuple[Span, ...]:
    spans: list[Span] = []
    first = 0
    for key, run in groupby(keys):
        end = first + len(list(run))
        spans.append(Span(key if isinstance(key, str) else "", first, end))
        first = end
    return tuple(spans)
