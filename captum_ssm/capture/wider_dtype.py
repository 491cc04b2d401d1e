"""Running a mixer in a wider dtype than its own, without a copy and without a change of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
# Methods that name a dtype.
_CASTS = {
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
    Tensor.float: torch.float32,
}


class InWider(TorchFunctionMode):
    """PyTorch's functions of tensors in one dtype compute in a wider one, and return that.

    Weights are converted wherever a function takes them, so hooks, patched methods and closures of
    a module run as they are. Kernels that PyTorch does not know as functions are given mixed
    dtypes, and may refuse them.

    Args:
        narrow (torch.dtype): one of :data:`WIDER`.

    Examples::

        >>> layer = nn.Linear(2, 3).bfloat16()
        >>> with InWider(torch.bfloat16):
        ...     y = layer(torch.ones(1, 2))
        >>> y.dtype, layer.weight.dtype
        (torch.float32, torch.bfloat16)
    """

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow, self.wide = narrow, WIDER[narrow]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        if _CASTS.get(func) is self.narrow:
            return args[0].to(self.wide)
        return tree_map(self._widened, func(*args, **kwargs))

    def _widened(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(self.wide) if leaf.dtype is self.narrow else leaf
        return self.wide if leaf is self.narrow else leaf
