"""Streamed responses: chunks of one answer are joined to the response that they are parts of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]


def grouped(entries: Iterable[Any]) -> Iterator[list[Any]]:
    """Records, each in a list of its own, and chunks that follow each other and share an id.

    Args:
        entries (iterable): records and chunks, as they were logged.
    """
    group: list[Any] = []
    for entry in entries:
        if group and not _is_next(group[0], entry):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def whole(group: Sequence[Any]) -> Any:
    """One record, out of its chunks where it has some."""
    return joined(group) if is_chunk(group[0]) or group[1:] else group[0]


def is_chunk(entry: Any) -> bool:
    """Whether a response is a chunk of a streamed one."""
    if not isinstance(entry, Mapping):
        return False
    choices = entry.get("choices") or ()
    return str(entry.get("object", "")).endswith(".chunk") or any(
        "delta" in choice for choice in choices
    )


def joined(chunks: Sequence[Data]) -> dict[str, Any]:
    """One response out of its chunks."""
    response: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        fields = {k: v for k, v in chunk.items() if k != "choices" and v is not None}
        response = fields | response if response else fields
        response |= {k: v for k, v in fields.items() if k == "usage"}
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
    added = dict(choice)
    delta = added.pop("delta", None)
    if delta is not None:
        added["message"] = delta
    return _sum(before, added)


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
