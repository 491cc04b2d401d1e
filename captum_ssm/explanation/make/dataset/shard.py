"""The rows of one shard: explained, or recorded as failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from captum_ssm.explanation import Example, Maps
from captum_ssm.explanation.corpus import RowError
from captum_ssm.explanation.corpus.shards import OWN, Shard, record
from captum_ssm.explanation.make.dataset.own import own_values
from captum_ssm.explanation.make.dataset.rows import RowReader
from captum_ssm.explanation.make.dataset.sources import attempt
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.relevance.batches import BatchLimit, batch_limit
from captum_ssm.metrics.evaluation import seeded


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
            outcomes = iter(explainer([one for one in asked if isinstance(one, InputRow)]))
        found = [next(outcomes) if isinstance(one, InputRow) else one for one in asked]
        records: list[dict[str, Any]] = []
        maps: dict[int, Sequence[Maps]] = {}
        for index, row, outcome in zip(indices, rows, found, strict=True):
            own = attempt(partial(own_values, types=self.types), row)
            told = attempt(partial(_recorded, explainer), _first_error(outcome, own))
            if isinstance(told, Exception):
                if self.raises:
                    raise RowError(f"row {index} was not explained: {_named(told)}") from told
                told = {"error": _named(told)}
            elif isinstance(outcome, Example) and outcome.maps and index is not None:
                maps[index] = outcome.maps
            kept = {} if isinstance(own, Exception) else own
            records.append({"index": index, **told, **{OWN + k: kept[k] for k in kept}})
        return Shard(records, maps, list(explainer.explanation(()).settings["notes"]))


def _recorded(explainer: Explainer, example: Example) -> dict[str, Any]:
    return record(example, explainer.heading([example]))


def _first_error(outcome: Any, own: Any) -> Any:
    return own if isinstance(own, Exception) and not isinstance(outcome, Exception) else outcome


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
