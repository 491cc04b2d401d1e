"""A data set, explained shard by shard into a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from captum_ssm.errors import InputError
from captum_ssm.explanation.corpus import ExplainedDataset
from captum_ssm.explanation.make.dataset.budget import checked, measured
from captum_ssm.explanation.make.dataset.folder import (
    ShardMaker,
    ShardRun,
    made_folder,
    this_process,
)
from captum_ssm.explanation.make.dataset.identity import (
    hash_of_model,
    hash_of_rows,
    hash_of_tokenizer,
)
from captum_ssm.explanation.make.dataset.own import column_types
from captum_ssm.explanation.make.dataset.rows import Columns, RowReader
from captum_ssm.explanation.make.dataset.served import ServedLog
from captum_ssm.explanation.make.dataset.sources import Source, source_of
from captum_ssm.explanation.make.inputs.parse_inputs import unpacked
from captum_ssm.explanation.make.many import Explainer, plain
from captum_ssm.explanation.make.parse import OPTIONS
from captum_ssm.utils.integers import count_of
from captum_ssm.utils.progress import showing


def explain_dataset(
    model: Any,
    tokenizer: Any = None,
    dataset: Any = None,
    output: str | Path | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    target: Any = None,
    against: Any = None,
    rows_per_shard: int = 1000,
    batch_memory: int | None = None,
    on_error: Literal["record", "raise"] = "record",
    accelerator: Any = None,
    process: tuple[int, int] | None = None,
    seed: int = 0,
    show_progress: bool = True,
    **options: Any,
) -> ExplainedDataset:
    """Explain every row of a data set, into a folder that other programs read as well.

    The folder gets a ``manifest.json`` and *shards*, each of a fixed number of consecutive rows: a
    Parquet file with one row per row of the data set, and maps, if asked for, in safetensors'
    format. A shard is written as a whole or not at all. A run that was killed goes on where it was
    when it is started again: finished shards are kept, and those that follow are the same bytes.

    A row that cannot be explained is recorded with its error, and the run goes on.

    Args:
        model, tokenizer (Any): as for :func:`captum_ssm.explain`; the tokenizer is None for models
            of images or series, and for pipelines.
        dataset (Dataset, DataFrame, path or iterable): a data set of the package ``datasets``, also
            a streaming one; a pandas table; the path of a ``.jsonl``, ``.csv``, ``.parquet`` or
            ``.txt`` file (one text per line); a list or any iterable of texts, conversations,
            token ids, images, series, or dicts by column; or the log of a served model
            (:class:`captum_ssm.ServedLog`).
        output (str or Path): the folder, which is made where it does not exist.
        columns (dict, optional): which column is what, such as ``{"text": "review"}``: ``text``,
            ``text_pair``, ``question``, ``context``, ``messages``, ``image``, ``series`` or
            ``input_ids`` is what the model reads; ``target``, ``against``, ``span`` and ``units``
            is what is asked about the row, as for :func:`captum_ssm.explain`. None for columns of
            these names. Scalar columns, except those that the model reads, are kept as
            ``row.NAME``. Default: None
        target, against (Any, optional): for all rows that have none of their own. Default: None
        rows_per_shard (int, optional): how many rows are kept in memory, and are lost where a run
            is killed. Default: 1000
        batch_memory (int, optional): bytes that the tensors of rows that are explained together
            may take, in addition to the model; a row that takes more is explained alone. What rows
            take is measured before the first shard. None for a quarter of the memory of the
            model's device. Default: None
        on_error (str, optional): ``"record"``, or ``"raise"`` to end the run at a row that fails;
            shards before it are kept. Default: ``"record"``
        accelerator (accelerate.Accelerator, optional): of one of several processes, each of which
            calls this function with the same arguments, and explains its part of the shards. What
            is written does not depend on how many there are. None for the processes that
            ``torchrun`` or ``accelerate launch`` started. Default: None
        process (tuple, optional): ``(k, n)`` for process k of n that were started otherwise.
            Default: None
        seed (int, optional): random numbers of shard k begin at this plus k, whatever PyTorch's
            random state, which is left as it was. Default: 0
        show_progress (bool, optional): a progress bar of rows. Default: True
        **options: ``methods``, ``maps``, ``max_new_tokens`` and all other options of
            :func:`captum_ssm.explain` that are not about one input.

    Returns:
        ExplainedDataset: what is in the folder: of several processes that are still at work, what
        they have finished.

    Raises:
        InputError: for a data set without rows or without a column to be read, and for a folder in
            which a run of other settings, another model or other data was begun; says what changed.
        OSError: where a file cannot be read or written, such as on a full disk.
        RowError: for the first row that fails, with ``on_error="raise"``.
        TypeError, ValueError: for options, as :func:`captum_ssm.explain` does.
        ImportError: without pyarrow.

    Examples::

        >>> rows = [{"text": "w3 w4", "target": "w5", "year": 1999}, {"text": "", "year": 2001}]
        >>> explained = explain_dataset(model, tokenizer, rows, folder / "why")
        >>> explained[0].relevance().shape, explained.column("row.year")
        ((3,), [1999, 2001])
        >>> explained.errors
        {1: "InputError: text is '', which is empty; expected a text."}

        Two processes, by ``torchrun --nproc_per_node 2 script.py``::

            explain_dataset(model, tokenizer, "prompts.jsonl", "why", methods=["latim"])
    """
    if on_error not in ("record", "raise"):
        raise InputError(f"on_error is {on_error!r}; expected 'record' or 'raise'.")
    folder, source, rows_per_shard = prepared(output, dataset, rows_per_shard, batch_memory)
    known_processor = options.get("processor")
    module, own_tokenizer, _, processor = unpacked(model, tokenizer, None, known_processor)
    make = partial(Explainer, model, tokenizer, show_progress=False, **options)
    head = source.read(0, rows_per_shard)
    if not head:
        raise InputError("the data set is empty; expected at least one row.")
    shared = {"target": target, "against": against}
    length, names, kinds = _survey(source, head)
    if source.reader is None:
        known: RowReader = Columns.find(names, columns or {}, shared)
    else:
        known = source.reader(own_tokenizer, {"columns": columns or None, **shared, **options})
    types = {name: kind for name, kind in kinds.items() if kind and known.keeps(name)}
    manifest = {
        "rows": length,
        "rows_per_shard": rows_per_shard,
        **_made_by(make()),
        "asked": _asked(
            {"columns": columns or {}, **shared, "seed": seed, "batch_memory": batch_memory}
            | options
        ),
        "hashes": {
            "model": hash_of_model(module),
            "tokenizer": hash_of_tokenizer(own_tokenizer),
            "processor": hash_of_tokenizer(processor),
        },
        "data": _told(source, head),
        "columns": types,
    }
    maker = ShardMaker(make, known, types, seed, on_error == "raise")
    told = partial(measured, make, known, batch_memory, seed, head)
    run = ShardRun(folder, source, manifest, maker, told, *this_process(process, accelerator))
    with showing(None if show_progress else False):
        run.start()
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return ExplainedDataset(folder)


def prepared(
    output: Any, dataset: Any, rows_per_shard: Any, batch_memory: Any
) -> tuple[Path, Source, int]:
    """The folder, which is made, the rows, and how many a shard has: what needs no model.

    Raises:
        InputError, OSError, TypeError: as for :func:`explain_dataset`.
    """
    checked(batch_memory)
    size = count_of("rows_per_shard", rows_per_shard, 1)
    source = dataset.source() if isinstance(dataset, ServedLog) else source_of(dataset)
    return made_folder(output), source, size


def _survey(
    source: Source, head: Sequence[Any]
) -> tuple[int | None, list[str] | None, Mapping[str, str | None]]:
    # How many rows there are, if that can be known; their columns, None for rows that are inputs
    # themselves; and the types of those that are of scalars.
    # Rows that are all there are looked at once: a column may begin in any of them.
    first: list[Any] = []
    passed = 0

    def looked_at() -> Iterator[Any]:
        nonlocal passed
        is_whole = source.digest is not None and source.schema is None
        for row in source.everything() if is_whole else head:
            passed += 1
            if not first and row is not None and not isinstance(row, Exception):
                first.append(row)
            yield row

    types = column_types(looked_at(), source.kind == ".csv")
    names = [*types] if first and isinstance(first[0], Mapping) else None
    if source.schema is not None:
        return source.length, names, source.schema
    return passed if source.digest else source.length, names, types


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    # All options, those that were not given as well; methods are in the manifest by themselves.
    left_out = ("methods", "show_progress")
    asked = {name: value for name, value in {**OPTIONS, **options}.items() if name not in left_out}
    return {name: plain(value, _class_of) for name, value in asked.items()}


def _made_by(explainer: Explainer) -> dict[str, Any]:
    # What is said of every explanation: where a model runs is the same on each of several GPUs.
    explanation = explainer.explanation(())
    settings = {name: value for name, value in explanation.settings.items() if name != "notes"}
    settings["device"] = settings["device"].partition(":")[0]
    return {
        "model": explanation.model,
        "methods": [dict(vars(method)) for method in explanation.methods],
        "device": settings["device"],
        "settings": settings,
        "versions": dict(explanation.versions),
    }


def _told(source: Source, head: Sequence[Any]) -> dict[str, Any]:
    # Data that are not all there are known by their first row.
    told = {"kind": source.kind, **source.told}
    if source.digest is None:
        return {**told, "first_row": hash_of_rows(head[:1])}
    return {**told, "hash": source.digest()}


def _class_of(value: Any) -> str:
    # An object is known by its class, which is the same in each run.
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
