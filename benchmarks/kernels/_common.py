"""What the kernel benchmarks share: inputs shaped like a layer, checks, options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from captum_ssm.kernels import DiagonalCoefficients, extension_loaded
from captum_ssm.operators import LinearAttentionOperator

sys.path.append(str(Path(__file__).resolve().parents[1]))
import _timing


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
    """A layer with its activation, gate and convolution of width 4 folded in."""
    g = torch.Generator().manual_seed(seed)
    dt = coefficients.dt
    return replace(
        coefficients,
        right=dt * torch.rand(dt.shape, generator=g),
        left=torch.randn(dt.shape, generator=g),
        conv=torch.randn(dt.shape[2], 4, generator=g) / 2,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest entry."""
    actual, expected = (x.detach().double().cpu() for x in (actual, expected))
    return float((actual - expected).abs().max() / expected.abs().max())


def check(name: str, actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> float:
    """Stop unless both sides of a comparison agree."""
    error = relative_error(actual, expected)
    if not error <= tolerance:
        raise SystemExit(f"{name}: the sides differ by {error:.1e}")
    return error


def arguments(
    description: str | None, name: str, flags: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """The options of every script here, and more flags; there have to be kernels to measure."""
    parser = _timing.options(description, name)
    for flag, says in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=says)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--device", default="cpu", help="of operators.py. Default: cpu")
    args = _timing.parsed(parser)
    if not extension_loaded():
        raise SystemExit("the compiled kernels are not loaded: there is nothing to measure")
    return args


# Shapes of heads that people run, by the name of their kind: arguments of ``linear_attention``.
HEADS: dict[str, dict[str, Any]] = {
    "decay per head, 24 heads of 64, state 128": {"heads": 24, "width": 64},
    "decay per key, 8 heads of 128, state 128": {"heads": 8, "width": 128, "per_key": True},
    "gated delta rule, 16 heads of 128, state 128": {"heads": 16, "width": 128, "delta": True},
}


def linear_attention(
    length: int,
    heads: int,
    width: int,
    per_key: bool = False,
    delta: bool = False,
    state: int = 128,
) -> LinearAttentionOperator:
    """Linear attention, or the delta rule, with one decay per head or per key."""
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, length, heads, state, generator=g) * state**-0.5
    decay = -torch.rand(1, length, heads, state if per_key else 1, generator=g) * 0.1
    if not delta:
        return LinearAttentionOperator(query, key, decay, width=width)
    probe = torch.nn.functional.normalize(key, dim=-1)
    write = probe * torch.rand(1, length, heads, 1, generator=g)
    return LinearAttentionOperator(query, write, decay, write, probe, width=width)
