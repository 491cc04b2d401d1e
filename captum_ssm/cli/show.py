"""Open the page of an explanation in the browser."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path

from captum_ssm.cli.arguments import add_output, check_file, check_output
from captum_ssm.explanation import Explanation


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("page", metavar="FILE", type=Path, help="A .html or .json of explain.")
    add_output(parser, "Where to keep the page of a .json. Default: a temporary folder")


def run(args: argparse.Namespace) -> None:
    """Open the page, and say where it is."""
    check_file(args.page)
    check_output(args.output, (".html",))
    page = args.page
    if page.suffix == ".json":
        name = page.with_suffix(".html").name
        page = args.output or Path(tempfile.mkdtemp(prefix="captum_ssm-"), name)
        Explanation.load(args.page).to_html(page)
    elif page.suffix != ".html":
        raise ValueError(f"FILE is {page}; expected a name that ends in .html or .json.")
    elif args.output is not None:
        raise ValueError(f"--output was given, and FILE is a page already, {page}; remove it.")
    where = page.resolve()
    print(f"The page is {where}")
    if not webbrowser.open(where.as_uri()):
        raise OSError(f"no browser could be started; open {where} in one.")
