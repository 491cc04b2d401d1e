"""Rows of a data set by their numbers, from what people have."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from captum_ssm.errors import InputError
from captum_ssm.explanation.corpus.shards import arrow
from captum_ssm.explanation.make.dataset.identity import hash_of_file, hash_of_rows
from captum_ssm.explanation.make.inputs.pictures import ENDINGS

ARRAYS = (".npy", ".npz")
FILES = (".jsonl", ".csv", ".parquet", ".txt", *ARRAYS)
# Rows that are read at a time where all are looked at.
_STEP = 1000
_LONGEST = 2**31 - 1  # characters of a value of a CSV file, of which Python takes 131,072
# Arrow's types of scalars, by the names of those that a shard has for them.
_SCALARS = {"bool": "bool", "string": "string", "large_string": "string", "string_view": "string"}


@dataclass(frozen=True)
class Source:
    """A data set as numbered rows.

    Args:
        kind (str): what it is, for people.
        read (Callable): rows ``start .. stop - 1`` as a list, which is shorter at the end; a row
            that cannot be read is its error.
        length (int, optional): how many rows there are; None where that shows at the end only.
            Default: None
        schema (dict, optional): the types of its scalar columns, where it knows them.
            Default: None
        digest (Callable, optional): a hash of all rows; None where they are not all there yet.
            Default: None
        position (Callable, optional): how many rows were passed, of those that are read from the
            first to the last. Default: None
        told (dict, optional): what else makes it another data set. Default: ``{}``
        reader (Callable, optional): what makes inputs of its rows, by the tokenizer and what is
            asked; None where their columns tell. Default: None
    """

    kind: str
    read: Callable[[int, int], list[Any]]
    length: int | None = None
    schema: Mapping[str, str] | None = None
    digest: Callable[[], str] | None = None
    position: Callable[[], int] | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    reader: Callable[[Any, Mapping[str, Any]], Any] | None = None

    def everything(self) -> Iterator[Any]:
        """All rows, from the first one on."""
        parts = (self.read(start, start + _STEP) for start in count(0, _STEP))
        return chain.from_iterable(takewhile(bool, parts))


def source_of(dataset: Any) -> Source:
    """The rows of what :func:`captum_ssm.explain_dataset` is given.

    Raises:
        InputError: for an empty data set, or a file of a kind that is not read.
        FileNotFoundError: for a file that is not there.
        TypeError: for what holds no rows.
    """
    if isinstance(dataset, (str, Path)):
        return _of_file(Path(dataset))
    if type(dataset).__module__.partition(".")[0] == "datasets":
        return _of_datasets(dataset)
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        return _of_table(dataset)
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"dataset is a {type(dataset).__name__} of {', '.join(map(str, dataset))}; expected "
            "one data set: choose one, such as dataset['train'], or make a table of columns by "
            "pandas.DataFrame(dataset)."
        )
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return _of_sequence(dataset)
    if isinstance(dataset, Iterable):
        reader = Forward(lambda start: islice(dataset, start, None))
        return Source("an iterable", reader.read, position=lambda: reader.at)
    raise TypeError(
        f"dataset is a {type(dataset).__name__}; expected a data set of the package datasets, a "
        f"pandas table, a path that ends in {' or '.join(FILES)}, or an iterable of inputs."
    )


class Forward:
    """Rows of what is read from its beginning to its end.

    Args:
        open_at (Callable): an iterator of raw rows, from one number on.
        parse (Callable, optional): a row of a raw one. Default: the raw one itself
    """

    def __init__(
        self, open_at: Callable[[int], Iterator[Any]], parse: Callable[[Any], Any] = lambda x: x
    ) -> None:
        self.open_at, self.parse = open_at, parse
        self.raw: Iterator[Any] | None = None
        self.at = 0
        self.last: tuple[tuple[int, int] | None, list[Any]] = (None, [])

    def read(self, start: int, stop: int) -> list[Any]:
        """Rows ``start .. stop - 1``, as :class:`Source` has them."""
        if self.last[0] == (start, stop):  # once more: an iterator cannot go back
            return self.last[1]
        if self.raw is None or start < self.at:
            self.raw, self.at = self.open_at(start), start
        self.at += sum(1 for _ in islice(self.raw, start - self.at))
        rows = list(islice(self.raw, stop - start))
        self.at += len(rows)
        self.last = (start, stop), [attempt(self.parse, row) for row in rows]
        return self.last[1]


def attempt(read: Callable[[Any], Any], row: Any) -> Any:
    """What a function makes of a row; the error where the row is one, or where it fails."""
    if isinstance(row, Exception):
        return row
    try:
        return read(row)
    except Exception as error:
        return error


def _of_file(path: Path) -> Source:
    if path.is_dir():
        return _of_folder(path)
    if path.suffix not in FILES:
        raise InputError(
            f"dataset is {str(path)!r}; expected the path of a file that ends in "
            f"{' or '.join(FILES)}. One text alone is a list of one: [text]."
        )
    if not path.is_file():
        raise FileNotFoundError(f"dataset is {str(path)!r}, and there is no such file.")
    if path.suffix == ".parquet":
        return _of_parquet(path)
    if path.suffix in ARRAYS:
        return _of_arrays(path)
    open_at = _records if path.suffix == ".csv" else _lines
    reader = Forward(lambda start: islice(open_at(path), start, None), _PARSE[path.suffix])
    return Source(path.suffix, reader.read, digest=lambda: hash_of_file(path))


def _of_folder(path: Path) -> Source:
    # Pictures, in the order of their names; the folder that one lies in may be its class.
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
    if not files:
        raise InputError(
            f"dataset is {str(path)!r}, a folder without pictures; expected files that end in "
            f"{', '.join(ENDINGS)}. A folder of the package datasets: datasets.load_from_disk."
        )
    names = [file.relative_to(path) for file in files]
    rows = [
        {"image": str(file), "file": name.as_posix(), "label": name.parent.name or None}
        for file, name in zip(files, names, strict=True)
    ]

    def digest() -> str:
        return hash_of_rows(
            [name.as_posix(), hash_of_file(file)] for file, name in zip(files, names, strict=True)
        )

    schema = {"file": "string", "label": "string"}
    read = _by_index(rows.__getitem__, len(rows))
    return Source("a folder of pictures", read, len(rows), schema, digest)


def _of_arrays(path: Path) -> Source:
    # Each row of an array is what the model reads; several arrays are columns, by their names.
    try:
        opened = np.load(path, mmap_mode="r")
        is_one = isinstance(opened, np.ndarray)
        arrays = {"": opened} if is_one else {name: opened[name] for name in opened.files}
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        told = str(error).partition(". ")[0]
        raise InputError(
            f"{str(path)!r} cannot be read ({told}); expected arrays of numbers, as numpy.save or "
            "numpy.savez writes them."
        ) from error
    shapes = {name: array.shape for name, array in arrays.items()}
    lengths = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(lengths) != 1 or -1 in lengths:
        told = ", ".join(f"{name or 'one array'} {shape}" for name, shape in shapes.items())
        raise InputError(
            f"{str(path)!r} holds {told or 'no array'}; expected one row per example in each, "
            "(N, ...)."
        )

    count = lengths.pop()

    def row(i: int) -> Any:
        values = {name: array[i] for name, array in arrays.items()}
        values = {name: np.array(x) if x.ndim else x.item() for name, x in values.items()}
        return values.get("", values)

    schema: dict[str, str] | None = {} if path.suffix == ".npy" else None
    read = _by_index(row, count)
    return Source(path.suffix, read, count, schema, lambda: hash_of_file(path))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_LONGEST)
    # A byte that is not of UTF-8 is a mistake of its own row.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            yield from rows
        except csv.Error as error:
            raise InputError(
                f"{str(path)!r}, line {rows.line_num}: {error}; expected values separated by "
                'commas, and in quotes where they hold commas, line breaks or quotes, as "".'
            ) from error


def _record(row: Mapping[Any, Any]) -> dict[str, str | None]:
    if None in row:
        raise InputError(
            f"the row has {len(row) - 1 + len(row[None])} values, and the header {len(row) - 1}; "
            'put a value that holds commas into quotes, "...".'
        )
    raw = {name: (value or "").encode("utf-8", "surrogateescape") for name, value in row.items()}
    return {name: value.decode("utf-8") or None for name, value in raw.items()}


def _object(line: bytes) -> Any:
    row = json.loads(line)
    if not isinstance(row, Mapping):
        raise InputError(f"the line is JSON of a {type(row).__name__}; expected an object.")
    return row


_PARSE: dict[str, Callable[[Any], Any]] = {
    ".csv": _record,
    ".jsonl": _object,
    ".txt": lambda line: {"text": line.decode("utf-8-sig").rstrip("\r\n")},
}


def _of_parquet(path: Path) -> Source:
    file = arrow().parquet.ParquetFile(path)

    def open_at(start: int) -> Iterator[Any]:
        batches = file.iter_batches(batch_size=_STEP)
        return islice(((batch, i) for batch in batches for i in range(len(batch))), start, None)

    def parse(position: Any) -> dict[str, Any]:
        batch, i = position
        return {name: batch.column(name)[i].as_py() for name in batch.schema.names}

    return Source(
        ".parquet",
        Forward(open_at, parse).read,
        file.metadata.num_rows,
        scalars(file.schema_arrow),
        lambda: hash_of_file(path),
    )


def scalars(schema: Any) -> dict[str, str]:
    """The types of an Arrow schema's scalar columns, by name; times and the like are texts."""
    types = arrow().types
    type_names = {}
    for column in schema:
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        if types.is_integer(kind):
            type_names[column.name] = "int64"
        elif types.is_floating(kind):
            type_names[column.name] = "float64"
        elif types.is_temporal(kind) or types.is_decimal(kind) or types.is_null(kind):
            type_names[column.name] = "string"
        elif str(kind) in _SCALARS:
            type_names[column.name] = _SCALARS[str(kind)]
    return type_names


