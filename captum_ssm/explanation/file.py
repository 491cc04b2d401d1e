"""Explanations as files: JSON, and maps in safetensors' format next to it.

The JSON object holds the explanation's fields by name, as the dataclasses have them. Arrays are
nested lists of numbers; an image is its shape and its bytes, compressed by zlib, in base64; maps
are their names, and the arrays are in the other file by ``example/maps/layer``.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from errno import EIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from captum_ssm.explanation.circuits import check_circuits
from captum_ssm.explanation.parts import Maps, Method
from captum_ssm.explanation.read import Damaged, example, printable, read
from captum_ssm.utils.writing import replacing

FORMAT = "captum_ssm.explanation"
VERSION = 1


def save(fields: Mapping[str, Any], path: str | Path) -> None:
    """Write the fields of an explanation, as :meth:`Explanation.save` says."""
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"path is {str(path)!r}; expected a name that ends in .json.")
    check_writable(path)
    tensors = map_tensors({e: explained.maps for e, explained in enumerate(fields["examples"])})
    text = encoded({"format": f"{FORMAT}/{VERSION}", **fields})
    # Both or none: an earlier explanation of that name is not left with maps of this one.
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")
        write_maps(path.with_suffix(".safetensors"), tensors)


def write_maps(path: Path, tensors: Mapping[str, np.ndarray], owner: int = 0) -> None:
    """Write the arrays of :func:`map_tensors`, as :func:`replacing` does; nothing where none are.

    Raises:
        OSError: where they cannot be written, such as on a full disk.
    """
    if not tensors:
        return
    with replacing(path, owner) as temporary:
        try:
            save_file(dict(tensors), temporary)
        except SafetensorError as error:  # which is how it tells of a full disk
            raise OSError(EIO, str(error)) from error


def map_tensors(maps: Mapping[int, Sequence[Maps]]) -> dict[str, np.ndarray]:
    """The maps of examples by the names that they have in a file, ``example/maps/layer``."""
    return {
        f"{e}/{m}/{layer}": np.ascontiguousarray(values)
        for e, kinds in maps.items()
        for m, kind in enumerate(kinds)
        for layer, values in kind.layers.items()
    }


def encoded(held: Any) -> str:
    """What an explanation holds, or parts of it, as JSON; maps are the names of their layers.

    Raises:
        ValueError: for numbers that are not finite, and what JSON cannot hold.
    """
    try:
        return _ENCODER.encode(held)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the explanation cannot be written as JSON: {error}.") from error


def check_writable(path: str | Path) -> Path:
    """The path of a file to be written, whose folder is there.

    Raises:
        FileNotFoundError: where there is no such folder.
        IsADirectoryError: where the path is a folder itself.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"path is {str(path)!r}, which is a folder; expected the name of a file in it."
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"path is {str(path)!r}, and there is no folder {str(path.parent)!r}; create it first, "
            f"as by Path({str(path.parent)!r}).mkdir(parents=True), or name another one."
        )
    return path


def page_or_file(make: Callable[[], str], path: str | Path | None) -> str | None:
    """A page, or None where it is written to a file, whose path is checked before it is made.

    A notebook or a prompt would show what is returned: all of the page's source.

    Raises:
        OSError: where it cannot be written.
    """
    if path is None:
        return make()
    file = check_writable(path)
    file.write_text(make(), encoding="utf-8", newline="\n")
    return None


