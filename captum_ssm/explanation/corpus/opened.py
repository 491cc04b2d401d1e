"""An explained data set, opened shard by shard."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from captum_ssm.explanation.corpus.manifest import read_manifest
from captum_ssm.explanation.corpus.shards import (
    OWN,
    arrow,
    example_of,
    reading,
    rows_in,
    shard_paths,
)
from captum_ssm.explanation.explanation import Explanation
from captum_ssm.explanation.parts import Method
from captum_ssm.explanation.read import printable, read
from captum_ssm.utils.lazy import cached_property

# How many shards are kept in memory: one that is read, and another one to compare it with.
_KEPT = 2


class RowError(ValueError):
    """A row of a data set was not explained; the message has its number and its own error.

    Examples::

        >>> explained = explain_dataset(model, tokenizer, ["w3 w4", ""], folder / "why")
        >>> try:
        ...     explained[1]
        ... except RowError as error:
        ...     print(str(error).split(":")[0])
        row 1 was not explained
    """


class ExplainedDataset:
    """The explanations of a data set, in a folder: read when they are asked for.

    ``explained[i]`` is the :class:`~captum_ssm.Explanation` of row i of the data set, and raises a
    :class:`RowError` for a row that failed. Iterating gives the explanations of all rows that did
    not. Where a run has not finished, there are the shards that it did finish.

    Args:
        folder (str or Path): as :func:`captum_ssm.explain_dataset` wrote it.

    Attributes:
        folder (Path): where it lies.
        manifest (dict): what was asked for (``"asked"``, ``"settings"``), ``"versions"`` of
            packages, ``"hashes"`` of model and tokenizer, what is known of the ``"data"``, and its
            number of ``"rows"``, None where that was not known yet.

    Raises:
        OSError, ValueError: where the folder does not hold an explained data set.
        ImportError: without pyarrow.

    Examples::

        >>> explained = explain_dataset(model, tokenizer, ["w3 w4", "w5 w6 w7"], folder / "why")
        >>> len(explained), explained[1].examples[0].prompt
        (2, 3)
        >>> explained.column("prompt")
        [2, 3]
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        self._paths = shard_paths(self.folder)
        self._methods = read(tuple[Method, ...], self.manifest["methods"], "methods")
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __repr__(self) -> str:
        names = ", ".join(method.name for method in self._methods)
        failed = f", {len(self.errors)} failed" if self.errors else ""
        model = self.manifest["model"]
        unfinished = "" if self.is_complete else " so far"
        return printable(
            f"<Explained data set of {model} by {names}: {len(self)} rows{unfinished}{failed}>"
        )

    def __len__(self) -> int:
        missing = max(self._paths, default=-1) + 1 - len(self._paths)
        return self._end - missing * int(self.manifest["rows_per_shard"])

    @cached_property
    def _end(self) -> int:
        # The number after that of the last row that is here: all shards but the last one are full.
        if not self._paths:
            return 0
        last = max(self._paths)
        return last * int(self.manifest["rows_per_shard"]) + rows_in(self._paths[last])

    @property
    def title(self) -> str:
        """The heading of all explanations together; each has its own."""
        return self.manifest["asked"].get("title") or f"What {self.manifest['model']} reads"

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the data set are here: explained, or recorded as failed."""
        return len(self) == self.manifest["rows"]

    @property
    def columns(self) -> list[str]:
        """The names of all columns; those of the data set itself begin with ``row.``."""
        if not self._paths:
            return []
        path = next(iter(self._paths.values()))
        with reading(path):
            return list(arrow().parquet.read_schema(path).names)

    def column(self, name: str) -> list[Any]:
        """The values of one column, of all rows.

        Args:
            name (str): such as ``"target"`` or ``"row.label"``; a name that no column of the shards
                has is one of the data set's own, ``"label"``.

        Raises:
            ValueError: for a column that there is not.
        """
        known = self.columns
        column = name if name in known else OWN + name
        if column not in known:
            raise ValueError(f"name is {name!r}; expected one of {', '.join(known)}.")
        values: list[Any] = []
        for path in self._paths.values():
            with reading(path):
                values += arrow().parquet.read_table(path, columns=[column])[column].to_pylist()
        return values

    @cached_property
    def errors(self) -> dict[int, str]:
        """Why rows failed, by their numbers in the data set."""
        pairs = zip(self.column("index"), self.column("error"), strict=True) if self._paths else ()
        return {index: error for index, error in pairs if error is not None}

    def __getitem__(self, index: int) -> Explanation:
        size = self.manifest["rows_per_shard"]
        position = index + self._end if index < 0 else index
        number, row = divmod(position, size)
        table = self._table(number) if number in self._paths else None
        if table is None or row >= len(table):
            raise IndexError(self._missing(index))
        return self._explanation(table, number, row)

    def __iter__(self) -> Iterator[Explanation]:
        for number in self._paths:
            table = self._table(number)
            errors = table["error"]
            for row in range(len(table)):
                if not errors[row].is_valid:
                    yield self._explanation(table, number, row)

    def _missing(self, index: int) -> str:
        if -self._end <= index < max(self.manifest["rows"] or 0, self._end):
            return (
                f"row {index} is in a shard that was not finished; call explain_dataset again to "
                "go on."
            )
        return f"index is {index}; expected 0 .. {self._end - 1}."

    def _table(self, number: int) -> Any:
        if number not in self._kept:
            with reading(self._paths[number]):
                self._kept[number] = arrow().parquet.read_table(self._paths[number])
        self._kept.move_to_end(number)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[number]

    def _explanation(self, table: Any, number: int, row: int) -> Explanation:
        values = {name: table[name][row] for name in table.column_names}
        index, error = values["index"].as_py(), values["error"].as_py()
        if error is not None:
            raise RowError(f"row {index} was not explained: {error}")
        title, example = example_of(
            values, partial(_map, self._paths[number].with_suffix(".safetensors"))
        )
        notes = json.loads((table.schema.metadata or {}).get(b"notes", b"[]"))
        return Explanation(
            title,
            self.manifest["model"],
            tuple(method for method in self._methods if method.name in example.relevance),
            (example,),
            self.manifest["settings"] | {"notes": notes},
            self.manifest["versions"],
        )


def _map(path: Path, name: str) -> np.ndarray:
    with reading(path), safe_open(path, "numpy") as file:
        values: np.ndarray = file.get_tensor(name)
    return values


def open_dataset(folder: str | Path) -> ExplainedDataset:
    """Open what :func:`captum_ssm.explain_dataset` wrote; needs neither the model nor PyTorch.

    Args:
        folder (str or Path): with a ``manifest.json`` and shards.

    Returns:
        ExplainedDataset

    Raises:
        OSError, ValueError: where the folder does not hold an explained data set.
        ImportError: without pyarrow.

    Examples::

        >>> _ = explain_dataset(model, tokenizer, ["w3 w4", "w5 w6 w7"], folder / "why")
        >>> explained = open_dataset(folder / "why")
        >>> [explanation.examples[0].text[:5] for explanation in explained]
        ['w3 w4', 'w5 w6']
    """
    return ExplainedDataset(folder)
