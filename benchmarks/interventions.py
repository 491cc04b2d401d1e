"""What interventions cost, how well cheap patching follows exact patching, and which explanation
agrees with knockout.

    python benchmarks/interventions.py cost --lengths 1024 16384 --layers 24 --vocabulary 50280
    python benchmarks/interventions.py sweep
    python benchmarks/interventions.py patching
    python benchmarks/interventions.py agreement

``cost``: one knockout run of all layers over the model's own forward, checked first against the run
with no source, which it has to equal. ``sweep``: TokenKnockout in batches over one run per token.
``patching``: rank correlation of attribution patching (gradients, RelP) with activation patching.
``agreement``: rank correlation and top-5 overlap of each method's relevance with TokenKnockout's,
on the copying task, next to how often its largest entry is the copied token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _record import RESULTS, save
from torch import Tensor

from captum_ssm.attr import methods
from captum_ssm.interventions import (
    TokenKnockout,
    activation_patching,
    attribution_patching,
    knockout,
)
from captum_ssm.metrics import knockout_agreement

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tutorials" / "models"
sys.path.append(str(ROOT / "benchmarks" / "copying"))
from task import SEPARATOR_ID, held_out_batch, predicting_positions, source_positions  # noqa: E402

LENGTH = 20


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The least time of some repeats."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def shaped(kind: str, width: int, layers: int, vocabulary: int) -> Any:
    """A model of random weights in the shape of a published one."""
    torch.manual_seed(0)
    shared = dict(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, use_cache=False
    )
    if kind == "mamba":
        config = transformers.MambaConfig(**shared, state_size=16)
        return transformers.MambaForCausalLM(config).eval()
    config = transformers.Mamba2Config(
        **shared, state_size=64, head_dim=64, num_heads=width // 32, n_groups=1
    )
    return transformers.Mamba2ForCausalLM(config).eval()


def cost(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One knockout run over the model's own forward."""
    rows = []
    for kind in options.models:
        model = shaped(kind, options.width, options.layers, options.vocabulary)
        for length in options.lengths:
            ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))

            def own(model: Any = model, ids: Tensor = ids) -> Tensor:
                with torch.no_grad():
                    return model(ids).logits

            def knocked(
                sources: Any = slice(100, 200), model: Any = model, ids: Tensor = ids, **more: Any
            ) -> Tensor:
                with torch.no_grad(), knockout(model, sources=sources, **more):
                    return model(ids).logits

            if not torch.equal(knocked(sources=[]), own()):
                raise SystemExit(f"{kind}: a knockout of nothing changes the logits")
            row = {"model": kind, "tokens": length, "forward": seconds(own, options.repeats)}
            row["knockout"] = seconds(knocked, options.repeats)
            row["unchecked"] = seconds(lambda: knocked(check=False), options.repeats)
            row["ratio"] = row["knockout"] / row["forward"]
            rows.append(row)
            print(row)
    return rows


def copying(kind: str) -> Any:
    """The model trained to copy."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / f"copying-{kind}").eval()


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """TokenKnockout in batches over one run per token."""
    rows = []
    batch = held_out_batch(1, torch.Generator().manual_seed(0), LENGTH)
    for kind in ("mamba", "mamba2"):
        method = TokenKnockout(copying(kind))
        target = int(batch.targets[0, -1])

        def run(count: int, method: TokenKnockout = method, target: int = target) -> Tensor:
            return method.attribute(batch.inputs, target=target, perturbations_per_eval=count)

        if not torch.allclose(run(1), run(40), atol=1e-4):
            raise SystemExit(f"{kind}: batches change the relevance")
        row: dict[str, Any] = {"model": kind, "tokens": batch.inputs.shape[1]}
        row["one by one"], row["batched"] = (
            seconds(lambda n=n: run(n), options.repeats) for n in (1, 40)
        )  # type: ignore[misc]
        row["ratio"] = row["one by one"] / row["batched"]
        rows.append(row)
        print(row)
    return rows


def pairs(name: str) -> tuple[Any, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """A model, clean and corrupted inputs, and a score: the answer's logit less the other one's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
    if name.startswith("copying"):
        clean = held_out_batch(8, torch.Generator().manual_seed(1), LENGTH).inputs
        place = LENGTH - 6
        corrupted, position = clean.clone(), LENGTH + place
        corrupted[:, place] = (corrupted[:, place] + 11) % SEPARATOR_ID
        answers = clean[:, place], corrupted[:, place]
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
        text = "{0} has a {1} ball. {0}'s ball is"
        names, colors = ("Anna", "Tom"), ("red", "blue")
        clean, corrupted = (
            tokenizer([text.format(n, c) for n in names], return_tensors="pt").input_ids
            for c in colors
        )
        position = -1
        ids = [tokenizer(f" {c}", add_special_tokens=False).input_ids[0] for c in colors]
        answers = torch.tensor(ids)[:, None].expand(-1, len(names)).unbind()

    def difference(inputs: Tensor) -> Tensor:
        logits = model(inputs).logits[:, position]
        k = len(inputs) // len(clean)
        right, wrong = (logits.gather(1, a.repeat(k)[:, None])[:, 0] for a in answers)
        return right - wrong

    return model, clean, corrupted, difference


