"""Streamed responses: chunks of one answer are joined to the response that they are parts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]


def merged(entries: Sequence[Any]) -> list[Any]:
    """Records, in which chunks that follow each other and share an id have become one.

    Args:
        entries (sequence): records and chunks, as they were logged.
    """
    found: list[list[Any]] = []
    for entry in entries:
        follows = bool(found) and _is_next(found[-1][0], entry)
        if follows:
            found[-1].append(entry)
        else:
            found.append([entry])
    return [joined(group) if is_chunk(group[0]) or group[1:] else group[0] for group in found]


def is_chunk(entry: Any) -> bool:
    """Whether a response is a chunk of a streamed one."""
    if not isinstance(entry, Mapping):
        return False
    choices = entry.get("choices") or ()
    return str(entry.get("object", "")).endswith(".chunk") or any("delta" in one for one in choices)


def joined(chunks: Sequence[Data]) -> dict[str, Any]:
    """One response out of its chunks."""
    response: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        named = {k: v for k, v in chunk.items() if k != "choices" and v is not None}
        response = named | response if response else named
        response |= {k: v for k, v in named.items() if k == "usage"}
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            choices[index] = _extended(choices.get(index, {}), choice)
    return {**response, "choices": [choices[index] for index in sorted(choices)]}


def _is_next(first: Any, entry: Any) -> bool:
    if not (isinstance(first, Mapping) and isinstance(entry, Mapping)):
        return False
    same = first.get("id") is not None and first.get("id") == entry.get("id")
    return same and "choices" in first and "choices" in entry


def _extended(before: dict[str, Any], choice: Data) -> dict[str, Any]:
    given = dict(choice)
    delta = given.pop("delta", None)
    if delta is not None:
        given["message"] = delta
    return _sum(before, given)


def _sum(before: Any, after: Any) -> Any:
    # Texts and lists grow, and of single values the last one counts.
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return {k: _sum(before.get(k), after.get(k)) for k in (*before, *after)} | {
            k: after[k] for k in ("role", "index") if after.get(k) is not None
        }
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    is_text = isinstance(before, str) and isinstance(after, str)
    return before + after if is_text else after
