"""The log of a server as it lies on the disk: its records one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from captum_ssm.errors import InputError

STREAM, DONE = "data:", "[DONE]"
INSPECT = {"eval", "plan"}  # what a log of Inspect has


def log_entries(path: Path) -> Iterator[Any]:
    """The records of a ``.json`` file, or of one with a record per line, also as streams are sent.

    A line that is not JSON is its error, with the line's number. Logs of Inspect (``.eval``, and
    ``.json`` of its format) are read by the package ``inspect_ai``.

    Raises:
        ImportError: for a log of Inspect, without the package.
    """
    return READERS.get(path.suffix, _lines)(path)


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8").removeprefix(STREAM).strip()
                entries = _listed(json.loads(text)) if text not in ("", DONE) else []
            except (ValueError, RecursionError) as error:
                entries = [ValueError(f"{path}, line {number} is not JSON: {error}")]
            yield from entries


def _json(path: Path) -> Iterator[Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Expected the log of a server.") from error
    if isinstance(record, Mapping) and record.keys() >= INSPECT:
        yield from _samples(path)
    else:
        yield from _listed(record)


def _samples(path: Path) -> Iterator[Any]:
    try:
        from inspect_ai.log import read_eval_log_samples
    except ImportError as error:
        raise ImportError(
            f"{path} is a log of Inspect; expected pip install captum-ssm[logs]."
        ) from error
    yield from read_eval_log_samples(path, all_samples_required=False, resolve_attachments=True)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {".json": _json, ".eval": _samples}


def with_requests(records: Iterable[Any], requests: Iterable[Any]) -> Iterator[Any]:
    """Records of a batch with the requests that they answer, which have the same ``custom_id``.

    A record without a request is an error.
    """
    asked = {
        request.get("custom_id"): request for request in requests if isinstance(request, Mapping)
    }
    for record in records:
        name = record.get("custom_id") if isinstance(record, Mapping) else None
        if isinstance(record, Exception):
            yield record
        elif name in asked:
            yield {**record, "request": asked[name]}
        else:
            yield InputError(f"no request has the custom_id {name!r} of this record.")


def _listed(record: Any) -> list[Any]:
    return record if isinstance(record, list) else [record]
