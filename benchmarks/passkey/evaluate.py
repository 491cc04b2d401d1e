"""Which method points at the record that was looked up, and which at the others.

The model answers a question about one record among several (``records.py``); the answer
has one source in the context. For every method: how often its largest score over the tokens
of the context is at that very token (a), anywhere within the right record (b), or within one of the
other records (c), at once, twice and four times the longest context of training. Methods that
explain one layer are read at the layer that does best on other examples.

    python benchmarks/passkey/evaluate.py
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import accuracy, answer_logits, largest_at
from records import (
    CONTEXT,
    RECORD_LENGTH,
    RECORDS,
    VALUE_LENGTH,
    PasskeyBatch,
    decode,
    held_out_batch,
)
from tqdm import tqdm

import captum_ssm
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.visualization import interaction_map

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _evaluating import Readings, Rows, best_layer, versions, write

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "tutorials" / "models" / "passkey-mamba"
FACTORS = (1, 2, 4)
CHOOSING_SEED, SCORING_SEED = 1, 2
AT_ONCE = 10  # examples explained together
FIGURE_METHODS = ("Mamba-Attention", "MambaLRP", "LaTIM (ALTI, gate)")

READINGS = Readings(lambda batch: (batch.predicting_positions, batch.context))
by_position, by_map = READINGS.by_position, READINGS.by_map


def methods(model: Any) -> Iterator[tuple[str, list[Rows]]]:
    """Each method by name, with one function for each layer it can be read at."""
    layers = range(model.config.num_hidden_layers)
    raw, unified, latim = RawAttention(model), UnifiedImplicitAttention(model), LaTIM(model)
    yield "Mamba-Attention, all layers", [by_position(raw)]
    yield "Mamba-Attention", [by_position(raw, layers=k) for k in layers]
    yield "Rollout", [by_position(MambaRollout(model))]
    yield "Mamba-Attribution", [by_position(MambaAttribution(model))]
    for aggregation in ("raw", "rollout", "attribution"):
        yield f"Unified ({aggregation})", [by_position(unified, aggregation=aggregation)]
    yield "MambaLRP", [by_position(MambaLRP(model))]
    for activation in ("silu", "gate"):
        for name, aggregation in (("l2", "l2"), ("ALTI", "alti")):
            yield (
                f"LaTIM ({name}, {activation})",
                [by_map(latim, k, aggregation, activation) for k in layers],
            )
        yield f"LaTIM (ALTI-Logit, {activation})", [by_map(latim, None, "alti_logit", activation)]


def score(rows: Rows, batches: list[PasskeyBatch]) -> dict[str, float]:
    """Shares of the answers by where the largest score lies."""
    found = [largest_at(rows(batch), batch) for batch in batches]
    hits = {name: torch.cat([each[name] for each in found]).double() for name in found[0]}
    return {name: float(hit.mean()) for name, hit in hits.items()}


def batches(examples: int, context: int, seed: int) -> list[PasskeyBatch]:
    """Fixed held-out examples, in batches small enough to explain at once."""
    generator = torch.Generator().manual_seed(seed + context)
    count = max(1, examples // AT_ONCE)
    return [held_out_batch(AT_ONCE, generator, context) for _ in range(count)]


def chance(context: int) -> dict[str, float]:
    """The shares of a score drawn at random."""
    return {
        "token": 1 / context,
        "record": RECORD_LENGTH / context,
        "distractor": (RECORDS - 1) * RECORD_LENGTH / context,
    }


def figure(model: Any, context: int, layers: dict[str, int]) -> Any:
    """The answer's rows of some methods over one long context, as one heatmap.

    Every row is scaled by its largest magnitude; the labels under it are the records.
    """
    batch = held_out_batch(1, torch.Generator().manual_seed(SCORING_SEED), context)
    chosen = dict(methods(model))
    lines, names = [], []
    truth = torch.zeros(VALUE_LENGTH, context)
    truth.scatter_(1, batch.answer_positions[0][:, None], 1.0)
    answer = decode(batch.targets[0])
    for name in ("right token", *FIGURE_METHODS):
        rows = truth if name == "right token" else chosen[name][layers[name]](batch)[0]
        lines.append(rows / rows.abs().amax(-1, keepdim=True).clamp_min(1e-30))
        names += [f"{name}: {digit}" for digit in answer]
    words = decode(batch.tokens[0, :context])
    labels = [" "] * context
    for start in batch.starts[0].tolist():
        labels[start + 2] = (
            f"{words[start + 1]}: {' '.join(words[start + 2 : start + RECORD_LENGTH])}"
        )
    key = decode(batch.prompt[0])[-1]
    # No-break spaces stay blank where ordinary ones would be drawn as a mark.
    return interaction_map(
        torch.cat(lines),
        [label.replace(" ", "\u00a0") for label in labels],
        row_tokens=[name.replace(" ", "\u00a0") for name in names],
        title=f"{context} tokens of context, asked for {key}: the answer's row, scaled",
        max_labels=context,
    )


def table(results: dict[str, Any]) -> str:
    """The results as markdown: one line a method, three shares a length."""
    contexts = list(results["contexts"])
    head = " | ".join(f"{context}: token | record | distractor" for context in contexts)
    lines = [f"| method | layer | {head} |", "|---|---|" + "---|" * 3 * len(contexts)]
    for name, row in {**results["methods"], "(at random)": None}.items():
        layer, cells = "", []
        for context in contexts:
            shares = chance(int(context)) if row is None else row["contexts"][context]
            cells += [f"{shares[key]:.1%}" for key in ("token", "record", "distractor")]
        if row is not None:
            layer = "all" if row["layer"] is None else row["layer"]
        lines.append(f"| {name} | {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """The Markdown file next to the JSON."""
    reached = "\n".join(
        f"| {context} | {each['answered']:.2%} | {each['generated']:.2%} | "
        f"{each['explained']:.2%} |"
        for context, each in results["contexts"].items()
    )
    return f"""# {results["model"]}

