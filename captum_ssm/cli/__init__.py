"""The command line.

    captum-ssm explain state-spaces/mamba-130m-hf \\
        --text "The capital of France is" --target " Paris" --output why.html
    captum-ssm run prompts.jsonl --model stories-mamba --output why
    captum-ssm circuit stories-mamba --text "Anna has a red ball. Anna's ball is"
    captum-ssm replay stories-mamba log.jsonl
    captum-ssm supported state-spaces/mamba-130m-hf
    captum-ssm compare first.json second.json
    captum-ssm show why.json

A command is a module with ``add(parser)`` and ``run(args)``, imported when it is called: what
opens saved explanations needs no PyTorch. :mod:`parser` reads the arguments, :mod:`arguments`
checks what they tell alone, :mod:`inputs`, :mod:`loading` and :mod:`options` turn them into what
the library takes, and :mod:`terminal` prints an explanation.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from captum_ssm.cli.parser import parse

# What a user can mend: a wrong input, a missing file or package, too little memory.
_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, given in ``arguments`` or to the process.

    Returns:
        int: the exit status. 0: it did what it was asked to; 1: an input is wrong, or the model
        cannot be explained; 130: it was interrupted.

    Raises:
        SystemExit: with 2 for arguments that are not understood, with 0 after ``--help``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _warn
        try:
            args = parse(sys.argv[1:] if arguments is None else list(arguments))
            args.run(args)
            sys.stdout.flush()
        except BrokenPipeError:  # what reads the output has read enough, such as head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except _ERRORS as error:
            print(f"captum-ssm: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("captum-ssm: interrupted", file=sys.stderr)
            return 130
    return 0


def _warn(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"captum-ssm: warning: {message}", file=sys.stderr)
