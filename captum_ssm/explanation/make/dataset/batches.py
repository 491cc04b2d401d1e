"""Batches of rows, explained where Ray Data sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from captum_ssm.explanation.corpus.arrow import arrow
from captum_ssm.explanation.corpus.shards import schema_of, table_of
from captum_ssm.explanation.make.dataset.rows import Columns
from captum_ssm.explanation.make.dataset.shard import ShardMaker
from captum_ssm.explanation.make.dataset.sources import scalars
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
        **options: Any,
    ) -> None:
        model, tokenizer = load()
        self.make = partial(Explainer, model, tokenizer, show_progress=False, **options)
        self.methods = [method.name for method in self.make().explanation(()).methods]
        self.columns, self.seed = dict(columns or {}), seed
        self.shared = {"target": target, "against": against}

    def __call__(self, batch: Any) -> Any:
        """Explain one batch.

        Args:
            batch (dict, pyarrow.Table or pandas.DataFrame): columns of rows.

        Returns:
            pyarrow.Table: one row per row of the batch.
        """
        table = _table(batch)
        known = Columns.find(table.column_names, self.columns, self.shared)
        types = {name: kind for name, kind in scalars(table.schema).items() if known.keeps(name)}
        rows = table.to_pylist()
        indices = [row.get("index") for row in rows]
        shard = ShardMaker(self.make, known, types, self.seed)(0, indices, rows)
        return table_of(schema_of(self.methods, types), shard)


def _table(batch: Any) -> Any:
    pa = arrow()
    if isinstance(batch, pa.Table):
        return batch
    if hasattr(batch, "iloc"):
        return pa.Table.from_pandas(batch, preserve_index=False)
    return pa.table({name: list(values) for name, values in batch.items()})
