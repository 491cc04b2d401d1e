"""Reading dataclasses from what JSON holds: every value is of its field's type, or said not to be.

A file may come from anywhere, so what it declares is checked before memory is taken for it.
"""

from __future__ import annotations

import base64
import binascii
import math
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from captum_ssm.explanation.parts import PART, ROLES, THROUGH, Example, Output


class Damaged(ValueError):
    """A part of a file holds something else than it should."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        super().__init__(f"{printable(path)} is {reprlib.repr(value)}; expected {expected}")


def printable(text: str) -> str:
    """A text in which what a terminal would obey or hide is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read(kind: Any, value: Any, path: str) -> Any:
    """What JSON holds as a value of a type, such as a dataclass or a tuple of them.

    Raises:
        Damaged: where it is of another type.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        (inner,) = (part for part in parts if part is not NoneType)
        return None if value is None else read(inner, value, path)
    if origin is tuple:
        _require(isinstance(value, list), path, value, "a list")
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        _require(len(kinds) == len(value), path, value, f"a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(read(hint, item, f"{path}[{i}]") for i, (hint, item) in pairs)
    if origin is Mapping:
        _require(isinstance(value, dict), path, value, "an object")
        return {name: read(parts[1], item, f"{path}.{name}") for name, item in value.items()}
    if is_dataclass(kind):
        _require_fields(kind, value, path)
        make: Any = kind
        hints = _hints(make)
        return make(**{name: read(hints[name], value[name], f"{path}.{name}") for name in value})
    if kind is np.ndarray:
        return _array(value, path)
    allowed = (int, float) if kind is float else kind
    is_one = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    _require(is_one, path, value, f"a value of type {kind.__name__}")
    return value


_hints = cache(get_type_hints)


def _array(value: Any, path: str) -> np.ndarray:
    if isinstance(value, dict):
        return _bytes(value, path)
    if not isinstance(value, np.ndarray):
        try:
            value = np.array(value)
        except ValueError:
            raise Damaged(path, value, "rows of one length") from None
        _require(value.dtype.kind in "fiu", path, value, "numbers")
        with np.errstate(over="ignore"):  # is not finite, which is said below
            value = value.astype(np.float32)
    _require(value.dtype.kind == "f", path, value, "an array of floats")
    _require(bool(np.isfinite(value).all()), path, value, "finite numbers")
    return value


def _bytes(held: dict[str, Any], path: str) -> np.ndarray:
    # No more is decompressed than the declared shape has room for.
    shape = read(tuple[int, ...], held.get("shape"), f"{path}.shape")
    data = read(str, held.get("zlib"), f"{path}.zlib")
    is_right = len(shape) in (3, 4) and min(shape) > 0 and shape[-1] == 3
    _require(is_right, f"{path}.shape", shape, "(H, W, 3) or (T, H, W, 3)")
    size, inflate = math.prod(shape), zlib.decompressobj()
    try:
        pixels = inflate.decompress(base64.b64decode(data, validate=True), size + 1)
    except (binascii.Error, zlib.error) as error:
        raise Damaged(f"{path}.zlib", data, f"bytes by zlib, in base64 ({error})") from None
    _require(len(pixels) == size, f"{path}.zlib", data, f"{size} bytes, as the shape says")
    return np.frombuffer(pixels, np.uint8).reshape(shape).copy()


def example(held: Any, methods: list[str], path: str) -> Example:
    """An example, whose numbers of tokens, rows and pixels agree."""
    _require_fields(Example, held, path)
    relevance = read(Mapping[str, np.ndarray], held["relevance"], f"{path}.relevance")
    _require(set(relevance) == set(methods), f"{path}.relevance", relevance, "one for each method")
    shapes = {array.shape for array in relevance.values()}
    shape: Any = shapes.pop() if len(shapes) == 1 else ()
    size = _size(held)
    _require(
        len(shape) > 1 and list(shape[1:]) == list(size),
        f"{path}.relevance",
        shape,
        f"arrays of one shape, rows of {' x '.join(map(str, size))}",
    )
    explained: Example = read(Example, held, path)
    _check(explained, shape[0], size, path)
    return explained


def _require_fields(kind: Any, value: Any, path: str) -> None:
    # A field with a default is left out by versions that did not have it.
    known = {
        field.name: field.default is MISSING is field.default_factory for field in fields(kind)
    }
    needed = {name for name, is_needed in known.items() if is_needed}
    is_whole = isinstance(value, dict) and needed <= set(value) <= set(known)
    _require(is_whole, path, value, f"an object of {', '.join(sorted(known))}")


def _size(held: dict[str, Any]) -> list[int]:
    # The shape of a row of relevance, as the tokens, the image or the series have it.
    image, series = held.get("image"), held.get("series")
    if image is not None:
        shape = image.get("shape") if isinstance(image, dict) else None
        return [*read(tuple[int, ...], shape, "image.shape")][:-1]
    if series is None:
        return [len(read(tuple[Any, ...], held.get("tokens", []), "tokens"))]
    return list(np.shape(_array(series, "series")))


def _check(explained: Example, rows: int, size: list[int], path: str) -> None:
    def require(is_right: bool, name: str, value: Any, expected: str) -> None:
        _require(is_right, f"{path}.{name}", value, expected)

    L, deltas = len(explained.tokens), {delta.shape for delta in explained.deltas.values()}
    require(deltas <= {(rows,)}, "deltas", deltas, f"arrays of shape ({rows},)")
    require(
        {*explained.deltas} <= {*explained.relevance}, "deltas", explained.deltas, "methods' names"
    )
    require(0 <= explained.prompt <= L, "prompt", explained.prompt, f"0 .. {L}")
    if explained.reasoning is not None:
        _check_tokens(explained.reasoning, explained.prompt, L, f"{path}.reasoning")
    F = 0 if explained.series is None else explained.series.shape[-1]
    require(len(explained.features) == F, "features", explained.features, f"{F} names")
    require(bool(explained.outputs), "outputs", explained.outputs, "one or more")
    for i, output in enumerate(explained.outputs):
        _check_output(output, rows, L, f"{path}.outputs[{i}]")
    for name, spans in explained.units.items():
        ends = [0, *(span.end for span in spans)]
        is_cover = [span.first for span in spans] == ends[:-1] and ends[-1] == L
        is_whole = is_cover and ends == sorted(ends)
        require(is_whole, f"units.{name}", spans, "spans of all tokens, in order")
    if explained.grid is not None:
        most = size if explained.image is not None else []
        fits = [0 < a <= b for a, b in zip(explained.grid, most, strict=False)]
        is_right = all(fits) and len(explained.grid) == len(most)
        require(is_right, "grid", explained.grid, "rows and columns of an image's patches")
    _check_pictures(explained, L, path)
    if explained.validation is not None:
        check = explained.validation
        shapes = {curve.shape for curve in check.curves.values()} | {check.random.shape[1:]}
        is_right = shapes == {(len(check.shares),)} and len(check.shares) > 1
        is_right = is_right and len(check.curves) > 0 and {*check.curves} <= {*explained.relevance}
        require(is_right, "validation", check.curves, "curves of methods, one per share")
    for maps in explained.maps:
        for layer, values in maps.layers.items():
            sides = {L} if L else set(values.shape[:1]) - {0}
            is_square = values.ndim == 2 and set(values.shape) == sides
            require(is_square, f"maps.{layer}", values.shape, f"({L or 'L'}, {L or 'L'})")


def _check_pictures(explained: Example, L: int, path: str) -> None:
    held: set[int] = set()
    for k, picture in enumerate(explained.pictures):
        tokens, where = picture.tokens, f"{path}.pictures[{k}]"
        is_own = len(tokens) == len(set(tokens)) and held.isdisjoint(tokens)
        is_right = bool(tokens) and is_own and min(tokens) >= 0 and max(tokens) < L
        _require(is_right, f"{where}.tokens", tokens, f"tokens 0 .. {L - 1}, each of one picture")
        held |= {*tokens}
        grid = picture.grid
        is_whole = grid is None or (min(grid) > 0 and math.prod(grid) == len(tokens))
        _require(is_whole, f"{where}.grid", grid, f"None, or rows and columns of {len(tokens)}")
        if picture.image is not None:
            kind = picture.image.dtype, picture.image.ndim
            _require(kind == (np.uint8, 3), f"{where}.image", kind, "bytes (H, W, 3)")


def _check_output(output: Output, rows: int, L: int, path: str) -> None:
    count = len(output.answers)
    for name, at in (("position", output.position), ("read_at", output.read_at)):
        is_inside = at is None or 0 <= at < L
        _require(is_inside, f"{path}.{name}", at, f"None or 0 .. {L - 1}" if L else "None")
    _require(output.role in ROLES, f"{path}.role", output.role, " or ".join(ROLES))
    indices = [
        output.chosen,
        *(i for contrast in output.contrasts for i in (contrast.answer, contrast.against)),
    ]
    _require(all(0 <= i < count for i in indices), path, indices, f"answers 0 .. {count - 1}")
    used = [answer.row for answer in output.answers if answer.row is not None]
    used += [contrast.row for contrast in output.contrasts]
    used += output.hops
    _require(all(0 <= row < rows for row in used), path, used, f"rows 0 .. {rows - 1}")
    _check_part(output, L, path)


def _check_part(output: Output, L: int, path: str) -> None:
    is_part = output.part is not None
    _require(is_part == (output.role == PART), f"{path}.part", output.part, f"None or a {PART}")
    if output.part is not None:
        _check_tokens(output.part, 1, L, f"{path}.part")
        _require(output.position is None, f"{path}.position", output.position, "None of a part")
    _require(output.through in THROUGH, f"{path}.through", output.through, " or ".join(THROUGH))
    has_first = not output.hops or output.answers[output.chosen].row is not None
    _require(has_first, f"{path}.hops", output.hops, "() where the chosen answer has no row")


def _check_tokens(tokens: tuple[int, int], least: int, L: int, path: str) -> None:
    first, end = tokens
    is_right = least <= first < end <= L
    _require(is_right, path, tokens, f"(first, end), {least} <= first < end <= {L}")


def _require(is_right: bool, path: str, value: Any, expected: str) -> None:
    if not is_right:
        raise Damaged(path, value, expected)
