"""The command line.

    captum-ssm explain --model state-spaces/mamba-130m-hf \\
        --text "The capital of France is" --target " Paris" --output why.html
    captum-ssm supported state-spaces/mamba-130m-hf
    captum-ssm compare first.json second.json
    captum-ssm show why.json

A command is a module with ``add(parser)`` and ``run(args)``, imported when it is called: what
opens saved explanations needs no PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

COMMANDS = {
    "explain": "which tokens, or which part of an image, a prediction rests on",
    "supported": "what of a model is supported, and what a run costs",
    "compare": "one saved explanation minus another one",
    "show": "open the page of an explanation in the browser",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, given in ``arguments`` or to the process; the exit status is 0 or 1."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser(given[:1]).parse_args(given)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _warn
        try:
            args.run(args)
        except (ValueError, TypeError, OSError) as error:
            print(f"captum_ssm: error: {error}", file=sys.stderr)
            return 1
    return 0


def _parser(called: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="captum-ssm", description="Explain state-space models and gated linear RNNs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, told in COMMANDS.items():
        command = commands.add_parser(name, help=told, allow_abbrev=False)
        if name in called:
            module = import_module(f"captum_ssm.cli.{name}")
            command.description = (module.__doc__ or "").partition("\n")[0]
            module.add(command)
            command.set_defaults(run=module.run)
    return parser


def _warn(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"captum_ssm: warning: {message}", file=sys.stderr)
