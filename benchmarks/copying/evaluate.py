"""Which method points at the token that was copied: the table of LaTIM's section 4.1, measured.

A model that copies well draws every copied token from one source token, so the true explanation
of each prediction is known. Each method's map of predictions to source tokens is compared with
it: area under the ROC curve, average precision and recall at K against the three diagonals
around the answer (the paper's ground truth), and how often the largest source-token score lies
within one token of the answer. Methods that explain one layer are read at the layer that does
best on other examples.

    python benchmarks/copying/evaluate.py --model tutorials/models/copying-mamba
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import captum_ssm
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.examples.copying import (
    CopyBatch,
    alignment,
    decode,
    held_out_batch,
    predicting_positions,
)
from captum_ssm.metrics import alignment_scores, hit_rate
from captum_ssm.visualization import interaction_map

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _evaluating import Readings, Rows, best_layer, versions, write

HERE = Path(__file__).resolve().parent
SAME = ("model", "examples", "length", "accuracy")  # of results that are put together
# Pitorro & Treviso (2025), table 2: AUC, AP, R@K, on 13M-parameter models and 50-token strings.
PAPER = {
    "mamba": {
        "Mamba-Attention": (0.84, 0.36, 0.22),
        "Mamba-Attribution": (0.83, 0.31, 0.19),
        "MambaLRP": (0.40, 0.22, 0.20),
        "LaTIM (l2, silu)": (0.88, 0.41, 0.27),
        "LaTIM (ALTI, silu)": (0.86, 0.47, 0.36),
        "LaTIM (ALTI-Logit, silu)": (0.85, 0.44, 0.31),
    },
    "mamba2": {
        "Mamba-Attention": (0.79, 0.49, 0.39),
        "Mamba-Attribution": (0.79, 0.47, 0.39),
        "LaTIM (l2, silu)": (0.98, 0.86, 0.74),
        "LaTIM (ALTI, silu)": (0.85, 0.71, 0.63),
        "LaTIM (ALTI-Logit, silu)": (0.87, 0.70, 0.61),
    },
}

READINGS = Readings(lambda batch: (predicting_positions(batch.length), batch.length))
by_position, by_map = READINGS.by_position, READINGS.by_map


def by_matrix(rollout: Callable[..., Tensor], **options: Any) -> Rows:
    """A whole map of a class-agnostic method, cut to predictions and source tokens."""

    def rows(batch: CopyBatch) -> Tensor:
        return rollout(batch.inputs, **options)[:, batch.length :, : batch.length]

    return rows


def layer_map(model: Any, layer: int | None, formulation: str, absolute: bool = False) -> Rows:
    """The channel-mean implicit attention of one layer, or the mean over layers."""

    def rows(batch: CopyBatch) -> Tensor:
        n = batch.length
        maps = hidden_attention(
            model,
            batch.inputs,
            layers=layer,
            formulation=formulation,
            reduction="mean",
            rows=predicting_positions(n),
        )
        found = torch.stack(list(maps.values())).mean(0)[..., :n]
        return found.abs() if absolute else found

    return rows


def methods(
    model: Any, layers: int, activations: Sequence[str]
) -> Iterator[tuple[str, list[Rows]]]:
    """Each method by name, with one map for each layer it can be read at."""
    unified, latim = UnifiedImplicitAttention(model), LaTIM(model)
    for name, formulation in (("Mamba-Attention", "hidden"), ("Unified (raw)", "unified")):
        yield f"{name}, all layers", [layer_map(model, None, formulation)]
        yield name, [layer_map(model, k, formulation) for k in range(layers)]
        yield (
            f"{name}, absolute",
            [layer_map(model, k, formulation, absolute=True) for k in range(layers)],
        )
    yield "Rollout", [by_matrix(MambaRollout(model).rollout)]
    yield "Unified (rollout)", [by_matrix(unified.rollout, aggregation="rollout")]
    yield "Mamba-Attribution", [by_position(MambaAttribution(model))]
    yield "Unified (attribution)", [by_position(unified)]
    yield "MambaLRP", [by_position(MambaLRP(model))]
    for activation in activations:
        for name, aggregation in (("l2", "l2"), ("ALTI", "alti")):
            yield (
                f"LaTIM ({name}, {activation})",
                [by_map(latim, k, aggregation, activation) for k in range(layers)],
            )
        yield (
            f"LaTIM (ALTI-Logit, {activation})",
            [by_map(latim, None, "alti_logit", activation)],
        )
    for activation in activations[:2]:
        yield (
            f"LaTIM (flow-logit, {activation})",
            [by_position(latim, aggregation="flow_logit", activation=activation)],
        )


def score(maps: Rows, examples: list[CopyBatch]) -> dict[str, float]:
    """The scores of one map over some batches of one length."""
    return score_of(torch.cat([maps(batch) for batch in examples]))


def score_of(found: Tensor) -> dict[str, float]:
    """The scores of maps ``(examples, n, n)`` of predictions to source tokens."""
    n = found.shape[-1]
    truth = alignment(n, (-1, 0, 1))[:, :n]
    scores = alignment_scores(found, truth)
    return {
        "auc": scores["auc"],
        "ap": scores["ap"],
        "recall_at_k": scores["recall_at_k"],
        "hit": hit_rate(found, torch.arange(n).expand(found.shape[0], n)),
    }


def batches(count: int, length: int, generator: torch.Generator) -> list[CopyBatch]:
    """Held-out strings of one length, about 200 predictions at a time."""
    size = max(1, 200 // length)
    parts = [min(size, count - first) for first in range(0, count, size)]
    return [held_out_batch(part, generator, length) for part in parts]


def accuracy(model: Any, examples: list[CopyBatch]) -> float:
    """Share of the explained predictions that are right."""
    right = [
        (model(b.inputs).logits[:, predicting_positions(b.length)].argmax(-1) == b.targets)
        for b in examples
    ]
    return float(torch.cat(right).double().mean())


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, the paper's numbers next to ours."""
    lines = [
        "| method | layer | AUC | AP | R@K | within one | paper: AUC / AP / R@K |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results["methods"].items():
        theirs = " / ".join(f"{x:.2f}" for x in row.get("paper", ()))
        layer = "all" if row["layer"] is None else row["layer"]
        lines.append(
            f"| {name} | {layer} | {row['auc']:.3f} | {row['ap']:.3f} | "
            f"{row['recall_at_k']:.3f} | {100 * row['hit']:.1f}% | {theirs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE.parents[1] / "tutorials/models/copying-mamba"))
    parser.add_argument("--examples", type=int, default=100, help="held-out strings scored")
    parser.add_argument("--chosen-on", type=int, default=10, help="strings to choose a layer by")
    parser.add_argument("--length", type=int, default=20, help="symbols of a string")
    parser.add_argument(
        "--activations", nargs="+", default=["silu", "gate", "taylor1", "taylor2"], help="of LaTIM"
    )
    parser.add_argument("--only", default="", help="only methods with this in their names")
    parser.add_argument("--name", help="of the result; default: the model's folder")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--figures", type=Path, help="also write each method's heatmap here")
    args = parser.parse_args()

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    generator = torch.Generator().manual_seed(1)
    chosen_on = batches(args.chosen_on, args.length, generator)
    scored_on = batches(args.examples, args.length, generator)
    results: dict[str, Any] = {
        "model": args.name or Path(args.model).name,
        "model_type": model.config.model_type,
        "examples": args.examples,
        "length": args.length,
        "layers": model.config.num_hidden_layers,
        "width": model.config.hidden_size,
        "machine": platform.machine(),
        **versions(torch, transformers, captum_ssm),
        "methods": {},
    }
    with torch.no_grad():
        results["accuracy"] = accuracy(model, scored_on)
    path = args.output / f"{results['model']}.json"
    if args.only:  # the others stay as they were measured, on the same strings
        before = json.loads(path.read_text())
        if [before[key] for key in SAME] != [results[key] for key in SAME]:
            raise SystemExit(f"{path} is of {before}; --only needs the same {', '.join(SAME)}.")
        results["methods"] = before["methods"]
    layers = model.config.num_hidden_layers
    chosen = [m for m in methods(model, layers, args.activations) if args.only in m[0]]
    for name, readings in tqdm(chosen, desc="methods"):
        layer = best_layer(readings, lambda maps: score(maps, chosen_on)["ap"])
        maps = readings[layer or 0]
        results["methods"][name] = {"layer": layer, **score(maps, scored_on)}
        if args.figures:
            args.figures.mkdir(parents=True, exist_ok=True)
            batch = scored_on[0]
            symbols = decode(batch.source[0])
            figure = interaction_map(
                maps(batch)[0], symbols, row_tokens=symbols, title=f"{name}: prediction i, source j"
            )
            slug = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
            figure.savefig(args.figures / f"{slug}.png", dpi=100)
    for name, scores in PAPER.get(results["model_type"], {}).items():
        if name in results["methods"]:
            results["methods"][name]["paper"] = scores
    text = (
        f"# {results['model']}\n\n{args.examples} held-out strings of {args.length} symbols; the "
        f"model predicts {100 * results['accuracy']:.2f}% of the copied tokens.\n\n"
        f"{table(results)}\n"
    )
    write(args.output, results["model"], results, text)
    print(text)


if __name__ == "__main__":
    main()
