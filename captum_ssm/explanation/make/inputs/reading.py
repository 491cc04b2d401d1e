"""A text as the model reads it: ids, and the part of the text that each token stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation import Token
from captum_ssm.explanation.make.inputs.media import Media
from captum_ssm.explanation.units import Turns
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.vocabulary import unknown_token
from captum_ssm.visualization import readable_tokens

CONTEXT = 8  # tokens: of a character outside ASCII there are four at most


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, which join to the text.

    Args:
        text (str): as typed.
        tokens (tuple of Token): L of them.
        parts (tuple, optional): of two texts, 0 or 1 for the tokens of each, None for those between
            them. Default: ``()``
        types (tuple of int, optional): the tokens' ``token_type_ids``, of tokenizers that tell two
            texts apart. Default: ``()``
        turns (Turns, optional): who says what, in a conversation. Default: None
        media (Media, optional): images and sound among the tokens. Default: None
    """

    text: str
    tokens: tuple[Token, ...]
    parts: tuple[int | None, ...] = ()
    types: tuple[int, ...] = ()
    turns: Turns | None = None
    media: Media | None = None

    @property
    def ids(self) -> list[int]:
        """What the model reads, ``(L,)``."""
        return [token.id for token in self.tokens]

    def part(self, first: int, end: int) -> str:
        """What tokens ``first .. end - 1`` say, without white space around it."""
        return "".join(token.text for token in self.tokens[first:end]).strip()

    def followed_by(self, other: TokenizedText, between: str = "") -> TokenizedText:
        """Both texts, one after the other."""
        shift = len(self.text)
        first, *rest = other.tokens
        moved = [replace(first, text=between + first.text, start=first.start - len(between))]
        shift += len(between)
        moved = [
            replace(token, start=token.start + shift, end=token.end + shift)
            for token in (*moved, *rest)
        ]
        text, tokens = self.text + between + other.text, self.tokens + tuple(moved)
        return TokenizedText(text, tokens, turns=self.turns, media=self.media)


def read(tokenizer: Any, text: str, name: str, special: bool = True) -> TokenizedText:
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
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    else:
        ids = list(tokenizer.encode(text, add_special_tokens=special))
        offsets = _found(text, _pieces(tokenizer, ids)) if ids else []
    if not ids:
        raise InputError(f"{name} is {brief(text)}, which holds no token; give at least one.")
    return _reading(tokenizer, text, ids, offsets)


def read_pair(tokenizer: Any, first: str, second: str) -> TokenizedText:
    """Two texts as a tokenizer joins them: one text, the second in a line of its own.

    A fast tokenizer tells which characters a token stands for; with another one they are searched
    for by decoding.

    Raises:
        InputError: where one of them is empty.
    """
    for text in (first, second):
        if not text.strip():
            raise InputError(f"one of two texts is {brief(text)}; expected two, each with a token.")
    joined, shift = f"{first}\n{second}", len(first) + 1
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(first, second, return_offsets_mapping=True)
        ids, parts = list(encoded["input_ids"]), encoded.sequence_ids()
        offsets = [
            (a + shift, b + shift) if part == 1 else (a, b)
            for part, (a, b) in zip(parts, encoded["offset_mapping"], strict=True)
        ]
    else:
        encoded = tokenizer(first, second)
        ids = list(encoded["input_ids"])
        offsets = _found(joined, _pieces(tokenizer, ids))
        special = {*getattr(tokenizer, "all_special_ids", ())}
        parts = [
            None if token_id in special else int(a >= shift)
            for token_id, (a, _) in zip(ids, offsets, strict=True)
        ]
    # The first text's last token ends its line. What stands for no character, such as a separator,
    # lies where the text before it ends.
    last = max((k for k, (a, b) in enumerate(offsets) if a < b < shift), default=0)
    offsets[last] = offsets[last][0], shift
    at = 0
    for k, (a, b) in enumerate(offsets):
        at = b if b > a else at
        offsets[k] = (a, b) if b > a else (at, at)
    read = _reading(tokenizer, joined, ids, offsets)
    return replace(read, parts=tuple(parts), types=tuple(encoded.get("token_type_ids", ())))


def read_ids(
    tokenizer: Any, ids: Sequence[int], name: str, placeholders: Collection[int] = ()
) -> TokenizedText:
    """Token ids as a text: what the tokenizer decodes, or without one the numbers themselves.

    Placeholders stand for no part of the text, as special tokens.

    Raises:
        InputError: where there is no id.
    """
    if not ids:
        raise InputError(f"{name} holds no token; give at least one.")
    if tokenizer is None:
        pieces = [f" {token_id}" if i else str(token_id) for i, token_id in enumerate(ids)]
    else:
        pieces = _pieces(tokenizer, ids)
    special = {*getattr(tokenizer, "all_special_ids", ()), *placeholders}
    tokens, at = [], 0
    for piece, token_id, called in zip(pieces, ids, _names(tokenizer, ids), strict=True):
        part = "" if token_id in special else piece
        tokens.append(Token(part or called, token_id, at, at + len(part)))
        at += len(part)
    return TokenizedText(
        "".join(token.text for token in tokens if token.end > token.start), tuple(tokens)
    )


