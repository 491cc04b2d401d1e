"""Runs that are made once more, with copies of what their graph keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from captum_ssm.utils.blocks import bound
from captum_ssm.utils.saved_tensors import Save, saving

Result = TypeVar("Result")
_COPIES: ContextVar[bool] = ContextVar("captum_ssm_copies", default=False)


def copies_are_kept() -> bool:
    """Whether this run is made once more, with copies of what it keeps."""
    return _COPIES.get()


def retry_with_copies(run: Callable[[], Result]) -> Result:
    """What ``run()`` returns, also of a model that writes into what is kept of its run.

    Such a model is run once more, with copies of all that its graph, or a recording, keeps.
    """
    try:
        return run()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise

    def copied(x: Tensor, save: Save) -> Callable[[], Tensor]:
        return save(x if isinstance(x, torch.nn.Parameter) else x.detach().clone())

    with bound(_COPIES, True), saving(copied):
        return run()
