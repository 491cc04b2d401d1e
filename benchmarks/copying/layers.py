"""Where in a deep model copying sits: by LaTIM, by knockout and by circuit, layer by layer.

python benchmarks/copying/layers.py --model FOLDER --length 50
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from evaluate import accuracy, by_map, by_position, score_of
from torch import Tensor

from captum_ssm import LaTIM, RelevanceFlow
from captum_ssm.examples.copying import CopyBatch, held_out_batch, predicting_positions
from captum_ssm.interventions import circuit
from captum_ssm.metrics import find_circuit

HERE = Path(__file__).resolve().parent


def crossing(batch: CopyBatch) -> Tensor:
    """The edges from source tokens to the tokens that predict the copy, ``(L, L)``."""
    mask = torch.zeros(batch.inputs.shape[1], batch.inputs.shape[1], dtype=torch.bool)
    mask[batch.length :, : batch.length] = True
    return mask


@torch.no_grad()
def without(model: Any, batch: CopyBatch, layer: int) -> float:
    """Share of right predictions without a layer's edges from the source to the copy."""
    with circuit(model, {layer: crossing(batch)}, remove=True, formulation="unified"):
        return accuracy(model, [batch])


def flows(model: Any, batch: CopyBatch) -> list[float]:
    """By layer, the share of the relevance that goes from the source straight to the query."""
    n, shares = batch.length, []
    for tokens in batch.tokens.split(1):
        edges = RelevanceFlow(model).edges(
            tokens[:, :-1].expand(n, -1),
            target=tokens[0, n + 1 :],
            position=predicting_positions(n),
            against=None,
            formulation="unified",
        )
        rows = predicting_positions(n)[:, None]
        crossed = [layer.rows(rows)[:, 0, :n].sum(-1) for layer in edges.values()]
        shares.append((torch.stack(crossed) / edges.score).mean(1))
    return torch.stack(shares).mean(0).tolist()


def circuits(model: Any, batch: CopyBatch, count: int) -> dict[str, Any]:
    """Edges of the circuits of some predictions, by layer; those that cross to the copy apart."""
    n, found = batch.length, []
    for tokens in batch.tokens[:count]:
        at = n + n // 2
        others = held_out_batch(8, torch.Generator().manual_seed(int(tokens.sum())), n).inputs
        found.append(
            find_circuit(
                model,
                tokens[None, :-1],
                (at, int(tokens[at + 1])),
                reference_inputs=others,
                max_edges=256,
            )
        )
    names = [name for name, _ in model.named_modules() if name.endswith("mixer")]
    edges = [edge for one in found for edge in one.edges]
    crossed = [edge for edge in edges if edge.source < n <= edge.target]
    return {
        "predictions": count,
        "reached": sum(one.reached for one in found),
        "edges": _by_layer(edges, names),
        "edges from source to copy": _by_layer(crossed, names),
    }


def _by_layer(edges: list[Any], names: list[str]) -> list[int]:
    counts = Counter(edge.layer for edge in edges)
    return [counts[name] + counts[k] for k, name in enumerate(names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="of the result; default: the model's folder")
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--circuits", type=int, default=5)
    parser.add_argument("--length", type=int, default=50)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    batch = held_out_batch(args.examples, torch.Generator().manual_seed(1), args.length)
    few = [CopyBatch(tokens, args.length) for tokens in batch.tokens[:5].split(1)]
    latim, layers = LaTIM(model), range(model.config.num_hidden_layers)
    results = {
        "examples": args.examples,
        "length": args.length,
        "accuracy": accuracy(model, [batch]),
        "accuracy without a layer's edges": [without(model, batch, k) for k in layers],
        "LaTIM l2, AP": [
            score_of(torch.cat([by_map(latim, k, "l2", "gate")(one) for one in few]))["ap"]
            for k in layers
        ],
        "what a layer adds to the logit, AP": [
            score_of(torch.cat([by_position(latim, layer=k)(one) for one in few]))["ap"]
            for k in layers
        ],
        "share of the relevance from source to copy": flows(model, batch),
        "circuits": circuits(model, batch, args.circuits),
    }
    name = args.name or args.model.name
    (HERE / "results" / "layers" / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
