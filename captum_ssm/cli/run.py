"""Explain every row of a data set into a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from captum_ssm.cli.explain import (
    add_answers,
    add_kept,
    asked_of_all,
    asked_of_texts,
    check_no_text,
    check_options,
    class_of,
    is_classifier,
)
from captum_ssm.cli.loading import (
    MODEL,
    add_loading,
    add_pixels,
    check_loading,
    load_for_rows,
    quiet,
)
from captum_ssm.cli.options import add_methods, add_options
from captum_ssm.cli.parser import listed
from captum_ssm.cli.replay import add_served, bound_of
from captum_ssm.explanation import ExplainedDataset
from captum_ssm.explanation.make.dataset import ServedLog, explain_dataset
from captum_ssm.explanation.make.dataset.rows import ROLES
from captum_ssm.explanation.make.dataset.run import prepared
from captum_ssm.explanation.make.dataset.sources import FILES
from captum_ssm.explanation.make.recorded import BOUND

SHOWN = 3  # rows that failed, in the closing lines


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    _add_data(parser)
    _add_running(parser)
    add_methods(parser, "--method")
    add_answers(parser)
    add_kept(parser)
    add_loading(parser)
    add_pixels(parser)
    add_options(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    # Which rows are explained, and where the explanations go.
    parser.usage = f"{parser.prog} DATASET --model MODEL --output FOLDER [options]"
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help=f"A file that ends in {listed(FILES, 'or')} (texts have one per line, arrays one per "
        "row), a folder of pictures, a folder that save_to_disk of the package datasets wrote, or "
        "a hub name.",
    )
    parser.add_argument("--model", required=True, help=MODEL)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="Where the explanations are written. The same command goes on where it was ended.",
    )
    parser.add_argument(
        "--served",
        action="store_true",
        help="DATASET is what vLLM or a server with OpenAI's API recorded, one record per line or "
        "row: an answer is explained if its log probabilities are also the model's. The next three "
        "options are about that.",
    )
    add_served(parser)
    parser.add_argument(
        "--split", default="train", help="The part of a hub's data set. Default: train"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=(),
        metavar="ROLE=COLUMN",
        help="Which column is what, such as text=review target=label.",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    # How many rows are explained at once, and what happens to one that fails.
    parser.add_argument(
        "--rows-per-shard",
        type=int,
        default=1000,
        metavar="N",
        help="How many rows are kept in memory and written at once. Default: 1000",
    )
    parser.add_argument(
        "--batch-memory",
        type=int,
        metavar="BYTES",
        help="What rows that are explained together may take, in addition to the model. Default: a "
        "quarter of the memory of the device",
    )
    parser.add_argument(
        "--on-error",
        choices=("record", "raise"),
        default="record",
        metavar="WAY",
        help="What a row that fails does: record, or raise, which ends the command. "
        "Default: record",
    )


def run(args: argparse.Namespace) -> None:
    """Explain, write, and say how many."""
    asked = asked_of_all(args)
    columns = _columns(args.columns)
    if args.device == "cuda":  # of several processes each has its own
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    check_loading(args)
    asked |= asked_of_texts(args)
    with quiet():
        dataset = _dataset(args)
        check_options(asked)
        prepared(args.output, dataset, args.rows_per_shard, args.batch_memory)
        model, tokenizer, known = load_for_rows(args)
        if tokenizer is None:
            check_no_text(args, f"{args.model} reads no text")
        if tokenizer is None or is_classifier(model):
            asked |= {name: class_of(asked[name]) for name in ("target", "against")}
        explained = explain_dataset(
            model,
            tokenizer,
            dataset,
            args.output,
            columns=columns,
            rows_per_shard=args.rows_per_shard,
            batch_memory=args.batch_memory,
            on_error=args.on_error,
            **asked,
            **known,
        )
    _close(explained)


def _columns(columns: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in columns]
    for role, equals, column in pairs:
        if not role or not equals or not column:
            raise ValueError(
                f"--columns is {' '.join(columns)}; expected ROLE=COLUMN, such as text=review; a "
                f"role is {listed(ROLES, 'or')}."
            )
    return {role: column for role, _, column in pairs}


def _dataset(args: argparse.Namespace) -> Any:
    source, bound = _found(args.dataset, args.split), bound_of(args.bound)
    if args.served:
        return ServedLog(source, args.requests, bound, args.temperature)
    if (args.requests, bound, args.temperature) != (None, BOUND, 1):
        raise ValueError("--requests, --bound and --temperature are about a log; add --served.")
    return source


def _found(name: str, split: str) -> Any:
    path = Path(name)
    is_saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    if path.suffix in FILES or path.is_file() or (path.is_dir() and not is_saved):
        return path
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"DATASET is {name!r}, which is neither a folder nor a file that ends in "
            f"{listed(FILES, 'or')}; other ones need the package datasets: "
            "pip install captum-ssm[data]"
        ) from error
    if path.is_dir():
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name, split=split)


def _close(explained: ExplainedDataset) -> None:
    failed = explained.errors
    for index in list(failed)[:SHOWN]:
        print(f"row {index}: {failed[index].splitlines()[0]}")
    if len(failed) > SHOWN:
        print(f"... and {len(failed) - SHOWN:,} more rows that failed")
    so_far = "" if explained.is_complete else " so far"
    count = len(explained) - len(failed)
    print(f"explained {count:,} rows{so_far}, {len(failed):,} failed, in {explained.folder}")
