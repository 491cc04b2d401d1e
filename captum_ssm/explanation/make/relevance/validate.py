"""The check that everybody should make: does the score fall when the most relevant parts go?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.explanation import Validation
from captum_ssm.explanation.make.relevance.removal import Parts, Replacement, is_causal, patches
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.metrics.perturbation import WHOLE, flipping

RANDOM = 16  # random orders
BATCH = 32  # inputs that the model is given at a time


def validated(
    run: Run,
    inputs: Tensor,
    relevance: Mapping[str, Tensor],
    asked: Mapping[int, Question],
    replacement: Replacement,
) -> Validation | None:
    """The curves of one example: the mean over its outputs.

    Args:
        run (Run): runs the model.
        inputs (Tensor): ``(1, ...)``.
        relevance (dict): by method, ``(R, ...)`` in the shape of the input.
        asked (dict): the questions that are checked, by row.
        replacement (Replacement): what a removed token becomes.

    Returns:
        Validation: or None where the input has no part that can be removed by itself.
    """
    if inputs.dim() > 4:
        return None
    parts = Parts.of(inputs, run.module, replacement)
    side = patches(run.module, inputs) if inputs.dim() == 4 else ()
    noise = torch.Generator().manual_seed(0)
    curves = []
    for row, question in asked.items():
        rows = [values[row].detach().cpu().float() for values in relevance.values()]
        removable = _removable(run, parts, question.position)
        if removable is not None and not bool(removable.any()):
            continue
        shuffled = torch.rand(RANDOM, *parts.shape, generator=noise)
        shuffled = parts.to_inputs(shuffled.to(inputs.device)).cpu()
        orders = torch.cat([torch.stack(rows), shuffled])
        curves.append(_curves(run, inputs, orders, question, parts, removable, side))
    if not curves:
        return None
    mean = np.mean(curves, axis=0).astype(np.float32)  # (methods + RANDOM, S)
    of_methods = dict(zip(relevance, mean, strict=False))
    return Validation("logit", parts.note, WHOLE, of_methods, mean[len(relevance) :])


def _removable(run: Run, parts: Parts, position: int | None) -> Tensor | None:
    # The tokens (1, L) that the answer may depend on, without the one at which it is read.
    if position is None or parts.inputs.dim() != 2:
        return None
    mask = torch.ones_like(parts.inputs)
    if is_causal(run, parts, position):
        mask[:, position:] = 0
    mask[:, position] = 0
    return mask


def _curves(
    run: Run,
    inputs: Tensor,
    orders: Tensor,
    question: Question,
    parts: Parts,
    removable: Tensor | None,
    side: tuple[int, ...],
) -> np.ndarray:
    # The score (orders, S) while the most relevant parts are removed first.
    def asked(changed: Tensor) -> Tensor:
        return question.score(run(changed))[:, None]

    options: dict[str, Any] = {}
    if inputs.dim() == 4:
        height, width = inputs.shape[2:]
        options["patch"] = (-(-height // side[0]), -(-width // side[1]))
    count = len(orders)
    curve = flipping(
        asked,
        inputs.expand(count, *inputs.shape[1:]),
        orders,
        torch.zeros(count, dtype=torch.long),
        removal=parts.baseline,
        mask=None if removable is None else removable.expand(count, -1),
        batch_size=BATCH,
        **options,
    )
    return curve.values.numpy()
