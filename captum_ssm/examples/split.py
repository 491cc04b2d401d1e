"""The split of the tasks in words: what is held out is told by the words, and not by a seed."""

from __future__ import annotations

import zlib

HELD_OUT_ONE_IN = 8


def is_reserved(text: str) -> bool:
    """Whether a text, by a hash of it, is reserved for evaluation: one in eight is."""
    return zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0
