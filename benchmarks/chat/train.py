"""Train a small Mamba that answers in chats, measure it and save it.

Run from the repository root::

    python benchmarks/chat/train.py

The result is a plain transformers checkpoint with a tokenizer that has a chat template, a model
card and its measured accuracy.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from captum_ssm.examples.chat import (
    END,
    EVALUATION_SEED,
    IDS,
    MARKS,
    PADDING,
    TEMPLATE,
    UNKNOWN,
    WORDS,
    Chat,
    make_chat,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _scan import fast_scan
from _training import about_run, fit, options, set_up, size_of, sized, slow_rates, table
from _words import loading, save_and_judge, word_tokenizer

SETTINGS = {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 16, "time_step_min": 0.01}
QUESTIONS = 0.1  # the weight of words that are not an answer's
LESSONS = 0.3  # of the training, in which chats have one question


def build(seed: int) -> MambaForCausalLM:
    """The model, before it is trained."""
    torch.manual_seed(seed)
    config = MambaConfig(
        vocab_size=len(WORDS),
        bos_token_id=None,
        eos_token_id=IDS[END],
        pad_token_id=IDS[PADDING],
        tie_word_embeddings=True,
        **SETTINGS,
    )
    model = MambaForCausalLM(config)
    slow_rates(model, 0.1)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words as tokens, with a chat template."""
    tokenizer = word_tokenizer(WORDS, UNKNOWN, PADDING, MARKS)
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def batch_of(chats: list[Chat]) -> tuple[Tensor, Tensor]:
    """Ids ``(n, length)``, padded on the right, and the weight of each as a next token."""
    length = max(len(chat.words) for chat in chats)
    ids = torch.full((len(chats), length), IDS[PADDING])
    weights = torch.zeros(len(chats), length)
    for row, weight, chat in zip(ids, weights, chats, strict=True):
        words = chat.words
        row[: len(words)] = torch.tensor([IDS[word] for word in words])
        weight[: len(words)] = QUESTIONS
        for answer in chat.answers:
            weight[answer.start : answer.stop] = 1.0
    return ids, weights


@torch.no_grad()
def accuracy(model: PreTrainedModel, n: int, seed: int = EVALUATION_SEED) -> dict[str, float]:
    """The share of held-out chats whose every answer has all its words first, by form."""
    rng = random.Random(seed)
    chats = [make_chat(rng, held_out=True) for _ in range(n)]
    ids, weights = batch_of(chats)
    first = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
    right = ((first == ids[:, 1:]) | (weights[:, 1:] < 1)).all(-1)
    short = torch.tensor([chat.turns[0][0] == "system" for chat in chats])
    forms = {"one word": short, "a sentence": ~short}
    return {name: float(right[form].float().mean()) for name, form in forms.items()}


def train(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took."""
    rng = random.Random(args.seed)

    def loss_of(step: int) -> Tensor:
        rounds = 1 if step < LESSONS * args.steps else 2
        chats = [make_chat(rng, rounds=rounds) for _ in range(args.batch)]
        ids, weights = batch_of(chats)
        logits = model(ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return fit(model, args, "chat", loss_of, lambda: accuracy(model, 200, seed=10_001))


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float, n: int) -> str:
    """The README.md saved next to the weights."""
    rows = {
        "task": f"`captum_ssm/examples/chat.py`: questions about who has what, {len(WORDS)} words",
        "tokenizer": "words, with a chat template; `AutoTokenizer` loads it",
        "model": sized(SETTINGS, n),
    } | about_run(
        "benchmarks/chat/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} chats; {seconds / 60:.0f} minutes, 1 CPU thread",
        (torch, transformers),
    )
    scores = {name: f"{share:.1%}" for name, share in metrics["accuracy"].items()}
    return f"""# {args.output.name}

A small `MambaForCausalLM` that answers questions in a chat: who has what, in a sentence, or in one
word where the system's turn asks for that. It was trained from scratch for this repository, to be
explained rather than used: the fact that each answer rests on is known.

{table(rows)}

Chats of {metrics["chats"]} held-out ones in which every word of every answer is given first; all
questions are about facts that were never trained on:

{table(scores, "answers in", "right")}

{loading(args.output.name)}
"""


def main() -> None:
    """Train, save, then measure what was saved."""
    parser = options(__doc__, "chat-mamba", report_every=500, steps=5000, batch=32)
    parser.add_argument("--chats", type=int, default=1000, help="held out, for evaluation")
    args = parser.parse_args()
    set_up()
    model = build(args.seed)
    with fast_scan():
        seconds = train(model, args)
    save_and_judge(
        model,
        make_tokenizer(),
        args.output,
        lambda saved: {"chats": args.chats, "accuracy": accuracy(saved, args.chats)},
        lambda metrics: model_card(metrics, args, seconds, size_of(model)),
    )


if __name__ == "__main__":
    main()
