"""Explain what a served model answered, from its log, by the same checkpoint here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captum_ssm.cli.arguments import check_file, check_output, write
from captum_ssm.cli.loading import (
    MODEL,
    add_loading,
    check_device,
    found_model,
    load_model,
    load_tokenizer,
    quiet,
)
from captum_ssm.cli.options import method_named
from captum_ssm.cli.parser import listed
from captum_ssm.cli.terminal import show, visible
from captum_ssm.explanation.make.relevance.methods import ALL, method_names
from captum_ssm.explanation.make.served import replay
from captum_ssm.explanation.make.served.front import BOUND

TOP = 5  # tokens of which differences are printed
STREAM, DONE = "data:", "[DONE]"


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.usage = f"{parser.prog} MODEL LOG [options]"
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="What vLLM or a server with OpenAI's API recorded: JSON, or one record per line "
        "(.jsonl), also an output file of a batch.",
    )
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
    parser.add_argument(
        "--methods",
        nargs="+",
        type=method_named,
        choices=[*method_names(), ALL],
        metavar="METHOD",
        default=["mamba-lrp"],
        help=f"One or several of {listed(method_names())}, or all. Default: mamba-lrp",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="Where to write a page (.html), the data (.json) or a table (.csv).",
    )
    add_loading(parser)


def run(args: argparse.Namespace) -> None:
    """Compare, explain, print, and write."""
    check_output(args.output, (".html", ".json", ".csv"))
    for path in (args.log, args.requests):
        check_file(path)
    records = _with_requests(read_log(args.log), args.requests)
    bound = _bound(args.bound)
    args.model = found_model(args.model)
    check_device(args.device)
    methods = ALL if ALL in args.methods else args.methods
    with quiet():
        model, tokenizer = load_model(args, images=False), load_tokenizer(args.model)
        how = {"bound": bound, "temperature": args.temperature, "methods": methods}
        found = replay(model, tokenizer, records, **how)
    for example, check in zip(found.examples, found.settings["replay"], strict=True):
        _show(example.name, check)
    show(found)
    if args.output is not None:
        write(found, args.output)


def read_log(path: Path) -> list[Any]:
    """The records of a file: JSON, or one per line, also as a server streams them.

    Raises:
        ValueError: for a file that is neither, with the line that is not JSON.
    """
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [
            _parsed(line, path, k) for k, line in enumerate(text.splitlines(), 1) if _holds(line)
        ]
    return whole if isinstance(whole, list) else [whole]


def _holds(line: str) -> bool:
    return line.removeprefix(STREAM).strip() not in ("", DONE)


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line.removeprefix(STREAM))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error}") from error


def _with_requests(records: list[Any], path: Path | None) -> list[Any]:
    # Records of a batch with the requests that they answer.
    if path is None:
        return records
    asked = {one.get("custom_id"): one for one in read_log(path) if isinstance(one, Mapping)}
    missing = [one.get("custom_id") for one in records if one.get("custom_id") not in asked]
    if missing:
        raise ValueError(f"--requests is {path}, which has no request {missing[0]!r} of the log.")
    return [one | {"request": asked[one["custom_id"]]} for one in records]


def _bound(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--bound is {text!r}; expected a number, or none.") from None


def _show(name: str, check: Mapping[str, Any]) -> None:
    # How the log probabilities of one answer differ, and those of which tokens most.
    print(f"{visible(name)}")
    if not check["compared"]:
        print("  no log probability was recorded")
        return
    print(
        f"  {check['compared']} log probabilities differ from the recorded ones by at most "
        f"{check['max']:.4f}, {check['mean']:.4f} in the mean"
    )
    worst = sorted(check["tokens"], key=lambda one: -abs(one["difference"]))[:TOP]
    for one in worst:
        print(
            f"  {one['position']:6d}  {visible(one['text']):16s} recorded {one['recorded']:9.4f}  "
            f"here {one['local']:9.4f}  {one['difference']:+.4f}"
        )
