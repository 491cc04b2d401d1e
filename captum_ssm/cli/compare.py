"""One saved explanation minus another one of the same texts, or one method minus another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from captum_ssm.cli.arguments import add_output, check_file, check_output, write
from captum_ssm.cli.parser import listed, plain
from captum_ssm.cli.terminal import show
from captum_ssm.explanation import Explanation, Method


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("first", metavar="FIRST", type=Path, help="A .json that explain wrote.")
    parser.add_argument(
        "second",
        metavar="SECOND",
        type=Path,
        nargs="?",
        help="Another .json, which is subtracted. Default: FIRST",
    )
    parser.add_argument(
        "--methods",
        nargs=2,
        metavar=("METHOD", "OTHER"),
        help="Subtract OTHER, as SECOND has it, from METHOD, as FIRST has it. Both are compared in "
        "shares of the total magnitude, since methods have scales of their own. Default: each "
        "method of both files is compared with itself; of one file with two methods, these two",
    )
    parser.add_argument(
        "--units",
        default="token",
        metavar="UNIT",
        help="What is shown: token, word, sentence or span. Default: token",
    )
    add_output(
        parser, "Where to write the difference: a page (.html), the data (.json) or a table (.csv)."
    )


def run(args: argparse.Namespace) -> None:
    """Print the difference, and write it."""
    check_output(args.output, (".html", ".json", ".csv"))
    paths = [args.first, args.second or args.first]
    for path in paths:
        check_file(path)
    first, second = (Explanation.load(path) for path in paths)
    names = [
        {plain(m.name): m.name for m in explanation.methods} for explanation in (first, second)
    ]
    if args.methods is not None:
        pair = [_named(*each) for each in zip(args.methods, names, paths, strict=True)]
    elif args.second is None:
        pair = list(names[0].values())
        if len(pair) != 2:
            raise ValueError(
                f"{args.first} has {listed(pair)}; expected two methods. Give a second file, or "
                "two of its methods with --methods."
            )
    else:
        pair = [*names[0].values(), *names[1].values()] if names[0] != names[1] else []
    if len(pair) == 2:
        title = " minus ".join(pair)
        first, second = _in_shares(first, pair[0], title), _in_shares(second, pair[1], title)
        print(f"{title}, in shares of each method's total magnitude:")
    difference = first.difference(second)
    show(difference, args.units)
    write(difference, args.output, args.units)


def _named(name: str, known: Mapping[str, str], path: Path) -> str:
    if plain(name) not in known:
        raise ValueError(f"--methods holds {name!r}; {path} has {listed(known.values())}.")
    return known[plain(name)]


def _in_shares(explanation: Explanation, name: str, new_name: str) -> Explanation:
    # By one method, each row in parts of its total magnitude.
    examples = []
    for example in explanation.examples:
        rows = example.relevance[name]
        total = np.abs(rows).sum(axis=tuple(range(1, rows.ndim)), keepdims=True)
        shares = np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
        examples.append(replace(example, relevance={new_name: shares}, deltas={}, maps=()))
    method = Method(new_name, new_name, "shares of the total magnitude", False, {})
    return replace(explanation, methods=(method,), examples=tuple(examples))
