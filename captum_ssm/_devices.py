"""Models whose weights lie elsewhere: offloaded by accelerate, or spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn


@contextmanager
def weights_loaded(module: nn.Module) -> Iterator[None]:
    """Have the weights of ``module`` at hand where accelerate offloads them between calls."""
    with ExitStack() as stack:
        for part in module.modules():
            hook = getattr(part, "_hf_hook", None)
            weights = chain(part.parameters(), part.buffers())
            if hook is not None and any(t.is_meta for t in weights):
                hook.pre_forward(part)
                stack.callback(hook.post_forward, part, None)
        yield


def moved(value: Any, device: torch.device) -> Any:
    """A copy of ``value`` whose tensors are on ``device``, and whose functions return theirs there.

    Tuples, lists, dicts and dataclasses are gone through; modules stay where they are.
    """
    if torch.is_tensor(value):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(moved(v, device) for v in value)
    if type(value) is dict:
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, nn.Module):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **parts)
    if callable(value) and not isinstance(value, type):
        return _moving(value, device)
    return value


def _moving(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return lambda *args: moved(function(*args), device)
