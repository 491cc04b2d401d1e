"""What an autograd graph keeps in place of the tensors that it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor

from captum_ssm.utils.blocks import bound, contextmanager

# Takes what a graph is to save, and returns how the graph gets it back.
Save: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]


@contextmanager
def saving(keep: Callable[[Tensor, Save], Callable[[], Tensor]]) -> Iterator[None]:
    """Have ``keep`` say what the graph recorded inside keeps.

    Unlike those of :class:`torch.autograd.graph.saved_tensors_hooks`, of which only the innermost
    counts, these can be nested, and a tensor that was changed in place since raises as without
    them.

    Args:
        keep (Callable): takes a tensor and what the next outer ``saving`` does with one, and
            returns a function that gives the tensor back.
    """
    outer = _SAVE.get()

    def save(x: Tensor) -> Callable[[], Tensor]:
        return keep(x, outer)

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda restore: restore())
    with bound(_SAVE, save), hooks:
        yield


def _itself(x: Tensor) -> Callable[[], Tensor]:
    # The tensor itself would hold its graph, which would then hold itself.
    x = x.detach()
    version = x._version

    def restore() -> Tensor:
        if x._version != version:
            raise written_over(x, version)
        return x

    return restore


def written_over(x: Tensor, version: int) -> RuntimeError:
    """The error for a tensor that was changed in place since it had a version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: a tensor of shape {tuple(x.shape)}, at version {x._version}; "
        f"expected version {version}. Let the model compute it out of place."
    )


_SAVE: ContextVar[Save] = ContextVar("captum_ssm_save", default=_itself)
