"""Models whose weights lie elsewhere: offloaded by accelerate, or spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from captum_ssm._nested import map_tensors

V = TypeVar("V")


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


def moved(value: V, device: torch.device) -> V:
    """A copy of ``value`` whose tensors are on ``device``, and whose functions return theirs there.

    Containers and dataclasses are gone through; modules stay where they are.
    """

    def moving(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: moved(function(*args), device)

    return map_tensors(lambda tensor: tensor.to(device), value, moving)
