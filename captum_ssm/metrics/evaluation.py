"""Scores of a data set, batch by batch, on one process or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_ssm.metrics.perturbation import Curve
from captum_ssm.metrics.segmentation import SegmentationScores
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.integers import count_of


def evaluate(
    function: Callable[..., Any],
    *samples: Sequence[Any] | Tensor,
    batch_size: int = 32,
    accelerator: Any = None,
    seed: int = 0,
) -> Any:
    """Scores of all samples, computed batch by batch on one process or several.

    Every process returns the scores of all samples, in the samples' order. Batches are the same
    for any number of processes, and each is seeded by its own number: with the same number of
    threads per process (``torchrun`` gives each process one), the scores, and intervals from
    them, are the same to the last bit.

    Args:
        function (Callable): scores one batch. It takes the batch's part of each of ``samples``:
            a tensor for a tensor, a list for anything else. It returns one row per sample: a
            tensor ``(b, ...)``, a :class:`Curve`, :class:`SegmentationScores`, or a dict of
            them, which may be nested.
        *samples (Sequence or Tensor): aligned by sample, each with a length and an index, such as
            tensors, lists and data sets. A process reads only the samples of its own batches.
        batch_size (int, optional): samples scored at once. Default: 32
        accelerator (accelerate.Accelerator, optional): None for one process. Default: None
        seed (int, optional): PyTorch's generators are seeded with this plus the batch's number:
            the CPU's, and every GPU's if CUDA is initialized before the batch. The caller's
            random state is restored afterwards. Default: 0

    Returns:
        What ``function`` returns, for all samples, on the CPU.

    Raises:
        ValueError: if there are no samples, samples are not aligned, or ``function`` does not
            return one row per sample.
        TypeError: if ``function`` returns something else.

    Examples::

        >>> def scores(ids):
        ...     last = lambda ids: model(ids).logits[:, -1]
        ...     predicted = last(ids).argmax(-1)
        ...     relevance = MambaLRP(model).attribute(ids, target=predicted)
        ...     return {"positive": perturbation(last, ids, relevance, predicted, removal=0)}
        >>> evaluate(scores, input_ids.repeat(5, 1), batch_size=2)["positive"].values.shape
        torch.Size([5, 9])

        Under ``torchrun --nproc_per_node 2``::

            evaluate(scores, input_ids, accelerator=accelerate.Accelerator())
    """
    count = len(samples[0]) if samples else 0
    if count == 0 or any(len(s) != count for s in samples):
        raise ValueError(
            f"samples hold {[len(s) for s in samples]} samples; expected as many in each, at "
            "least one."
        )
    batch_size = count_of("batch_size", batch_size, 1)
    rank = 0 if accelerator is None else accelerator.process_index
    processes = 1 if accelerator is None else accelerator.num_processes
    batches = list(enumerate(torch.arange(count).split(batch_size)))
    scored = {}
    for number, batch in batches[rank::processes]:
        with seeded(seed + number):
            scores = function(*(_part(s, batch.tolist()) for s in samples))
        scored[number] = _map(partial(_checked, rows=len(batch)), scores)
    if processes > 1:
        from accelerate.utils import gather_object

        scored = dict(gather_object(list(scored.items())))
    return _map(lambda *rows: torch.cat(rows), *(scored[number] for number, _ in batches))


def _part(samples: Any, batch: list[int]) -> Any:
    if torch.is_tensor(samples):
        return samples[batch[0] : batch[-1] + 1]
    return [samples[k] for k in batch]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's generators begin at ``seed``; the caller's random state is restored afterwards."""
    # torch.manual_seed seeds every GPU; before CUDA is initialized it would queue a call for them.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    with torch.random.fork_rng(devices=gpus):
        (torch.manual_seed if gpus else torch.default_generator.manual_seed)(seed)
        yield


def _map(function: Callable[..., Tensor], *parts: Any) -> Any:
    # The function of the tensors at the same index in each of the parts.
    first = parts[0]
    if isinstance(first, dict):
        return {name: _map(function, *(part[name] for part in parts)) for name in first}
    if isinstance(first, SegmentationScores):
        return SegmentationScores(**_map(function, *map(vars, parts)))
    if isinstance(first, Curve):
        if any(not torch.equal(part.shares, first.shares) for part in parts):
            raise ValueError("function returned curves over different shares; use the same.")
        return Curve(first.shares.cpu(), _map(function, *(part.values for part in parts)))
    return function(*parts)


def _checked(scores: Any, rows: int) -> Tensor:
    # The scores of a batch on the CPU, where every process can read them.
    if not torch.is_tensor(scores):
        raise TypeError(
            f"function returned a {type(scores).__name__}; expected tensors, Curve, "
            "SegmentationScores or dicts of them."
        )
    if scores.dim() == 0 or len(scores) != rows:
        raise ValueError(
            f"function returned a tensor of shape {tuple(scores.shape)} for a batch of {rows}; "
            "expected one row per sample."
        )
    return scores.detach().cpu()