def between(tokenizer: Any, first: TokenizedText, second: TokenizedText) -> str:
    """What stands between two texts where the tokenizer drops white space: a space, or nothing."""
    joint = read_ids(tokenizer, [first.ids[-1], second.ids[0]], "the text").tokens[1]
    spaced = first.text[-1:].isspace() or second.text[:1].isspace()
    return " " if joint.text[:1] == " " and not spaced else ""


def answer_text(tokenizer: Any) -> Callable[[int], str]:
    """The text of an answer, by its id."""
    if tokenizer is None:
        return str

    def text(token_id: int) -> str:
        decoded = tokenizer.decode([token_id])
        return _names(tokenizer, [token_id])[0] if not decoded or "\ufffd" in decoded else decoded

    return text


def is_all(position: Any) -> bool:
    """Whether all tokens of the text are asked about."""
    return isinstance(position, str) and position == "all"


def positions_in(position: Any, P: int) -> list[int] | None:
    """The tokens that are asked about, of P; None where no single ones are.

    Raises:
        TypeError: for what is not a position.
        InputError: for one outside the text.
    """
    if position is None or is_all(position):
        return None
    is_one = as_index(position) is not None or not isinstance(position, Iterable)
    several = [position] if is_one else position
    indices = [] if isinstance(several, str) else [as_index(item) for item in several]
    positions = [index for index in indices if index is not None]
    if not positions or len(positions) < len(indices):
        raise TypeError(
            f"position is {brief(position)}; expected an int, several ints, 'all' or None."
        )
    if any(not -P <= index < P for index in positions):
        raise InputError(
            f"position is {brief(position)}; the text has {P} tokens: expected 0 .. {P - 1} (or "
            f"-{P} .. -1 from the end)."
        )
    return sorted({index % P for index in positions})


def _names(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    # What tokens that stand for no part of the text are called.
    if tokenizer is None:
        return [str(token_id) for token_id in ids]
    return readable_tokens(tokenizer.convert_ids_to_tokens(list(ids)))


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    # What each token adds to the decoded text; a character that several tokens make up is the
    # last one's. A few tokens before it tell how it is spaced.
    pieces = []
    for i in range(len(ids)):
        start = max(0, i - CONTEXT)
        before, after = (
            tokenizer.decode(list(ids[start:end])).rstrip("\ufffd") if end > start else ""
            for end in (i, i + 1)
        )
        pieces.append(after[len(before) :])
    return pieces


def _found(text: str, pieces: Sequence[str]) -> list[tuple[int, int]]:
    # Where the decoded pieces lie in the text. What is not there, as of unknown words, shares what
    # lies between its neighbors.
    offsets: list[tuple[int, int]] = []
    lost: list[int] = []
    at = 0
    for i, piece in enumerate([*pieces, ""]):
        wanted = piece.strip() or piece
        start = text.find(wanted, at) if i < len(pieces) else len(text)
        if start < 0 or (text[at:start].strip() and not lost and i < len(pieces)):
            lost.append(i)
            offsets.append((at, at))
            continue
        for k, part in zip(lost, _shared(text, at, start, len(lost)), strict=True):
            offsets[k] = part
        lost = []
        at = start + len(wanted)
        offsets.append((start, at))
    return offsets[:-1]


def _shared(text: str, start: int, end: int, count: int) -> list[tuple[int, int]]:
    # A part of the text for several tokens: a word each, or else as many characters each.
    words = [match.span() for match in re.finditer(r"\S+", text[start:end])]
    if len(words) == count:
        return [(start + a, start + b) for a, b in words]
    bounds = [start + (end - start) * k // max(1, count) for k in range(count + 1)]
    return list(pairwise(bounds))


def _reading(
    tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> TokenizedText:
    # Every character belongs to one token: of several that share it to the last one, white space
    # to the one after it, and what lies after the last token to that.
    ends: list[int] = []
    at = 0
    for (start, end), (after, until) in zip(offsets, [*offsets[1:], (0, 0)], strict=True):
        if end > start:
            at = max(at, min(end, after) if until > after else end)
        ends.append(at)
    if at < len(text):
        last = max((i for i, end in enumerate(ends) if end > (ends[i - 1] if i else 0)), default=-1)
        ends[last:] = [len(text)] * len(ends[last:])
    unknown, names = unknown_token(tokenizer), _names(tokenizer, ids)
    tokens = []
    for token_id, start, end, called in zip(ids, [0, *ends[:-1]], ends, names, strict=True):
        typed = text[start:end]
        is_unknown = token_id == unknown and typed.strip() not in ("", called)
        tokens.append(Token(typed or called, token_id, start, end, called if is_unknown else None))
    return TokenizedText(text, tuple(tokens))
