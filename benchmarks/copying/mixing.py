"""Why ALTI-Logit misses the copied token: its dot products under one mixing after another.

ALTI-Logit (Pitorro & Treviso 2025, eq. 8) is a sum over layers of dot products with the target's
direction, carried to the input tokens by the mixing R of the layers below. This script keeps the
dot products and changes one thing at a time: what the vectors of a layer are compared with, with
which norm, with or without the residual stream, the activation's form, the direction, which
layers count. It also measures how much of the source tokens' streams a mixing leaves with them.

    python benchmarks/copying/mixing.py --model tutorials/models/copying-mamba
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from evaluate import by_position, score_of
from torch import Tensor

from captum_ssm import LaTIM
from captum_ssm.examples.copying import CopyBatch, held_out_batch

HERE = Path(__file__).resolve().parent
ACTIVATIONS = ("gate", "silu")


def shares(near: Tensor) -> Tensor:
    """Rows that sum to one; a row of nothing is the token's own, as in the library."""
    total = near.sum(-1, keepdim=True)
    return torch.where(total > 0, near / total.clamp(min=1e-30), torch.eye(near.shape[-1]))


def alti(vectors: Tensor, output: Tensor, order: float = 1.0) -> Tensor:
    """Eq. 6 before its rows are divided: ``(L, L)`` of vectors ``(L, L, E)``."""
    distance = torch.linalg.vector_norm(output[:, None] - vectors, ord=order, dim=-1)
    near = torch.linalg.vector_norm(output, ord=order, dim=-1)[:, None] - distance
    return torch.where(near > 1e-6 * near.abs().max(), near, 0)


def rows_of(kind: str, vectors: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The mixing of one layer, from its vectors and the stream before and after it."""
    L = len(vectors)
    if kind == "none":
        return torch.eye(L)
    with_stream = vectors + torch.diag_embed(before.mT).permute(1, 2, 0)
    total = with_stream.sum(1)
    return {
        "ALTI": lambda: shares(alti(with_stream, total)),
        "ALTI, compared with the layer's output": lambda: shares(alti(with_stream, after)),
        "ALTI, l2 distances": lambda: shares(alti(with_stream, total, 2.0)),
        "ALTI, without the residual stream": lambda: shares(alti(vectors, vectors.sum(1))),
        "l2 norms": lambda: shares(with_stream.norm(dim=-1)),
    }[kind]()


KINDS = (
    "none",
    "ALTI",
    "ALTI, compared with the layer's output",
    "ALTI, l2 distances",
    "ALTI, without the residual stream",
    "l2 norms",
)


@torch.no_grad()
def streams(model: Any, ids: Tensor) -> Tensor:
    """The residual stream before each layer and after the last, ``(K + 1, L, E)``."""
    found: list[Tensor] = []
    modules = [*model.backbone.layers, model.backbone.norm_f]
    hooks = [m.register_forward_pre_hook(lambda _, args: found.append(args[0])) for m in modules]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found)


def one_example(
    model: Any, latim: LaTIM, batch: CopyBatch, activation: str
) -> Iterator[tuple[str, Tensor]]:
    """Maps ``(n, n)`` by name, and facts about the mixing, of one string."""
    n, ids = batch.length, batch.inputs
    stream, norm = streams(model, ids), model.backbone.norm_f
    K = len(stream) - 1
    read = model.lm_head.weight.detach()[batch.tokens[0, 1:]]
    scale = (stream[-1].square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    direction = read * norm.weight.detach() * scale
    rows = list(range(ids.shape[1]))
    vectors = [latim.contributions(ids, k, rows, activation=activation)[0] for k in range(K)]
    dots = [torch.einsum("ie,ije->ij", direction, v) for v in vectors]
    logit = (direction * stream[-1]).sum(-1)[n:]
    copied = torch.stack([d[n:, :n].diagonal() / logit for d in dots])  # (K, n)
    yield "share of the logit at the copied token, by layer", copied.mean(1)
    for kind in KINDS:
        mixing, maps, own = torch.eye(len(rows)), [], []
        for k in range(K):
            maps.append((dots[k] @ mixing)[n:, :n])
            own.append(mixing[:n, :n].diagonal().mean())
            mixing = rows_of(kind, vectors[k], stream[k], stream[k + 1]) @ mixing
        yield f"map: {kind}", sum(maps)
        yield f"map: {kind}, layer that copies", maps[int(copied.mean(1).argmax())]
        yield f"own share of a source token before each layer: {kind}", torch.stack(own)
    plain = [torch.einsum("ie,ije->ij", read, v)[n:, :n] for v in vectors]
    yield "map: none, without the last norm", sum(plain)


def measured(model: Any, batch: CopyBatch) -> dict[str, Any]:
    """The scores of each map, and the means of the facts, over the strings of a batch."""
    latim, results = LaTIM(model), {}
    for activation in ACTIVATIONS:
        found: dict[str, list[Tensor]] = defaultdict(list)
        for tokens in batch.tokens.split(1):
            for name, value in one_example(
                model, latim, CopyBatch(tokens, batch.length), activation
            ):
                found[name].append(value)
        results[activation] = {
            name: score_of(torch.stack(values))
            if name.startswith("map: ")
            else [round(x, 4) for x in torch.stack(values).mean(0).tolist()]
            for name, values in found.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="of the result; default: the model's folder")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--edges", type=int, default=20, help="strings for the target's edges")
    parser.add_argument("--length", type=int, default=20)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    batch = held_out_batch(args.examples, torch.Generator().manual_seed(1), args.length)
    results = {"examples": args.examples, "length": args.length, **measured(model, batch)}
    few = [CopyBatch(tokens, args.length) for tokens in batch.tokens[: args.edges].split(1)]
    by_edges = by_position(LaTIM(model), aggregation="flow_logit")
    results["edges"] = {
        "examples": args.edges,
        "the target's edges": score_of(torch.cat([by_edges(one) for one in few])),
    }
    name = args.name or args.model.name
    (HERE / "results" / "mixing" / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
