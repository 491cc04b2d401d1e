"""Submitted functions: their rows are of the file as it is now, and a run ends with their ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .summary import TRACKS, standings


def forget_edited(record: dict[str, Any], track: str, places: list[str]) -> None:
    """Drop the scores and refusals of functions whose file was edited since.

    Only that file is compared, not what it imports.

    Args:
        record (dict): of a run; it also keeps a digest of each file.
        track (str): one of :data:`TRACKS`.
        places (list of str): ``path/to/file.py:function``.
    """
    known = record["submitted"].setdefault(track, {})
    for place in places:
        path, _, name = place.rpartition(":")
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if known.get(name) != digest:
            known[name] = digest
            for row in record[track]:
                for part in ("scores", "refused", "seconds"):
                    row[part].pop(name, None)


def report(record: dict[str, Any], track: str, name: str) -> str:
    """A method's scores and ranks over the tasks that it was asked about, one measure per line."""
    rows = [row for row in record[track] if name in row["scores"] or name in row["refused"]]
    if not rows:
        return ""
    lines = [f"{name}, over {len(rows)} tasks:"]
    for measure in TRACKS[track][1]:
        found = standings({track: rows}, measure, track)
        if name in found:
            one = found[name]
            lines.append(
                f"  {measure:<12}{one.value:6.2f} [{one.low:.2f}, {one.high:.2f}], "
                f"rank {one.rank} ({one.first} to {one.last}) of {len(found)}"
            )
    for row in rows:
        if name in row["refused"]:
            lines.append(f"  {row['name']}: the random map's scores, for {row['refused'][name]}")
    return "\n".join(lines) + "\n"
