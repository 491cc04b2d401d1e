"""Train a small language model of one architecture on the stories, measure it and save it.

Run from the repository root::

    python benchmarks/language/train.py mamba
    python benchmarks/language/train.py rwkv

The result is a plain transformers checkpoint with a tokenizer, a model card and its measured
accuracy. Nothing from this directory is needed to run it. Training is reproducible from ``--seed``
with a fixed ``--threads`` on one machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from story_accuracy import accuracy
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from captum_ssm.examples.stories import (
    KINDS,
    PADDING,
    PADDING_ID,
    PEOPLE,
    UNKNOWN,
    UNKNOWN_ID,
    WORDS,
    make_batch,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _scan import fast_scan
from _training import about_run, fit, options, parsed, set_up, size_of, sized, slow_rates, table
from _words import loading, save_and_judge, word_tokenizer

SHORTEST_LESSON = 24
LESSONS = 0.3
BLANKS = 0.5

SHARED = {
    "vocab_size": len(WORDS),
    # Stories do not end: the defaults would stop generation at some word.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PADDING_ID,
    "tie_word_embeddings": True,
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": (
        "Mamba",
        {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 16, "time_step_min": 0.01},
    ),
    "mamba2": (
        "Mamba2",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "state_size": 32,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "time_step_min": 0.01,
        },
    ),
    "recurrentgemma": (
        "RecurrentGemma",
        {
            **ATTENTION,
            "hidden_size": 48,
            "lru_width": 48,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "w_init_variance_scale": 1.0,
        },
    ),
    "rwkv": (
        "Rwkv",
        {
            "hidden_size": 96,
            "attention_hidden_size": 96,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "context_length": 256,
            "rescale_every": 0,
        },
    ),
    "qwen3next": (
        "Qwen3Next",
        {
            **ATTENTION,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "mlp_only_layers": [0, 1, 2],
            "initializer_range": 0.1,
        },
    ),
}


def spec(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The architecture's class and its settings, with as many layers as were asked for."""
    prefix, settings = SPECS[args.architecture]
    return prefix, settings if args.layers is None else settings | {
        "num_hidden_layers": args.layers
    }


def build(args: argparse.Namespace) -> PreTrainedModel:
    """A model of the architecture; Mamba's rates as in the copying task's ``build``."""
    torch.manual_seed(args.seed)
    prefix, settings = spec(args)
    config = getattr(transformers, f"{prefix}Config")(**SHARED, **settings)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if prefix.startswith("Mamba"):
        slow_rates(model, 0.1)
    return model


def train(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took.

    The loss is that of a language model, over every next word, with the answers counted once
    more: they are few, and most other words are chance. Stories grow over the first part of
    training. In the second, half of the batches have some words blanked, so that an input with
    words taken away is nothing new to the model.
    """
    rng = random.Random(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    def loss_of(step: int) -> Tensor:
        share = min(1.0, step / (LESSONS * args.steps))
        length = round(SHORTEST_LESSON + (args.length - SHORTEST_LESSON) * share)
        tokens, asked = make_batch(args.batch, rng, length, people=2 if share < 1 else args.people)
        inputs = tokens[:, :-1]
        if step > args.steps * (1 - BLANKS) and step % 2:
            chance = 0.5 * torch.rand(args.batch, 1, generator=generator)
            blank = torch.rand(inputs.shape, generator=generator) < chance
            inputs = inputs.masked_fill(blank, UNKNOWN_ID)
        logits = model(inputs, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        answers = losses[asked[:, :-1].flatten()]
        return losses.mean() + answers.mean()

    def scores() -> dict[str, float]:
        return accuracy(model, 100, args.people, seed=10_001)

    return fit(model, args, args.architecture, loss_of, scores)


def model_card(
    model: PreTrainedModel, metrics: dict[str, Any], args: argparse.Namespace, seconds: float
) -> str:
    """The README.md saved next to the weights."""
    kind = type(model).__name__
    rows = {
        "task": "`captum_ssm.examples.stories`: short stories of people, things and animals, "
        f"{len(WORDS)} words, up to {args.people} people with a thing each",
        "tokenizer": "words; `AutoTokenizer` loads it",
        "model": sized(spec(args)[1], size_of(model)),
    } | about_run(
        "benchmarks/language/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} stories of up to {args.length} words; "
        f"{seconds / 60:.0f} minutes, {args.threads} CPU thread(s)",
        (torch, transformers),
    )
    asked = {
        "color": "Anna has a red ball. ... Anna's ball is **red**",
        "animal": "The dogs near the bird **bark**",
        "pronoun": "Tom sings near the hill because **he**",
    }
    scores = {asked[kind]: f"{metrics['accuracy'][kind]:.1%}" for kind in KINDS}
    weak = " and ".join(kind for kind in KINDS if metrics["accuracy"][kind] < 0.9)
    warning = f"It guesses at questions of kind {weak}: do not explain those.\n\n" if weak else ""
    return f"""# {args.output.name}

A small `{kind}` that goes on with stories such as "Anna has a red ball. Tom has a blue kite. The
dogs near the bird bark. Anna's ball is red." It was trained from scratch for this repository, to
be explained rather than used: the word that decides every answer is known, so an explanation
of this model can be checked.

{table(rows)}

Answers given first, of {metrics["stories"]} held-out questions of each kind on stories of
{args.people} people, measured on the saved model with transformers' own code:

{table(scores)}

{warning}No sentence of a held-out story was trained on: a fact is held out with its owner, color
and object together.

{loading(args.output.name)}
"""


def main() -> None:
    """Train, save, then measure what was saved."""
    parser = options(__doc__, "stories-", report_every=500, threads=1, steps=3000, batch=32)
    parser.add_argument("architecture", choices=SPECS)
    parser.add_argument("--people", type=int, default=PEOPLE, help="in a story at most")
    parser.add_argument("--length", type=int, default=64, help="words of a story at most")
    parser.add_argument("--layers", type=int, help="default: as many as the architecture's own")
    parser.add_argument("--stories", type=int, default=500, help="of each kind, for evaluation")
    args = parsed(parser, "stories-", "architecture")
    set_up(args.threads)
    model = build(args)
    # The others are fast enough as they are, and train with every release of transformers.
    with fast_scan() if args.architecture in ("mamba", "rwkv") else nullcontext():
        seconds = train(model, args)
    counts = {"people": args.people, "stories": args.stories}
    save_and_judge(
        model,
        word_tokenizer(WORDS, UNKNOWN, PADDING),
        args.output,
        lambda saved: counts | {"accuracy": accuracy(saved, args.stories, args.people)},
        lambda metrics: model_card(model, metrics, args, seconds),
    )


if __name__ == "__main__":
    main()
