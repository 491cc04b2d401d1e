"""What metrics read of a model: its logits, one row per example, and the classes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from captum_ssm.utils.integers import as_integers


def batched_logits(
    forward_func: Callable[..., Any], inputs: tuple[Tensor, ...], batch_size: int | None
) -> Tensor:
    """The logits ``(B, V)`` of all examples, at most ``batch_size`` of them per run."""
    step = len(inputs[0]) if batch_size is None else batch_size
    with torch.no_grad():
        parts = zip(*(x.split(step) for x in inputs), strict=True)
        return torch.cat([read_logits(forward_func(*part)) for part in parts])


def read_logits(output: Any) -> Tensor:
    """The output of ``forward_func``, or its ``.logits``, which must be ``(B, V)``."""
    logits = getattr(output, "logits", output)
    if not torch.is_tensor(logits) or logits.dim() != 2:
        what = tuple(logits.shape) if torch.is_tensor(logits) else type(output).__name__
        raise ValueError(
            f"forward_func returned {what}; expected logits (B, V), one row per example."
        )
    return logits


def classes(name: str, target: Any, logits: Tensor) -> Tensor:
    """The class of each example, ``(B,)``, which must be a column of ``logits (B, V)``."""
    (B, V), expected = logits.shape, "expected one class per example, integers (B,)"
    yes_or_no = isinstance(target, Tensor) and target.dtype == torch.bool
    is_entry = isinstance(target, tuple) and len(target) > 1  # of another output, as in Captum
    index = None if is_entry else as_integers(target.long() if yes_or_no else target, logits.device)
    if index is None:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"{name} is {kind}; {expected}.")
    if index.numel() != 1 and tuple(index.shape) != (B,):
        raise ValueError(f"{name} has shape {tuple(index.shape)} for a batch of {B}; {expected}.")
    if bool(((index < 0) | (index >= V)).any()):
        raise ValueError(
            f"{name} holds classes from {int(index.min())} to {int(index.max())}; expected 0 .. "
            f"{V - 1}, since forward_func returns logits of shape {tuple(logits.shape)}."
        )
    return index.reshape(-1).expand(B)
