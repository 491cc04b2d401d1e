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
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from captum_ssm.explanation._parts import (
    Answer,
    Contrast,
    Example,
    Maps,
    Method,
    Output,
    Span,
    Token,
)

if TYPE_CHECKING:
    from captum_ssm.explanation._explanation import Explanation

FORMAT = "captum_ssm.explanation"
VERSION = 1


def save(explanation: Explanation, path: str | Path) -> None:
    """Write an explanation, as :meth:`Explanation.save` says."""
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"path is {str(path)!r}; expected a name that ends in .json.")
    tensors = {
        f"{e}/{m}/{layer}": np.ascontiguousarray(values)
        for e, example in enumerate(explanation.examples)
        for m, maps in enumerate(example.maps)
        for layer, values in maps.layers.items()
    }
    held = {"format": f"{FORMAT}/{VERSION}"} | _plain(explanation)
    try:
        text = json.dumps(held, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"the explanation cannot be written as JSON: {error}.") from error
    path.write_text(text + "\n", encoding="utf-8", newline="\n")
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))


def load(path: str | Path) -> dict[str, Any]:
    """The fields of an explanation that was saved."""
    path = Path(path)
    expected = f"expected a file that Explanation.save wrote, of format {FORMAT}/{VERSION}"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); {expected}.") from error
    name = held.get("format") if isinstance(held, dict) else None
    if not str(name).startswith(f"{FORMAT}/"):
        raise ValueError(f"{path} has the format {name!r}; {expected}.")
    if name != f"{FORMAT}/{VERSION}":
        raise ValueError(
            f"{path} has the format {name!r}, which this version of captum_ssm does not read; "
            f"{expected}. Open it with the version that wrote it."
        )
    try:
        maps = _maps_file(path, held["examples"])
        examples = (_example(e, one, maps) for e, one in enumerate(held["examples"]))
        return {
            "title": held["title"],
            "model": held["model"],
            "methods": tuple(Method(**method) for method in held["methods"]),
            "examples": tuple(examples),
            "settings": held["settings"],
            "versions": held["versions"],
        }
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error!r}; {expected}.") from error


def _plain(value: Any) -> Any:
    # What JSON can hold.
    if isinstance(value, Maps):
        return {"name": value.name, "unit": value.unit, "layers": list(value.layers)}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        data = base64.b64encode(zlib.compress(value.tobytes(), 9)).decode("ascii")
        return {"shape": list(value.shape), "zlib": data}
    if isinstance(value, np.ndarray):
        return _numbers(value.tolist())
    return value


def _numbers(values: Any) -> Any:
    # Zeros, such as those of later tokens, in one character.
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return 0 if values == 0 and math.copysign(1, values) > 0 else values


def _maps_file(path: Path, examples: list[Any]) -> dict[str, np.ndarray]:
    if not any(one["maps"] for one in examples):
        return {}
    file = path.with_suffix(".safetensors")
    if not file.exists():
        raise FileNotFoundError(
            f"{path} has maps, and there is no {file}, which holds them; put the file that was "
            "saved with it next to it, under the same name."
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}.") from error


def _example(index: int, held: dict[str, Any], maps: dict[str, np.ndarray]) -> Example:
    image, grid = held["image"], held["grid"]
    return Example(
        name=held["name"],
        outputs=tuple(map(_output, held["outputs"])),
        relevance={name: _array(rows) for name, rows in held["relevance"].items()},
        deltas={name: _array(rows) for name, rows in held["deltas"].items()},
        tokens=tuple(Token(**token) for token in held["tokens"]),
        prompt=held["prompt"],
        units={
            name: tuple(Span(**span) for span in spans) for name, spans in held["units"].items()
        },
        image=None if image is None else _image(image),
        grid=None if grid is None else (grid[0], grid[1]),
        maps=tuple(
            Maps(
                one["name"],
                one["unit"],
                {layer: maps[f"{index}/{m}/{layer}"] for layer in one["layers"]},
            )
            for m, one in enumerate(held["maps"])
        ),
    )


def _output(held: dict[str, Any]) -> Output:
    return Output(
        position=held["position"],
        answers=tuple(Answer(**answer) for answer in held["answers"]),
        chosen=held["chosen"],
        contrasts=tuple(Contrast(**contrast) for contrast in held["contrasts"]),
        lens=tuple(tuple(Answer(**answer) for answer in layer) for layer in held["lens"]),
    )


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def _image(held: dict[str, Any]) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(held["zlib"]))
    return np.frombuffer(data, np.uint8).reshape(held["shape"]).copy()
