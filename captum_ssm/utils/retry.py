"""Runs that are made once more, with copies of what their graph keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from captum_ssm.utils.saved_tensors import Save, saving

Result = TypeVar("Result")


def retry_with_copies(run: Callable[[], Result]) -> Result:
    """What ``run()`` returns, also of a model that writes into what its gradient needs.

    Such a model is run once more, with copies of all that its graph keeps.
    """
    try:
        return run()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise

    def copied(x: Tensor, save: Save) -> Callable[[], Tensor]:
        return save(x if isinstance(x, torch.nn.Parameter) else x.detach().clone())

    with saving(copied):
        return run()
