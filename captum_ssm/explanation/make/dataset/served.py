"""The log of a served model as a data set: one row per answer, compared before it is explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from captum_ssm.explanation.make.dataset.identity import hash_of_file, hash_of_rows
from captum_ssm.explanation.make.dataset.sources import Forward, Source, source_of
from captum_ssm.explanation.make.many import InputRow
from captum_ssm.explanation.make.recorded import BOUND, check_bound
from captum_ssm.explanation.make.served.log import log_entries, with_requests
from captum_ssm.explanation.make.served.records import as_data, each_answer
from captum_ssm.explanation.make.served.rendering import check_told, served_row
from captum_ssm.explanation.make.served.vocabulary import Vocabulary

RECORD = "record"
TABLES = (".parquet", ".csv")


@dataclass(frozen=True)
class ServedLog:
    """What a server recorded, as a data set for :func:`captum_ssm.explain_dataset`.

    Each answer is a row, also of several to one prompt. It runs through the local model once, as
    :func:`captum_ssm.replay` does: the log probabilities of that run are compared with those that
    were recorded, and an answer of which one differs by more than the bound is a row with that
    error. ``Example.replay`` and the column ``difference`` tell how each token differs. Single
    values that came with an answer, such as ``custom_id`` and ``finish_reason``, are columns.

    Args:
        records (path, Dataset or iterable): a ``.json`` file, one with a record per line, a log of
            Inspect (``.eval``, ``.json``) or of lm-eval (``samples_*.jsonl``), or whatever else
            :func:`captum_ssm.explain_dataset` takes, with a record per row.
        requests (path or iterable, optional): the input of a batch, whose requests are found by
            their ``custom_id``. Default: None
        bound (float, optional): how much the log probability of any token may differ, in nats; None
            for any amount. Default: 0.5
        temperature (float, optional): by which the server divided its logits before it recorded.
            Default: 1.0

    Raises:
        InputError: for a bound or a temperature that is not one, and for requests that are not.

    Examples::

        >>> from captum_ssm import ServedLog
        >>> answer = {"token_ids": [5, 6], "logprobs": [{5: -3.2}, {6: -3.1}]}
        >>> records = [{"prompt_token_ids": [3, 4], "outputs": [answer], "user": "a"}]
        >>> log = ServedLog(records, bound=9)  # the model here is random
        >>> explained = explain_dataset(model, tokenizer, log, folder / "why")
        >>> len(explained[0].examples[0].replay.tokens), explained.column("row.user")
        (2, ['a'])
    """

    records: Any
    requests: Any = None
    bound: float | None = BOUND
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_bound(self.bound, self.temperature)

    def source(self) -> Source:
        """Its answers as numbered rows.

        Raises:
            FileNotFoundError: for a file that is not there.
        """
        rows = Forward(lambda start: islice(self._rows(), start, None))
        logs = [log for log in (self.records, self.requests) if log is not None]
        digest = _digest(logs)
        return Source(
            "a served log",
            rows.read,
            digest=digest,
            position=None if digest else lambda: rows.at,
            told={"bound": self.bound, "temperature": self.temperature},
            reader=self.reader,
        )

    def reader(self, tokenizer: Any, options: Mapping[str, Any]) -> ServedRows:
        """What makes inputs of its rows.

        Raises:
            TypeError: for an option that the records tell themselves.
        """
        check_told(options)
        return ServedRows(self, Vocabulary(tokenizer), options.get("against"))

    def _rows(self) -> Iterator[Any]:
        records = _each(self.records)
        if self.requests is not None:
            records = with_requests(records, _each(self.requests))
        for answer in each_answer(records):
            yield answer if isinstance(answer, Exception) else {RECORD: answer, **answer.columns}


@dataclass(frozen=True)
class ServedRows:
    """What is explained of the rows of a log: as :class:`Columns` for other data sets."""

    log: ServedLog
    vocabulary: Vocabulary
    against: Any

    def row(self, entry: Any) -> InputRow:
        """The prompt and the answer of a row, and what was recorded of them.

        Raises:
            InputError, TypeError: for a record that the tokenizer does not reproduce.
        """
        how = self.log.bound, self.log.temperature, self.against
        return served_row(entry[RECORD], self.vocabulary, *how)

    def keeps(self, column: str) -> bool:
        """Whether a column is kept with the explanation."""
        return column != RECORD


def _each(records: Any) -> Iterable[Any]:
    if isinstance(records, (str, Path)) and Path(records).suffix not in TABLES:
        return log_entries(Path(records))
    return source_of(records).everything()


def _digest(logs: Sequence[Any]) -> Callable[[], str] | None:
    # None where something is not all there yet.
    files = [Path(log) if isinstance(log, (str, Path)) else None for log in logs]
    for path in filter(None, files):
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} is not a file; expected a log.")
    if any(
        path is None and source_of(log).digest is None
        for path, log in zip(files, logs, strict=True)
    ):
        return None
    return lambda: hash_of_rows(
        [as_data(row) for row in _each(log)] if path is None else hash_of_file(path)
        for path, log in zip(files, logs, strict=True)
    )
