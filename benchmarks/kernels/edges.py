"""What all relevance edges of a model cost, next to one forward pass of it.

The edges of a mixer are the channel sum of an operator: `recurrence.scaled(g, v)` where an edge
starts at the scan's values, and `recurrence.compose(left=g, skip=s, right=sigma, conv=C)
.scaled(None, u)` where it starts at the mixer's input. Here g is random, which leaves no row
without relevance. Small models of random weights, four layers of width 256. First the edges of a
short input are compared with those of whole maps in float64.

What has decayed to zero in float32 is not computed, and in these models much has: after tens of
tokens in Qwen3-Next's. ``--lasting`` sets all rates to nearly zero, so that every state lasts to
the end: the most that edges may cost.

    python benchmarks/kernels/edges.py --cpu-time
    python benchmarks/kernels/edges.py --cpu-time --lasting --output edges_lasting.json
"""

from __future__ import annotations

import itertools
import resource
from statistics import median
from typing import Any

import torch
import transformers
from _common import arguments, check
from _timing import keep, rounded, seconds, turns
from torch import Tensor

from captum_ssm.capture import Request, freeze
from captum_ssm.operators import PermutedOperator, SumOperator, TokenOperator

SHAPE: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4}
LONG = 16384
ROWS = 512
SLOW = -12.0  # the logarithm of a rate


def model_of(kind: str, lasting: bool = False) -> Any:
    torch.manual_seed(0)
    if kind == "mamba":
        config = transformers.MambaConfig(**SHAPE)
    elif kind == "mamba2":
        heads = {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 128}
        config = transformers.Mamba2Config(**SHAPE, **heads)
    else:
        delta = {f"linear_{what}_head_dim": 64 for what in ("key", "value")}
        config = transformers.Qwen3NextConfig(
            **SHAPE, **delta, linear_num_key_heads=4, linear_num_value_heads=8, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
            moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=4,
            num_experts_per_tok=2, max_position_embeddings=LONG,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, rate in model.named_parameters():
        if lasting and name.endswith("A_log"):
            rate.data.fill_(SLOW)
    return model


def ids_of(length: int) -> Tensor:
    return torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def edges_of(model: Any, length: int, formulation: str) -> list[TokenOperator]:
    """An operator for each mixer whose channel sum is its edges."""
    generator = torch.Generator().manual_seed(1)
    frozen = freeze(Request.of(model, model, ids_of(length), None), query=False, wiring=False)
    operators: list[TokenOperator] = []
    for layer in frozen.layers:
        parts: list[TokenOperator] = []
        for scan, order, _ in layer.mixer.scans_in_order():
            g = torch.randn(scan.values.shape, generator=generator)
            if formulation == "hidden":
                part = scan.recurrence.scaled(g, scan.values)
            else:
                factors = {"skip": scan.skip, "right": scan.activation, "conv": scan.conv}
                part = scan.recurrence.compose(left=g, **factors).scaled(None, scan.inputs)
            parts.append(part if order is None else PermutedOperator(part, order))
        operators.append(SumOperator(tuple(parts)))
    return operators


def all_edges(operators: list[TokenOperator]) -> list[Tensor]:
    return [operator.matrix("mean") * operator.channels for operator in operators]


def streamed(operators: list[TokenOperator]) -> None:
    """Every edge once, in tiles of rows."""
    for operator in operators:
        for start in range(0, operator.length, ROWS):
            operator.row_tile(start, min(operator.length, start + ROWS))


@torch.no_grad()
def main() -> None:
    args = arguments(__doc__, "edges", {"--lasting": "no state decays"})
    rows: list[dict[str, Any]] = []
    for kind, formulation in itertools.product(
        ("mamba", "mamba2", "qwen3-next"), ("hidden", "unified")
    ):
        model = model_of(kind, args.lasting)
        for operator in edges_of(model, 65, formulation):
            maps = operator.matrix().double().sum(1) * (operator.channels // operator.maps)
            check("edges", all_edges([operator])[0], maps)
        for length in args.lengths or (1024, 4096):
            ids, operators = ids_of(length), edges_of(model, length, formulation)
            taken = turns(
                lambda m=model, x=ids: m(x),
                lambda o=operators: all_edges(o),
                repeats=args.repeats,
            )
            ratios = sorted(edges / forward for forward, edges in zip(*taken, strict=True))
            forward, edges = (min(times) for times in taken)
            row = {"model": kind, "edges from": formulation, "length": length}
            row |= {"lasting": args.lasting, "forward_ms": 1e3 * forward, "edges_ms": 1e3 * edges}
            row |= {"least_ratio": ratios[0], "largest_ratio": ratios[-1]}
            rows.append(row | {"edges_over_forward": median(ratios)})
            print(rounded(rows[-1]), flush=True)
    keep(args, rows)
    if not args.lengths and not args.lasting:
        rows.append(longest(model_of("mamba"), "hidden"))
        print(rounded(rows[-1]), flush=True)
        keep(args, rows)


def longest(model: Any, formulation: str) -> dict[str, Any]:
    """The top 100 edges per layer of a long text, with what memory they took."""
    operators = edges_of(model, LONG, formulation)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward, top, tiles = seconds(
        lambda: model(ids_of(LONG)),
        lambda: [operator.top(100) for operator in operators],
        lambda: streamed(operators[-1:]),
        repeats=1,
    )
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    row = {"model": "mamba", "edges from": formulation, "length": LONG}
    row |= {
        "forward_ms": 1e3 * forward,
        "top100_ms": 1e3 * top,
        "last_layer_every_tile_ms": 1e3 * tiles,
    }
    return row | {"top100_over_forward": top / forward, "more_memory_mib": more}


if __name__ == "__main__":
    main()
