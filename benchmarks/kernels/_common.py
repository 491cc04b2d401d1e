"""What the kernel benchmarks share: inputs shaped like a layer, timing, the record of a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from captum_ssm.kernels import DiagonalCoefficients, extension_loaded

sys.path.append(str(Path(__file__).resolve().parents[1]))
import _record


def layer(
    length: int, channels: int = 1536, states: int = 16, seed: int = 0
) -> DiagonalCoefficients:
    """Coefficients with the shape of one layer of a 130m-sized Mamba, and typical decays."""
    g = torch.Generator().manual_seed(seed)
    dt = torch.nn.functional.softplus(torch.randn(1, length, channels, generator=g) - 3)
    return DiagonalCoefficients(
        dt,
        dt,
        A=-torch.arange(1, states + 1.0).repeat(channels, 1),
        B=torch.randn(1, length, 1, states, generator=g),
        C=torch.randn(1, length, 1, states, generator=g),
    )


def mixer(coefficients: DiagonalCoefficients, seed: int = 1) -> DiagonalCoefficients:
    """The same layer with its activation, gate and convolution of width 4 folded in."""
    g = torch.Generator().manual_seed(seed)
    dt = coefficients.dt
    return replace(
        coefficients,
        right=dt * torch.rand(dt.shape, generator=g),
        left=torch.randn(dt.shape, generator=g),
        conv=torch.randn(dt.shape[2], 4, generator=g) / 2,
    )


_clock = time.perf_counter


def seconds(*functions: Callable[[], object], repeats: int = 5) -> list[float]:
    """The best time of each function. They take turns, so that other load on the machine
    affects all of them alike; ratios are more reliable than times.
    """
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for k, f in enumerate(functions):
            start = _clock()
            f()
            best[k] = min(best[k], _clock() - start)
    return best


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest entry."""
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


def check(name: str, actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> float:
    """Stop unless both sides of a comparison agree."""
    error = relative_error(actual, expected)
    if not error <= tolerance:
        raise SystemExit(f"{name}: the sides differ by {error:.1e}")
    return error


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, by the processor time it took: for a machine that is busy otherwise",
    )
    args = parser.parse_args()
    if args.cpu_time:
        global _clock
        args.threads, _clock = 1, time.process_time
    torch.set_num_threads(args.threads)
    if not extension_loaded():
        raise SystemExit("the compiled kernels are not loaded: there is nothing to measure")
    return args


def save(name: str, args: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Write the rows with the machine and versions they belong to."""
    if not args.no_save:
        _record.save(_record.RESULTS / f"{name}.json", name, rows, cpu_time=args.cpu_time)
