"""Whether the score of one example depends on others of its batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def joins_examples(score: Tensor, ends: Sequence[Any], of_others: Sequence[Any]) -> bool:
    """Whether the first of some scores ``(B,)`` depends on other examples. The graph is kept.

    Args:
        score (Tensor): with its graph.
        ends (sequence of Tensor or GradientEdge): earlier tensors, of all examples.
        of_others (sequence): by end, an index of what is there of the other examples.
    """
    if not (score.requires_grad and ends):
        return False
    with torch.inference_mode(False), torch.enable_grad():  # also for a caller without gradients
        gradients = torch.autograd.grad(score[0], list(ends), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, of_others, strict=True)
    return any(bool(gradient[index].any()) for gradient, index in pairs if gradient is not None)


def warn_of_joined_examples() -> None:
    """Warn that :func:`joins_examples`."""
    warnings.warn(
        "the score of one example depends on others of the batch (as by a batch norm in "
        "training mode), so relevance of each holds what it adds to the scores of the "
        "others too. Explain one example at a time.",
        UserWarning,
        stacklevel=2,
    )
