"""Checkpointed parts of a model, run as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, cast

from torch.utils.checkpoint import checkpoint

from captum_ssm.utils.patch_functions import patched_functions


def without_checkpoints() -> AbstractContextManager[None]:
    """Checkpointed parts of a model run as they are, and leave their graph (in this thread).

    The graph of a part that runs once more in each backward pass has no nodes to measure on.
    """
    return patched_functions([cast(FunctionType, checkpoint)], _run_once)


def _run_once(_: Any, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _without_checkpoint(*args, **kwargs)


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
