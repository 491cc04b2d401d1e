"""Runs of one input, several at once in one batch, and the explained score of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from captum_ssm.capture import FrozenModel, Request
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.target import read_score
from captum_ssm.capture.thrown_away import run_on_copies
from captum_ssm.errors import InputError
from captum_ssm.mixers import MixerCall
from captum_ssm.utils.blocks import contextmanager


@dataclass(frozen=True)
class Runs:
    """The runs of one input.

    Args:
        frozen (FrozenModel): one of them.
        target, position (Any): as for ``attribute``.
    """

    frozen: FrozenModel
    target: Any
    position: Any

    def request(self, k: int) -> Request:
        """The input k times, as :func:`repeated` does."""
        return repeated(self.frozen.request, k)

    def scores(self, k: int = 1) -> Tensor:
        """The score of each of k runs at once, ``(k, B)``, as the model is now."""
        frozen, B = self.frozen, self.frozen.request.batch
        output = run_on_copies(self.request(k))
        outputs = [output] if k == 1 else extract_logits(output).split(B)
        # The call tells the score how many tokens there are.
        last = frozen.layers[-1].call
        call = MixerCall(last.path, last.module, (), {}, last.output)
        arguments = {} if frozen.mask is None else {"attention_mask": frozen.mask}
        recordings = [Recording(frozen.request, each, [call], [], arguments) for each in outputs]
        scores = [read_score(each, self.target, self.position) for each in recordings]
        if [len(score) for score in scores] != [B] * k:
            raise InputError(
                f"forward_func returned {sum(map(len, scores))} scores for {k * B} examples; "
                "expected one per example. Let it return one row of its output for each."
            )
        return torch.stack(scores)


def repeated(request: Request, k: int) -> Request:
    """A request's input k times, the examples of one run after those of another."""
    return _of_examples(request, lambda x: times(x, k))


def only(request: Request, example: int) -> Request:
    """A request for one example of its batch."""
    return _of_examples(request, lambda x: x[example : example + 1])


def _of_examples(request: Request, of: Callable[[Tensor], Tensor]) -> Request:
    # Tensors with one row per example are changed; other values hold for all examples.
    def changed(value: Any) -> Any:
        return of(value) if _has_examples(value, request.batch) else value

    return replace(
        request,
        inputs=tuple(map(changed, request.inputs)),
        positional=tuple(map(changed, request.positional)),
        named={name: changed(value) for name, value in request.named.items()},
    )


def times(x: Tensor, k: int) -> Tensor:
    """``x (B, ...)`` k times: ``(k B, ...)``."""
    return x if k == 1 else x.repeat(k, *[1] * (x.dim() - 1))


def _has_examples(value: Any, B: int) -> bool:
    return torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == B


@contextmanager
def bar(what: str, total: int, show: bool) -> Iterator[Callable[[int], Any]]:
    """A progress bar, if ``show``; the yielded function takes how many steps were done."""
    with tqdm(desc=what, total=total, disable=not show) as progress:
        yield progress.update
