"""The token ids of an answer that was recorded by the texts or the bytes of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.inputs.reading import CONTEXT
from captum_ssm.explanation.make.served.records import ServedToken
from captum_ssm.utils.vocabulary import BYTES

LOST = "\ufffd"  # what tokenizers decode a part of a character to
MOST = 1000  # tokens that are tried for one text
OTHER = "so this is the tokenizer of another model"


class Vocabulary:
    """A tokenizer's tokens by their texts and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = {*getattr(tokenizer, "all_special_ids", ())}

    def ids_of(self, tokens: Sequence[ServedToken], text: str | None) -> list[int]:
        """The ids of an answer's tokens.

        A text may be that of several tokens, such as a word with and without a space before it:
        the one counts that continues the answer's text, and of several that do the tokenizer's
        own.

        Raises:
            InputError: for a token that the tokenizer does not have, or that may be several, and
                for tokens that spell another text.
        """
        if all(token.id is not None for token in tokens):
            return [self._checked(token, k) for k, token in enumerate(tokens)]
        text = text or ""
        encoded = list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        ids: list[int] = []
        at = 0
        for k, token in enumerate(tokens):
            known = self._candidates(token, k)
            pieces = {token_id: self._piece(ids, token_id) for token_id in known[:MOST]}
            ends = {token_id: _end(text, at, piece) for token_id, piece in pieces.items()}
            if encoded[:k] == ids and encoded[k : k + 1] and encoded[k] in known:
                token_id = encoded[k]
            else:
                token_id = _only(known, encoded, ends, token, k)
            ids.append(token_id)
            at = ends.get(token_id) or at
        self._check_spelled(ids, text)
        return ids

    def _check_spelled(self, ids: Sequence[int], text: str) -> None:
        # Texts may be cut where they stop. Some logs have the likeliest tokens, and not the drawn.
        spelled = str(self.tokenizer.decode(ids, skip_special_tokens=True)).rstrip(LOST)
        ours, theirs = ("".join(spelling.split()) for spelling in (spelled, text))
        if not (ours.startswith(theirs) or theirs.startswith(ours)):
            raise InputError(
                f"the recorded tokens spell {spelled!r}, and the answer is {brief(text)}; expected "
                "the tokens that were drawn. Inspect's hf provider records the likeliest ones, "
                "which are those with do_sample=False."
            )

    def _candidates(self, token: ServedToken, k: int) -> list[int]:
        text = str(token.text)
        keys = zip(self._tables, (token.data, text, text), strict=True)
        known = next((table[key] for table, key in keys if key in table), None)
        if not known:
            raise InputError(
                f"token {k} of the answer is {told(token)}, which the tokenizer does not have, "
                f"{OTHER}; pass the served model's own, or record ids (vLLM's return_token_ids)."
            )
        return known

    def _piece(self, before: Sequence[int], token_id: int) -> str:
        # What a token adds to the text of those before it.
        if token_id in self.special:
            return ""
        context = list(before[-CONTEXT:])
        start = self.tokenizer.decode(context).rstrip(LOST) if context else ""
        return str(self.tokenizer.decode([*context, token_id])).rstrip(LOST)[len(start) :]

    def _checked(self, token: ServedToken, k: int) -> int:
        # An id whose text was recorded as well has to be that of the tokenizer.
        assert token.id is not None
        if token.text is None:
            return token.id
        decoded = str(self.tokenizer.decode([token.id]))
        name = str(self.tokenizer.convert_ids_to_tokens(token.id))
        recorded = token.text.strip()
        if LOST not in decoded + recorded and recorded not in (decoded.strip(), name.strip(), ""):
            raise InputError(
                f"token {k} of the answer is {told(token)}, and the tokenizer's id {token.id} is "
                f"{decoded!r}, {OTHER}; pass the served model's own."
            )
        return token.id

    @cached_property
    def _tables(self) -> list[dict[Any, list[int]]]:
        # The ids of tokens by their bytes, their texts and their names.
        ids = list(range(len(self.tokenizer)))
        texts = [
            str(text) for text in self.tokenizer.batch_decode([[token_id] for token_id in ids])
        ]
        names = self.tokenizer.convert_ids_to_tokens(ids)
        tables: list[dict[Any, list[int]]] = []
        for keys in (map(_bytes, texts, names), texts, names):
            tables.append({})
            for token_id, key in enumerate(keys):
                tables[-1].setdefault(key, []).append(token_id)
        return tables


def told(token: ServedToken) -> str:
    """A recorded token in words."""
    parts = [] if token.text is None else [repr(token.text)]
    parts += [] if token.id is None else [f"id {token.id}"]
    parts += [] if token.data is None else [f"bytes {token.data.hex(' ')}"]
    first, *rest = parts or ["unknown"]
    return f"{first} ({', '.join(rest)})" if rest else first


def _end(text: str, at: int, piece: str) -> int | None:
    # Where a piece ends that continues a text, also after white space; None if it does not.
    if text.startswith(piece, at):
        return at + len(piece)
    start = len(text) - len(text[at:].lstrip())
    piece = piece.strip()
    return start + len(piece) if text.startswith(piece, start) else None


def _only(
    known: Sequence[int],
    encoded: Sequence[int],
    ends: Mapping[int, int | None],
    token: ServedToken,
    k: int,
) -> int:
    # The one of several tokens that continues the text.
    fits = list(known)
    for candidates in (
        [token_id for token_id in known if ends.get(token_id) is not None],
        [*encoded],
    ):
        fits = [token_id for token_id in fits if token_id in candidates] or fits
    if len(fits) > 1:
        raise InputError(
            f"token {k} of the answer is {told(token)}, which may be any of the ids "
            f"{', '.join(map(str, fits[:8]))}; record ids (vLLM's return_token_ids)."
        )
    return fits[0]


def _bytes(text: str, name: str) -> bytes:
    # A part of a character has no text: its bytes are in its name, <0xE2> where a vocabulary falls
    # back to bytes, else one character per byte, as byte-level vocabularies write them.
    if LOST not in text:
        return text.encode()
    if name.startswith("<0x") and len(name) == 6:
        return bytes([int(name[3:5], 16)])
    if all(character in BYTES for character in name):
        return bytes(BYTES[character] for character in name)
    return text.encode()
