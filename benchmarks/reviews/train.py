"""Train a small classifier of reviews, measure it and save it.

Run from the repository root::

    python benchmarks/reviews/train.py

The result is a plain transformers checkpoint, a ``JambaForSequenceClassification`` whose middle
layer is softmax attention, with its tokenizer, labels, model card and measured accuracy.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import JambaConfig, JambaForSequenceClassification, PreTrainedModel

from captum_ssm.examples.reviews import (
    EVALUATION_SEED,
    LABELS,
    PADDING,
    UNKNOWN,
    WORDS,
    Review,
    of_each_label,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _training import about_run, fit, options, set_up, size_of, sized, slow_rates, table
from _words import save_and_judge, word_tokenizer

SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
BLANKS = 0.2  # of the words of every second batch, so that a blanked input is nothing new


def build(seed: int) -> JambaForSequenceClassification:
    """The model, before it is trained."""
    torch.manual_seed(seed)
    config = JambaConfig(
        vocab_size=len(WORDS),
        pad_token_id=WORDS.index(PADDING),
        bos_token_id=None,
        eos_token_id=None,
        use_mamba_kernels=False,
        id2label=dict(enumerate(LABELS)),
        label2id={name: k for k, name in enumerate(LABELS)},
        **SETTINGS,
    )
    model = JambaForSequenceClassification(config)
    slow_rates(model, 0.1)
    return model


def batch_of(reviews: Iterable[Review]) -> tuple[Tensor, Tensor]:
    """Ids ``(n, length)``, padded on the right, and labels ``(n,)``."""
    held = list(reviews)
    length = max(len(review.ids) for review in held)
    ids = torch.full((len(held), length), WORDS.index(PADDING))
    for row, review in zip(ids, held, strict=True):
        row[: len(review.ids)] = torch.tensor(review.ids)
    return ids, torch.tensor([review.label for review in held])


def predicted(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits of each label, ``(n, 3)``."""
    logits: Tensor = model(ids, attention_mask=ids != WORDS.index(PADDING), use_cache=False).logits
    return logits


@torch.no_grad()
def accuracy(model: PreTrainedModel, n: int, seed: int = EVALUATION_SEED) -> dict[str, float]:
    """The share of held-out reviews of each label that the model names."""
    ids, labels = batch_of(islice(of_each_label(random.Random(seed), held_out=True), n))
    right = predicted(model, ids).argmax(-1) == labels
    return {name: float(right[labels == k].float().mean()) for k, name in enumerate(LABELS)}


def train(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took."""
    reviews = of_each_label(random.Random(args.seed))
    generator = torch.Generator().manual_seed(args.seed)

    def loss_of(step: int) -> Tensor:
        ids, labels = batch_of(islice(reviews, args.batch))
        if step % 2:
            # Words that judge nothing are blanked: the label stays right.
            judging = torch.tensor([word in _JUDGING for word in WORDS])[ids]
            blank = (torch.rand(ids.shape, generator=generator) < BLANKS) & ~judging
            ids = ids.masked_fill(blank & (ids != WORDS.index(PADDING)), WORDS.index(UNKNOWN))
        return functional.cross_entropy(predicted(model, ids), labels)

    return fit(model, args, "reviews", loss_of, lambda: accuracy(model, 300, seed=10_001))


_JUDGING = {"not", "very", "was", "my", "My", *WORDS[WORDS.index("plot") :]}


def model_card(metrics: dict[str, Any], args: argparse.Namespace, seconds: float, n: int) -> str:
    """The README.md saved next to the weights."""
    rows = {
        "task": f"`captum_ssm/examples/reviews.py`: short reviews of films, {len(WORDS)} words, "
        "labels negative, mixed and positive",
        "tokenizer": "words; `AutoTokenizer` loads it",
        "model": sized(SETTINGS, n),
    } | about_run(
        "benchmarks/reviews/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} reviews; {seconds / 60:.0f} minutes, 1 CPU thread",
        (torch, transformers),
    )
    scores = {name: f"{share:.1%}" for name, share in metrics["accuracy"].items()}
    return f"""# {args.output.name}

A small `JambaForSequenceClassification` that says whether a review of a film is negative, mixed or
positive. It was trained from scratch for this repository, to be explained rather than used: the
words that decide the label are known, and the same words about people decide nothing.

{table(rows)}

Right labels of {metrics["reviews"]} held-out reviews, each with a pair of a subject and a word that
was never trained on:

{table(scores, "label", "right")}

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = "tutorials/models/{args.output.name}"
model = AutoModelForSequenceClassification.from_pretrained(name).eval()
tokenizer = AutoTokenizer.from_pretrained(name)
```
"""


def main() -> None:
    """Train, save, then measure what was saved."""
    parser = options(__doc__, "reviews-jamba", report_every=250, steps=3000, batch=32)
    parser.add_argument("--reviews", type=int, default=600, help="held out, for evaluation")
    args = parser.parse_args()
    set_up()
    model = build(args.seed)
    seconds = train(model, args)
    save_and_judge(
        model,
        word_tokenizer(WORDS, UNKNOWN, PADDING),
        args.output,
        lambda saved: {"reviews": args.reviews, "accuracy": accuracy(saved, args.reviews)},
        lambda metrics: model_card(metrics, args, seconds, size_of(model)),
    )


if __name__ == "__main__":
    main()