{RECORDS} records of {RECORD_LENGTH} tokens among filler; the model was trained with at most
{CONTEXT} tokens of context. Its accuracy on held-out records:

| tokens of context | right of {results["judged"]} questions | the same, generated | \
right of the {results["examples"]} questions explained |
|---|---|---|---|
{reached}

Share of answers for which a method's largest score over the context lies at the right
value, within the right record, and within one of the {RECORDS - 1} other records. What is missing
to 100% is filler. Methods read at one layer use the one with the most hits of the right token on
other examples of {CONTEXT} tokens.

The hidden attention (first four lines) relates the inputs of the scan, in which the convolution has
already mixed every token with the three before it. Its largest score therefore often lies one or
two tokens after the right value, which counts as a miss here.

{table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--examples", type=int, default=50, help="questions explained, a length")
    parser.add_argument("--judged", type=int, default=500, help="questions for the accuracy")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    contexts = [factor * CONTEXT for factor in FACTORS]
    scored_on = {context: batches(args.examples, context, SCORING_SEED) for context in contexts}
    chosen_on = batches(50, CONTEXT, CHOOSING_SEED)
    results: dict[str, Any] = {
        "model": args.model.name,
        "examples": AT_ONCE * len(scored_on[CONTEXT]),
        "judged": args.judged,
        "machine": platform.machine(),
        **versions(torch, transformers, captum_ssm),
        "contexts": {},
        "methods": {},
    }
    for context in contexts:
        with torch.no_grad():
            right = [answer_logits(model, b).argmax(-1) == b.targets for b in scored_on[context]]
        results["contexts"][str(context)] = {
            **asdict(accuracy(model, context, args.judged)),
            "explained": float(torch.cat(right).double().mean()),
        }
    print(results["contexts"])
    for name, readings in tqdm(list(methods(model)), desc="methods"):
        layer = best_layer(
            readings, lambda rows: itemgetter("token", "record")(score(rows, chosen_on))
        )
        results["methods"][name] = {
            "layer": layer,
            "contexts": {
                str(context): score(readings[layer or 0], scored_on[context])
                for context in contexts
            },
        }
    write(args.output, results["model"], results, report(results))
    layers = {name: row["layer"] or 0 for name, row in results["methods"].items()}
    figure(model, contexts[-1], layers).savefig(args.output / f"{results['model']}.png", dpi=100)
    print(report(results))


if __name__ == "__main__":
    main()
