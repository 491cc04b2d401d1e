"""The graph of a run as autograd records it, without what a model does to its backward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, checkpoint
from torch.utils.hooks import RemovableHandle

from captum_ssm.utils.patch_functions import patched_functions


def plain_graph() -> AbstractContextManager[None]:
    """Let checkpointed parts of a model run as they are, and its tensors take no hooks.

    The graph of a part that runs once more in each backward pass has no nodes to measure on, and
    hooks, which may clip or scale gradients in training, are not what the model computes. Calls of
    other threads go on as before.
    """
    return patched_functions([*_CHECKPOINTS, *_HOOKS], _replaced)


def without_checkpoints() -> AbstractContextManager[None]:
    """Let checkpointed parts of a model run as they are, in this thread.

    They run once more in the backward pass, when the block that changes the model may have ended.
    """
    return patched_functions(_CHECKPOINTS, _replaced)


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, once more in the backward pass, also in :func:`without_checkpoints`."""
    with patched_functions(_CHECKPOINTS, _original):
        return checkpoint(function, *args, use_reentrant=False)


def _original(_: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(*args, **kwargs)


def _replaced(function: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _BODIES[function](*args, **kwargs)


def _without_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: Any = None,
    preserve_rng_state: Any = None,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = None,
    **kwargs: Any,
) -> Any:
    # Takes what `checkpoint` takes.
    return function(*args, **kwargs)


def _without_frame(*args: Any, **kwargs: Any) -> Iterator[None]:
    # Takes what hooks around a module give, such as those of `torch.distributed._composable`.
    yield


def _without_hook(tensor: torch.Tensor, hook: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())


# The function, and what both it and hooks around a module call.
_CHECKPOINTS = [
    cast(FunctionType, f) for f in (checkpoint, _checkpoint_without_reentrant_generator)
]
_HOOKS = [cast(FunctionType, torch.Tensor.register_hook)]
_BODIES: dict[Any, Callable[..., Any]] = {
    checkpoint: _without_checkpoint,
    _checkpoint_without_reentrant_generator: _without_frame,
    torch.Tensor.register_hook: _without_hook,
}