def patching(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Correlation of attribution patching with activation patching."""
    rows = []
    for name in ("copying-mamba", "copying-mamba2", "stories-qwen3next"):
        model, clean, corrupted, score = pairs(name)
        for component in ("output", "values", "state"):
            truth = activation_patching(
                score, clean, corrupted, model=model, component=component, perturbations_per_eval=40
            )
            for rule in ("gradient", "relp"):
                found = attribution_patching(
                    score, clean, corrupted, model=model, rule=rule, components=[component]
                )[component]
                x, y = (t.effects.flatten().double() for t in (found, truth))
                ranks = [t.argsort().argsort().double() for t in (x, y)]
                row = {
                    "model": name,
                    "component": component,
                    "rule": rule,
                    "pearson": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
                    "spearman": float(torch.corrcoef(torch.stack(ranks))[0, 1]),
                    "best share": float(truth.shares.amax((1, 2)).mean()),
                }
                rows.append(row)
                print(row)
    return rows


def agreement(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each method's relevance against TokenKnockout's effects, on the copying task."""
    rows = []
    for kind in ("mamba", "mamba2"):
        model = copying(kind)
        batch = held_out_batch(options.examples, torch.Generator().manual_seed(2), LENGTH)
        ids = batch.inputs
        for k in (4, 10, 16):
            position = int(predicting_positions(LENGTH)[k])
            answer = int(source_positions(LENGTH)[k])
            asked = {"target": batch.targets[:, k], "position": position}
            mask = (torch.arange(ids.shape[1]) < position).expand_as(ids)
            effects = {
                readers: TokenKnockout(model).attribute(
                    ids, readers=readers, perturbations_per_eval=40, **asked
                )
                for readers in ("later", "query")
            }
            found = {f"token-knockout, {readers}": one for readers, one in effects.items()}
            for name, method in methods().items():
                if method.__module__.startswith("captum_ssm"):
                    found[name] = method(model).attribute(ids, **asked)
            for name, relevance in found.items():
                hits = relevance.masked_fill(~mask, -torch.inf).argmax(1) == answer
                row = {"model": f"copying-{kind}", "copied": k, "method": name}
                for readers, one in effects.items():
                    scores = knockout_agreement(relevance, one, mask=mask)
                    row |= {
                        f"rank, {readers}": float(scores.rank.nanmean()),
                        f"overlap, {readers}": float(scores.overlap.mean()),
                    }
                rows.append(row | {"hits": float(hits.double().mean())})
    table: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        table.setdefault((row["model"], row["method"]), []).append(row)
    numbers = [key for key in rows[0] if key not in ("model", "method", "copied")]
    joined = [
        {"model": m, "method": name}
        | {key: sum(r[key] for r in part) / len(part) for key in numbers}
        for (m, name), part in table.items()
    ]
    for row in joined:
        print(row)
    return joined


def main() -> None:
    """Run one of the benchmarks and save its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "sweep", "patching", "agreement"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=["mamba", "mamba2"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = globals()[options.what](options)
    save(
        options.out / f"interventions-{options.what}.json", f"interventions: {options.what}", found
    )


if __name__ == "__main__":
    main()
