"""Whether a tokenizer knows all of a text."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from captum_ssm.errors import TargetError

MOST_NAMED = 10  # words, in a warning
# By the characters in which byte-level vocabularies write them: some bytes print as themselves, and
# the others are shifted up.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + k): byte for k, byte in enumerate(b for b in range(256) if b not in _PRINTED)
}


def unknown_token(tokenizer: Any) -> int | None:
    """The token that a tokenizer puts in the place of what it does not know, if it has one."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Byte-level tokenizers know every text; their unknown token begins or ends one.
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")]
    return None if unknown in others else unknown


def unknown_parts(tokenizer: Any, ids: Sequence[int]) -> str:
    """The tokens of ``ids`` in one line, if the unknown token is among them; else ``""``."""
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return ""
    return " ".join(tokenizer.convert_ids_to_tokens(list(ids)))


def require_known(tokenizer: Any, text: str, ids: Sequence[int], name: str, instead: str) -> None:
    """Raise where a tokenizer put its unknown token for a part of ``text``.

    The error names tokens that are in the vocabulary, those near the text first, and ``instead``,
    what takes token ids.
    """
    read = unknown_parts(tokenizer, ids)
    if not read or tokenizer.unk_token in text:
        return
    known = sorted(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
    near = get_close_matches(text.strip(), known, n=5)
    shown = [*near, *(token for token in known if token not in near)][:20]
    raise TargetError(
        f"{name} is {text!r}, which the tokenizer reads as {read}: a part of it is not in the "
        f"vocabulary. Among its {len(known)} tokens are {', '.join(shown)}; {instead}"
    )


def unknown_in_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a warning where a prompt holds the unknown token; else ``""``."""
    read = unknown_parts(tokenizer, ids)
    if not read:
        return ""
    return (
        f"the tokenizer reads the prompt as {read}: a part of it is not in the vocabulary, and the "
        "model reads the unknown token in its place. Use other words there."
    )


def unknown_words(words: Sequence[str], read_as: str) -> str:
    """The text of a warning of words that a tokenizer does not know.

    ``read_as`` is what the model reads in the place of each.
    """
    shown = ", ".join(map(repr, words[:MOST_NAMED]))
    more = len(words) - MOST_NAMED
    return (
        f"the tokenizer does not know {shown}{f' and {more} more' if more > 0 else ''}: the model "
        f"reads {read_as} in the place of each. Use other words there."
    )
