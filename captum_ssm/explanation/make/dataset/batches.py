"""Batches of rows, explained where Ray Data sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from captum_ssm.explanation.corpus.shards import arrow, schema_of, table_of
from captum_ssm.explanation.make.dataset.budget import checked, limit_of, measured
from captum_ssm.explanation.make.dataset.folder import ShardMaker
from captum_ssm.explanation.make.dataset.own import column_types
from captum_ssm.explanation.make.dataset.rows import Columns, RowReader
from captum_ssm.explanation.make.dataset.served import ServedLog
from captum_ssm.explanation.make.dataset.sources import scalars
from captum_ssm.explanation.make.inputs.parse_inputs import unpacked
from captum_ssm.explanation.make.many import Explainer


class ExplainBatches:
    """Explains batches of rows: a class to be called by ``map_batches`` of Ray Data.

    Each actor loads the model once. A batch becomes a table with the columns of the shards of
    :func:`captum_ssm.explain_dataset`, without maps. ``index`` is that of a column ``index`` of the
    batch, if it has one; rows that fail have their ``error``.

    Args:
        load (Callable): returns the model and its tokenizer, which may be None.
        columns (dict, optional): as for :func:`captum_ssm.explain_dataset`. Default: None
        target, against (Any, optional): for all rows that have none of their own. Default: None
        seed (int, optional): random numbers of each batch begin there. Default: 0
        log (Callable, optional): where rows are records of a served model, makes the log of a
            batch's records, such as :class:`captum_ssm.ServedLog`, or a ``partial`` of it with
            another bound. The table then has a row per answer, and a record's own single values are
            its columns. None for rows of a data set. Default: None
        batch_memory (int, optional): as for :func:`captum_ssm.explain_dataset`; rows of the first
            batch are measured. Default: None
        **options: of :func:`captum_ssm.explain` that are not about one input.

    Examples::

        >>> explain_batch = ExplainBatches(lambda: (model, tokenizer), methods="rollout")
        >>> table = explain_batch({"text": ["w3 w4", ""], "year": [1999, 2001]})
        >>> table["row.year"].to_pylist(), table["error"].to_pylist()[0]
        ([1999, 2001], None)

        By Ray::

            data.map_batches(ExplainBatches, fn_constructor_args=(load,), concurrency=2)
    """

    def __init__(
        self,
        load: Callable[[], tuple[Any, Any]],
        columns: Mapping[str, str] | None = None,
        *,
        target: Any = None,
        against: Any = None,
        seed: int = 0,
        log: Callable[[list[Any]], ServedLog] | None = None,
        batch_memory: int | None = None,
        **options: Any,
    ) -> None:
        model, tokenizer = load()
        self.make = partial(Explainer, model, tokenizer, show_progress=False, **options)
        self.methods = [method.name for method in self.make().explanation(()).methods]
        self.seed, self.log = seed, log
        self.columns, self.shared = dict(columns or {}), {"target": target, "against": against}
        self.asked = {"columns": columns or None, **self.shared, **options}
        self.tokenizer = unpacked(model, tokenizer, None, None)[1]
        self.memory = checked(batch_memory)
        self.measured: dict[str, Any] | None = None

    def __call__(self, batch: Any) -> Any:
        """Explain one batch.

        Args:
            batch (dict, pyarrow.Table or pandas.DataFrame): columns of rows.

        Returns:
            pyarrow.Table: one row per row of the batch, or per answer of a log.
        """
        rows, kinds, known = self._read(_table(batch))
        types = {name: kind for name, kind in kinds.items() if kind and known.keeps(name)}
        indices = [row.get("index") if isinstance(row, Mapping) else None for row in rows]
        if self.measured is None:
            self.measured = measured(self.make, known, self.memory, self.seed, rows)
        limit = partial(limit_of, self.measured)
        shard = ShardMaker(self.make, known, types, self.seed, limit=limit)(0, indices, rows)
        return table_of(schema_of(self.methods, types), shard)

    def _read(self, table: Any) -> tuple[list[Any], Mapping[str, str | None], RowReader]:
        # The rows, the types of their columns, and what makes inputs of them.
        rows = table.to_pylist()
        if self.log is None:
            known = Columns.find(table.column_names, self.columns, self.shared)
            return rows, {**scalars(table.schema)}, known
        log = self.log(rows)
        rows = list(log.source().everything())
        return rows, column_types(rows, False), log.reader(self.tokenizer, self.asked)


def _table(batch: Any) -> Any:
    pa = arrow()
    if isinstance(batch, pa.Table):
        return batch
    if hasattr(batch, "iloc"):
        return pa.Table.from_pandas(batch, preserve_index=False)
    return pa.table({name: list(values) for name, values in batch.items()})
