"""What scripts that take times share: their options, functions that take turns, their record."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _record import RESULTS, save

clock = time.perf_counter


def options(description: str | None, name: str, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser of the options that the scripts share; ``name`` is that of the results."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, by the processor time it took: for a machine that is busy otherwise",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.set_defaults(benchmark=name)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; threads and the clock are set as they say."""
    global clock
    args = parser.parse_args()
    if args.cpu_time:
        args.threads, clock = 1, time.process_time
    torch.set_num_threads(args.threads)
    return args


def turns(*functions: Callable[[], object], repeats: int = 5) -> list[list[float]]:
    """The seconds of each call of each function.

    The functions take turns, in alternating order, so that other load on the machine affects all
    of them alike; ratios are more reliable than times.
    """
    taken: list[list[float]] = [[] for _ in functions]
    on_gpu = torch.cuda.is_available()
    for function in functions if on_gpu else ():
        function()  # kernels are loaded, or compiled, by their first call
    for i in range(repeats):
        order = range(len(functions))
        for k in reversed(order) if i % 2 else order:
            if on_gpu:
                torch.cuda.synchronize()
            start = clock()
            functions[k]()
            if on_gpu:
                torch.cuda.synchronize()
            taken[k].append(clock() - start)
    return taken


def seconds(*functions: Callable[[], object], repeats: int = 5) -> list[float]:
    """The best time of each function, by turns."""
    return [min(times) for times in turns(*functions, repeats=repeats)]


def keep(args: argparse.Namespace, rows: Sequence[dict[str, Any]], **details: Any) -> None:
    """Write the rows, with the machine and versions that they belong to, unless told not to."""
    if "CAPTUM_SSM_ISA" in os.environ:
        details["instruction_set"] = os.environ["CAPTUM_SSM_ISA"]
    if not args.no_save:
        save(args.output, args.benchmark, rows, cpu_time=args.cpu_time, **details)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row to print."""
    return {key: f"{x:.3g}" if isinstance(x, float) else x for key, x in row.items()}
