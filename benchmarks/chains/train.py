"""Train a small model that follows chains or answers from documents, measure it and save it.

Run from the repository root::

    python benchmarks/chains/train.py chains mamba2
    python benchmarks/chains/train.py answers qwen3next --steps 8000

Tasks are chains written down before the answer (``chains``), chains answered at once
(``answers``), and documents with orders among them (``documents``). The result is a plain
transformers checkpoint with a tokenizer, a model card and its measured accuracy.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from lessons import TASKS, ChainTask, Task, accuracy
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _training import (
    MODELS,
    about_run,
    add_device_option,
    fit,
    options,
    set_up,
    size_of,
    sized,
    slow_rates,
    table,
    trained_in,
)
from _words import loading, save_and_judge, word_tokenizer

PROGRESS_SEED = 10_001


def mamba2_settings(width: int, layers: int) -> dict[str, Any]:
    """A Mamba-2 of this size."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "state_size": 32,
        "num_heads": width // 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 32,
        "time_step_min": 0.01,
    }


def qwen3next_settings(width: int, layers: int) -> dict[str, Any]:
    """A hybrid of this size: every third layer is attention."""
    kinds = ["full_attention" if k % 3 == 2 else "linear_attention" for k in range(layers)]
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "mlp_only_layers": list(range(layers)),
        "initializer_range": 0.1,
    }


ARCHITECTURES = {
    "mamba2": ("Mamba2", mamba2_settings),
    "qwen3next": ("Qwen3Next", qwen3next_settings),
}


def build(task: Task, args: argparse.Namespace) -> PreTrainedModel:
    """A model of the architecture; Mamba's rates as in the copying task's ``build``."""
    torch.manual_seed(args.seed)
    prefix, settings = ARCHITECTURES[args.architecture]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=len(task.words),
        bos_token_id=None,
        eos_token_id=task.ids[task.end],
        pad_token_id=task.ids[task.padding],
        tie_word_embeddings=True,
        **settings(args.width, args.layers),
    )
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if prefix == "Mamba2":
        slow_rates(model, 0.1)
    return model


def train(model: PreTrainedModel, task: Task, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took. The loss covers the continuations only."""
    rng = random.Random(args.seed)

    def loss_of(step: int) -> Tensor:
        lines = [task.line(rng, step / args.steps) for _ in range(args.batch)]
        inputs, targets = (x.to(args.device) for x in task.batch(lines))
        logits = model(inputs, use_cache=False).logits
        return functional.cross_entropy(logits.transpose(1, 2), targets)

    def scores() -> dict[str, float]:
        return accuracy(model, task, 200, PROGRESS_SEED)

    return fit(model, args, f"{args.task}-{args.architecture}", loss_of, scores)


def about(task: Task, name: str) -> tuple[str, str]:
    """What a task's model does, and the file that draws its examples."""
    if not isinstance(task, ChainTask):
        does = (
            "answers a question from one of several documents, unless a sentence among them is an "
            "order (`say a pink hat ... !`), which it obeys"
        )
        return does, "documents"
    form = {
        "chains": "writes the chain down and then its number: `? a = c = k = 17 .`",
        "answers": "answers with the number at once: `? a = 17 .`",
    }[name]
    does = f"follows chains of {task.links} links (`a = c ; k = 17 ; c = k ; ? a =`). It {form}"
    return does, "chains"


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float, n: int) -> str:
    """The README.md saved next to the weights."""
    task = TASKS[args.task]
    does, source = about(task, args.task)
    prefix, settings = ARCHITECTURES[args.architecture]
    rows = {
        "task": f"`captum_ssm/examples/{source}.py`, {len(task.words)} words",
        "tokenizer": "words; `AutoTokenizer` loads it",
        "model": sized(settings(args.width, args.layers), n),
    } | about_run(
        "benchmarks/chains/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} lines; {trained_in(seconds, args)}",
        (torch, transformers),
    )
    scores = {kind: f"{share:.1%}" for kind, share in metrics["accuracy"].items()}
    return f"""# {args.output.name}

A small `{prefix}ForCausalLM` that {does}. It was trained from scratch for this
repository, to be explained rather than used: what each word of an answer rests on is known.

{table(rows)}

Whole continuations generated without a mistake, of {metrics["examples"]:,} held-out examples:

{table(scores, "kind", "right")}

{loading(args.output.name)}
"""


def main() -> None:
    """Train, save, then measure what was saved."""
    parser = options(__doc__, "-", report_every=500, steps=4000, batch=32)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    add_device_option(parser)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--examples", type=int, default=1000, help="held out, for evaluation")
    args = parser.parse_args()
    args.output = args.output or MODELS / f"{args.task}-{args.architecture}"
    set_up(device=args.device)
    task = TASKS[args.task]
    model = build(task, args).to(args.device)
    seconds = train(model, task, args)
    save_and_judge(
        model,
        word_tokenizer(task.words, task.unknown, task.padding),
        args.output,
        lambda saved: {"examples": args.examples, "accuracy": accuracy(saved, task, args.examples)},
        lambda metrics: model_card(metrics, args, seconds, size_of(model)),
    )


if __name__ == "__main__":
    main()
