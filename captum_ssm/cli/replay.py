"""Explain what a served model answered, from its log, by the same checkpoint here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from captum_ssm.cli.arguments import add_output, check_file, check_output, write
from captum_ssm.cli.loading import (
    MODEL,
    add_loading,
    check_loading,
    load_model,
    load_tokenizer,
    quiet,
)
from captum_ssm.cli.options import add_methods
from captum_ssm.cli.terminal import show, visible
from captum_ssm.explanation.make.recorded import BOUND, check_bound
from captum_ssm.explanation.make.relevance.methods import ALL
from captum_ssm.explanation.make.served import replay
from captum_ssm.explanation.make.served.log import log_entries, with_requests
from captum_ssm.explanation.make.served.records import read_records
from captum_ssm.explanation.replayed import Replay

TOP = 5  # tokens of which differences are printed


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.usage = f"{parser.prog} MODEL LOG [options]"
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="What vLLM or a server with OpenAI's API recorded: JSON, or one record per line "
        "(.jsonl), also an output file of a batch; or a log of Inspect or lm-eval.",
    )
    add_served(parser)
    add_methods(parser)
    add_output(parser, "Where to write a page (.html), the data (.json) or a table (.csv).")
    add_loading(parser)


def add_served(parser: argparse._ActionsContainer) -> None:
    """The arguments that say how what was recorded is compared."""
    parser.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="The input file of a batch, whose requests are found by their custom_id.",
    )
    parser.add_argument(
        "--bound",
        default=str(BOUND),
        metavar="NATS",
        help="How much the log probability of a token may differ from the recorded one, or none "
        f"to explain what differs as well. Default: {BOUND}",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="The temperature, where the server recorded log probabilities after dividing by it. "
        "Default: 1, the model's own",
    )


def run(args: argparse.Namespace) -> None:
    """Compare, explain, print, and write."""
    check_output(args.output, (".html", ".json", ".csv"))
    for path in (args.log, args.requests):
        check_file(path)
    how = {"bound": bound_of(args.bound), "temperature": args.temperature}
    check_bound(**how)
    records = _records(args.log, args.requests)
    read_records(records)
    check_loading(args)
    how["methods"] = ALL if ALL in args.methods else args.methods
    with quiet():
        model, tokenizer = load_model(args, images=False), load_tokenizer(args.model)
        explanation = replay(model, tokenizer, records, **how)
    for example in explanation.examples:
        assert example.replay is not None
        _show(example.name, example.replay)
    show(explanation)
    write(explanation, args.output)


def _records(log: Path, requests: Path | None) -> list[Any]:
    # The records of a file, with the requests of another one.
    entries = log_entries(log)
    if requests is not None:
        entries = with_requests(entries, log_entries(requests))
    held = list(entries)
    failed = next((entry for entry in held if isinstance(entry, Exception)), None)
    if failed is not None:
        raise failed
    return held


def bound_of(text: str) -> float | None:
    """How much log probabilities may differ, or a ValueError; None for any amount."""
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--bound is {text!r}; expected a number, or none.") from None


def _show(name: str, replay: Replay) -> None:
    # How the log probabilities of one answer differ, and those of which tokens most.
    print(f"{visible(name)}")
    if not replay.tokens:
        print("  no log probability was recorded")
        return
    print(
        f"  {len(replay.tokens)} log probabilities differ from the recorded ones by at most "
        f"{replay.max:.4f}, {replay.mean:.4f} in the mean"
    )
    for token in sorted(replay.tokens, key=lambda token: -abs(token.difference))[:TOP]:
        print(
            f"  {token.position:6d}  {visible(token.text):16s} recorded {token.recorded:9.4f}  "
            f"here {token.local:9.4f}  {token.difference:+.4f}"
        )
