"""The manifest of an explained data set: what was asked for, of which model and which data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.read import printable
from captum_ssm.utils.writing import replacing

FORMAT = "captum_ssm.dataset"
VERSION = 1
NAME = "manifest.json"
# What has to be the same for a run to go on, by what people call it.
FIXED = {
    "asked": "settings",
    "rows_per_shard": "settings",
    "device": "settings",
    "methods": "methods",
    "model": "model",
    "hashes": "model",
    "data": "data set",
    "columns": "data set",
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is not one, or of another version.
    """
    path, shown = folder / NAME, printable(str(folder))
    if not path.is_file():
        raise FileNotFoundError(
            f"{shown} holds no {NAME}; expected a folder that explain_dataset wrote."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{NAME} of {shown} is not JSON that can be read; expected the file that "
            "explain_dataset wrote."
        ) from error
    name = manifest.get("format") if isinstance(manifest, dict) else None
    if name != f"{FORMAT}/{VERSION}":
        raise ValueError(
            f"{NAME} of {shown} has the format {name!r}; expected {FORMAT}/{VERSION}. Open it with "
            "the version of captum_ssm that wrote it."
        )
    return dict(manifest)


def write_manifest(
    folder: Path, manifest: Mapping[str, Any], owner: int, is_first: bool = False
) -> None:
    """Write a manifest, as :func:`replacing` does; ``is_first`` where there is none yet."""
    held = {"format": f"{FORMAT}/{VERSION}"} | dict(manifest)
    text = json.dumps(held, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(folder / NAME, owner, is_first) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise where a run cannot go on in a folder."""
    now = json.loads(json.dumps(now))
    changed = [
        f"{what}: {path} was {_short(old)} and is {_short(new)}"
        for key, what in FIXED.items()
        for path, old, new in _differences(before.get(key), now.get(key), key)
    ]
    rows = before.get("rows"), now.get("rows")
    if None not in rows and rows[0] != rows[1]:
        changed.append(f"data set: it had {rows[0]} rows and has {rows[1]}")
    if changed:
        raise InputError(
            f"output is {str(folder)!r}, where another run was begun. Changed is the "
            f"{'; the '.join(changed)}. Nothing was written: name another folder, or start with "
            "what that run had to go on."
        )


def changed_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The packages that are of another version than when a folder was begun."""
    pairs = _differences(before.get("versions"), now.get("versions"), "")
    return [f"{path.lstrip('.')} {old} -> {new}" for path, old, new in pairs]


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{path}.{name}")
    elif old != new:
        yield path, old, new


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
