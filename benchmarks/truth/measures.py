"""What a map of relevance is scored by, one number per example.

========================= ====================================================== ===================
measure                   what it is                                             a perfect map has
========================= ====================================================== ===================
``hit``                   whether the largest relevance is at the cause          1
``precision``             average precision of the cause among what is           1
                          irrelevant
``share``                 the cause's share of the positive relevance of both    1
``removal``               rank correlation with how far the target's logit       1
                          falls when one unit is removed
``interchange``           the same when one unit is as in the counterfactual     1
``paraphrase``            cosine similarity with the map of a redrawn input      1
``seeds``                 cosine similarity between trainings by other seeds     1
``randomized``            rank correlation of magnitudes with the map of a       0
                          model whose weights are shuffled, mean of the cascade
``guessing``              average precision in the model that only guesses       that of chance
========================= ====================================================== ===================

Cause and irrelevant units are those of the proof (:mod:`task`); ``removal`` counts all units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.metrics import average_precision
from captum_ssm.metrics.agreement import rank_correlation

from .task import Examples, Task, outputs

AT_ONCE = 128  # changed inputs that a model is given together


def finding(relevance: Tensor, cause: Tensor, irrelevant: Tensor) -> dict[str, Tensor]:
    """``hit``, ``precision`` and ``share`` of relevance ``(B, U)``.

    Equal numbers count as in random order: a hit is then the share of the largest ones that are
    the cause's.
    """
    counted = cause | irrelevant
    among = relevance.masked_fill(~counted, -torch.inf)
    largest = (among == among.amax(1, keepdim=True)) & counted
    hit = (largest & cause).sum(1) / largest.sum(1).double()
    precision = [
        average_precision(row[use], truth[use])
        for row, truth, use in zip(relevance, cause, counted, strict=True)
    ]
    positive = relevance.clamp(min=0) * counted
    total = positive.sum(1)
    chance = cause.sum(1) / counted.sum(1).double()
    share = (positive * cause).sum(1) / total.clamp(min=1e-300)
    return {
        "hit": hit,
        "precision": torch.stack(precision).double(),
        "share": torch.where(total > 0, share, chance),
    }


@torch.no_grad()
def effects(model: nn.Module, examples: Examples, units: Tensor, others: Tensor | float) -> Tensor:
    """How far the target's logit falls when one unit holds something else, ``(B, U)``.

    ``others`` are what the unit holds: that of another input, or one value. The model is run once
    for each unit.
    """
    count = int(units.max()) + 1
    numbers = torch.arange(count).view(-1, *[1] * units.dim())
    masks = numbers == units  # (U, ...)
    found = []
    rows = zip(examples.inputs, examples.target.tolist(), strict=True)
    for row, (one, target) in enumerate(rows):
        other = others[row] if isinstance(others, Tensor) else torch.full_like(one, others)
        changed = torch.cat([one[None], torch.where(masks, other, one)])
        logits = torch.cat([outputs(model, part)[:, target] for part in changed.split(AT_ONCE)])
        found.append(logits[0] - logits[1:])
    return torch.stack(found).double()


def references(task: Task, model: nn.Module, examples: Examples) -> dict[str, Tensor]:
    """The effects of removing a unit, and of interchanging it with the counterfactual's.

    The counterfactual has another cause and, elsewhere, what a redraw has. Its effects are the
    mean over redraws.
    """
    units = task.units_of(examples.inputs)
    e = examples
    is_cause = e.cause.gather(1, units.flatten().expand(len(e), -1)).view(e.inputs.shape)
    each = [
        effects(model, e, units, torch.where(is_cause, e.swapped, again)) for again in e.redrawn
    ]
    return {
        "removal": effects(model, e, units, task.blank),
        "interchange": torch.stack(each).mean(0),
    }


def agreement(
    relevance: Tensor, reference: dict[str, Tensor], cause: Tensor, irrelevant: Tensor
) -> dict[str, Tensor]:
    """``removal`` and ``interchange``: rank correlations with effects, 0 for a constant map."""
    found = {"removal": rank_correlation(relevance, reference["removal"]).nan_to_num()}
    rows = []
    for x, y, use in zip(relevance, reference["interchange"], cause | irrelevant, strict=True):
        rows.append(rank_correlation(x[use], y[use]).nan_to_num())
    return found | {"interchange": torch.stack(rows)}


def alike(first: Tensor, second: Tensor) -> Tensor:
    """The cosine similarity of maps ``(B, U)``."""
    return F.cosine_similarity(first.double(), second.double(), dim=1, eps=1e-30)


def unmoved(first: Tensor, second: Tensor) -> Tensor:
    """The rank correlation of the magnitudes of maps ``(B, U)``, at least 0."""
    return rank_correlation(first.abs(), second.abs()).nan_to_num().clamp(min=0)
