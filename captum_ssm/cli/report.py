"""What many explanations have in common: in print, as a page and as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from captum_ssm.cli.arguments import check_output
from captum_ssm.explanation import summarize


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="What run wrote, or a .json that explain wrote."
    )
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="Another run of the same data."
    )
    parser.add_argument("--method", help="Whose relevance is told. Default: the first")
    parser.add_argument(
        "--by", nargs="+", metavar="COLUMN", help="Columns of the data by which it is divided."
    )
    parser.add_argument("--labels", metavar="COLUMN", help="The column of the right answers.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Where to write the page.")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="Where to write the table of mean shares."
    )


def run(args: argparse.Namespace) -> None:
    """Print the report, and write it."""
    check_output(args.html, (".html",), "--html")
    check_output(args.csv, (".csv",), "--csv")
    for path in (args.folder, args.against):
        if path is not None and not path.exists():
            raise ValueError(f"No such file or folder: {path}. Expected what captum-ssm run wrote.")
    report = summarize(
        args.folder, method=args.method, by=args.by, labels=args.labels, against=args.against
    )
    print(report)
    if args.html is not None:
        report.to_html(args.html)
        print(f"\nwrote {args.html}")
    if args.csv is not None:
        report.to_pandas().to_csv(args.csv, index=False)
        print(f"\nwrote {args.csv}")