def _of_datasets(dataset: Any) -> Source:
    import datasets

    if isinstance(dataset, dict):
        raise TypeError(
            f"dataset is a {type(dataset).__name__} of {', '.join(dataset)}; expected one of them, "
            f"such as dataset[{next(iter(dataset), 'train')!r}]."
        )
    schema = None if dataset.features is None else scalars(dataset.features.arrow_schema)
    if isinstance(dataset, datasets.IterableDataset):
        reader = Forward(lambda start: iter(dataset.skip(start)))
        where = reader.read, None, schema, None, lambda: reader.at
        return Source("an IterableDataset", *where)

    def digest() -> str:
        # As Arrow has it: no image is decoded.
        raw = dataset.with_format("arrow")
        parts = (raw[start : start + _STEP] for start in range(0, len(raw), _STEP))
        return hash_of_rows(_bytes_of(part) for part in parts)

    read = _by_index(dataset.__getitem__, len(dataset))
    return Source("a Dataset", read, len(dataset), schema, digest)


def _bytes_of(table: Any) -> bytes:
    pa = arrow()
    sink = pa.BufferOutputStream()
    plain = table.replace_schema_metadata(None).combine_chunks()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _by_index(row: Callable[[int], Any], count: int) -> Callable[[int, int], list[Any]]:
    return lambda start, stop: [attempt(row, i) for i in range(start, min(stop, count))]


def _of_table(table: Any) -> Source:
    names = [str(name) for name in table.columns]

    def read(start: int, stop: int) -> list[Any]:
        return [
            dict(zip(names, row, strict=True))
            for row in table.iloc[start:stop].itertuples(index=False, name=None)
        ]

    source = Source("a pandas table", read, len(table))
    return replace(source, digest=lambda: hash_of_rows(source.everything()))


def _of_sequence(rows: Sequence[Any]) -> Source:
    read = _by_index(rows.__getitem__, len(rows))
    source = Source(f"a {type(rows).__name__}", read, len(rows))
    # Rows that are made when they are asked for are not made for their hash.
    is_held = isinstance(rows, (list, tuple)) or hasattr(rows, "__array__")
    return replace(source, digest=lambda: hash_of_rows(rows)) if is_held else source
