"""One saved explanation minus another one of the same texts, by another model or other options."""

from __future__ import annotations

import argparse
from pathlib import Path

from captum_ssm.cli.arguments import check_file, check_output, write
from captum_ssm.cli.terminal import show
from captum_ssm.explanation import Explanation


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("first", type=Path, help="a .json that explain wrote")
    parser.add_argument("second", type=Path, help="another one, which is taken away")
    parser.add_argument(
        "--units", default="token", help="token, word, sentence or span. Default: token"
    )
    parser.add_argument("--output", type=Path, help="write the difference, a page (.html) or .json")


def run(args: argparse.Namespace) -> None:
    """Print the difference, and write it."""
    check_output(args.output, (".html", ".json"))
    for name in ("first", "second"):
        check_file(getattr(args, name), name)
    found = Explanation.load(args.first).difference(Explanation.load(args.second))
    show(found, args.units)
    if args.output is not None:
        write(found, args.output)
