"""What the page's script reads: the format ``captum_ssm.page/1``, small enough to mail."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from captum_ssm.explanation.circuits import check_circuits
from captum_ssm.explanation.page.whole import divided, opening_of, whole_of
from captum_ssm.explanation.parts import (
    END,
    SPAN,
    START,
    Answer,
    Example,
    ExplanationData,
    Maps,
    Output,
    Token,
    Validation,
)
from captum_ssm.explanation.pictures import Picture, picture_names
from captum_ssm.explanation.units import says_nothing

FORMAT = "captum_ssm.page/1"

# Maps and images have at most so many cells per side: more than most screens have pixels for.
MOST_CELLS = 512


def page_data(explanation: ExplanationData) -> dict[str, Any]:
    """The explanation as JSON, without what the page does not show (see docs/how_to/page.md)."""
    names = [method.name for method in explanation.methods]
    return {
        "format": FORMAT,
        "title": explanation.title,
        "model": explanation.model,
        "methods": [
            {"name": m.name, "title": m.title, "note": m.note, "adds_up": m.adds_up}
            for m in explanation.methods
        ],
        "units": explanation.settings.get("units"),
        "against": bool(explanation.settings.get("against")),
        "settings": {
            str(key): str(value)
            for key, value in explanation.settings.items()
            if value not in (None, "", [], {}, ())
        },
        "versions": dict(explanation.versions),
        "examples": [
            _example(example, names, _is_written(explanation, example))
            for example in explanation.examples
        ],
    }


def _is_written(explanation: ExplanationData, example: Example) -> bool:
    # Whether the model wrote the answer, or it is one of a conversation.
    asked = explanation.settings
    is_generated = bool(asked.get("max_new_tokens") or asked.get("generation"))
    return bool(example.tokens) and (is_generated or "turn" in example.units)


def _example(example: Example, methods: list[str], is_written: bool) -> dict[str, Any]:
    relevance = {name: example.relevance[name] for name in methods if name in example.relevance}
    data = {
        "name": example.name,
        "outputs": [_output(output, example.tokens) for output in example.outputs],
        "deltas": {
            name: _numbers(example.deltas[name]) for name in relevance if name in example.deltas
        },
        "maps": [_maps(maps) for maps in example.maps],
        "validation": _validation(example.validation),
        "opening": opening_of(example, next(iter(relevance))) if is_written and relevance else None,
        "circuits": _circuits(example),
    }
    if example.image is not None:
        return data | _image(example.image, example.grid, relevance)
    if example.series is not None:
        return data | _series(example.series, example.features, relevance)
    whole = whole_of(example, is_written)
    units = {unit: divided(spans, whole) for unit, spans in example.units.items()}
    return data | {
        "tokens": picture_names(example.pictures, [token.text for token in example.tokens]),
        **(
            {"pictures": [_picture(picture) for picture in example.pictures]}
            if example.pictures
            else {}
        ),
        "unknown": [[k, token.read_as] for k, token in enumerate(example.tokens) if token.read_as],
        "special": [k for k, token in enumerate(example.tokens) if token.start == token.end],
        "prompt": example.prompt,
        "units": {
            unit: {"ends": [span.end for span in spans], "names": [span.name for span in spans]}
            for unit, spans in units.items()
        },
        "rows": {name: packed(rows) for name, rows in relevance.items()},
        **({} if whole is None else {"whole": whole}),
    }


def _circuits(example: Example) -> list[dict[str, Any]]:
    # What the explanation says elsewhere is left out.
    check_circuits(example, f"the example {example.name!r}")
    left_out = {"format", "title", "model", "formulation"}
    return [
        {name: value for name, value in circuit.items() if name not in left_out}
        for circuit in example.circuits
    ]


def _validation(check: Validation | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {
        "score": check.score,
        "removed": check.removed,
        "shares": _numbers(check.shares),
        "curves": {name: _numbers(curve) for name, curve in check.curves.items()},
        "random": _numbers(check.random.mean(0)),
        "area": rounded(check.random_area),
        "areas": {name: rounded(area) for name, area in check.areas.items()},
        "beaten": {name: check.beaten(name) for name in check.curves},
        "orders": len(check.random),
        "falls": check.falls,
        "telling": check.is_telling,
    }


def _output(output: Output, tokens: tuple[Token, ...]) -> dict[str, Any]:
    L, at = len(tokens), output.read_at
    return {
        "position": output.position,
        "readAt": at,
        "apart": at is not None and says_nothing(tokens[at]),
        "role": output.role,
        "answers": [_answer(answer) | _bounds(output, answer, L) for answer in output.answers],
        "of": output.among,
        "chosen": output.chosen,
        "contrasts": [[c.answer, c.against, c.row] for c in output.contrasts],
        "lens": [[_answer(answer) for answer in layer] for layer in output.lens],
        **({} if output.part is None else {"part": list(output.part)}),
        **({"hops": list(output.hops), "through": output.through} if output.hops else {}),
    }


def _bounds(output: Output, answer: Answer, L: int) -> dict[str, list[int]]:
    # The first token of an answer that is a part of the text, and the one after its last.
    if output.role == SPAN:
        first, last = divmod(answer.id, L)
        return {"at": [first, last + 1]}
    return {"at": [answer.id, answer.id + 1]} if output.role in (START, END) else {}


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "p": rounded(answer.probability),
        "logit": rounded(answer.logit),
        "rank": answer.rank,
        "row": answer.row,
    }


def _image(
    image: np.ndarray, grid: tuple[int, ...] | None, relevance: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    # The frames of a video lie one below the other.
    frames = len(image) if image.ndim == 4 else 1
    most = MOST_CELLS // math.isqrt(frames)
    small = {name: pooled(np.asarray(rows), most) for name, rows in relevance.items()}
    height, width = next(iter(small.values())).shape[-2:] if small else image.shape[-3:-1]
    step = -(-max(image.shape[-3:-1]) // (2 * most))
    pixels = np.ascontiguousarray(image[..., ::step, ::step, :], dtype=np.uint8)
    return {
        "size": [frames * height, width],
        "frames": frames,
        "grid": None if not grid else [1, *grid] if len(grid) == 2 else list(grid),
        "image": _pixels(pixels),
        "rows": {name: packed(rows.reshape(len(rows), -1)) for name, rows in small.items()},
    }


def _pixels(pixels: np.ndarray) -> dict[str, Any]:
    # (..., H, W, 3) bytes, frames one below the other.
    *frames, down, across, _ = pixels.shape
    return {"size": [math.prod(frames) * down, across], "data": _text(pixels.tobytes())}


def _picture(picture: Picture) -> dict[str, Any]:
    image = picture.image
    if image is not None:
        step = -(-max(image.shape[:2]) // (2 * MOST_CELLS))
        image = np.ascontiguousarray(image[::step, ::step])
    return {
        "name": picture.name,
        "tokens": list(picture.tokens),
        "grid": None if picture.grid is None else list(picture.grid),
        "image": None if image is None else _pixels(image),
        "note": picture.note,
    }


def _series(
    series: np.ndarray, features: tuple[str, ...], relevance: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    steps = np.atleast_2d(series)  # (T, F), of a table's row (1, F)
    return {
        "size": list(steps.shape),
        "table": series.ndim == 1,
        "features": list(features),
        "series": packed(steps.T),
        "rows": {name: packed(rows.reshape(len(rows), -1)) for name, rows in relevance.items()},
    }


def _maps(maps: Maps) -> dict[str, Any]:
    layers = []
    for name, values in maps.layers.items():
        drawn = pooled(np.asarray(values))
        pool = -(-np.shape(values)[-1] // MOST_CELLS)
        layers.append({"name": name, "pool": pool, "values": packed(drawn)})
    return {"name": maps.name, "unit": maps.unit, "layers": layers}


def packed(rows: np.ndarray) -> dict[str, Any]:
    """Rows as 16 bits per value, deflated, in base64.

    A step holds the square root of a value's share of its row's largest magnitude, so that weak
    relevance keeps its digits next to a strong one: ``value = step * abs(step) * scale``.
    """
    values = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(
            "The relevance or a map holds NaN or Inf, which a page cannot show; expected finite "
            "numbers. Look for the weights or inputs that are not finite."
        )
    largest = np.abs(values).max(axis=-1, keepdims=True, initial=0)
    share = values / np.where(largest > 0, largest, 1)
    steps = np.rint(np.sign(share) * np.sqrt(np.abs(share)) * 32767).astype("<i2")
    return {
        "shape": list(values.shape),
        "scale": [rounded(top / 32767**2, digits=7) for top in largest[:, 0]],
        "data": _text(steps.tobytes()),
    }


def pooled(values: np.ndarray, most: int = MOST_CELLS) -> np.ndarray:
    """At most so many cells per side: each keeps its strongest entry, a mean would erase it.

    Args:
        values (numpy.ndarray): of shape ``(..., rows, columns)``.
        most (int, optional): Default: ``MOST_CELLS``

    Returns:
        numpy.ndarray: with the last two axes divided by one whole number.
    """
    *batch, height, width = values.shape
    size = -(-max(height, width) // most)
    if size == 1:
        return values
    rows, columns = -(-height // size), -(-width // size)
    room = np.zeros((*batch, rows * size, columns * size), values.dtype)
    room[..., :height, :width] = values
    cells = room.reshape(*batch, rows, size, columns, size).swapaxes(-3, -2)
    cells = cells.reshape(*batch, rows, columns, size * size)
    strongest = np.abs(cells).argmax(axis=-1)[..., None]
    return np.take_along_axis(cells, strongest, axis=-1)[..., 0]


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _numbers(values: Any) -> list[float | None]:
    return [rounded(value) for value in np.asarray(values, dtype=np.float64)]


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number of few digits; JSON has neither NaN nor Inf."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
