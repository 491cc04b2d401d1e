"""How close do LaTIM's interactions come to this machine's matrix products?

`interactions(aggregation="l2")` of one 130m-shaped layer: for every pair of tokens the vector one
adds to the other's output (768 numbers, a sum over 1536 channels), reduced to its norm, without the
(L, L, 768) tensor. Useful work counts each causal pair once. Checked first against the vectors of
some rows.

    python benchmarks/latim.py --length 512
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from _memory import peak_mib
from _timing import keep, options, parsed, turns
from torch import Tensor

from captum_ssm.attr.latim_parts.contributions import Contributions
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import DiagonalOperator

D, N, E, K = 1536, 16, 768, 4


def layer(length: int) -> FrozenMixer:
    """A frozen mixer of mamba-130m's shape with random contents."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    weight = normal(E, D) * D**-0.5
    dt = torch.rand(1, length, D, generator=g) * 0.1
    rates = -torch.arange(1.0, N + 1).repeat(D, 1)
    return FrozenMixer(
        recurrence=DiagonalOperator(
            dt, dt, rates, normal(1, length, 1, N), normal(1, length, 1, N)
        ),
        inputs=normal(1, length, D),
        out_proj=lambda y: y @ weight.mT,
        out_weight=weight,
        skip=torch.ones(D),
        conv=normal(D, K),
        conv_bias=normal(D),
        activation=torch.rand(1, length, D, generator=g),
        gate=normal(1, length, D),
    )


def norms(contributions: Contributions) -> Tensor:
    """The l2 interactions, ``(1, L, L)``."""

    def reduce(vectors: Tensor, rows: slice, columns: slice) -> Tensor:
        return torch.linalg.vector_norm(vectors, dim=1)

    L = contributions.length
    found = torch.zeros(1, L, L)
    for rows in contributions.tiles(torch.arange(L)):
        columns = contributions.columns(rows)
        found[:, rows, :columns] = contributions.reduced(rows[None], columns, reduce)
    return found


def sides(length: int, activation: str) -> dict[str, Callable[[], object]]:
    """What memory is compared of: the interactions, and what they are made of."""
    contributions = Contributions([layer(length)], activation)
    return {"idle": lambda: None, "norms": lambda: norms(contributions)}


def main() -> None:
    parser = options(__doc__, "latim", repeats=3)
    parser.add_argument("--length", type=int, default=512)
    args = parsed(parser)
    L = args.length
    a, b = torch.randn(2, 2048, 2048)
    mixer = layer(L)
    rows = []
    for activation in ("gate", "silu"):
        contributions = Contributions([mixer], activation)
        found = norms(contributions)
        idle, peak = (peak_mib(__file__, "sides", s, L, activation) for s in ("idle", "norms"))
        index = torch.tensor([[0, L // 3, L - 1]])
        expected = contributions.vectors(index).norm(dim=-1)
        error = float((found[:, index[0]] - expected).abs().max() / expected.abs().max())
        if not error < 1e-5:
            raise SystemExit(f"the tiles differ from the vectors by {error:.1e}")
        taken, products = turns(
            lambda c=contributions: norms(c), lambda: a @ b, repeats=args.repeats
        )
        best, product = statistics.median(taken), statistics.median(products)
        work = L * (L + 1) * D * E
        share = (work / best) / (2 * 2048**3 / product)
        row = {"activation": activation, "seconds": best, "share_of_mm": share}
        rows.append(row | {"extra_MiB": peak - idle})
        print(f"{activation}: {best:.2f} s, {share:.0%} of torch.mm, {peak - idle:.0f} MiB more")
    keep(args, rows, length=L)


if __name__ == "__main__":
    main()
