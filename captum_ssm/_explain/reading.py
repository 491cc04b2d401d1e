"""A text as the model reads it: ids, and the part of the text that each token stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from captum_ssm._errors import InputError
from captum_ssm.explanation import Token
from captum_ssm.visualization import readable_tokens


@dataclass(frozen=True)
class Reading:
    """A text and its tokens, which join to the text.

    Args:
        text (str): as typed.
        tokens (tuple of Token): L of them.
    """

    text: str
    tokens: tuple[Token, ...]

    @property
    def ids(self) -> list[int]:
        """What the model reads, ``(L,)``."""
        return [token.id for token in self.tokens]

    def followed_by(self, other: Reading, between: str = "") -> Reading:
        """Both texts, one after the other."""
        shift = len(self.text)
        first, *rest = other.tokens
        moved = [replace(first, text=between + first.text, start=first.start - len(between))]
        shift += len(between)
        moved = [
            replace(one, start=one.start + shift, end=one.end + shift) for one in (*moved, *rest)
        ]
        return Reading(self.text + between + other.text, self.tokens + tuple(moved))


def read(tokenizer: Any, text: str, name: str, special: bool = True) -> Reading:
    """A text as a tokenizer splits it.

    Args:
        tokenizer (TokenizerLike): a fast one tells which characters a token stands for; of
            another one it is found by decoding.
        text (str): what is read.
        name (str): of the text, for the message.
        special (bool, optional): with the special tokens that the model expects. Default: True

    Raises:
        InputError: for a text without a token.
    """
    offsets: list[tuple[int, int] | None] | None = None
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    else:
        ids = list(tokenizer.encode(text, add_special_tokens=special))
    if not ids:
        raise InputError(f"{name} is {text!r}, which holds no token; give at least one.")
    names = _names(tokenizer, ids)
    if offsets is None:
        offsets = _found(text, _pieces(tokenizer, ids), names)
    return _reading(text, ids, offsets, names)


def read_ids(tokenizer: Any, ids: Sequence[int], name: str) -> Reading:
    """Token ids as a text: what the tokenizer decodes, or without one the numbers themselves.

    Raises:
        InputError: where there is no id.
    """
    if not ids:
        raise InputError(f"{name} holds no token; give at least one.")
    if tokenizer is None:
        pieces = [f" {one}" if i else str(one) for i, one in enumerate(ids)]
    else:
        pieces = _pieces(tokenizer, ids)
    special = {*getattr(tokenizer, "all_special_ids", ())}
    tokens, at = [], 0
    for piece, one, called in zip(pieces, ids, _names(tokenizer, ids), strict=True):
        part = "" if one in special else piece
        tokens.append(Token(part or called, one, at, at + len(part)))
        at += len(part)
    return Reading("".join(one.text for one in tokens if one.end > one.start), tuple(tokens))


def between(tokenizer: Any, first: Reading, second: Reading) -> str:
    """What a tokenizer that drops white space needs between two texts: a space, or nothing."""
    if tokenizer is None:
        return " "
    for text in ("", " "):
        joined = first.text + text + second.text
        if list(tokenizer.encode(joined)) == first.ids + second.ids:
            return text
    return ""


def answer_text(tokenizer: Any) -> Callable[[int], str]:
    """The text of an answer, by its id."""
    if tokenizer is None:
        return str

    def text(one: int) -> str:
        found = tokenizer.decode([one])
        return _names(tokenizer, [one])[0] if not found or "\ufffd" in found else found

    return text


def _names(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    # What tokens that stand for no part of the text are called.
    if tokenizer is None:
        return [str(one) for one in ids]
    return readable_tokens(tokenizer.convert_ids_to_tokens(list(ids)))


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    # What each token adds to the decoded text; a character that several tokens make up is the
    # last one's.
    decoded = [tokenizer.decode(list(ids[: i + 1])).rstrip("\ufffd") for i in range(len(ids))]
    decoded[-1] = tokenizer.decode(list(ids))
    ends = [min(map(len, decoded[i:])) for i in range(len(ids))]
    starts = [0, *ends[:-1]]
    return [decoded[-1][start:end] for start, end in zip(starts, ends, strict=True)]


def _found(text: str, pieces: Sequence[str], names: Sequence[str]) -> list[tuple[int, int] | None]:
    # Where the decoded pieces lie in the text; None where they do not, as of unknown words.
    found: list[tuple[int, int] | None] = []
    at = 0
    for piece in pieces:
        wanted = piece.strip() or piece
        start = text.find(wanted, at) if wanted else -1
        # Far from here it is another one of the same kind.
        if start < 0 or text[at:start].strip():
            found.append(None)
            continue
        at = start + len(wanted)
        found.append((start, at))
    return found


def _reading(
    text: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int] | None],
    names: Sequence[str],
) -> Reading:
    # Every character belongs to one token: white space to the one after it, and what lies after
    # the last token to that.
    ends: list[int] = []
    at = 0
    for i, place in enumerate(offsets):
        if place is None:
            later = [one[0] for one in offsets[i + 1 :] if one is not None and one[0] > at]
            at = len(text[: min(later, default=len(text))].rstrip())
        elif place[1] > place[0]:
            at = max(at, place[1])
        ends.append(at)
    if at < len(text):
        last = max((i for i, end in enumerate(ends) if end > (ends[i - 1] if i else 0)), default=-1)
        ends[last:] = [len(text)] * len(ends[last:])
    tokens = []
    for one, start, end, called in zip(ids, [0, *ends[:-1]], ends, names, strict=True):
        tokens.append(Token(text[start:end] or called, one, start, end))
    return Reading(text, tuple(tokens))
