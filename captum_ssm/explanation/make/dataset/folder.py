"""The folder of an explained data set, filled shard by shard, and how a shard is made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation import Example, Maps
from captum_ssm.explanation.corpus import RowError
from captum_ssm.explanation.corpus.manifest import (
    NAME,
    changed_versions,
    check_same,
    read_manifest,
    write_manifest,
)
from captum_ssm.explanation.corpus.shards import (
    OWN,
    Shard,
    record,
    rows_in,
    schema_of,
    shard_path,
    shard_paths,
    write_shard,
)
from captum_ssm.explanation.make.dataset.budget import limit_of
from captum_ssm.explanation.make.dataset.own import legal, own_values
from captum_ssm.explanation.make.dataset.rows import RowReader
from captum_ssm.explanation.make.dataset.sources import Source, attempt
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.relevance.batches import BatchLimit, batch_limit
from captum_ssm.metrics.evaluation import seeded
from captum_ssm.utils.integers import pair_of
from captum_ssm.utils.progress import Bar
from captum_ssm.utils.writing import remove_temporary


def made_folder(output: Any) -> Path:
    """The folder that is written into, made where it does not exist.

    Raises:
        InputError: for a file, and for a folder with shards that are not explained data.
        TypeError: for what is not a path.
    """
    if not isinstance(output, (str, Path)):
        raise TypeError(f"output is {output!r}; expected the path of a folder.")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output is {str(folder)!r}, which is a file; expected a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    if shard_paths(folder) and not (folder / NAME).exists():
        raise InputError(
            f"output is {str(folder)!r}, which holds files named part-*.parquet and no {NAME}; "
            "name another folder."
        )
    return folder


def this_process(process: Any, accelerator: Any) -> tuple[int, int]:
    """The number of this process, and how many there are.

    The caller says so as ``process``, ``(k, n)``, or ``accelerator`` does. With neither, it is what
    ``torchrun`` and ``accelerate launch`` tell each process (``RANK``, ``WORLD_SIZE``).

    Raises:
        InputError: for what is not one of n processes.
    """
    if accelerator is not None:
        return accelerator.process_index, accelerator.num_processes
    if process is None:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    numbers = pair_of(process)
    if numbers is None or not 0 <= numbers[0] < numbers[1]:
        raise InputError(f"process is {process!r}; expected (k, n), 0 <= k < n.")
    return numbers


@dataclass(frozen=True)
class ShardMaker:
    """Explains the rows of a shard, by an explainer of its own: nothing is kept from other shards.

    Args:
        make (Callable): the explainer.
        columns (RowReader): what the model reads.
        types (dict): of the scalar columns that are kept, by name.
        seed (int): random numbers of shard k begin at this plus k.
        raises (bool): whether a row that fails ends the run. Default: False
        limit (Callable): makes the limit of a shard's batches. Default: without a budget
    """

    make: Callable[[], Explainer]
    columns: RowReader
    types: Mapping[str, str]
    seed: int = 0
    raises: bool = False
    limit: Callable[[], BatchLimit] = BatchLimit

    def __call__(self, number: int, indices: Sequence[int | None], rows: Sequence[Any]) -> Shard:
        """Explain the rows of shard ``number``, which have these indices in the data set."""
        explainer = self.make()
        asked = [attempt(self.columns.row, row) for row in rows]
        with seeded(self.seed + number), batch_limit(self.limit()):
            outcomes = iter(explainer([result for result in asked if isinstance(result, InputRow)]))
        results = [next(outcomes) if isinstance(result, InputRow) else result for result in asked]
        records: list[dict[str, Any]] = []
        maps: dict[int, Sequence[Maps]] = {}
        for index, row, outcome in zip(indices, rows, results, strict=True):
            values = attempt(partial(own_values, types=self.types), row)
            is_ready = isinstance(outcome, Exception) or not isinstance(values, Exception)
            told = attempt(
                lambda one: record(one, explainer.heading([one])), outcome if is_ready else values
            )
            if isinstance(told, Exception):
                if self.raises:
                    raise RowError(f"row {index} was not explained: {_named(told)}") from told
                told = {"error": legal(_named(told))}
            elif isinstance(outcome, Example) and outcome.maps and index is not None:
                maps[index] = outcome.maps
            columns = {} if isinstance(values, Exception) else values
            records.append({"index": index, **told, **{OWN + k: columns[k] for k in columns}})
        return Shard(records, maps, list(explainer.explanation(()).settings["notes"]))


@dataclass(frozen=True)
class ShardRun:
    """The shards of one of several processes.

    Args:
        folder (Path): where they are written.
        source (Source): the rows.
        manifest (dict): what is asked for.
        maker (ShardMaker): explains the rows of a shard.
        budget (Callable): what a manifest tells of batches, where none is there yet.
        process, processes (int): process k of n explains the shards that are k modulo n.
    """

    folder: Path
    source: Source
    manifest: Mapping[str, Any]
    maker: ShardMaker
    budget: Callable[[], dict[str, Any]]
    process: int
    processes: int

    def start(self) -> None:
        """Explain what is not there yet.

        Raises:
            InputError: where the folder holds a run of something else.
            OSError: where a file cannot be written.
        """
        self._begin()
        begun = read_manifest(self.folder)
        # Where rows can only be counted by reading them all, an earlier run may have done so.
        rows = begun["rows"]
        maker = replace(self.maker, limit=partial(limit_of, begun.get("batches")))
        size, done = self.manifest["rows_per_shard"], shard_paths(self.folder)
        mine = [n for n in done if n % self.processes == self.process]
        whole = {n for n in mine if not isinstance(attempt(rows_in, done[n]), Exception)}
        schema = schema_of([m["name"] for m in self.manifest["methods"]], self.manifest["columns"])
        with Bar("rows", rows or 0) as bar:
            for number in count(self.process, self.processes):
                start = number * size
                if rows is not None and start >= rows:
                    return
                if number not in whole and not self._explain(maker, number, start, schema):
                    break
                if rows is not None:
                    bar.advance(min(size, rows - start))
        self._end()

    def _begin(self) -> None:
        remove_temporary(self.folder, self.process, self.processes)
        if not (self.folder / NAME).exists():
            told = {**self.manifest, "batches": self.budget()}
            write_manifest(self.folder, told, self.process, is_first=True)
        # Another process that began at once may have written it.
        before = read_manifest(self.folder)
        check_same(self.folder, before, self.manifest)
        changed = changed_versions(before, self.manifest)
        if changed:
            warnings.warn(
                f"{self.folder} was begun with other versions: {', '.join(changed)}. Shards that "
                "follow may differ in their last bits.",
                stacklevel=4,
            )

    def _explain(self, maker: ShardMaker, number: int, start: int, schema: Any) -> bool:
        # False where there are no such rows.
        rows = self.source.read(start, start + self.manifest["rows_per_shard"])
        if not rows:
            return False
        shard = maker(number, range(start, start + len(rows)), rows)
        write_shard(shard_path(self.folder, number), number, schema, shard)
        return True

    def _end(self) -> None:
        if self.source.position is not None:
            told = {**read_manifest(self.folder), "rows": self.source.position()}
            write_manifest(self.folder, told, self.process)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
