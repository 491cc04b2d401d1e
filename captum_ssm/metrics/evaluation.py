"""The harness: batches of samples scored one by one, by one process or by many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from captum_ssm.metrics.perturbation import Curve
from captum_ssm.metrics.segmentation import SegmentationScores


def evaluate(
    function: Callable[..., Any],
    *samples: Sequence[Any] | Tensor,
    batch_size: int = 32,
    accelerator: Any = None,
    seed: int = 0,
) -> Any:
    """Scores of all samples, computed a batch at a time on as many processes as there are.

    The batches are the unit of work: the processes take them in turn, and every process gets the
    scores of all samples back, in the samples' order. Which process scored a batch changes
    nothing: batches are cut the same way for any number of processes and each is seeded by its
    own number, so two processes with as many threads each as one (``torchrun`` gives each one
    thread) return that one's numbers to the last bit, and so do intervals from them.

    Args:
        function (Callable): scores one batch, and takes of each of ``samples`` the batch's part:
            a tensor of a tensor, a list of anything else. It returns one row a sample: a tensor
            ``(b, ...)``, a :class:`Curve`, :class:`SegmentationScores`, or a dict of them, nested
            as it likes.
        *samples (Sequence or Tensor): aligned by sample, each with a length and an index, such as
            tensors, lists and data sets. Only the samples of a process's own batches are read.
        batch_size (int, optional): samples scored at once. With fewer batches than processes
            some processes have nothing to do. Default: 32
        accelerator (accelerate.Accelerator, optional): knows the processes; None for one
            process. Default: None
        seed (int, optional): of PyTorch's generators, plus the batch's number: the CPU's, and
            every GPU's where CUDA is initialised before the batch. The caller's random state is
            left as it was. Default: 0

    Returns:
        What ``function`` returns, for all samples, on the CPU.

    Raises:
        ValueError: where there is no sample, samples are not aligned, or ``function`` does not
            return a row a sample.
        TypeError: where it returns something else than the above.

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
            f"samples hold {[len(s) for s in samples]} samples; give as many each, at least one."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least 1 is needed.")
    starts = range(0, count, batch_size)
    rank = 0 if accelerator is None else accelerator.process_index
    processes = 1 if accelerator is None else accelerator.num_processes
    found = []
    for number in range(rank, len(starts), processes):
        start, stop = starts[number], min(starts[number] + batch_size, count)
        with _seeded(seed + number):
            scores = function(*(_part(s, start, stop) for s in samples))
        found.append((number, _checked(scores, stop - start)))
    if processes > 1:
        from accelerate.utils import gather_object

        found = gather_object(found)
    return _joined([scores for _, scores in sorted(found, key=lambda batch: batch[0])])


def _part(samples: Any, start: int, stop: int) -> Any:
    if torch.is_tensor(samples):
        return samples[start:stop]
    return [samples[k] for k in range(start, stop)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # torch.manual_seed seeds every GPU, before CUDA is initialised by a call that waits for it.
    if torch.cuda.is_initialized():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield


def _checked(scores: Any, rows: int) -> Any:
    # The scores of a batch on the CPU, where every process can read them.
    if isinstance(scores, dict):
        return {name: _checked(value, rows) for name, value in scores.items()}
    if isinstance(scores, Curve):
        return Curve(scores.shares.cpu(), _checked(scores.values, rows))
    if isinstance(scores, SegmentationScores):
        fields = vars(scores).items()
        return SegmentationScores(**{name: _checked(value, rows) for name, value in fields})
    if not torch.is_tensor(scores):
        raise TypeError(
            f"function returned a {type(scores).__name__}; accepted are tensors, Curve, "
            "SegmentationScores and dicts of them."
        )
    if scores.dim() == 0 or len(scores) != rows:
        raise ValueError(
            f"function returned a tensor of shape {tuple(scores.shape)} for a batch of {rows}; "
            "return one row a sample."
        )
    return scores.detach().cpu()


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, Curve):
        if any(not torch.equal(part.shares, first.shares) for part in parts):
            raise ValueError("function returned curves over different shares; use the same.")
        return Curve(first.shares, torch.cat([part.values for part in parts]))
    if isinstance(first, SegmentationScores):
        names = [field.name for field in dataclasses.fields(first)]
        return SegmentationScores(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        )
    return torch.cat(parts)
