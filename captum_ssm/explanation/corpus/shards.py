"""Shards: examples as the rows of a Parquet file, and back.

A row has the columns that people look at, and ``details``, JSON of the rest of the example, so that
an example comes back as it was. Relevance is ``(R, L)``, a list of R rows; rows of images, videos
and series are flattened, and ``shape`` is that of one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError

from captum_ssm.explanation.file import decoded, encoded, map_tensors, write_maps
from captum_ssm.explanation.parts import LABEL, NEXT, Example, Maps, Output
from captum_ssm.explanation.read import example as read_example
from captum_ssm.explanation.read import printable
from captum_ssm.explanation.tables import told_answer
from captum_ssm.utils.writing import replacing

ARROW_TYPES = {"bool": "bool_", "int64": "int64", "float64": "float64", "string": "string"}
OWN = "row."
_REST = ("relevance", "deltas")


class Shard(NamedTuple):
    """What a shard holds.

    Args:
        records (list of dict): its rows.
        maps (dict): of rows that have some, by their indices.
        notes (list of str): what could not be done.
    """

    records: list[dict[str, Any]]
    maps: dict[int, Sequence[Maps]]
    notes: list[str]


def arrow() -> Any:
    """``pyarrow``, with ``pyarrow.parquet``.

    Raises:
        ImportError: says how it is installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "explained data sets are Parquet files, which need pyarrow: "
            "pip install captum-ssm[data]"
        ) from error
    return pyarrow


def schema_of(methods: Sequence[str], columns: Mapping[str, str]) -> Any:
    """The columns of a shard.

    ``columns`` are the data set's own scalar columns, by name: ``"bool"``, ``"int64"``,
    ``"float64"`` or ``"string"``.
    """
    pa = arrow()
    row = pa.list_(pa.float32())
    return pa.schema(
        [
            ("index", pa.int64()),
            ("error", pa.string()),
            ("name", pa.string()),
            ("text", pa.string()),
            ("tokens", pa.list_(pa.string())),
            ("ids", pa.list_(pa.int32())),
            ("prompt", pa.int32()),
            ("difference", row),
            ("target", pa.string()),
            ("prediction", pa.string()),
            ("probability", pa.float64()),
            ("shape", pa.list_(pa.int32())),
            *((f"relevance.{name}", pa.list_(row)) for name in methods),
            *((f"delta.{name}", row) for name in methods),
            *((OWN + name, getattr(pa, ARROW_TYPES[kind])()) for name, kind in columns.items()),
            ("details", pa.string()),
        ]
    )


def record(example: Example, title: str) -> dict[str, Any]:
    """An example as a row, without its index.

    Raises:
        ValueError: for numbers that are not finite.
    """
    rest = {name: value for name, value in vars(example).items() if name not in _REST}
    for values in (*example.relevance.values(), *example.deltas.values()):
        if not np.isfinite(values).all():
            raise ValueError(
                "its relevance is not finite; run the model in a wider dtype, such as float32."
            )
    shapes = [list(values.shape[1:]) for values in example.relevance.values()]
    return {
        "name": example.name,
        "text": example.text,
        "tokens": [token.text for token in example.tokens],
        "ids": [token.id for token in example.tokens],
        "prompt": example.prompt,
        "difference": _differences(example),
        **_answers(example.outputs),
        "shape": shapes[0],
        **{f"relevance.{m}": list(x.reshape(len(x), -1)) for m, x in example.relevance.items()},
        **{f"delta.{m}": values for m, values in example.deltas.items()},
        "details": encoded({"title": title} | rest),
    }


def _differences(example: Example) -> list[float | None] | None:
    # What a served model's record tells of each token; None where nothing was recorded.
    if example.replay is None:
        return None
    differences = {token.position: token.difference for token in example.replay.tokens}
    return [differences.get(k) for k in range(len(example.tokens))]


def _answers(outputs: Sequence[Output]) -> dict[str, Any]:
    # Tokens that follow one another are joined; labels of tokens are words of their own.
    by_role = {
        role: [output for output in outputs if output.role == role] for role in (NEXT, LABEL)
    }
    asked = by_role[NEXT] or by_role[LABEL] or outputs[:1]
    space = " " if asked[0].role == LABEL else ""
    return told_answer(asked, space)._asdict()


def example_of(row: Mapping[str, Any], map_of: Callable[[str], np.ndarray]) -> tuple[str, Example]:
    """The title and the example of a row that has one.

    ``map_of`` returns a map of its shard by its name, ``index/maps/layer``.
    """
    held = decoded(row["details"].as_py())
    title = held.pop("title")
    shape = row["shape"].as_py()
    for kind, name in (("relevance.", "relevance"), ("delta.", "deltas")):
        methods = (key for key in row if key.startswith(kind) and row[key].is_valid)
        held[name] = {key.removeprefix(kind): _array(row[key]) for key in methods}
    held["relevance"] = {m: x.reshape(-1, *shape) for m, x in held["relevance"].items()}
    index = row["index"].as_py()
    for m, maps in enumerate(held["maps"]):
        maps["layers"] = {layer: map_of(f"{index}/{m}/{layer}") for layer in maps["layers"]}
    return title, read_example(held, list(held["relevance"]), f"row {index}")


def _array(scalar: Any) -> np.ndarray:
    values = scalar.values
    while arrow().types.is_list(values.type):
        values = values.flatten()
    array: np.ndarray = values.to_numpy(zero_copy_only=False).copy()
    return array


def shard_path(folder: Path, number: int) -> Path:
    """The Parquet file of a shard; maps lie next to it, under the ending ``.safetensors``."""
    return folder / f"part-{number:05d}.parquet"


def shard_paths(folder: Path) -> dict[int, Path]:
    """The shards of a folder that are finished, by their numbers, in order."""
    names = (path.stem.removeprefix("part-") for path in folder.glob("part-*.parquet"))
    numbers = sorted({int(name) for name in names if name.isdecimal()})
    paths = {number: shard_path(folder, number) for number in numbers}
    return {number: path for number, path in paths.items() if path.is_file()}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What cannot be read of a shard's file is a ValueError that names the file, and what to do."""
    try:
        yield
    except (arrow().ArrowInvalid, SafetensorError, OSError) as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{printable(str(path))} cannot be read ({told}). If it is damaged, delete "
            f"{path.stem}.parquet and call explain_dataset again, which explains its rows anew."
        ) from error


def rows_in(path: Path) -> int:
    """How many rows a shard has.

    Raises:
        ValueError: for a file that is damaged.
    """
    with reading(path):
        return int(arrow().parquet.read_metadata(path).num_rows)


def write_shard(path: Path, number: int, schema: Any, shard: Shard) -> None:
    """Write the maps of a shard, and then its rows: what a Parquet file lies for is finished.

    Raises:
        OSError: where a file cannot be written; says what to do.
    """
    write_maps(path.with_suffix(".safetensors"), map_tensors(shard.maps), number)
    with replacing(path, number) as temporary:
        arrow().parquet.write_table(table_of(schema, shard), temporary, compression="zstd")


def table_of(schema: Any, shard: Shard) -> Any:
    """The rows of a shard, a ``pyarrow.Table``."""
    noted = schema.with_metadata({"notes": json.dumps(shard.notes)})
    return arrow().Table.from_pylist(shard.records, schema=noted)
