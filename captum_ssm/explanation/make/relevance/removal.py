"""Parts of the input that are removed: what stands in their place, and how the score falls.

That is the check that everybody should make: does it fall when the most relevant parts go?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.errors import brief
from captum_ssm.explanation import Validation
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.explanation.make.relevance.run import Run, are_ids
from captum_ssm.inspection.implicit_attention import token_grids
from captum_ssm.metrics.perturbation import WHOLE, flipping, removed
from captum_ssm.utils.integers import as_index

SPECIAL = ("mask", "unk", "pad")  # tokens that may replace another one, the best first
PATCHES = 16  # along each side of an image whose patches are not known
RANDOM = 16  # random orders
BATCH = 32  # inputs that the model is given at a time


@dataclass(frozen=True)
class Replacement:
    """The token that replaces a removed one."""

    token: int
    name: str

    @classmethod
    def of(cls, tokenizer: Any, wanted: Any = None) -> Replacement:
        """The tokenizer's token for what is masked, unknown or padding; else token 0.

        ``wanted`` is the id of another token, or one of these three names.

        Raises:
            ValueError: for a name that the tokenizer has no token of.
        """
        index = None if isinstance(wanted, str) else as_index(wanted)
        if index is not None:
            return cls(index, _name(tokenizer, index))
        names = SPECIAL if wanted is None else (wanted,)
        for name in names:
            token = as_index(getattr(tokenizer, f"{name}_token_id", None))
            if token is not None and name in SPECIAL:
                return cls(token, _name(tokenizer, token))
        if wanted is None:
            return cls(0, _name(tokenizer, 0))
        raise ValueError(
            f"the baseline is {brief(wanted)}, and the tokenizer has no such token; expected a "
            f"token id, or one of {', '.join(SPECIAL)} that the tokenizer has."
        )


def _name(tokenizer: Any, token: int) -> str:
    if tokenizer is None:
        return f"token {token}"
    return str(tokenizer.convert_ids_to_tokens([token])[0])


@dataclass(frozen=True)
class Parts:
    """The parts of one input that are removed by themselves, and how.

    A token of a text is a part, a patch of an image or a video, and an entry of any other input.

    Args:
        inputs (Tensor): ``(1, ...)``.
        shape (tuple of int): of the parts.
        baseline (Tensor): the input with all parts removed.
        note (str): what a part is replaced by.
    """

    inputs: Tensor
    shape: tuple[int, ...]
    baseline: Tensor
    note: str

    @classmethod
    def of(cls, inputs: Tensor, module: Any, replacement: Replacement, wanted: Any = None) -> Parts:
        """The parts of an input; ``wanted`` is another baseline, a number or a tensor."""
        if are_ids(inputs):
            baseline = torch.full_like(inputs, replacement.token)
            return cls(inputs, tuple(inputs.shape[1:]), baseline, f"by {replacement.name}")
        kind = "mean" if inputs.dim() in (3, 4) else "zero"
        baseline = removed(inputs, kind if wanted is None else wanted)
        note = f"by the {kind}" if wanted is None else "by the baseline"
        if inputs.dim() < 4:
            return cls(inputs, tuple(inputs.shape[1:]), baseline, note)
        return cls(inputs, patches(module, inputs), baseline, note)

    def kept(self, presence: Tensor) -> Tensor:
        """Inputs ``(n, ...)`` in which parts of presence ``(n, *shape)`` 0 are removed."""
        is_kept = self._spread(presence) > 0.5
        return torch.where(is_kept, self.inputs, self.baseline)

    def to_inputs(self, relevance: Tensor) -> Tensor:
        """Relevance of parts ``(R, *shape)`` in the shape of the input; sums are kept."""
        if self.inputs.dim() < 4:
            return relevance
        counts = torch.bincount(self._index().flatten()).view(1, *self.shape)  # places of each
        of_place = relevance / counts.to(relevance) / self.inputs.shape[1]
        shape = (len(relevance), *self.inputs.shape[1:])
        return self._spread(of_place).expand(shape).contiguous()

    def _spread(self, values: Tensor) -> Tensor:
        # From parts to the entries of the input; a patch is the same in all channels.
        if self.inputs.dim() < 4:
            return values
        index = self._index().to(values.device)
        return values.flatten(1)[:, index].unsqueeze(1)

    def _index(self) -> Tensor:
        # The patch of each place of an image or a video.
        numbers = torch.arange(math.prod(self.shape), dtype=torch.float64).view(1, 1, *self.shape)
        numbers_of = F.interpolate(numbers, tuple(self.inputs.shape[2:]), mode="nearest")
        return numbers_of[0, 0].long()


def is_causal(run: Callable[[Tensor], Tensor], parts: Parts, position: int) -> bool:
    """Whether no later token of a text ``(1, L)`` changes what ``run`` returns at a position."""
    changed = parts.inputs.clone()
    changed[:, position + 1 :] = parts.baseline[:, position + 1 :]
    if torch.equal(changed, parts.inputs):
        return True
    with torch.no_grad():
        before, after = run(parts.inputs)[:, position], run(changed)[:, position]
    return bool((after - before).abs().max() <= 1e-4 * before.abs().max())


def patches(module: Any, inputs: Tensor) -> tuple[int, ...]:
    """The patches of an image ``(1, C, H, W)`` or a video along each axis: the model's own.

    Where these are not known there are sixteen on each side, or one per pixel of small images.
    """
    size = tuple(inputs.shape[2:])
    try:
        grids = list(token_grids(module, inputs).values())
    except ValueError:
        grids = []
    for grid in grids:
        if grid is not None and len(grid.shape) == len(size):
            return tuple(min(a, b) for a, b in zip(grid.shape, size, strict=True))
    return tuple(min(length, PATCHES) for length in size)


def validated(
    run: Run,
    inputs: Tensor,
    relevance: Mapping[str, Tensor],
    asked: Mapping[int, Question],
    replacement: Replacement,
) -> Validation | None:
    """The curves of one example: the mean over its outputs.

    None where the input has no part that can be removed by itself. ``relevance`` is by method,
    ``(R, ...)`` in the shape of the input; ``asked`` are the questions that are checked, by row.
    """
    if inputs.dim() > 4:
        return None
    parts = Parts.of(inputs, run.module, replacement)
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
        curves.append(_curves(run, parts, orders, question, removable))
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
    run: Run, parts: Parts, orders: Tensor, question: Question, removable: Tensor | None
) -> np.ndarray:
    # The score (orders, S) while the most relevant parts are removed first.
    def asked(changed: Tensor) -> Tensor:
        return question.score(run(changed))[:, None]

    options: dict[str, Any] = {}
    count, inputs = len(orders), parts.inputs
    if inputs.dim() == 4:
        pairs = zip(inputs.shape[2:], parts.shape, strict=True)
        options["patch"] = tuple(-(-length // n) for length, n in pairs)
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
