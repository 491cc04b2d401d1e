"""A run of a model on texts, and what its modules tell of it: who made the output, from where.

A model with one output per text reads it from all tokens together, such as from their mean, or from
one token alone: the last one, or one in front such as ``[CLS]``. A module that is given the very
vector of one token, and no other, tells which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.randomness import noting_draws, one_run, warn_of_randomness
from captum_ssm.explanation.make.inputs.media import refusals_explained
from captum_ssm.explanation.make.relevance.run import OneInput, Run, joined
from captum_ssm.utils.nested import first_of
from captum_ssm.utils.watch_modules import watch_modules

KEPT = 16  # results of modules: the output's maker is among the last


@dataclass(frozen=True)
class Observed:
    """What a model returned for B texts.

    Args:
        inputs (Tensor): the ids of the texts, ``(B, L)``, or other inputs.
        output (Any): as the model returned it.
        maker (nn.Module, optional): the module that returned the very tensor that is read of the
            output; None where no module did.
        read_at (tuple): for each text the token from which the output is read, if it is one alone,
            else None.
    """

    inputs: Tensor
    output: Any
    maker: nn.Module | None
    read_at: tuple[int | None, ...]


@dataclass(frozen=True)
class Seen:
    """What answers about one input are read from.

    Args:
        scores (Tensor): ``(1, ...)``.
        read_at (int, optional): the token from which a model with one output per text reads it, if
            it is one alone. Default: None
    """

    scores: Tensor
    read_at: int | None = None


@dataclass(frozen=True)
class Look(OneInput):
    """The step of a question that needs what the model returns for its input.

    ``positions`` are the tokens of a text whose scores are needed, all if None. ``first`` may hold
    a run that was made before, most often on the same tokens; it is kept no longer.
    """

    positions: Sequence[int] | None = None
    first: list[Observed] = field(default_factory=list)

    @staticmethod
    def together(several: Sequence[Look]) -> list[Seen]:
        """What each of a batch needs, by one run of the model."""
        batch, (first, *others) = joined(several), several
        result = first.first.pop() if first.first and not others else None
        if result is None or not torch.equal(result.inputs, batch.inputs):
            result = _run(batch)
        scores = batch.run.read(result.output)
        if others and len(scores) != len(several):
            raise RuntimeError(f"{len(scores)} outputs for {len(several)} inputs")
        parts = scores.split(1) if others else [scores]
        asked = zip(several, parts, result.read_at, strict=True)
        return [
            Seen(part if look.positions is None else part[:, list(look.positions)], at)
            for look, part, at in asked
        ]


def _run(batch: OneInput) -> Observed:
    if batch.is_text:
        return observed(batch.run, batch.inputs)
    with torch.no_grad():
        return Observed(
            batch.inputs, batch.run.module(batch.inputs), None, (None,) * len(batch.inputs)
        )


def observed(run: Run, ids: Tensor) -> Observed:
    """The model, run on the ids ``(B, L)`` of texts."""
    module, arguments = run.module, run.arguments(ids)
    watch = _Watch(ids.shape)
    told = refusals_explained(module, run.media, ids)
    with torch.no_grad(), watch.watching(module), noting_draws() as draws, one_run(module), told:
        output = module(ids, **arguments)
    if any(draws):
        with torch.no_grad():
            warn_of_randomness(module, partial(module, ids, **arguments))
    logits = first_of(output) if bound_logits(output, ids) else extract_logits(output)
    watch.see(logits)
    return Observed(ids, output, watch.maker_of(logits), watch.read_at)


def bound_logits(output: Any, ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scores ``(B, L)`` of being the first token of an answer, and its last, if it has any."""
    if isinstance(output, Mapping) and {"start_logits", "end_logits"} <= {*output}:
        pair = output["start_logits"], output["end_logits"]
    elif type(output) is tuple and len(output) == 2:
        pair = output
    else:
        return None
    are_scores = all(torch.is_tensor(scores) and scores.shape == ids.shape for scores in pair)
    return pair if are_scores and ids.shape[1] > 1 else None


class _Watch:
    # What the last modules without parts return, and the one token of each of B texts whose vector
    # is read after the last module that returned a vector of each token.
    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)  # (B, L)
        self.read_at: tuple[int | None, ...] = (None,) * shape[0]
        self._tokens: Tensor | None = None
        # A result that is no longer kept may leave its memory to another one.
        self._made: deque[tuple[nn.Module, Tensor]] = deque(maxlen=KEPT)

    def watching(self, module: nn.Module) -> AbstractContextManager[None]:
        parts = [part for part in module.modules() if not any(True for _ in part.children())]
        return watch_modules(parts, before=self._before, after=self._after)

    def maker_of(self, result: Tensor) -> nn.Module | None:
        """The module that returned this very tensor."""
        wanted = result.data_ptr(), result.shape
        made = ((part, (tensor.data_ptr(), tensor.shape)) for part, tensor in reversed(self._made))
        return next((part for part, key in made if key == wanted), None)

    def see(self, read: Any) -> None:
        """Look whether what is read is the vector of one token."""
        tokens, is_known = self._tokens, None not in self.read_at
        if is_known or tokens is None or not torch.is_tensor(read):
            return
        if read.numel() == len(tokens) * tokens.shape[-1]:
            is_read = (tokens == read.reshape(len(tokens), 1, -1)).all(-1)  # (B, L)
            rows = [row.nonzero().flatten().tolist() for row in is_read]
            self.read_at = tuple(row[0] if len(row) == 1 else None for row in rows)

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        self.see(first_of(args))

    def _after(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = first_of(output)
        if torch.is_tensor(first):
            self._made.append((part, first))
            if first.dim() == 3 and first.shape[:2] == self.shape:
                self._tokens, self.read_at = first, (None,) * self.shape[0]
