"""What is measured of a passkey model and of an explanation of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from records import VALUE_LENGTH, PasskeyBatch, held_out_batch
from torch import Tensor
from transformers import PreTrainedModel

EVALUATION_SEED = 20_002


@dataclass(frozen=True)
class Accuracy:
    """How well a model answers held-out questions at one length of context.

    Attributes:
        answered: Share of values predicted right from the whole sequence at once.
        generated: Share of values that greedy generation gives, from its cached state.
    """

    answered: float
    generated: float


def answer_logits(model: PreTrainedModel, batch: PasskeyBatch) -> Tensor:
    """Logits of the predictions that answer, shape ``(examples, questions, vocabulary)``."""
    logits: Tensor = model(batch.inputs, use_cache=False).logits
    return logits[:, batch.predicting_positions]


@torch.no_grad()
def accuracy(model: PreTrainedModel, context: int, examples: int) -> Accuracy:
    """Accuracy on fixed held-out examples with one question each."""
    batch = held_out_batch(examples, torch.Generator().manual_seed(EVALUATION_SEED), context)
    forced, generated = [], []
    # A hundred at a time: the stock scan holds every step of every example.
    for rows in torch.arange(examples).split(100):
        part = PasskeyBatch(batch.tokens[rows], context, batch.starts[rows], batch.asked[rows])
        forced.append(answer_logits(model, part).argmax(-1) == part.targets)
        answer: Tensor = model.generate(
            part.prompt,
            attention_mask=torch.ones_like(part.prompt),
            max_new_tokens=VALUE_LENGTH,
            do_sample=False,
        )
        generated.append((answer[:, part.prompt.shape[1] :] == part.targets).all(1))
    return Accuracy(
        torch.cat(forced).double().mean().item(), torch.cat(generated).double().mean().item()
    )


def largest_at(rows: Tensor, batch: PasskeyBatch) -> dict[str, Tensor]:
    """Where each row of relevance has its largest score: boolean tensors ``(examples, 1)``.

    ``token`` implies ``record``; ``record`` and ``distractor`` exclude each other, and a row for
    which neither holds points at filler.

    Args:
        rows: Relevance of the context, ``(examples, 1, context)``: one row per answer.
        batch: The examples, with one question each.
    """
    largest = rows.argmax(-1)
    right, others = batch.record_masks()
    return {
        "token": largest == batch.answer_positions,
        "record": right.gather(1, largest),
        "distractor": others.gather(1, largest),
    }
