"""The arguments of the process, read: what is not understood is said in two lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from captum_ssm import __version__
from captum_ssm.utils.suggestions import closest

COMMANDS = {
    "explain": "Show which tokens, or parts of an image, support or oppose a prediction.",
    "run": "Explain every row of a data set into a folder, and go on where a run has ended.",
    "circuit": "Show which token reads which other one, in which layer, for a prediction.",
    "replay": "Explain what a served model answered, from the log of its server.",
    "supported": "Report which methods explain a model, and how exactly.",
    "compare": "Show the difference of two saved explanations, or of two methods.",
    "report": "Report what many explanations have in common, and how two runs differ.",
    "show": "Open the page of a saved explanation in the browser.",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command was asked for; ``run`` is the function that does it.

    Raises:
        SystemExit: for what is not understood, and after ``--help`` and ``--version``.
    """
    parser = _Parser(
        prog="captum-ssm",
        description="Explain state-space models and gated linear RNNs.",
        epilog="Exit status: 0 for success, 1 for an error, 2 for arguments that are not "
        "understood, 130 when interrupted.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"captum-ssm {__version__}",
        help="Print the version and exit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    for name, told in COMMANDS.items():
        command = commands.add_parser(name, help=told, description=told, allow_abbrev=False)
        if name in arguments[:1]:
            module = import_module(f"captum_ssm.cli.{name}")
            module.add(command)
            command.set_defaults(run=module.run)
    if "--model" in arguments[1:-1] and arguments[0] != "run":  # the form of earlier versions
        i = list(arguments).index("--model")
        arguments = [arguments[0], arguments[i + 1], *arguments[1:i], *arguments[i + 2 :]]
    return parser.parse_args(arguments)


def listed(names: Iterable[str], last: str = "and") -> str:
    """``a, b and c``."""
    *first, final = names
    return f"{', '.join(first)} {last} {final}" if first else final


def plain(name: str) -> str:
    """A name without what people spell differently: ``MambaLRP`` is ``mamba_lrp``."""
    return name.lower().replace("-", "").replace("_", "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion; empty where nothing is close."""
    near = closest(name.lower().replace("_", "-"), known)
    return "" if near is None else f"Did you mean {near}?"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"captum-ssm: error: {message}\n{self.prog} --help lists what it takes.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        name = action.option_strings[0] if action.option_strings else action.metavar
        meant = did_you_mean(str(value), action.choices)
        hint = meant or f"Expected {listed(action.choices, 'or')}."
        self.error(f"{name} is {value!r}. {hint}")


class _Command(_Parser):
    # An unknown option is found before others are found missing.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = [name for action in self._actions for name in action.option_strings]
        for name in (arg.partition("=")[0] for arg in args):
            if name.startswith("--") and " " not in name and name not in (*known, "--"):
                self.error(
                    f"{self.prog} has no option {name}. {did_you_mean(name, known)}".rstrip()
                )
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{' '.join(rest)!r} was not expected. Quote a text of several words.")
        return parsed, rest
