"""Open the page of an explanation in the browser."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path

from captum_ssm.cli.arguments import check_file
from captum_ssm.explanation import Explanation


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("page", type=Path, help="a .html or a .json that explain wrote")


def run(args: argparse.Namespace) -> None:
    """Open the page; that of a .json is written to a temporary folder."""
    check_file(args.page, "page")
    page = args.page
    if page.suffix == ".json":
        page = Path(tempfile.mkdtemp(prefix="captum_ssm-"), page.with_suffix(".html").name)
        Explanation.load(args.page).to_html(page)
    elif page.suffix != ".html":
        raise ValueError(f"page is {page}; expected a name that ends in .html or .json.")
    print(page.resolve())
    if not webbrowser.open(page.resolve().as_uri()):
        raise OSError(f"no browser could be started; open {page.resolve()} in one.")
