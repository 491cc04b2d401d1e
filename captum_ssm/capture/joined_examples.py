"""Whether what is computed of one example depends on others of its batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_ssm.graph.points import Point, visit_gradients
from captum_ssm.wiring.cuts import RunCuts


def joins_examples(score: Tensor, ends: Sequence[Any], of_others: Sequence[Any]) -> bool:
    """Whether the first of some scores ``(B,)`` depends on other examples. The graph is kept.

    ``ends`` are earlier tensors, of all examples, and ``of_others`` is, by end, an index of what is
    there of the other examples.
    """
    if not (score.requires_grad and ends):
        return False
    with torch.inference_mode(False), torch.enable_grad():  # also for a caller without gradients
        gradients = torch.autograd.grad(score[0], list(ends), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, of_others, strict=True)
    return any(bool(gradient[index].any()) for gradient, index in pairs if gradient is not None)


def are_joined(cuts: RunCuts, output: Tensor, batch: int) -> bool:
    """Whether what mixers are given, or an output, depends on other examples, mixers left out.

    The graph of the run is kept; the output may have none.
    """
    ends = [
        *(port.entry for port in cuts.ports),
        Point.of(output) if output.requires_grad else None,
    ]
    later = [end for end in ends if end is not None and end.shape[0] == batch]
    starts = [*(port.exit for port in cuts.ports), *(start.point for start in cuts.starts.values())]
    earlier = [start for start in starts if start.shape[0] == batch]
    joined = False

    def of_first(end: Point) -> Tensor:
        seed = end.unflat(end.noise()).clone()
        seed[1:] = 0
        return end.flat(seed)

    def look(k: int, gradient: Tensor) -> None:
        nonlocal joined
        # NaN tells nothing.
        joined = joined or bool((earlier[k].unflat(gradient)[1:].abs() > 0).any())

    with cuts.measured():
        visit_gradients(later, [partial(of_first, end) for end in later], earlier, look)
    return joined


def warn_of_joined_examples() -> None:
    """Warn that :func:`joins_examples`."""
    warnings.warn(
        "the score of one example depends on others of the batch (as by a batch norm in "
        "training mode), so relevance of each holds what it adds to the scores of the "
        "others too. Explain one example at a time.",
        UserWarning,
        stacklevel=2,
    )