def load(path: str | Path) -> dict[str, Any]:
    """The fields of an explanation that was saved."""
    path = Path(path)
    expected = f"expected a file that Explanation.save wrote, of format {FORMAT}/{VERSION}"
    shown = printable(str(path))
    try:
        data = decoded(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(
            f"{shown} is not JSON that can be read: it is nested too deep; {expected}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{shown} is not JSON ({printable(str(error))}); {expected}.") from error
    name = data.get("format") if isinstance(data, dict) else None
    if not str(name).startswith(f"{FORMAT}/"):
        raise ValueError(f"{shown} has the format {name!r}; {expected}.")
    if name != f"{FORMAT}/{VERSION}":
        raise ValueError(
            f"{shown} has the format {name!r}, which this version of captum_ssm does not read; "
            f"{expected}. Open it with the version that wrote it."
        )
    try:
        return _fields(path, data)
    except Damaged as error:
        raise ValueError(
            f"{shown} is damaged: {error}. It is not as Explanation.save wrote it: save the "
            "explanation again."
        ) from error


def decoded(text: str) -> Any:
    """What JSON holds, of numbers that a computer holds as well.

    Raises:
        ValueError: for what is not JSON, and for other numbers.
        RecursionError: for what is nested too deep.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_integer)


def _integer(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"a number is {text[:20]}...; expected one of at most 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number is {text[:20]}; expected a finite one")
    return value


def _fields(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    methods = read(tuple[Method, ...], data.get("methods"), "methods")
    names = [method.name for method in methods]
    if not names or not all(map(str.isprintable, names)) or len(set(names)) < len(names):
        raise Damaged("methods", names, "one or more, each of a name of its own")
    examples = read(tuple[Any, ...], data.get("examples"), "examples")
    if not examples:
        raise Damaged("examples", examples, "one or more")
    _put_maps(path, examples)
    read_examples = tuple(example(raw, names, f"examples[{i}]") for i, raw in enumerate(examples))
    for i, explained in enumerate(read_examples):
        check_circuits(explained, f"examples[{i}]")
    kinds: dict[str, Any] = {"title": str, "model": str}
    kinds |= {"settings": Mapping[str, Any], "versions": Mapping[str, str]}
    told = {name: read(kind, data.get(name), name) for name, kind in kinds.items()}
    return {**told, "methods": methods, "examples": read_examples}


class _Encoder(json.JSONEncoder):
    # What an explanation holds in addition to JSON's own types.
    def default(self, value: Any) -> Any:
        if isinstance(value, Maps):
            return {"name": value.name, "unit": value.unit, "layers": list(value.layers)}
        if is_dataclass(value):
            return vars(value)
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            data = base64.b64encode(zlib.compress(value.tobytes(), 9)).decode("ascii")
            return {"shape": list(value.shape), "zlib": data}
        if isinstance(value, np.ndarray):
            return _numbers(value.tolist())
        return super().default(value)


_ENCODER = _Encoder(allow_nan=False, separators=(",", ":"))


def _numbers(values: Any) -> Any:
    # Zeros, such as those of later tokens, in one character.
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return 0 if values == 0 and math.copysign(1, values) > 0 else values


def _put_maps(path: Path, examples: Sequence[Any]) -> None:
    # In place of the names of layers, their arrays from the other file.
    held = [example.get("maps", []) if isinstance(example, dict) else [] for example in examples]
    kinds = read(tuple[tuple[Any, ...], ...], held, "maps")
    maps = [(f"{e}/{m}", kind) for e, kept in enumerate(kinds) for m, kind in enumerate(kept)]
    if not maps:
        return
    file = path.with_suffix(".safetensors")
    if not file.exists():
        raise FileNotFoundError(
            f"{printable(str(path))} has maps, and there is no {printable(str(file))}, which holds "
            "them; put the file that was saved with it next to it, under the same name."
        )
    try:
        arrays = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{printable(str(file))} is damaged: {error}.") from error
    for where, kind in maps:
        layers = kind.get("layers") if isinstance(kind, dict) else None
        layers = read(tuple[str, ...], layers, f"maps {where}.layers")
        missing = [layer for layer in layers if f"{where}/{layer}" not in arrays]
        if missing:
            raise Damaged(f"maps {where}.layers", missing, "layers of the file of maps")
        kind["layers"] = {layer: arrays[f"{where}/{layer}"] for layer in layers}
